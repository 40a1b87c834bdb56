"""A whole layer of an encoder as one operation: for small models, and on many cores, calls cost as much as arithmetic.

Shape suffixes: T tokens, D hidden width.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from torch import Tensor, nn
from torch.autograd import Function
from torch.autograd.function import once_differentiable

from fleetune.kernels.attention import Sequences
from fleetune.kernels.contest import torch_wins
from fleetune.kernels.library import raw_ops
from fleetune.kernels.linear import joined
from fleetune.kernels.random import Dropout

_NUM_WEIGHTS = 12
"""As the raw operations take them: queries, keys and values are one."""


@dataclass(frozen=True, kw_only=True)
class LayerSettings:
    """What a layer computes with, besides its input and weights."""

    sequences: Sequences
    """Of queries and keys alike."""
    eps: tuple[float, float]
    """Of the norm behind attention and of the last one."""
    kind: int
    """Of GELU."""
    dropouts: tuple[Dropout, Dropout, Dropout]
    """Of attention's probabilities, of what follows attention, of the layer's end."""

    @property
    def randomness(self) -> tuple[list[float], list[int], Tensor | None]:
        """Rates, site keys and row keys, as the raw operations take them."""
        rates, site_keys, row_keys = zip(*(d.arguments for d in self.dropouts), strict=True)
        return list(rates), list(site_keys), next((keys for keys in row_keys if keys is not None), None)


class _Layer(Function):
    """Weights: those of queries, keys and values, their biases, then the other ten tensors in the order of forward."""

    @staticmethod
    def forward(ctx: Any, x_TD: Tensor, settings: LayerSettings, *weights: Tensor) -> Tensor:
        qkv_weight, qkv_bias = joined(weights[:3]), joined(weights[3:6])
        assert qkv_weight is not None
        assert qkv_bias is not None
        ctx.settings, ctx.sizes, ctx.by_torch = settings, [len(w) for w in weights[:3]], torch_wins()
        wide, sequences = [qkv_weight, qkv_bias, *weights[6:]], settings.sequences
        y_TD, *kept = raw_ops().layer_forward(
            x_TD, wide, sequences.cu_q, sequences.num_heads, sequences.scale, list(settings.eps),
            settings.kind, *settings.randomness, ctx.by_torch,
        )  # fmt: skip
        ctx.save_for_backward(x_TD, *wide, *kept)
        result: Tensor = y_TD
        return result

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, dy_TD: Tensor) -> tuple[Tensor | None, ...]:
        x_TD, *saved = ctx.saved_tensors
        settings, sequences = ctx.settings, ctx.settings.sequences
        dx_TD, dqkv, dqkv_bias, *others = raw_ops().layer_backward(
            dy_TD, x_TD, saved[:_NUM_WEIGHTS], saved[_NUM_WEIGHTS:], sequences.cu_q, sequences.num_heads,
            sequences.scale, settings.kind, *settings.randomness, ctx.by_torch,
        )  # fmt: skip
        return dx_TD, None, *dqkv.split(ctx.sizes), *dqkv_bias.split(ctx.sizes), *others


def encoder_layer(x_TD: Tensor, linears: Sequence[nn.Linear], norms: tuple[nn.LayerNorm, nn.LayerNorm],
                  settings: LayerSettings) -> Tensor:  # fmt: skip
    """A layer with its norms behind, for all tokens (T, D), in the type of `x_TD`.

    Args:
        x_TD: Its input (T, D), float32 or bfloat16.
        linears: Query, key, value, what follows attention, up, down; all with biases.
        norms: The norm behind attention, and the last one.
        settings: The rest.
    """
    query, key, value, output, up, down = linears
    weights = [*(m.weight for m in (query, key, value)), *(m.bias for m in (query, key, value))]
    for module in (output, norms[0], up, down, norms[1]):
        weights += [module.weight, module.bias]
    y_TD: Tensor = _Layer.apply(x_TD, settings, *weights)  # type: ignore[no-untyped-call]
    return y_TD
