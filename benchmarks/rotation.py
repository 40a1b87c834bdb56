"""Whose turn it is: an order that changes from round to round."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TypeVar

Item = TypeVar("Item")


def rotated(items: Sequence[Item], by: int) -> list[Item]:
    """The items in the order of a round: each is first, second and last equally often."""
    first = by % len(items)
    return [*items[first:], *items[:first]]
