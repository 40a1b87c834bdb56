"""The facts: numbers and days in words."""

from __future__ import annotations

import pytest

from fleetune.data.demo.facts import number_words, ordinal_words


@pytest.mark.parametrize(
    ("number", "words"),
    [
        (2, "two"),
        (19, "nineteen"),
        (40, "forty"),
        (45, "forty-five"),
        (300, "three hundred"),
        (1200, "twelve hundred"),
        (2000, "two thousand"),
        (3700, "thirty-seven hundred"),
    ],
)
def test_number_words(number: int, words: str) -> None:
    assert number_words(number) == words


@pytest.mark.parametrize(
    ("day", "words"),
    [
        (2, "second"),
        (5, "fifth"),
        (12, "twelfth"),
        (13, "thirteenth"),
        (20, "twentieth"),
        (21, "twenty-first"),
        (28, "twenty-eighth"),
    ],
)
def test_ordinal_words(day: int, words: str) -> None:
    assert ordinal_words(day) == words
