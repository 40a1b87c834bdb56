"""Chance that is the same everywhere: the example corpus is a function of its seed."""

from __future__ import annotations

import random
from collections.abc import Sequence
from typing import TypeVar

T = TypeVar("T")


class Dice:
    """Chance that is the same on every platform and Python version."""

    def __init__(self, seed: int) -> None:
        self._random = random.Random(seed).random

    def below(self, stop: int) -> int:
        return int(self._random() * stop)

    def chance(self, probability: float) -> bool:
        return self._random() < probability

    def pick(self, options: Sequence[T]) -> T:
        return options[self.below(len(options))]

    def pick_weighted(self, weights: dict[str, int]) -> str:
        return self.pick([name for name, weight in weights.items() for _ in range(weight)])

    def shuffle(self, items: list[T]) -> None:
        for last in range(len(items) - 1, 0, -1):
            other = self.below(last + 1)
            items[last], items[other] = items[other], items[last]
