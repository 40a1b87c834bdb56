"""From numbers to places on a picture."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass


@dataclass(frozen=True, kw_only=True)
class Axis:
    """A linear axis from `low` to `high`, drawn from `begin` to `end`."""

    low: float
    high: float
    begin: float
    end: float
    ticks: tuple[float, ...]

    def at(self, value: float) -> float:
        """Where a value is."""
        return self.begin + (value - self.low) / (self.high - self.low) * (self.end - self.begin)


def make_axis(values: Sequence[float], begin: float, end: float, *, from_zero: bool, ticks: int = 5) -> Axis:
    """An axis that holds all values, from one round number to another.

    Args:
        values: What is drawn; none gives an axis from 0 to 1.
        begin: Where its low end is drawn.
        end: Where its high end is drawn.
        from_zero: Whether it begins at 0.
        ticks: About how many marks it has.
    """
    low, high = (min(values), max(values)) if values else (0.0, 1.0)
    low = min(0.0, low) if from_zero else low
    if high == low:
        high, low = high + (abs(high) / 2 or 1.0), low if from_zero else low - (abs(low) / 2 or 1.0)
    step = round_step((high - low) / max(1, ticks - 1))
    first, last = math.floor(low / step + 1e-9), math.ceil(high / step - 1e-9)
    marks = tuple(round(i * step, 12) for i in range(first, last + 1))
    return Axis(low=marks[0], high=marks[-1], begin=begin, end=end, ticks=marks)


def fixed_axis(ticks: Sequence[float], begin: float, end: float, *, margin: float) -> Axis:
    """An axis with marks at given places, as the sizes of a cluster, and room at both ends.

    Args:
        ticks: The marks.
        begin: Where its low end is drawn.
        end: Where its high end is drawn.
        margin: Room beyond the first and the last mark, as a share of what lies between them.
    """
    low, high = min(ticks), max(ticks)
    room = margin * ((high - low) or 1.0)
    return Axis(low=low - room, high=high + room, begin=begin, end=end, ticks=tuple(sorted(set(ticks))))


def round_step(least: float) -> float:
    """The smallest of 1, 2, 2.5 and 5 times a power of ten that is not below `least`."""
    power = 10.0 ** math.floor(math.log10(least))
    return next((m * power for m in (1.0, 2.0, 2.5, 5.0) if m * power >= least * (1 - 1e-9)), 10.0 * power)


def tick_text(value: float) -> str:
    """A mark's number, as short as it can be."""
    return f"{value:,.10g}" if abs(value) < 1e4 else f"{value / 1e3:,.10g}k"
