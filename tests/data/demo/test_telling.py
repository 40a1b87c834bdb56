"""The wording: the article that the next word needs."""

from __future__ import annotations

import pytest

from fleetune.data.demo import telling


@pytest.mark.parametrize(
    ("word", "article"), [("8-2", "an"), ("11%", "an"), ("18", "an"), ("12-day", "a"), ("eight-day", "an"), ("3%", "a")]
)
def test_article_before_numbers(word: str, article: str) -> None:
    assert telling.article(word) == article
