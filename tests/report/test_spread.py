"""Means, deviations and what counts as a difference: against SciPy."""

from __future__ import annotations

import math
import random
import statistics

import pytest

from fleetune.report.spread import T_99_ONE_SIDED, Spread, noise_of_difference, student_t


def test_the_table_of_student_is_scipys() -> None:
    from scipy import stats

    for freedom, value in enumerate(T_99_ONE_SIDED, start=1):
        assert value == pytest.approx(stats.t.ppf(0.99, freedom), abs=6e-4)


def test_freedom_is_rounded_down_and_kept_within_the_table() -> None:
    assert student_t(2.9) == student_t(2) == T_99_ONE_SIDED[1]
    assert student_t(0.3) == T_99_ONE_SIDED[0]
    assert student_t(1e9) == T_99_ONE_SIDED[-1]


def test_a_spread_by_hand() -> None:
    spread = Spread.of([1.0, None, 2.0, 6.0])
    assert spread == Spread(mean=3.0, deviation=math.sqrt(7.0), count=3)
    assert Spread.of([5.0]) == Spread(mean=5.0, deviation=None, count=1)
    assert Spread.of([None]) is None


def test_noise_is_that_of_welchs_test() -> None:
    """A difference as large as the noise has about the p-value 0.01 in SciPy's test; freedom is rounded down here."""
    from scipy import stats

    draw = random.Random(0)
    for size, other_size in ((3, 3), (4, 9), (12, 10)):
        one = [draw.gauss(10, 1) for _ in range(size)]
        other = [draw.gauss(10, 2) for _ in range(other_size)]
        noise = noise_of_difference(_spread(one), _spread(other))
        assert noise is not None
        shift = (
            statistics.fmean(one) - statistics.fmean(other) + noise
        )  # so that the means are as far apart as the noise
        p = stats.ttest_ind([x + shift for x in other], one, equal_var=False, alternative="greater").pvalue
        assert 0.002 < p <= 0.0101


def test_a_side_that_was_measured_once_is_given_the_others_noise() -> None:
    single, repeated = Spread.of([4.0]), Spread.of([3.0, 5.0, 7.0])
    assert single is not None
    assert repeated is not None
    expected = T_99_ONE_SIDED[1] * math.sqrt(4.0 / 1 + 4.0 / 3)
    assert noise_of_difference(single, repeated) == pytest.approx(expected)
    assert noise_of_difference(repeated, single) == pytest.approx(expected)


def test_no_noise_was_measured() -> None:
    single, same = Spread.of([4.0]), Spread.of([2.0, 2.0])
    assert single is not None
    assert same is not None
    assert noise_of_difference(single, single) is None
    assert noise_of_difference(same, same) == 0.0


def _spread(values: list[float]) -> Spread:
    spread = Spread.of(values)
    assert spread is not None
    return spread
