"""Linear layers with low-rank updates (LoRA, Hu et al. 2021): W x + b + s B (A dropout(x)), of which A and B learn.

No gradient of W or b is computed. What the updates of layers that share an input read of it is one product, and one
dropout mask, for all of them.

Shape suffixes: R rows, I input width, O output width of all layers side by side, o of one of them, r ranks of one
update, S of all.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd import Function
from torch.autograd.function import once_differentiable

from fleetune.kernels.library import raw_ops
from fleetune.kernels.linear import joined, product
from fleetune.kernels.random import Dropout


@dataclass(frozen=True, kw_only=True)
class LowRankUpdate:
    """What is added to the weight of a linear layer: `scale` B A."""

    down: nn.Parameter
    """A (r, I)."""
    up: nn.Parameter
    """B (o, r)."""
    scale: float


@dataclass(frozen=True, kw_only=True)
class _Place:
    """Where an update is: rows of the joined A, columns of the joined output."""

    ranks: slice
    outputs: slice
    scale: float


class _LowRankLinear(Function):
    """Parameters: weights, biases, then A and then B of the updates, in the order of `places`."""

    @staticmethod
    def forward(ctx: Any, x_RI: Tensor, places: Sequence[_Place], dropout: Dropout, count: int,
                *parameters: Tensor | None) -> Tensor:  # fmt: skip
        weight_OI, bias_O = joined(parameters[:count]), joined(parameters[count : 2 * count])
        down_SI = joined(parameters[2 * count : 2 * count + len(places)])
        ups_or = [up for up in parameters[2 * count + len(places) :] if up is not None]
        assert weight_OI is not None
        assert down_SI is not None
        y_RO = product(x_RI, weight_OI.t(), bias_O)
        read_RS = product(_dropped(x_RI, dropout), down_SI.t())
        for place, up_or in zip(places, ups_or, strict=True):
            y_RO[:, place.outputs] += place.scale * product(read_RS[:, place.ranks], up_or.t())
        ctx.save_for_backward(x_RI, weight_OI, down_SI, read_RS, *ups_or)
        ctx.places, ctx.dropout, ctx.count = places, dropout, count
        return y_RO

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, dy_RO: Tensor) -> tuple[Tensor | None, ...]:
        x_RI, weight_OI, down_SI, read_RS, *ups_or = ctx.saved_tensors
        dread_RS, dups_or = torch.empty_like(read_RS), []
        for place, up_or in zip(ctx.places, ups_or, strict=True):
            dy_Ro = place.scale * dy_RO[:, place.outputs]
            dread_RS[:, place.ranks] = product(dy_Ro, up_or)
            dups_or.append(product(dy_Ro.t(), read_RS[:, place.ranks]).float())
        ddown_SI = product(dread_RS.t(), _dropped(x_RI, ctx.dropout)).float()
        dx_RI = None
        if ctx.needs_input_grad[0]:
            dx_RI = product(dy_RO, weight_OI) + _dropped(product(dread_RS, down_SI), ctx.dropout)
        ddowns_rI = [ddown_SI[place.ranks] for place in ctx.places]
        return dx_RI, None, None, None, *([None] * (2 * ctx.count)), *ddowns_rI, *dups_or


def _dropped(x_RI: Tensor, dropout: Dropout) -> Tensor:
    if dropout.rate == 0.0:
        return x_RI
    kept_RI: Tensor = raw_ops().dropout_rows(x_RI.contiguous(), *dropout.arguments)
    return kept_RI


def low_rank_linear(x_RI: Tensor, layers: Sequence[nn.Linear], updates: Sequence[LowRankUpdate | None],
                    dropout: Dropout) -> Tensor:  # fmt: skip
    """The updated layers' results side by side (R, O), in the type of `x_RI`.

    Args:
        x_RI: Float32 or bfloat16.
        layers: They do not learn.
        updates: Of each layer, at least one of them.
        dropout: Of what the updates read.
    """
    places, outputs, ranks = [], 0, 0
    for layer, update in zip(layers, updates, strict=True):
        if update is not None:
            rank = len(update.down)
            places.append(_Place(ranks=slice(ranks, ranks + rank), outputs=slice(outputs, outputs + len(layer.weight)),
                                 scale=update.scale))  # fmt: skip
            ranks += rank
        outputs += len(layer.weight)
    own = [update for update in updates if update is not None]
    parameters = [*(layer.weight for layer in layers), *(layer.bias for layer in layers),
                  *(update.down for update in own), *(update.up for update in own)]  # fmt: skip
    y_RO: Tensor = _LowRankLinear.apply(x_RI, places, dropout, len(layers), *parameters)  # type: ignore[no-untyped-call]
    return y_RO
