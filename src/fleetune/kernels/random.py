"""Dropout's random numbers: a pure function of what is dropped, not of who drops it, when, or in which order.

Whether an element is kept depends on the run's seed, the step, the layer and the place in it (together the *site*),
on the example and the position of the token (the *row*), on the head, and on the column; on nothing else. Hence one,
two and four processes, which see the same examples in other company, draw the same masks; a resumed run draws those
that the interrupted one would have drawn; and the backward pass draws its masks again instead of keeping them.

The numbers are those of a counter-based generator (Salmon et al. 2011, "Parallel random numbers: as easy as 1, 2, 3").
A row's 64-bit stream comes from the finalizer of SplitMix64 (Steele, Lea and Flood 2014, "Fast splittable
pseudorandom number generators"; the constants are Stafford's mix 13). Within a row, a Weyl sequence of 32 bits goes
through a two-round mixer of low bias (github.com/skeeto/hash-prospector, issue 19; the tool is Wellons'), to which
each half of the stream is added: one before the first round, one before the second. One such number serves two
columns, with 16 bits each: the rate is a multiple of 2**-16.

The compiled kernels compute the same numbers; what is written here is the definition. Shape suffixes: T tokens of the
batch, R rows, S streams, N columns, h heads, Q query tokens of one sequence.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import overload

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

_ALL_64 = (1 << 64) - 1
GOLDEN = 0x9E3779B97F4A7C15  # 2**64 and 2**32 over the golden ratio, odd: steps of a Weyl sequence
_GOLDEN_32 = 0x9E3779B9
_LEVELS = 1 << 16
_PAIRS = 16
"""Numbers of a block of 32 columns. Each serves the columns i and i + 16, so that one vector register of numbers
gives two vectors of neighbouring columns."""

Words = NDArray[np.uint64]


@dataclass(frozen=True, kw_only=True)
class Dropout:
    """Which elements of a hidden state, or of attention's probabilities, are dropped."""

    rate: float = 0.0
    """Probability that an element is dropped, in [0, 1); rounded to a multiple of 2**-16."""
    site_key: int = 0
    """Seed, step, layer and site, as `as_int64(site_key(...))` gives them."""
    row_keys: Tensor | None = None
    """The rows' keys, int64 (R), as `row_keys` gives them; None where the rate is 0."""

    @property
    def arguments(self) -> tuple[float, int, Tensor | None]:
        """As the raw operations take them."""
        return self.rate, self.site_key, self.row_keys


NO_DROPOUT = Dropout()


@overload
def mix64(z: int) -> int: ...
@overload
def mix64(z: Words) -> Words: ...
def mix64(z: int | Words) -> int | Words:
    """The finalizer of SplitMix64, a bijection of 64-bit words: every bit of the result depends on all of `z`.

    Args:
        z: A Python integer, taken modulo 2**64, or an array of words.

    Returns:
        An integer in [0, 2**64), or an array of the shape of `z`.
    """
    if isinstance(z, int):
        z &= _ALL_64
        z = (z ^ z >> 30) * 0xBF58476D1CE4E5B9 & _ALL_64
        z = (z ^ z >> 27) * 0x94D049BB133111EB & _ALL_64
        return z ^ z >> 31
    z = (z ^ z >> np.uint64(30)) * np.uint64(0xBF58476D1CE4E5B9)
    z = (z ^ z >> np.uint64(27)) * np.uint64(0x94D049BB133111EB)
    return z ^ z >> np.uint64(31)


def site_key(seed: int, step: int, layer: int, site: int) -> int:
    """The key of one place of the model in one step of a run, in [0, 2**64).

    Args:
        seed: The run's seed.
        step: The update, from 0.
        layer: The layer.
        site: The place in the layer.
    """
    key = 0
    for part in (seed, step, layer, site):
        key = mix64(key + part + GOLDEN)
    return key


def as_int64(key: int) -> int:
    """The signed integer with the bits of `key`, in two's complement: what the raw ops take."""
    key &= _ALL_64
    return key - (1 << 64) if key >> 63 else key


