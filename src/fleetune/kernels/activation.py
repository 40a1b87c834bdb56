"""GELU, exact and by tanh, and its gated form."""

from __future__ import annotations

from typing import Any

from torch import Tensor
from torch.autograd import Function
from torch.autograd.function import once_differentiable

from fleetune.kernels.library import raw_ops

ERF, TANH = 0, 1
"""Kinds of GELU: x times the normal distribution function, and its approximation by tanh."""


class _Gelu(Function):
    @staticmethod
    def forward(ctx: Any, x_RF: Tensor, kind: int) -> Tensor:
        ctx.save_for_backward(x_RF)
        ctx.kind = kind
        y_RF: Tensor = raw_ops().gelu_forward(x_RF, kind)
        return y_RF

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, dy_RF: Tensor) -> tuple[Tensor, None]:
        return raw_ops().gelu_backward(dy_RF, *ctx.saved_tensors, ctx.kind), None


class _Geglu(Function):
    @staticmethod
    def forward(ctx: Any, x_RG: Tensor, kind: int) -> Tensor:
        ctx.save_for_backward(x_RG)
        ctx.kind = kind
        y_RF: Tensor = raw_ops().geglu_forward(x_RG, kind)
        return y_RF

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, dy_RF: Tensor) -> tuple[Tensor, None]:
        return raw_ops().geglu_backward(dy_RF, *ctx.saved_tensors, ctx.kind), None


def gelu(x_RF: Tensor, kind: int = ERF) -> Tensor:
    """x times the normal distribution function of x (Hendrycks and Gimpel 2016), float32 or bfloat16."""
    y_RF: Tensor = _Gelu.apply(x_RF, kind)  # type: ignore[no-untyped-call]
    return y_RF


def geglu(x_RG: Tensor, kind: int = ERF) -> Tensor:
    """gelu of the first half of the columns times the second (Shazeer 2020): (R, 2 F) to (R, F)."""
    y_RF: Tensor = _Geglu.apply(x_RG, kind)  # type: ignore[no-untyped-call]
    return y_RF
