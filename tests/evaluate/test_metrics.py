"""Every metric against numbers worked out by hand from the confusion matrix or the definition."""

from __future__ import annotations

import math
import random
from typing import Any

import numpy as np
import pytest

from fleetune.evaluate.metrics import METRICS, Outcome, compute_metrics, is_greater_better


def outcome(labels: list[Any], predictions: list[Any], positive_id: int | None = None) -> Outcome:
    return Outcome(predictions=np.array(predictions), labels=np.array(labels), positive_id=positive_id)


def of_confusion(tp: int, fn: int, fp: int, tn: int, positive_id: int) -> Outcome:
    """Binary examples with these counts, in an order that means nothing."""
    other = 1 - positive_id
    pairs = (
        [(positive_id, positive_id)] * tp + [(positive_id, other)] * fn + [(other, positive_id)] * fp
        + [(other, other)] * tn
    )  # fmt: skip
    random.Random(5).shuffle(pairs)
    return outcome([label for label, _ in pairs], [predicted for _, predicted in pairs], positive_id)


def test_f1_is_of_the_positive_class_whichever_id_it_has() -> None:
    # tp 6, fn 2, fp 3, tn 9: accuracy 15/20; F1 = 2 * 6 / (2 * 6 + 2 + 3) = 12/17.
    # Of the other class it would be 18/23.
    for positive_id in (0, 1):
        found = compute_metrics(("accuracy", "f1"), of_confusion(6, 2, 3, 9, positive_id))
        assert found == {"accuracy": pytest.approx(15 / 20), "f1": pytest.approx(12 / 17)}


def test_matthews_by_hand() -> None:
    # (6 * 9 - 3 * 2) / sqrt((6 + 3) (6 + 2) (9 + 3) (9 + 2)) = 48 / sqrt(9504)
    expected = 48 / math.sqrt(9504)
    for positive_id in (0, 1):  # symmetric in the classes
        found = compute_metrics(("matthews_correlation",), of_confusion(6, 2, 3, 9, positive_id))
        assert found["matthews_correlation"] == pytest.approx(expected)


def test_matthews_of_the_opposite_is_minus_one_and_of_one_class_zero() -> None:
    assert METRICS["matthews_correlation"](outcome([0, 1, 1, 0], [1, 0, 0, 1])) == pytest.approx(-1)
    assert METRICS["matthews_correlation"](outcome([0, 1, 1, 0], [1, 1, 1, 1])) == 0.0  # as GLUE's own scorer says


@pytest.mark.parametrize(("tp", "fn", "fp", "tn"), [(0, 4, 0, 6), (0, 0, 3, 7), (0, 0, 0, 5)])
def test_f1_without_a_hit_is_zero_and_warns_of_nothing(tp: int, fn: int, fp: int, tn: int) -> None:
    assert compute_metrics(("f1",), of_confusion(tp, fn, fp, tn, positive_id=1)) == {"f1": 0.0}


def test_macro_f1_is_the_plain_mean_over_classes() -> None:
    # truth      0 0 0 0 1 1 2      class 0: tp 3, fp 1, fn 1 -> 6/8
    # predicted  0 0 0 1 1 0 1      class 1: tp 1, fp 2, fn 1 -> 2/5
    #                               class 2: tp 0, fp 0, fn 1 -> 0
    found = compute_metrics(("accuracy", "f1_macro"), outcome([0, 0, 0, 0, 1, 1, 2], [0, 0, 0, 1, 1, 0, 1]))
    assert found == {"accuracy": pytest.approx(4 / 7), "f1_macro": pytest.approx((6 / 8 + 2 / 5 + 0) / 3)}


def test_pearson_by_hand() -> None:
    # labels 1 2 3 4 (mean 2.5), scores 1 3 2 6 (mean 3): deviations -1.5 -.5 .5 1.5 and -2 0 -1 3
    # sum of products 3 + 0 - .5 + 4.5 = 7; squares 5 and 14
    found = compute_metrics(("pearson",), outcome([1.0, 2.0, 3.0, 4.0], [1.0, 3.0, 2.0, 6.0]))
    assert found["pearson"] == pytest.approx(7 / math.sqrt(5 * 14))


def test_spearman_is_pearson_of_the_ranks() -> None:
    # ranks 1 2 3 4 and 1 3 2 4: 1 - 6 * (0 + 1 + 1 + 0) / (4 * 15) = 0.8
    found = compute_metrics(("spearmanr",), outcome([1.0, 2.0, 3.0, 4.0], [1.0, 3.0, 2.0, 6.0]))
    assert found["spearmanr"] == pytest.approx(0.8)


def test_spearman_gives_ties_their_mean_rank() -> None:
    # labels 0 0 1 2 -> ranks 1.5 1.5 3 4; scores 5 7 7 9 -> ranks 1 2.5 2.5 4 (means 2.5)
    # deviations -1 -1 .5 1.5 and -1.5 0 0 1.5: products 1.5 + 0 + 0 + 2.25 = 3.75; squares 4.5 and 4.5
    found = compute_metrics(("spearmanr",), outcome([0.0, 0.0, 1.0, 2.0], [5.0, 7.0, 7.0, 9.0]))
    assert found["spearmanr"] == pytest.approx(3.75 / 4.5)


def test_spearman_sees_order_only() -> None:
    labels = [0.0, 1.0, 2.0, 3.0, 5.0]
    found = compute_metrics(("pearson", "spearmanr"), outcome(labels, [math.exp(3 * x) for x in labels]))
    assert found["spearmanr"] == pytest.approx(1)
    assert found["pearson"] is not None
    assert found["pearson"] < 0.9


def test_mse_by_hand() -> None:
    assert compute_metrics(("mse",), outcome([1.0, 2.0], [1.5, 4.0])) == {"mse": pytest.approx((0.25 + 4) / 2)}


@pytest.mark.parametrize(
    ("labels", "predictions"),
    [([1.0, 2.0, 3.0], [2.0, 2.0, 2.0]), ([2.0, 2.0, 2.0], [1.0, 2.0, 3.0]), ([1.0], [1.0])],
)
def test_a_correlation_with_a_constant_is_undefined(labels: list[float], predictions: list[float]) -> None:
    found = compute_metrics(("pearson", "spearmanr", "mse"), outcome(labels, predictions))
    assert found["pearson"] is None
    assert found["spearmanr"] is None
    assert found["mse"] is not None


def test_one_class_on_both_sides_warns_of_nothing() -> None:
    found = compute_metrics(("accuracy", "f1", "matthews_correlation"), outcome([1, 1, 1], [1, 1, 1], 1))
    assert found == {"accuracy": 1.0, "f1": 1.0, "matthews_correlation": 0.0}


def test_f1_without_a_positive_class_is_a_mistake_of_ours() -> None:
    with pytest.raises(AssertionError):
        compute_metrics(("f1",), outcome([0, 1], [0, 1]))


@pytest.mark.parametrize("metric", ["accuracy", "f1", "f1_macro", "matthews_correlation", "pearson", "spearmanr"])
def test_more_is_better(metric: str) -> None:
    assert is_greater_better(metric)
    assert is_greater_better(f"eval_{metric}")
    assert is_greater_better(f"eval_{metric}_mm")


@pytest.mark.parametrize("metric", ["loss", "mse"])
def test_less_is_better(metric: str) -> None:
    assert not is_greater_better(metric)
    assert not is_greater_better(f"eval_{metric}")
    assert not is_greater_better(f"eval_{metric}_mm")