def row_keys(example_ids_T: Tensor | NDArray[np.int64], positions_T: Tensor | NDArray[np.int64]) -> Tensor:
    """The keys of tokens.

    Args:
        example_ids_T: The number of each token's example in its data set, int64 (T).
        positions_T: The token's position in its sequence, int64 (T), from 0.

    Returns:
        int64 (T): the bits of unsigned words.
    """
    examples, positions = _words(example_ids_T), _words(positions_T)
    if examples.shape != positions.shape:
        raise ValueError(f"row_keys: {examples.size} example ids and {positions.size} positions; give one a token")
    keys = mix64(mix64(examples + GOLDEN) + (positions + 1) * GOLDEN)
    return torch.from_numpy(keys.view(np.int64))


def threshold(rate: float) -> int:
    """How many of the 65536 values of an element's 16 bits drop it. A rate below 2**-17 gives 0: all are kept."""
    dropped = int(rate * _LEVELS + 0.5) if 0.0 <= rate < 1.0 else _LEVELS
    if dropped == _LEVELS:
        raise ValueError(f"dropout's rate is {rate}: it must be in [0, 1), and not be rounded to 1 in steps of 2**-16")
    return dropped


def keep_scale(rate: float) -> float:
    """The factor of kept elements: with it, the expectation of the result is the input."""
    return _LEVELS / (_LEVELS - threshold(rate))


def levels(row_keys_R: Tensor, site_key: int, num_columns: int, head: int = 0) -> NDArray[np.uint16]:
    """The 16 bits of every element of some rows, (R, num_columns); those below `threshold` drop their element."""
    return _levels(_streams(row_keys_R, site_key, head), num_columns)


def keep_mask(row_keys_R: Tensor, site_key: int, num_columns: int, rate: float, head: int = 0) -> Tensor:
    """Which elements of some rows are kept.

    Args:
        row_keys_R: Keys of the rows, int64 (R).
        site_key: The site's key, signed or unsigned.
        num_columns: Width of the hidden state; for attention, keys of the sequence.
        rate: Probability that an element is dropped, in [0, 1).
        head: The head of attention; 0 for a hidden state.

    Returns:
        bool (R, num_columns), true where kept.

    Raises:
        ValueError: If the rate is not in [0, 1).
    """
    return torch.from_numpy(levels(row_keys_R, site_key, num_columns, head) >= threshold(rate))


def keep_masks(row_keys_Q: Tensor, site_key: int, num_columns: int, rate: float, num_heads: int) -> Tensor:
    """`keep_mask` of the heads 0 to `num_heads` - 1 in one go: bool (h, Q, num_columns)."""
    streams_S = np.concatenate([_streams(row_keys_Q, site_key, head) for head in range(num_heads)])
    kept_SN = _levels(streams_S, num_columns) >= threshold(rate)
    return torch.from_numpy(kept_SN.reshape(num_heads, len(row_keys_Q), num_columns))


def _words(values: Tensor | NDArray[np.int64]) -> Words:
    """The same bits, unsigned."""
    array = values.numpy() if isinstance(values, Tensor) else values
    if array.dtype != np.int64:
        raise ValueError(f"dropout's keys are made of int64, not of {array.dtype}")
    return array.view(np.uint64)


def _streams(row_keys_R: Tensor, site_key: int, head: int) -> Words:
    site, offset = np.uint64(site_key & _ALL_64), np.uint64(head * GOLDEN & _ALL_64)
    return mix64((_words(row_keys_R) ^ site) + offset)


def _levels(streams_S: Words, num_columns: int) -> NDArray[np.uint16]:
    num_blocks = -(-num_columns // (2 * _PAIRS))
    counters = np.arange(num_blocks * _PAIRS, dtype=np.uint32)
    x = counters * _GOLDEN_32 + streams_S.astype(np.uint32)[:, None]
    shifted = x >> 16
    x ^= shifted
    x *= 0x21F0AAAD
    x ^= np.right_shift(x, 15, out=shifted)
    x += (streams_S >> 32).astype(np.uint32)[:, None]
    x *= 0x735A2D97
    x ^= np.right_shift(x, 15, out=shifted)
    halves = np.empty((len(x), num_blocks, 2, _PAIRS), dtype=np.uint16)
    halves[:, :, 0] = x.reshape(len(x), num_blocks, _PAIRS)  # the cast keeps the low half
    halves[:, :, 1] = np.right_shift(x, 16, out=shifted).reshape(len(x), num_blocks, _PAIRS)
    return halves.reshape(len(x), num_blocks * 2 * _PAIRS)[:, :num_columns]
