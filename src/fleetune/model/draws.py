"""Where the dropout masks of one forward come from: the places of the model, named and numbered.

Shape suffixes: T tokens of the batch, B sequences, h heads.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from enum import IntEnum

import numpy as np
import torch
from torch import Tensor

from fleetune.kernels.random import GOLDEN, NO_DROPOUT, Dropout, as_int64, site_key


class Site(IntEnum):
    """A place in a layer. The numbers are part of what decides a mask: never change one, only add."""

    EMBEDDINGS = 0
    ATTENTION = 1
    """The probabilities of attention."""
    ATTENTION_OUTPUT = 2
    OUTPUT = 3
    HEAD_INPUT = 4
    HEAD = 5
    FEED_FORWARD = 6
    """What a gated feed-forward gives to its last product."""
    LORA_QKV = 7
    """What low-rank updates read, of queries, keys and values, and of the other linear layers."""
    LORA_ATTENTION_OUTPUT = 8
    LORA_UP = 9
    LORA_DOWN = 10


Place = tuple[int, Site]
"""A layer and a site in it. Layer 0 is the embeddings, 1 the first layer, and one more than the last the head."""


@dataclass(frozen=True, kw_only=True)
class Draws:
    """Dropout of one forward: every mask is a function of seed and step, of the place, the example and the position."""

    seed: int
    step: int
    token_keys: Tensor
    """Row keys of the batch's tokens, int64 (T)."""
    rates: Mapping[Place, float]
    """Probability that an element is dropped; none where a place is not named."""

    def at(self, layer: int, site: Site, rows: Tensor | None = None) -> Dropout:
        """The dropout of a place.

        Args:
            layer: See `Place`.
            site: See `Place`.
            rows: Tokens that the place works on, int64; None: all.
        """
        rate = self.rates.get((layer, site), 0.0)
        if rate == 0.0:
            return NO_DROPOUT
        keys = self.token_keys if rows is None else self.token_keys[rows]
        return Dropout(rate=rate, site_key=self._site_key(layer, site), row_keys=keys)

    def at_heads_of(self, layer: int, site: Site, rows_B: Tensor, num_heads: int) -> Dropout:
        """The dropout of the attention of some tokens, whose heads are rows of one wide head (B x h).

        The masks are those that `at` gives to the heads.
        """
        rate = self.rates.get((layer, site), 0.0)
        if rate == 0.0:
            return NO_DROPOUT
        site_key = self._site_key(layer, site)
        streams_Bh = (self.token_keys[rows_B] ^ site_key).unsqueeze(1) + torch.arange(num_heads) * as_int64(GOLDEN)
        return Dropout(rate=rate, site_key=site_key, row_keys=(streams_Bh ^ site_key).flatten())

    def _site_key(self, layer: int, site: Site) -> int:
        return as_int64(site_key(self.seed, self.step, layer, site))


NO_DRAWS = Draws(seed=0, step=0, token_keys=torch.empty(0, dtype=torch.int64), rates={})
"""Nothing is dropped."""


def drawn_seed() -> int:
    """A seed from torch's generator, for whoever calls a model outside of a training loop that counts its steps."""
    return int(torch.randint(np.iinfo(np.int64).max, (), dtype=torch.int64))
