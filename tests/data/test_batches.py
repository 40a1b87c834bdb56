"""Global batches are a function of seed, epoch and step alone; their split is by cost and loses nothing."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch

from fleetune.data.batches import CostModel, GlobalBatches, epoch_order, pack, sorted_batches, split_by_cost
from fleetune.data.tasks import Columns
from fleetune.data.tokens import TokenTable

LENGTHS = np.random.default_rng(0).integers(3, 60, 103)


def batches(world_size: int = 1, accumulation: int = 1, size: int = 16, seed: int = 1) -> GlobalBatches:
    return GlobalBatches(
        lengths=LENGTHS, seed=seed, global_batch_size=size, world_size=world_size, accumulation=accumulation,
        costs=CostModel(hidden_size=32),
    )  # fmt: skip


@pytest.mark.parametrize(("world_size", "accumulation"), [(2, 1), (3, 1), (4, 2), (20, 1), (1, 5)])
def test_any_split_draws_the_same_global_batch(world_size: int, accumulation: int) -> None:
    one, many = batches(), batches(world_size, accumulation)
    for step in range(2 * one.steps_per_epoch):
        parts = [part for rank in range(world_size) for part in many.micro_batches(step, rank)]
        assert sorted(np.concatenate(parts)) == sorted(one.examples_of(step))


def test_an_epoch_has_every_example_once_and_ends_with_a_smaller_batch() -> None:
    one = batches()
    assert one.steps_per_epoch == 7  # 103 = 6 x 16 + 7
    epoch = [one.examples_of(step) for step in range(7)]
    assert [len(b) for b in epoch] == [16] * 6 + [7]
    assert sorted(np.concatenate(epoch)) == list(range(103))


def test_epochs_and_seeds_differ_and_repeat() -> None:
    assert not np.array_equal(epoch_order(1, 0, 103), epoch_order(1, 1, 103))
    assert not np.array_equal(epoch_order(1, 0, 103), epoch_order(2, 0, 103))
    first = batches().examples_of(9)
    epoch_order.cache_clear()
    assert np.array_equal(first, batches().examples_of(9))


def test_split_by_cost_worked_by_hand() -> None:
    # Longest first: 7 -> A, 6 -> B, 5 -> B (6 < 7) = 11, 4 -> A = 11, 3 -> A (a tie of cost and count: the first).
    assert split_by_cost(np.array([3.0, 7.0, 4.0, 5.0, 6.0]), 2) == [[0, 1, 2], [3, 4]]


def test_equal_costs_are_shared_equally() -> None:
    assert [len(part) for part in split_by_cost(np.ones(16), 4)] == [4, 4, 4, 4]
    assert [len(part) for part in split_by_cost(np.zeros(9), 3)] == [3, 3, 3]


def test_fewer_examples_than_ranks_leave_some_without() -> None:
    assert split_by_cost(np.array([2.0, 1.0]), 4) == [[0], [1], [], []]


def test_ranks_get_nearly_equal_costs() -> None:
    """The spread by cost must beat that of equal counts clearly."""
    costs, many = CostModel(hidden_size=32), batches(4, size=64)
    by_cost = [costs.of(LENGTHS[many.micro_batches(0, rank)[0]]).sum() for rank in range(4)]
    by_count = [costs.of(LENGTHS[part]).sum() for part in np.split(many.examples_of(0), 4)]
    assert max(by_cost) / np.mean(by_cost) < 1.02
    assert max(by_count) / np.mean(by_count) > max(by_cost) / np.mean(by_cost)


def test_cost_by_hand() -> None:
    # 48 tokens at width 32: 10 + 48 x (1 + 2 x 48 / (6 x 32)) = 10 + 48 x 1.5 = 82.
    costs = CostModel(hidden_size=32, attention_penalty=2.0, sequence_overhead=10.0)
    assert costs.of(np.array([48])).tolist() == [82.0]


def test_sorted_batches_hold_every_example_once_the_longest_first() -> None:
    found = list(sorted_batches(LENGTHS, 10))
    assert sorted(np.concatenate(found)) == list(range(103))
    assert (np.diff(LENGTHS[np.concatenate(found)]) <= 0).all()
    assert [len(b) for b in found] == [10] * 10 + [3]


def table(labels: np.ndarray | None) -> TokenTable:
    return TokenTable(
        folder=Path(), split="train", source="here", columns=Columns(texts=("text",), label="label"),
        token_ids=np.array([2, 7, 3, 2, 8, 9, 3, 2, 3], dtype=np.int32),
        type_ids=np.array([0, 0, 0, 0, 0, 1, 1, 0, 0], dtype=np.uint8),
        offsets=np.array([0, 3, 7, 9]), labels=labels, rows=np.array([2, 3, 5]),
        num_bad_rows=0, bad_rows=(), num_unlabelled=0,
    )  # fmt: skip


def test_pack_lays_examples_out_one_after_the_other() -> None:
    batch = pack(table(np.array([1, 0, 2])), np.array([2, 1]))
    assert batch.token_ids.tolist() == [2, 3, 2, 8, 9, 3]
    assert batch.type_ids.tolist() == [0, 0, 0, 0, 1, 1]
    assert batch.position_ids.tolist() == [0, 1, 0, 1, 2, 3]
    assert batch.lengths == (2, 4)
    assert batch.first_token.tolist() == [0, 2]
    assert batch.labels.tolist() == [2, 0]
    assert batch.example_ids.tolist() == [2, 1]
    assert {t.dtype for t in (batch.token_ids, batch.type_ids, batch.position_ids, batch.labels)} == {torch.int64}
    assert (len(batch), batch.num_tokens) == (2, 6)


def test_pack_of_scores_and_of_nothing() -> None:
    assert pack(table(np.array([0.5, 1.5, 2.5], dtype=np.float32)), np.array([0])).labels.dtype == torch.float32
    assert pack(table(None), np.array([0])).labels is None
    empty = pack(table(np.array([1, 0, 2])), np.empty(0, np.int64))
    assert (len(empty), empty.num_tokens, empty.first_token.shape) == (0, 0, (0,))
