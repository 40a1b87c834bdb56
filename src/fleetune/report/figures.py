"""The pictures of a report, and the tables of their numbers: what is drawn, from rows."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from fleetune.report.columns import EMPTY, Cell, aligned, clock, rounded, share, spread_cell
from fleetune.report.html import Html
from fleetune.report.measures import is_metric
from fleetune.report.phases import Parts, hidden_of, names_of, phases_of, startup_parts_of, step_parts_of
from fleetune.report.plots import Bar, Bars, Chart, Line, Point, bar_chart, bar_legend, line_chart, line_legend
from fleetune.report.rows import Row, Table
from fleetune.report.spread import Spread
from fleetune.report.turns import Turn

MOST_POINTS = 60
"""Of a line: longer histories are drawn as means of as many stretches."""


@dataclass(frozen=True, kw_only=True)
class Figure:
    """A picture with the table that says the same."""

    title: str
    picture: Html
    legend: Html
    caption: str
    header: tuple[str, ...]
    cells: tuple[tuple[Cell, ...], ...]


def scaling_figures(table: Table) -> list[Figure]:
    """Speed-up and efficiency over the sizes; none where there is but one size."""
    rows = [row for row in table.rows if row.speedup is not None and row.ideal is not None]
    if len({(row.source, place_of(row, table)) for row in rows}) < 2:
        return []
    by = "hosts" if _varies(table) else "ranks"
    return [
        _scaling_figure(table, rows, by, "Speed-up", lambda row: row.speedup, lambda row: row.ideal or 1.0),
        _scaling_figure(table, rows, by, "Efficiency", lambda row: row.efficiency, lambda row: 1.0),
    ]


def _varies(table: Table) -> bool:
    return len({row.hosts for row in table.rows}) > 1


def place_of(row: Row, table: Table) -> float:
    """Where a size stands on the axis: its hosts, or its ranks where all have as many hosts."""
    return float(row.hosts if _varies(table) else row.first("ranks") or 1)


SpreadOf = Callable[[Row], Spread | None]


def _scaling_figure(
    table: Table, rows: Sequence[Row], by: str, title: str, of: SpreadOf, ideal: Callable[[Row], float]
) -> Figure:
    series: dict[str, list[Row]] = {}
    for row in rows:
        name = row.trainer if row.bench is None or len(table.benches) < 2 else f"{row.trainer}, {row.source}"
        series.setdefault(name, []).append(row)
    lines = [Line(label=name, points=_points(mine, table, of)) for name, mine in series.items()]
    places = sorted({(place_of(row, table), ideal(row)) for row in rows})
    lines.append(Line(label="ideal", points=tuple(Point(x=x, y=y) for x, y in places), is_ideal=True))
    known = [(row, spread) for row in rows if (spread := of(row)) is not None]
    told = ", ".join(f"{row.label}: {spread.mean:.2f}" for row, spread in known)
    chart = Chart(
        name=title.lower(), title=f"{title} by {by}", description=f"{told}. The table below has the same numbers.",
        x_title=by, y_title=title.lower(), lines=tuple(lines), x_ticks=tuple(x for x, _ in places),
    )  # fmt: skip
    cells = tuple(
        (Cell(text=row.label), _shown(title, spread), _ideal_cell(title, ideal(row))) for row, spread in known
    )
    return Figure(
        title=title, picture=line_chart(chart), legend=line_legend(lines),
        caption="Bars are the standard deviation of a round." if any(s.deviation for _, s in known) else "",
        header=("size", title.lower(), "ideal"), cells=cells,
    )  # fmt: skip


def _shown(title: str, spread: Spread) -> Cell:
    return aligned(spread) if title == "Speed-up" else spread_cell(spread, share)


def _ideal_cell(title: str, value: float) -> Cell:
    return Cell(text=f"{value:g}" if title == "Speed-up" else share(value), value=value)


def _points(rows: Sequence[Row], table: Table, of: SpreadOf) -> tuple[Point, ...]:
    known = [(row, spread) for row in rows if (spread := of(row)) is not None]
    points = [Point(x=place_of(row, table), y=s.mean, deviation=s.deviation) for row, s in known]
    return tuple(sorted(points, key=lambda point: point.x))


# ---- loss and metric against time


def history_figures(table: Table) -> list[Figure]:
    """Loss and metric of one run of each row against the time that it had trained."""
    rows = [(row, row.turns[0]) for row in table.rows if row.turns and row.turns[0].history]
    figures = [_history_figure(rows, "loss", "Training loss", "loss")]
    if table.metric is not None:
        figures.append(_history_figure(rows, f"eval_{table.metric}", f"Metric: {table.metric}", table.metric))
    return [figure for figure in figures if figure is not None]


def _history_figure(rows: Sequence[tuple[Row, Turn]], key: str, title: str, y_title: str) -> Figure | None:
    lines, is_thinned = [], False
    for row, turn in rows:
        told = [(time_at(turn, entry["step"]), float(entry[key])) for entry in turn.history if key in entry]
        points = thinned(told, MOST_POINTS)
        if points:
            is_thinned |= len(points) < len(told)
            drawn = tuple(Point(x=x, y=y) for x, y in points)
            lines.append(Line(label=row.label, points=drawn, has_markers=is_metric(key) or len(points) < 12))
    if not lines:
        return None
    ends = "; ".join(f"{line.label}: {line.points[-1].y:.4f} after {clock(line.points[-1].x)}" for line in lines)
    chart = Chart(
        name=key.replace("_", "-"), title=f"{title} against training time", description=f"At the end: {ends}.",
        x_title="seconds of training", y_title=y_title, lines=tuple(lines), y_from_zero=False,
    )  # fmt: skip
    cells = tuple(
        (Cell(text=line.label), Cell(text=clock(p.x), value=p.x), Cell(text=f"{p.y:.4f}", value=p.y))
        for line in lines
        for p in shown_of(line.points)
    )
    return Figure(
        title=title, picture=line_chart(chart), legend=line_legend(lines),
        caption="The first run of each size; evaluations and checkpoints are not in the time."
        + (f" Long runs are drawn as the means of {MOST_POINTS} stretches." if is_thinned else ""),
        header=("size", "trained for", y_title), cells=cells,
    )  # fmt: skip


def time_at(turn: Turn, step: int) -> float:
    """Seconds of training until the end of a step, counted from 1; from means where steps were not timed."""
    first = turn.record.get("resumed_at_step") or 0
    told = turn.record.get("time", {}).get("step_s")
    if told:
        whole, rest = divmod(max(0, step - first), told["steps_each"])
        means: list[float] = told["seconds"]
        return float(sum(means[:whole]) * told["steps_each"] + sum(means[whole : whole + 1]) * rest)
    steps, training_s = turn.record.get("step", 0) - first, turn.record.get("seconds", {}).get("training", 0.0)
    return float(training_s * (step - first) / steps) if steps > 0 else 0.0


def thinned(points: Sequence[tuple[float, float]], most: int) -> list[tuple[float, float]]:
    """As they are, or the means of `most` stretches of about equal length."""
    if len(points) <= most:
        return list(points)
    bounds = [round(i * len(points) / most) for i in range(most + 1)]
    stretches = [points[a:b] for a, b in itertools.pairwise(bounds)]
    return [(sum(x for x, _ in part) / len(part), sum(y for _, y in part) / len(part)) for part in stretches]


def shown_of(points: Sequence[Point]) -> list[Point]:
    """Up to nine points of a line for its table, the first and the last among them."""
    if len(points) <= 9:
        return list(points)
    return [points[round(i * (len(points) - 1) / 8)] for i in range(9)]


# ---- parts of the time


def time_figures(table: Table) -> list[Figure]:
    """The wall time in phases, and an update in parts where records have them."""
    rows = [row for row in table.rows if row.turns]
    wall = [(row, phases_of(row)) for row in rows]
    starts = [(row, startup_parts_of(row)) for row in rows]
    steps = [(row, step_parts_of(row)) for row in rows]
    figures = [
        _parts_figure(wall, "wall", "Wall time of a run", "From the command to the end."),
        _parts_figure(starts, "start-up", "Start-up", "“launcher”: what ran before the ranks' clocks, and after them."),
        _parts_figure(steps, "update", "Time of an update", _caption_of_update(rows)),
    ]
    return [figure for figure in figures if figure is not None]


def _caption_of_update(rows: Sequence[Row]) -> str:
    hidden = [(row, spread.mean) for row in rows if (spread := hidden_of(row)) is not None and spread.mean > 0]
    told = "; ".join(f"{row.label}: {clock_of(seconds)}" for row, seconds in hidden)
    beside = f" Behind them, and no part of the sum, communication that computation hides: {told}." if told else ""
    return f"Means over ranks and updates, the first update left out.{beside}"


def _parts_figure(told: Sequence[tuple[Row, Parts]], name: str, title: str, caption: str) -> Figure | None:
    told = [(row, parts) for row, parts in told if parts]
    if not told:
        return None
    names = names_of([parts for _, parts in told])
    bars = [Bar(label=row.label, parts=parts, total_text=clock_of(sum(s for _, s in parts))) for row, parts in told]
    largest = "; ".join(f"{row.label}: most in {max(parts, key=lambda part: part[1])[0]}" for row, parts in told)
    chart = Bars(name=name, title=title, description=f"{largest}.", bars=tuple(bars), parts=names)
    cells = []
    for part in names:
        sizes = [dict(parts).get(part) for _, parts in told]
        cells.append((Cell(text=part), *(EMPTY if s is None else Cell(text=clock_of(s), value=s) for s in sizes)))
    totals = [sum(s for _, s in parts) for _, parts in told]
    cells.append((Cell(text="sum"), *(Cell(text=clock_of(total), value=total) for total in totals)))
    return Figure(
        title=title, picture=bar_chart(chart), legend=bar_legend(names), caption=caption,
        header=("part", *(row.label for row, _ in told)), cells=tuple(cells),
    )  # fmt: skip


def clock_of(seconds: float) -> str:
    """A duration that may be short: 12.3 ms, 4.56 s, 4:39 min."""
    return f"{rounded(1e3 * seconds)} ms" if seconds < 0.9995 else clock(seconds)
