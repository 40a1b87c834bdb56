"""Spreads, ratios and tables, against values worked out by hand."""

from __future__ import annotations

import pytest

from benchmarks.summary import Spread, markdown_table, paired_ratios


def test_spread_of_an_odd_and_an_even_number_of_samples() -> None:
    assert Spread.of([3.0, 1.0, 2.5]) == Spread(minimum=1.0, median=2.5, maximum=3.0)
    assert Spread.of([4.0, 1.0, 2.0, 8.0]) == Spread(minimum=1.0, median=3.0, maximum=8.0)


def test_spread_of_one_sample() -> None:
    assert Spread.of([7.0]) == Spread(minimum=7.0, median=7.0, maximum=7.0)


def test_no_spread_without_samples() -> None:
    with pytest.raises(ValueError, match="no samples"):
        Spread.of([])


def test_text_of_a_spread() -> None:
    assert Spread(minimum=2.949, median=3.1, maximum=1234.5).text(2) == "3.10 (2.95 to 1,234.50)"
    assert Spread(minimum=0.4, median=1.0, maximum=1.6).text(0) == "1 (0 to 2)"


def test_ratios_are_taken_within_a_round() -> None:
    assert paired_ratios([6.0, 9.0, 5.0], [2.0, 3.0, 4.0]) == [3.0, 3.0, 1.25]


def test_ratios_of_unequal_counts_are_refused() -> None:
    with pytest.raises(ValueError, match="shorter"):
        paired_ratios([1.0, 2.0], [1.0])


def test_markdown_table() -> None:
    assert markdown_table(("a", "long"), [("1", "2"), ("333", "")]) == (
        "| a   | long |\n"
        "| --- | ---- |\n"
        "| 1   | 2    |\n"
        "| 333 |      |"
    )  # fmt: skip
