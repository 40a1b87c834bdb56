"""Repeated measurements: mean, standard deviation, and what counts as a difference."""

from __future__ import annotations

import math
import statistics
from collections.abc import Iterable
from dataclasses import dataclass

T_99_ONE_SIDED = (
    31.821, 6.965, 4.541, 3.747, 3.365, 3.143, 2.998, 2.896, 2.821, 2.764,
    2.718, 2.681, 2.650, 2.624, 2.602, 2.583, 2.567, 2.552, 2.539, 2.528,
    2.518, 2.508, 2.500, 2.492, 2.485, 2.479, 2.473, 2.467, 2.462, 2.457,
)  # fmt: skip
"""Student's t that is exceeded in 1 % of cases, for 1, 2, 3 ... degrees of freedom."""


@dataclass(frozen=True, kw_only=True)
class Spread:
    """Mean of some measurements and how far they are apart."""

    mean: float
    deviation: float | None
    """Standard deviation of one measurement (of n - 1); None for a single one."""
    count: int

    @classmethod
    def of(cls, samples: Iterable[float | None]) -> Spread | None:
        """The spread of what was measured; None when nothing was."""
        values = [value for value in samples if value is not None]
        if not values:
            return None
        deviation = statistics.stdev(values) if len(values) > 1 else None
        return cls(mean=statistics.fmean(values), deviation=deviation, count=len(values))


def noise_of_difference(one: Spread, other: Spread) -> float | None:
    """How far apart two means are in 1 of 100 cases when nothing has changed; None where no noise was measured.

    Welch's test, one-sided: t times the standard error of the difference, with the degrees of freedom of Welch and
    Satterthwaite. A side that was measured once is given the other's standard deviation.
    """
    deviations = [side.deviation for side in (one, other) if side.deviation is not None]
    if not deviations:
        return None
    sides = [(side, deviations[0] if side.deviation is None else side.deviation) for side in (one, other)]
    variances = [deviation**2 / side.count for side, deviation in sides]
    if not sum(variances):
        return 0.0
    terms = [
        variance**2 / (side.count - 1)
        for variance, (side, _) in zip(variances, sides, strict=True)
        if side.count > 1 and variance
    ]
    freedom = sum(variances) ** 2 / sum(terms) if terms else 1.0
    if len(deviations) == 1:  # all that is known comes from one side
        freedom = max(one.count, other.count) - 1
    return student_t(freedom) * math.sqrt(sum(variances))


def student_t(freedom: float) -> float:
    """Student's t of 1 %, one-sided; degrees of freedom are rounded down, which asks for more."""
    return T_99_ONE_SIDED[min(len(T_99_ONE_SIDED), max(1, int(freedom))) - 1]
