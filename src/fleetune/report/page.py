"""The report as one HTML page that loads nothing: figures, tables behind them, plan, versions, commands."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from fleetune.report.columns import EMPTY, QUOTED_COLUMNS, Cell, Column, columns_of, rounded, share
from fleetune.report.facts import differing_settings, hosts_in_words, plans_of, versions_of
from fleetune.report.figures import Figure, history_figures, scaling_figures, time_figures
from fleetune.report.html import Html, element, joined
from fleetune.report.plots import hatches
from fleetune.report.published import SOURCE
from fleetune.report.regression import HEADER, RULE, Comparison, comparison_cells, verdict_of
from fleetune.report.rows import Table
from fleetune.report.tables import (
    cells_of,
    commands_of,
    failures_of,
    notes_of,
    quoted_cells,
    quoted_rows,
    title_of,
)

STYLE = Path(__file__).with_name("page.css")
WHO = ("size", "trainer")
SPENT = ("startup_s", "training_s", "other_s", "wall_s", "step_bytes", "cost")
"""Columns of the second table."""
NO_PARTS = (
    "These records do not tell what an update consists of: they are of an earlier version, or of another trainer."
)


def page(table: Table, compared: Sequence[Comparison] = ()) -> str:
    """The whole page.

    Args:
        table: The runs.
        compared: With those of a baseline, where there is one.
    """
    title = title_of(table)
    sections = [
        _head(table, title),
        _failures(table),
        _baseline(compared),
        _scaling(table),
        _figures("Speed-up and efficiency", scaling_figures(table)),
        _quoted(table),
        _figures("Loss and metric against time", history_figures(table)),
        _time(table),
        _plan(table),
        _versions(table),
        _repeat(table),
    ]
    head = element(
        "head",
        element("meta", charset="utf-8"),
        element("meta", name="viewport", content="width=device-width, initial-scale=1"),
        element("meta", name="color-scheme", content="light dark"),
        element("title", title),
        element("style", Html(STYLE.read_text(encoding="utf-8"))),
        element("link", rel="icon", href="data:,"),
    )
    body = element("body", hatches(), element("main", *sections))
    return f"<!doctype html>\n{element('html', head, body, lang='en')}\n"


# ---- sections


def _head(table: Table, title: str) -> Html:
    return element(
        "header",
        element("h1", title),
        element("p", hosts_in_words(table), class_="faint"),
        element("ul", *_headlines(table), class_="heads"),
    )


def _headlines(table: Table) -> list[Html]:
    """The numbers to take away: of the largest size that finished."""
    rows = [row for row in table.rows if row.turns and row.trainer == "fleetune"] or [r for r in table.rows if r.turns]
    if not rows:
        return []
    last = rows[-1]
    told: list[tuple[float | None, str, str]] = []
    if last.speedup is not None and last is not rows[0]:
        told.append((last.speedup.mean, f"{last.speedup.mean:.2f}x", f"speed-up, {last.size}"))
    if last.efficiency is not None and last is not rows[0]:
        told.append((last.efficiency.mean, share(last.efficiency.mean), "efficiency"))
    if last.against is not None:
        told.append((last.against.mean, f"{last.against.mean:.2f}x", "the speed of transformers.Trainer"))
    if (speed := last.spread("samples_per_s")) is not None:
        told.append((speed.mean, rounded(speed.mean), "samples a second"))
    if table.metric is not None and (metric := last.metric(table.metric)) is not None:
        told.append((metric.mean, f"{metric.mean:.4f}", table.metric))
    return [element("li", element("strong", _data(value, text)), words) for value, text, words in told]


def _failures(table: Table) -> Html | None:
    failures = failures_of(table)
    if not failures:
        return None
    lines = [element("li", line) for line in failures]
    return element(
        "section", element("h2", "What failed"), element("p", element("strong", "The others stand.")),
        element("ul", *lines, class_="notes"), class_="failed",
    )  # fmt: skip


def _baseline(compared: Sequence[Comparison]) -> Html | None:
    if not compared:
        return None
    verdict = element("p", element("strong", verdict_of(compared)), ". ", RULE)
    return element(
        "section", element("h2", "Against the baseline"), verdict, plain_table(HEADER, comparison_cells(compared))
    )


def _scaling(table: Table) -> Html:
    """Two tables, since one would be wider than most screens: speed, and what it took."""
    columns = columns_of(table)
    who = [column for column in columns if column.name in WHO]
    spent = [column for column in columns if column.name in SPENT]
    speed = [column for column in columns if column.name not in SPENT and column.name not in ("learning_rate", "runs")]
    guess = ", extrapolated" if any(bench.mode == "steps" for bench in table.benches) else ""
    shown = [(speed, "Speed: means of all runs of a size, ± standard deviation of a run.")]
    shown += [([*who, *spent], f"Time and money of a run, from the command to its end{guess}.")] if spent else []
    tables = [cards(some, cells_of(table, some), caption) for some, caption in shown]
    notes = element("ul", *(element("li", note) for note in notes_of(table)), class_="notes")
    return element("section", element("h2", "Results"), *tables, notes)


def _quoted(table: Table) -> Html | None:
    quoted = quoted_rows(table)
    if not quoted:
        return None
    content = cards(QUOTED_COLUMNS, quoted_cells(quoted), "Quoted, not measured here.")
    return element("section", element("h2", "Published elsewhere"), element("p", SOURCE), content)


def _figures(title: str, figures: Sequence[Figure]) -> Html | None:
    if not figures:
        return None
    drawn = [_figure(figure) for figure in figures]
    return element("section", element("h2", title), element("div", *drawn, class_="figures"))


def _figure(figure: Figure) -> Html:
    numbers = element(
        "details", element("summary", f"Numbers of “{figure.title}”"), plain_table(figure.header, figure.cells)
    )
    caption = element("figcaption", figure.caption) if figure.caption else None
    return element("figure", element("h3", figure.title), figure.legend, figure.picture, caption, numbers)


def _time(table: Table) -> Html | None:
    figures = time_figures(table)
    if not figures:
        return None
    has_parts = any(figure.title == "Time of an update" for figure in figures)
    drawn = [_figure(figure) for figure in figures]
    return element(
        "section",
        element("h2", "Where the time goes"),
        None if has_parts else element("p", NO_PARTS, class_="faint"),
        element("div", *drawn, class_="figures"),
    )


def _plan(table: Table) -> Html:
    plans = [
        element("section", element("h3", label), _facts(facts)) for label, facts in plans_of(table)
    ]  # fmt: skip
    changed = differing_settings(table)
    rows = [(Cell(text=name), *(Cell(text=value) for value in values)) for name, *values in changed]
    header = ("setting", *(row.label for row in table.rows if row.turns))
    differing = joined(element("h3", "Settings that differ"), plain_table(header, rows)) if rows else None
    return element("section", element("h2", "Plan"), *plans, differing)


def _facts(facts: Sequence[tuple[str, str]]) -> Html:
    return element("dl", *(part for name, told in facts for part in (element("dt", name), element("dd", told))))


def _versions(table: Table) -> Html:
    return element("section", element("h2", "Versions"), _facts(versions_of(table)))


def _repeat(table: Table) -> Html:
    commands = [element("pre", element("code", command)) for command in commands_of(table)]
    return element("section", element("h2", "Repeat it"), *commands)


# ---- tables


def cards(columns: Sequence[Column], rows: Sequence[Sequence[Cell]], caption: str) -> Html:
    """A table that becomes a card a row where the screen is narrow; roles keep it a table to those who listen."""
    heads = [
        element("th", c.title, scope="col", role="columnheader", class_="text" if c.is_text else None)
        for c in columns
    ]  # fmt: skip
    lines = [element("tr", *_card_cells(columns, row), role="row") for row in rows]
    head = element("thead", element("tr", *heads, role="row"), role="rowgroup")
    body = element("tbody", *lines, role="rowgroup")
    whole = element("table", element("caption", caption), head, body, role="table", class_="cards")
    return scrolled(whole, caption)


def _card_cells(columns: Sequence[Column], row: Sequence[Cell]) -> list[Html]:
    cells = [element("th", cell_content(row[0]), scope="row", role="rowheader")]
    for column, cell in zip(columns[1:], row[1:], strict=True):
        kind = "text" if column.is_text else None
        content = element("span", cell_content(cell))
        cells.append(element("td", content, role="cell", class_=kind, data_title=column.title))
    return cells


def plain_table(header: Sequence[str], rows: Sequence[Sequence[Cell]]) -> Html:
    """A small table, its first column the heads of its rows."""
    heads = [element("th", title, scope="col") for title in header]
    lines = [
        element(
            "tr", element("th", cell_content(row[0]), scope="row"), *(element("td", cell_content(c)) for c in row[1:])
        )
        for row in rows
    ]
    return scrolled(element("table", element("thead", element("tr", *heads)), element("tbody", *lines)), "numbers")


def scrolled(content: Html, label: str) -> Html:
    """What may be wider than the screen scrolls by itself, with the keyboard too."""
    return element("div", content, class_="scroll", role="region", aria_label=label, tabindex="0")


def cell_content(cell: Cell) -> Html:
    """A cell; a number keeps its exact value, and its deviation, for whoever reads the page by program."""
    if cell is EMPTY:
        return element("span", "-", aria_label="not measured")
    if cell.value is None:
        return joined(cell.text)
    if not cell.deviation_text:
        return _data(cell.value, cell.text)
    deviation = element("span", " ± ", _data(cell.deviation, cell.deviation_text), class_="deviation")
    return joined(_data(cell.value, cell.text), deviation)


def _data(value: float | None, text: str) -> Html:
    return element("data", text, value=repr(value))
