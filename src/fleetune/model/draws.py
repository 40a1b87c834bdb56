"""Where the dropout masks of one forward come from: the places of the model, named and numbered.

Shape suffixes: T tokens of the batch, B sequences, h heads.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import IntEnum

import numpy as np
import torch
from torch import Tensor

from fleetune.kernels.random import GOLDEN, NO_DROPOUT, Dropout, as_int64, row_keys, site_key


class Site(IntEnum):
    """A place in a layer. The numbers are part of what decides a mask: never change one, only add."""

    EMBEDDINGS = 0
    ATTENTION = 1
    """The probabilities of attention."""
    ATTENTION_OUTPUT = 2
    OUTPUT = 3
    HEAD_INPUT = 4
    HEAD = 5


@dataclass(frozen=True, kw_only=True)
class Draws:
    """Dropout of one forward: every mask is a function of these, of the site, the example and the position."""

    seed: int
    step: int
    token_keys: Tensor
    """Row keys of the batch's tokens, int64 (T)."""

    @classmethod
    def of_batch(cls, seed: int, step: int, example_ids_B: Tensor, position_ids_T: Tensor, boundaries: Tensor) -> Draws:
        """The draws of a batch.

        Args:
            seed: The run's seed.
            step: The update.
            example_ids_B: Numbers of the examples in their data set, int64 (B).
            position_ids_T: Place of every token in its sequence, int64 (T).
            boundaries: Prefix sums of the sequences' lengths, int64 (B + 1).
        """
        examples_T = torch.repeat_interleave(example_ids_B, boundaries.diff())
        return cls(seed=seed, step=step, token_keys=row_keys(examples_T, position_ids_T))

    def at(self, layer: int, site: Site, rate: float, rows: Tensor | None = None) -> Dropout:
        """The dropout of a place.

        Args:
            layer: 0 for the embeddings, 1 for the first layer, and one more than the last for the head.
            site: The place.
            rate: Probability that an element is dropped.
            rows: Tokens that the place works on, int64; None: all.
        """
        if rate == 0.0:
            return NO_DROPOUT
        keys = self.token_keys if rows is None else self.token_keys[rows]
        return Dropout(rate=rate, site_key=self._site_key(layer, site), row_keys=keys)

    def at_heads_of(self, layer: int, site: Site, rate: float, rows_B: Tensor, num_heads: int) -> Dropout:
        """The dropout of the attention of some tokens, whose heads are rows of one wide head (B x h).

        The masks are those that `at` gives to the heads.
        """
        if rate == 0.0:
            return NO_DROPOUT
        site_key = self._site_key(layer, site)
        streams_Bh = (self.token_keys[rows_B] ^ site_key).unsqueeze(1) + torch.arange(num_heads) * as_int64(GOLDEN)
        return Dropout(rate=rate, site_key=site_key, row_keys=(streams_Bh ^ site_key).flatten())

    def _site_key(self, layer: int, site: Site) -> int:
        return as_int64(site_key(self.seed, self.step, layer, site))


@dataclass(frozen=True, kw_only=True)
class NoDraws:
    """Evaluation: nothing is dropped."""

    def at(self, layer: int, site: Site, rate: float, rows: Tensor | None = None) -> Dropout:
        """No dropout."""
        return NO_DROPOUT

    def at_heads_of(self, layer: int, site: Site, rate: float, rows_B: Tensor, num_heads: int) -> Dropout:
        """No dropout."""
        return NO_DROPOUT


def drawn_seed() -> int:
    """A seed from torch's generator, for whoever calls a model outside of a training loop that counts its steps."""
    return int(torch.randint(np.iinfo(np.int64).max, (), dtype=torch.int64))
