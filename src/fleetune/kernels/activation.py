"""GELU, exact and by tanh, its gated form, and GELU with the linear layer behind it."""

from __future__ import annotations

from typing import Any

from torch import Tensor, nn
from torch.autograd import Function
from torch.autograd.function import once_differentiable

from fleetune.kernels.library import raw_ops
from fleetune.kernels.linear import product

ERF, TANH = 0, 1
"""Kinds of GELU: x times the normal distribution function, and its approximation by tanh."""


class _Activation(Function):
    """GELU or GeGLU: the raw operations of that name."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, name: str, kind: int) -> Tensor:
        ctx.save_for_backward(x)
        ctx.name, ctx.kind = name, kind
        y: Tensor = getattr(raw_ops(), f"{name}_forward")(x, kind)
        return y

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, dy: Tensor) -> tuple[Tensor, None, None]:
        return getattr(raw_ops(), f"{ctx.name}_backward")(dy, *ctx.saved_tensors, ctx.kind), None, None


class _GeluLinear(Function):
    """Keeps GELU's input alone: its result, as wide, comes out of the backward of the same elements again."""

    @staticmethod
    def forward(ctx: Any, x_RF: Tensor, kind: int, weight_OF: Tensor, bias_O: Tensor | None) -> Tensor:
        ctx.save_for_backward(x_RF, weight_OF)
        ctx.kind = kind
        return product(raw_ops().gelu_forward(x_RF, kind), weight_OF.t(), bias_O)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, dy_RO: Tensor) -> tuple[Tensor | None, ...]:
        x_RF, weight_OF = ctx.saved_tensors
        wants_x, _, wants_weight, wants_bias = ctx.needs_input_grad
        dx_RF = dweight_OF = None
        if wants_x:
            dx_RF, gelu_RF = raw_ops().gelu_again(product(dy_RO, weight_OF), x_RF, ctx.kind)
        elif wants_weight:
            gelu_RF = raw_ops().gelu_forward(x_RF, ctx.kind)
        if wants_weight:
            dweight_OF = product(dy_RO.t(), gelu_RF).float()
        return dx_RF, None, dweight_OF, raw_ops().column_sums(dy_RO) if wants_bias else None


def gelu(x_RF: Tensor, kind: int = ERF) -> Tensor:
    """x times the normal distribution function of x (Hendrycks and Gimpel 2016), float32 or bfloat16."""
    y_RF: Tensor = _Activation.apply(x_RF, "gelu", kind)  # type: ignore[no-untyped-call]
    return y_RF


def geglu(x_RG: Tensor, kind: int = ERF) -> Tensor:
    """gelu of the first half of the columns times the second (Shazeer 2020): (R, 2 F) to (R, F)."""
    y_RF: Tensor = _Activation.apply(x_RG, "geglu", kind)  # type: ignore[no-untyped-call]
    return y_RF


def gelu_linear(x_RF: Tensor, layer: nn.Linear, kind: int = ERF) -> Tensor:
    """The layer's result for gelu(x) (R, O), in the type of `x_RF`; gelu(x) is not kept for backward."""
    y_RO: Tensor = _GeluLinear.apply(x_RF, kind, layer.weight, layer.bias)  # type: ignore[no-untyped-call]
    return y_RO
