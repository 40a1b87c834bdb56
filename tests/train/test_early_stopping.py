"""Evaluations without an improvement are counted as transformers' callback counts them."""

from __future__ import annotations

import random
from types import SimpleNamespace

import pytest
import transformers

from fleetune.train.state import TrainState

BY_HAND = [0.5, 0.6, 0.6, 0.605, 0.55, 0.7, 0.71, 0.69, 0.7, 0.71]


def counts_of_the_callback(values: list[float], *, greater: bool, threshold: float) -> list[int]:
    """Its counter after each evaluation; the Trainer sets the best metric afterwards."""
    callback = transformers.EarlyStoppingCallback(early_stopping_patience=3, early_stopping_threshold=threshold)
    arguments = SimpleNamespace(greater_is_better=greater, metric_for_best_model="f1")
    state, control, counts = transformers.TrainerState(), transformers.TrainerControl(), []
    for value in values:
        callback.on_evaluate(arguments, state, control, {"eval_f1": value})
        counts.append(callback.early_stopping_patience_counter)
        if state.best_metric is None or (value > state.best_metric if greater else value < state.best_metric):
            state.best_metric = value
    return counts


def counts_of_ours(values: list[float | None], *, greater: bool, threshold: float) -> list[int]:
    state, counts = TrainState(), []
    for value in values:
        state.note_evaluation(value, greater, threshold)
        counts.append(state.num_stale)
        if state.is_new_best(value, greater):
            state.best_metric = value
    return counts


def test_by_hand() -> None:
    # best 0.5, 0.6, 0.6, 0.605 (better, by less than 0.01), 0.605, 0.7, 0.71 (by less than 0.01, as floats are) ...
    assert counts_of_ours(list(BY_HAND), greater=True, threshold=0.02) == [0, 0, 1, 2, 3, 0, 1, 2, 3, 4]
    assert counts_of_ours([0.5, None, 0.6], greater=True, threshold=0.0) == [0, 1, 0]


@pytest.mark.parametrize("greater", [True, False])
@pytest.mark.parametrize("threshold", [0.0, 0.02, 0.1])
def test_counts_are_those_of_the_callback(greater: bool, threshold: float) -> None:
    draw = random.Random(3)
    for values in (BY_HAND, *([round(draw.random(), 1) for _ in range(40)] for _ in range(20))):
        expected = counts_of_the_callback(values, greater=greater, threshold=threshold)
        assert counts_of_ours(list(values), greater=greater, threshold=threshold) == expected
