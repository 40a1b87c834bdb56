"""How attention knows where tokens are, besides embeddings of positions: windows, rotations, a bias of distances.

Shape suffixes: T tokens of the batch, h heads, m half the width of a head, P distances of a bias, L tokens of the
longest sequence.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass, field

import torch
from torch import Tensor, nn

from fleetune.data.batches import PackedBatch


@dataclass(frozen=True, kw_only=True, eq=False)
class Rotation:
    """Rotary embeddings (Su et al. 2021): queries and keys are turned by angles that grow with the position."""

    frequencies_m: Tensor
    """Angle of one position, of every pair of a head's columns."""
    factor: float = 1.0
    """What cosine and sine are multiplied by (YaRN's attention scaling)."""

    def of(self, position_ids_T: Tensor) -> tuple[Tensor, Tensor]:
        """Cosine and sine of every token's angles, float32 (T, m)."""
        angles_Tm = position_ids_T.unsqueeze(1).float() * self.frequencies_m.float()
        return angles_Tm.cos() * self.factor, angles_Tm.sin() * self.factor


@dataclass(frozen=True, kw_only=True)
class Reach:
    """What the attention of one layer knows of places."""

    window: int = 0
    """Keys up to this many tokens from a query are attended to; 0: all keys."""
    rotation: Rotation | None = None


EVERYWHERE = Reach()
"""Attention that knows of no places."""


@dataclass(frozen=True, kw_only=True)
class DistanceBias:
    """A bias of the scores for every head and bucket of distances, the same in all layers (Raffel et al. 2020)."""

    table: nn.Embedding
    """Buckets x heads."""
    bucket_of: Callable[[Tensor], Tensor]
    """Distance, key's place less query's -> bucket."""

    def of(self, longest: int, scale: float) -> Tensor:
        """What is added to the products of queries and keys before they are scaled, float32 (h, P = 2 L - 1)."""
        distances_P = torch.arange(1 - longest, longest)
        bias_Ph = nn.functional.embedding(self.bucket_of(distances_P), self.table.weight)
        return bias_Ph.t().contiguous() / scale


@dataclass(frozen=True, kw_only=True)
class Scene:
    """Where the tokens of one batch are, for all layers."""

    batch: PackedBatch
    keys: Tensor | None
    """Tokens that are attended to, int64; None: all."""
    cu_k: Tensor
    """Prefix sums of their count in every sequence."""
    bias: Tensor | None
    """Of the scores, by heads and distances (h, P)."""
    turns: dict[Rotation, tuple[Tensor, Tensor]] = field(default_factory=dict)
    """Cosine and sine of every token, by the rotations of the layers."""

    @classmethod
    def of(cls, batch: PackedBatch, attended: Tensor | None, bias_hP: Tensor | None, reaches: Iterable[Reach]) -> Scene:
        """The scene.

        Args:
            batch: The tokens.
            attended: Whether each is attended to, bool (T); None: all are.
            bias_hP: Of the distances in the longest sequence.
            reaches: Of the layers.
        """
        keys, cu_k = None, batch.boundaries
        if attended is not None:
            keys = attended.nonzero().squeeze(1)
            cu_k = nn.functional.pad(attended.cumsum(0), (1, 0))[batch.boundaries]
        rotations = {reach.rotation for reach in reaches if reach.rotation is not None}
        turns = {rotation: rotation.of(batch.position_ids) for rotation in rotations}
        return cls(batch=batch, keys=keys, cu_k=cu_k, bias=bias_hP, turns=turns)
