"""Dropout of the rows of a hidden state."""

from __future__ import annotations

from typing import Any

from torch import Tensor
from torch.autograd import Function
from torch.autograd.function import once_differentiable

from fleetune.kernels.library import raw_ops
from fleetune.kernels.random import Dropout


class _Dropout(Function):
    @staticmethod
    def forward(ctx: Any, x_RD: Tensor, dropout: Dropout) -> Tensor:
        ctx.dropout = dropout
        y_RD: Tensor = raw_ops().dropout_rows(x_RD.contiguous(), *dropout.arguments)
        return y_RD

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, dy_RD: Tensor) -> tuple[Tensor, None]:
        return raw_ops().dropout_rows(dy_RD.contiguous(), *ctx.dropout.arguments), None


def dropout_rows(x_RD: Tensor, dropout: Dropout) -> Tensor:
    """`x_RD` (R, D) with a share of its elements zeroed and the others scaled up; itself at rate 0."""
    if dropout.rate == 0.0:
        return x_RD
    y_RD: Tensor = _Dropout.apply(x_RD, dropout)  # type: ignore[no-untyped-call]
    return y_RD
