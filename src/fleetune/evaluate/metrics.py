"""The metrics of tasks by name, as GLUE defines them, computed by scikit-learn and SciPy."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

Array = NDArray[Any]


@dataclass(frozen=True, kw_only=True)
class Outcome:
    """What a metric compares: predictions and labels of every example."""

    predictions: Array
    """Class ids (N,), scores (N,), or flags of classes (N, C)."""
    labels: Array
    """The same for the truth."""
    positive_id: int | None
    """Class that F1 is of, in a binary task."""


def _accuracy(outcome: Outcome) -> float:
    from sklearn.metrics import accuracy_score

    return float(accuracy_score(outcome.labels, outcome.predictions))


def _f1(outcome: Outcome) -> float:
    from sklearn.metrics import f1_score

    assert outcome.positive_id is not None
    truth, predicted = outcome.labels == outcome.positive_id, outcome.predictions == outcome.positive_id
    return float(f1_score(truth, predicted, zero_division=0.0))


def _f1_macro(outcome: Outcome) -> float:
    from sklearn.metrics import f1_score

    return float(f1_score(outcome.labels, outcome.predictions, average="macro", zero_division=0.0))


def _f1_micro(outcome: Outcome) -> float:
    from sklearn.metrics import f1_score

    return float(f1_score(outcome.labels, outcome.predictions, average="micro", zero_division=0.0))


def _matthews(outcome: Outcome) -> float:
    from sklearn.metrics import matthews_corrcoef

    if np.ptp(outcome.labels) == 0 and np.array_equal(outcome.labels, outcome.predictions):
        return 0.0  # as for any constant prediction, without the warning about one class
    return float(matthews_corrcoef(outcome.labels, outcome.predictions))


def _correlation(name: str) -> Callable[[Outcome], float]:
    def compute(outcome: Outcome) -> float:
        from scipy import stats

        if np.ptp(outcome.predictions) == 0 or np.ptp(outcome.labels) == 0:
            return math.nan  # undefined: a correlation with a constant
        return float(getattr(stats, name)(outcome.predictions, outcome.labels).statistic)

    return compute


def _mse(outcome: Outcome) -> float:
    return float(np.mean((outcome.predictions - outcome.labels) ** 2))


METRICS: dict[str, Callable[[Outcome], float]] = {
    "accuracy": _accuracy,
    "f1": _f1,
    "f1_macro": _f1_macro,
    "f1_micro": _f1_micro,
    "matthews_correlation": _matthews,
    "pearson": _correlation("pearsonr"),
    "spearmanr": _correlation("spearmanr"),
    "mse": _mse,
}
"""Name -> metric."""

_SMALLER_IS_BETTER = ("loss", "mse")


def compute_metrics(names: tuple[str, ...], outcome: Outcome) -> dict[str, float | None]:
    """The named metrics; None where one is undefined for these predictions, such as a correlation with a constant."""
    values = {name: METRICS[name](outcome) for name in names}
    return {name: None if math.isnan(value) else value for name, value in values.items()}


def is_greater_better(metric: str) -> bool:
    """Whether a larger value of a metric, with or without the `eval_` prefix, is the better one."""
    return not metric.removesuffix("_mm").endswith(_SMALLER_IS_BETTER)
