"""Dropout, residual and LayerNorm in one pass over the rows."""

from __future__ import annotations

from typing import Any

from torch import Tensor, nn
from torch.autograd import Function
from torch.autograd.function import once_differentiable

from fleetune.kernels.library import raw_ops
from fleetune.kernels.random import NO_DROPOUT, Dropout


class _AddNorm(Function):
    @staticmethod
    def forward(ctx: Any, new_RD: Tensor, residual_RD: Tensor | None, weight_D: Tensor, bias_D: Tensor | None,
                eps: float, dropout: Dropout) -> Tensor:  # fmt: skip
        y_RD: Tensor
        y_RD, sum_RD, mean_R, rstd_R = raw_ops().add_norm_forward(
            new_RD, residual_RD, weight_D, bias_D, eps, *dropout.arguments
        )
        ctx.save_for_backward(sum_RD, weight_D, mean_R, rstd_R)
        ctx.dropout = dropout
        return y_RD

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, dy_RD: Tensor) -> tuple[Tensor | None, ...]:
        grads = raw_ops().add_norm_backward(dy_RD, *ctx.saved_tensors, *ctx.dropout.arguments)
        wanted = [grad if wants else None for grad, wants in zip(grads, ctx.needs_input_grad[:4], strict=True)]
        return *wanted, None, None


class _AddThenNorm(Function):
    """The sum as a result of its own, whose gradient is added to the norm's."""

    @staticmethod
    def forward(ctx: Any, new_RD: Tensor, residual_RD: Tensor, weight_D: Tensor, bias_D: Tensor | None, eps: float,
                dropout: Dropout) -> tuple[Tensor, Tensor]:  # fmt: skip
        y_RD, sum_RD, mean_R, rstd_R = raw_ops().add_norm_forward(
            new_RD, residual_RD, weight_D, bias_D, eps, *dropout.arguments
        )
        ctx.save_for_backward(sum_RD, weight_D, mean_R, rstd_R)
        ctx.dropout = dropout
        return y_RD, sum_RD

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, dy_RD: Tensor, dsum_RD: Tensor) -> tuple[Tensor | None, ...]:
        _, dresidual_RD, *dnorm = raw_ops().add_norm_backward(dy_RD, *ctx.saved_tensors, *NO_DROPOUT.arguments)
        dresidual_RD = dresidual_RD + dsum_RD
        dnew_RD = dresidual_RD
        if ctx.dropout.rate > 0.0:
            dnew_RD = raw_ops().dropout_rows(dresidual_RD, *ctx.dropout.arguments)
        grads = dnew_RD, dresidual_RD, *dnorm
        return *(g if wants else None for g, wants in zip(grads, ctx.needs_input_grad[:4], strict=True)), None, None


def add_norm(new_RD: Tensor, residual_RD: Tensor | None, norm: nn.LayerNorm, dropout: Dropout) -> Tensor:
    """LayerNorm(dropout(new) + residual) (Ba, Kiros and Hinton 2016).

    Args:
        new_RD: What a sub-layer computed (R, D), float32 or bfloat16.
        residual_RD: Its input (R, D), or None.
        norm: Over D; its parameters are float32.
        dropout: Of `new_RD`.
    """
    y_RD: Tensor = _AddNorm.apply(new_RD, residual_RD, norm.weight, norm.bias, norm.eps, dropout)  # type: ignore[no-untyped-call]
    return y_RD


def add_then_norm(new_RD: Tensor, residual_RD: Tensor, norm: nn.LayerNorm, dropout: Dropout) -> tuple[Tensor, Tensor]:
    """LayerNorm(s) and s = dropout(new) + residual itself, as encoders need it whose norms come first.

    Args:
        new_RD: As for `add_norm`, like the others.
        residual_RD: What is added.
        norm: Over D.
        dropout: Of `new_RD`.
    """
    y_RD, sum_RD = _AddThenNorm.apply(new_RD, residual_RD, norm.weight, norm.bias, norm.eps, dropout)  # type: ignore[no-untyped-call]
    return y_RD, sum_RD
