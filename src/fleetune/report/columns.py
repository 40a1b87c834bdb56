"""Columns of the scaling table: what stands in each, exactly and as it is shown."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass

from fleetune.report.published import Quoted
from fleetune.report.rows import Row, Table
from fleetune.report.spread import Spread


@dataclass(frozen=True, kw_only=True)
class Cell:
    """What stands in a place of a table."""

    text: str
    value: float | None = None
    """Exactly; None where it is no number."""
    deviation: float | None = None
    """Standard deviation, where it was measured more than once."""
    deviation_text: str = ""

    @property
    def whole_text(self) -> str:
        """The number with what it varies by."""
        return f"{self.text} ± {self.deviation_text}" if self.deviation_text else self.text


EMPTY = Cell(text="-")

Format = Callable[[float], str]


@dataclass(frozen=True, kw_only=True)
class Column:
    """One column."""

    name: str
    """In files."""
    title: str
    """On the page; units are in the cells."""
    of: Callable[[Row], Cell]
    of_quoted: Callable[[Quoted], Cell] = lambda quoted: EMPTY
    is_text: bool = False


def columns_of(table: Table) -> list[Column]:
    """The columns of a report; those that no row fills are left out."""
    columns = [*_WHO, *_SPEED, *_TIME, *_metric_columns(table.metric), *_SPENT]
    needed = ("size", "hosts", "ranks")
    filled = [c for c in columns if c.name in needed or any(c.of(row) is not EMPTY for row in table.rows)]
    has_peers = any(row.trainer != "fleetune" for row in table.rows)
    return [c for c in filled if has_peers or c.name != "trainer"]


# ---- how numbers are written


def rounded(value: float, digits: int = 3) -> str:
    """So many significant digits, whole numbers kept whole: 1,234, 55.1, 0.00812."""
    if value == 0 or not math.isfinite(value):
        return f"{value:g}"
    decimals = max(0, digits - 1 - math.floor(math.log10(abs(value))))
    return f"{value:,.{decimals}f}"


def clock(seconds: float) -> str:
    """A duration: 12.3 s, 4:39 min, 3:51:07 h."""
    if seconds < 59.95:
        return f"{rounded(seconds)} s"
    minutes, rest = divmod(round(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours}:{minutes:02}:{rest:02} h" if hours else f"{minutes}:{rest:02} min"


def share(value: float) -> str:
    return f"{100 * value:.0f} %"


def count(value: float) -> str:
    return f"{value:,.0f}"


def spread_cell(spread: Spread | None, form: Format, form_deviation: Format | None = None) -> Cell:
    """Mean and deviation of a measurement, the latter in a form of its own where that is given."""
    if spread is None:
        return EMPTY
    text = form(spread.mean)
    if spread.deviation is None:
        return Cell(text=text, value=spread.mean)
    told = (form_deviation or form)(spread.deviation)
    return Cell(text=text, value=spread.mean, deviation=spread.deviation, deviation_text=told)


def aligned(spread: Spread | None, digits: int = 3) -> Cell:
    """Mean and deviation with the same number of decimals, those that the mean has."""
    if spread is None:
        return EMPTY
    decimals = decimals_of(rounded(spread.mean, digits))
    return spread_cell(spread, lambda value: f"{value:,.{decimals}f}")


def times(spread: Spread | None) -> Cell:
    """A mean duration, and its deviation in seconds, as exact as the mean."""
    if spread is None:
        return EMPTY
    decimals = decimals_of(clock(spread.mean).partition(" ")[0])
    return spread_cell(spread, clock, lambda value: f"{value:,.{decimals}f} s")


def decimals_of(text: str) -> int:
    """Digits behind the point of a number as it is written."""
    return len(text.partition(".")[2])


def _number(value: float | None, form: Format = count) -> Cell:
    return EMPTY if value is None else Cell(text=form(value), value=value)


# ---- the columns


_WHO = (
    Column(
        name="size", title="size", is_text=True, of=lambda row: Cell(text=row.size),
        of_quoted=lambda q: Cell(text=f"{q.model}, {q.task.upper()}"),
    ),
    Column(name="trainer", title="trainer", is_text=True, of=lambda row: Cell(text=row.trainer)),
    Column(
        name="hosts", title="hosts", of=lambda row: _number(row.hosts),
        of_quoted=lambda q: _number(q.hosts),
    ),
    Column(name="ranks", title="ranks", of=lambda row: _number(row.first("ranks"))),
    Column(name="threads", title="threads", of=lambda row: _number(row.first("threads"))),
    Column(name="global_batch", title="global batch", of=lambda row: _number(row.first("global_batch"))),
    Column(
        name="learning_rate", title="learning rate",
        of=lambda row: _number(row.first("learning_rate"), lambda value: f"{value:g}"),
    ),
    Column(name="runs", title="runs", of=lambda row: _number(len(row.turns))),
)  # fmt: skip
_SPEED = (
    Column(name="samples_per_s", title="samples/s", of=lambda row: aligned(row.spread("samples_per_s"), 4)),
    Column(name="tokens_per_s", title="tokens/s", of=lambda row: aligned(row.spread("tokens_per_s"), 4)),
    Column(
        name="speedup", title="speed-up", of=lambda row: aligned(row.speedup),
        of_quoted=lambda q: _number(q.speedup, lambda value: f"{value:.2f}"),
    ),
    Column(
        name="efficiency", title="efficiency", of=lambda row: spread_cell(row.efficiency, share),
        of_quoted=lambda q: _number(q.speedup / q.hosts, share),
    ),
    Column(name="against", title="x transformers", of=lambda row: aligned(row.against)),
)  # fmt: skip
_TIME = (
    Column(name="startup_s", title="start-up", of=lambda row: times(row.spread("startup_s"))),
    Column(name="training_s", title="training", of=lambda row: times(row.spread("training_s"))),
    Column(
        name="other_s", title="evaluation, files", of=lambda row: times(row.spread("other_s")),
    ),
    Column(
        name="wall_s", title="wall time", of=lambda row: times(row.spread("wall_s")),
        of_quoted=lambda q: _number(q.wall_s, clock),
    ),
)  # fmt: skip
_SPENT = (
    Column(
        name="step_bytes", title="MB/step, rank",
        of=lambda row: spread_cell(row.spread("step_bytes"), lambda value: rounded(value / 1e6)),
    ),
    Column(name="cost", title="money/run", of=lambda row: aligned(row.spread("cost"))),
)  # fmt: skip

QUOTED_COLUMNS = (
    *(c for c in (*_WHO, *_SPEED, *_TIME) if c.name in ("size", "hosts", "speedup", "efficiency", "wall_s")),
    Column(
        name="setting", title="hardware", is_text=True, of=lambda row: EMPTY,
        of_quoted=lambda q: Cell(text=q.setting),
    ),
)  # fmt: skip
"""What published results tell."""


def _metric_columns(metric: str | None) -> list[Column]:
    """The task's metric over the seeds."""
    if metric is None:
        return []
    name = metric
    return [Column(name=name, title=name, of=lambda row: spread_cell(row.metric(name), lambda v: f"{v:.4f}"))]
