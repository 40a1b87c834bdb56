"""Dropout with a cheap random mask.

`torch.dropout` draws one Bernoulli sample an element, which costs more than the matrix products around it on many
CPUs. Here one draw of a 64-bit integer serves four elements of 16 bits each. The rate is therefore a multiple of
2**-16 (0.1 becomes 0.100006), and the kept elements are scaled by the rate's exact complement, so that the
expectation is the input. The bits come from torch's default CPU generator.
"""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor

_LEVELS = 1 << 16
_LOW = -(1 << 15)


def random_mask(shape: torch.Size | tuple[int, ...], rate: float) -> tuple[Tensor, float]:
    """Draw a mask of kept elements.

    Args:
        shape: Shape of the mask.
        rate: Probability that an element is dropped, in [0, 1).

    Returns:
        A boolean tensor, true where the element is kept, and the factor that kept elements are scaled by.
    """
    dropped_levels = round(rate * _LEVELS)
    count = math.prod(shape)
    bits = torch.empty((count + 3) // 4, dtype=torch.int64).random_(-(1 << 63), None)
    kept = bits.view(torch.int16)[:count].view(shape) >= _LOW + dropped_levels
    return kept, _LEVELS / (_LEVELS - dropped_levels)


class _Dropout(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, rate: float) -> Tensor:
        kept, scale = random_mask(x.shape, rate)
        ctx.save_for_backward(kept)
        ctx.scale = scale
        return torch.mul(x, kept).mul_(scale)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None]:
        (kept,) = ctx.saved_tensors
        return torch.mul(grads[0], kept).mul_(ctx.scale), None


def dropout(x: Tensor, rate: float, training: bool) -> Tensor:
    """`x` with a share `rate` of its elements zeroed and the others scaled up; `x` itself outside training."""
    if not training or rate == 0.0:
        return x
    if rate >= 1.0:
        return torch.zeros_like(x)
    result: Tensor = _Dropout.apply(x, rate)  # type: ignore[no-untyped-call]
    return result
