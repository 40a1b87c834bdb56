"""From a tokenised split to flat batches: which examples, on which rank, laid out how.

The global batch of a step is a pure function of (seed, epoch, step): one and four ranks draw the same examples.
Only its split over ranks and micro-batches follows the cost of each example, so that ranks finish together.
"""

from __future__ import annotations

import functools
import heapq
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

if TYPE_CHECKING:
    from fleetune.data.tokens import TokenTable

Indices = NDArray[np.int64]


@dataclass(frozen=True, kw_only=True)
class PackedBatch:
    """The tokens of B sequences, one after the other, without padding: T tokens in all. B may be 0."""

    token_ids: Tensor
    """int64 (T,)."""
    type_ids: Tensor | None
    """int64 (T,): 0 for the first text of a pair, 1 for the second; none where the tokenizer gives no types."""
    position_ids: Tensor
    """int64 (T,): place of the token in its sequence, from 0."""
    lengths: tuple[int, ...]
    """Tokens of each sequence."""
    labels: Tensor | None
    """int64 (B,) class ids, float32 (B,) scores, float32 (B, C) flags of classes, int64 (T,) class ids of tokens, or
    int64 (B, 2) first and last tokens of answers; none for unlabelled examples."""
    example_ids: Tensor
    """int64 (B,): index of each example in its split."""
    boundaries: Tensor = field(init=False)
    """int64 (B + 1,): prefix sums of the lengths; sequence b is tokens boundaries[b] to boundaries[b + 1]."""

    def __post_init__(self) -> None:
        boundaries = np.cumsum((0, *self.lengths), dtype=np.int64)
        object.__setattr__(self, "boundaries", torch.from_numpy(boundaries))

    def __len__(self) -> int:
        return len(self.lengths)

    @property
    def first_token(self) -> Tensor:
        """int64 (B,): index of each sequence's first token in the batch."""
        return self.boundaries[:-1]

    @property
    def num_tokens(self) -> int:
        return int(self.token_ids.shape[0])


def pack(table: TokenTable, examples: Indices) -> PackedBatch:
    """Lay the given examples of a split out as one flat batch, in the given order."""
    spans = [(int(table.offsets[i]), int(table.offsets[i + 1])) for i in examples]
    lengths = tuple(end - start for start, end in spans)
    return PackedBatch(
        token_ids=_joined([table.token_ids[a:b] for a, b in spans]),
        type_ids=None if table.type_ids is None else _joined([table.type_ids[a:b] for a, b in spans]),
        position_ids=_joined([np.arange(n) for n in lengths]),
        lengths=lengths,
        labels=_labels(table, examples, spans),
        example_ids=torch.from_numpy(np.array(examples, dtype=np.int64)),
    )


def _labels(table: TokenTable, examples: Indices, spans: Sequence[tuple[int, int]]) -> Tensor | None:
    if table.labels is None:
        return None
    if table.labels_of_tokens:
        return _joined([table.labels[a:b] for a, b in spans])
    return torch.from_numpy(table.labels[examples])


def touched_rows(table: TokenTable, examples: Indices, padding: int | None, num_rows: int) -> Tensor:
    """The token ids that a batch of the given examples holds: int64, ascending, each once.

    Args:
        table: The split.
        examples: Indices.
        padding: Id of the token that a batch is filled up with; None: it is not.
        num_rows: Of the table of words.
    """
    is_touched = np.zeros(num_rows, dtype=bool)
    for i in examples:
        is_touched[table.token_ids[int(table.offsets[i]) : int(table.offsets[i + 1])]] = True
    if padding is not None:
        is_touched[padding] = True
    return torch.from_numpy(np.flatnonzero(is_touched))


def _joined(parts: Sequence[NDArray[np.generic]]) -> Tensor:
    return torch.from_numpy(np.concatenate([np.empty(0, np.int64), *parts]).astype(np.int64, copy=False))


@functools.lru_cache(maxsize=2)
def epoch_order(seed: int, epoch: int, num_examples: int) -> Indices:
    """The order of an epoch's examples: a permutation that depends on the seed and the epoch alone."""
    return np.random.Generator(np.random.Philox(key=[seed, epoch])).permutation(num_examples)


@dataclass(frozen=True, kw_only=True)
class CostModel:
    """What an example costs a rank, in units of one token's matrix products.

    The products of a layer need 24 D**2 operations a token where the feed-forward is 4 D wide, and attention 4 L D: a
    share L / 6 D of it. The other two numbers were measured, see `docs/log.md`.
    """

    hidden_size: int
    attention_penalty: float = 1.2
    """How much longer an operation of attention takes than one of a product."""
    sequence_overhead: float = 0.4
    """What a sequence costs whatever its length, in tokens."""

    def of(self, lengths: NDArray[np.int64]) -> NDArray[np.float64]:
        """Cost of sequences of the given lengths (tokens)."""
        share = self.attention_penalty * lengths / (6.0 * self.hidden_size)
        return np.asarray(self.sequence_overhead + lengths * (1.0 + share), dtype=np.float64)


def split_by_cost(costs: NDArray[np.float64], parts: int) -> list[list[int]]:
    """Share items out so that the most expensive part is cheap: the longest first, to the part with the least so far.

    Graham's LPT rule (1969): at most 4/3 of the best possible. Ties go to the part with fewer items, then to the
    first. Within a part the items keep their order. Parts are empty when there are fewer items than parts.
    """
    heap = [(0.0, 0, part) for part in range(parts)]
    shares: list[list[int]] = [[] for _ in range(parts)]
    for item in np.argsort(-costs, kind="stable").tolist():
        total, count, part = heapq.heappop(heap)
        shares[part].append(item)
        heapq.heappush(heap, (total + float(costs[item]), count + 1, part))
    return [sorted(share) for share in shares]


@dataclass(frozen=True, kw_only=True)
class GlobalBatches:
    """The global batches of a training run, and each rank's share of them."""

    lengths: NDArray[np.int64]
    """Tokens of every training example."""
    seed: int
    global_batch_size: int
    world_size: int
    accumulation: int
    """Micro-batches that a rank works through for one update."""
    costs: CostModel

    @property
    def steps_per_epoch(self) -> int:
        """Updates of an epoch; the last one may be of a smaller batch."""
        return -(-len(self.lengths) // self.global_batch_size)

    def examples_of(self, step: int) -> Indices:
        """Indices of the examples of an update, counted from 0 over the whole run."""
        epoch, step_of_epoch = divmod(step, self.steps_per_epoch)
        start = step_of_epoch * self.global_batch_size
        return epoch_order(self.seed, epoch, len(self.lengths))[start : start + self.global_batch_size]

    def micro_batches(self, step: int, rank: int) -> list[Indices]:
        """Examples of each of a rank's micro-batches in an update; a micro-batch may be empty."""
        examples = self.examples_of(step)
        mine = split_by_cost(self._cost(examples), self.world_size)[rank]
        examples = examples[mine]
        return [examples[part] for part in split_by_cost(self._cost(examples), self.accumulation)]

    def _cost(self, examples: Indices) -> NDArray[np.float64]:
        return self.costs.of(self.lengths[examples])


def sorted_batches(lengths: NDArray[np.int64], batch_size: int) -> Iterator[Indices]:
    """All examples once, the longest first, in batches of at most `batch_size`.

    A pure function of the lengths: however many ranks share the batches, each batch is computed the same way.
    """
    order = np.argsort(-lengths, kind="stable")
    for start in range(0, len(order), batch_size):
        yield order[start : start + batch_size]
