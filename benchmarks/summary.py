"""From raw samples to what is told of them: spreads, ratios, tables."""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from dataclasses import dataclass


@dataclass(frozen=True, kw_only=True)
class Spread:
    """Median and range of repeated measurements."""

    minimum: float
    median: float
    maximum: float

    @classmethod
    def of(cls, samples: Sequence[float]) -> Spread:
        """The spread of at least one sample.

        Raises:
            ValueError: There is none.
        """
        if not samples:
            raise ValueError("no samples: a spread needs at least one")
        return cls(minimum=min(samples), median=statistics.median(samples), maximum=max(samples))

    def text(self, digits: int) -> str:
        """The median, with the range behind it, as in `3.10 (2.95 to 3.22)`."""
        low, middle, high = (f"{value:,.{digits}f}" for value in (self.minimum, self.median, self.maximum))
        return f"{middle} ({low} to {high})"


def paired_ratios(numerators: Sequence[float], denominators: Sequence[float]) -> list[float]:
    """Quotients of measurements that were taken in the same round, and so under the same conditions.

    Raises:
        ValueError: There are not as many of one as of the other.
    """
    return [top / bottom for top, bottom in zip(numerators, denominators, strict=True)]


def markdown_table(header: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    """A Markdown table, its columns padded to the same width so that it reads well as plain text too."""
    widths = [max(len(row[i]) for row in (header, *rows)) for i in range(len(header))]
    lines = [header, ["-" * width for width in widths], *rows]
    return "\n".join(
        "| " + " | ".join(cell.ljust(width) for cell, width in zip(line, widths, strict=True)) + " |" for line in lines
    )
