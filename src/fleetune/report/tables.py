"""The numbers of a report as Markdown, CSV and JSON; the page has the same."""

from __future__ import annotations

import csv
import dataclasses
import io
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

from fleetune.report.columns import QUOTED_COLUMNS, Cell, Column, columns_of
from fleetune.report.published import QUOTED, SOURCE, Quoted
from fleetune.report.regression import HEADER, RULE, Comparison, comparison_cells, verdict_of
from fleetune.report.rows import Row, Table
from fleetune.report.spread import Spread


def quoted_rows(table: Table) -> tuple[Quoted, ...]:
    """The published results that stand beside a report: of its tasks where there are any, else all.

    None stand beside runs of a single size, which say nothing about scaling.
    """
    if len(table.rows) < 2:
        return ()
    tasks = {record.get("task", {}).get("name", "").partition("_")[0] for record in table.records}
    return tuple(quoted for quoted in QUOTED if quoted.task in tasks) or QUOTED


def failures_of(table: Table) -> list[str]:
    """What did not finish, and why."""
    return [f"{row.label}: {reason}" for row in table.rows for reason in row.failures]


def notes_of(table: Table) -> list[str]:
    """How the numbers came about."""
    notes = []
    for bench in table.benches:
        if bench.mode == "steps":
            notes.append(
                f"Speed: {bench.steps} updates of every run, behind {bench.discarded_steps} that are not counted. "
                "Training and wall time are extrapolated from them to the full run, and hold neither evaluations nor "
                "checkpoints."
            )
        else:
            notes.append("Every run trained to its end: times and metrics are measured, none is extrapolated.")
        rounds = "round" if bench.rounds == 1 else "rounds"
        notes.append(
            f"Runs took turns: {bench.rounds} {rounds} of all sizes; ± is the standard deviation of a run. Speed-ups "
            "are taken within each round."
        )
    if any(row.efficiency is not None for row in table.rows):
        notes.append("Efficiency is the speed-up by that of the threads in use.")
    return list(dict.fromkeys(notes))


# ---- Markdown


def markdown(table: Table, compared: Sequence[Comparison] = ()) -> str:
    """The table with its notes, as text that reads well by itself."""
    columns = columns_of(table)
    lines = [f"# {title_of(table)}", "", markdown_table([c.title for c in columns], cells_of(table, columns))]
    if compared:
        shown = markdown_table(HEADER, comparison_cells(compared))
        lines += ["", "## Against the baseline", "", f"{verdict_of(compared)}. {RULE}", "", shown]
    if quoted := quoted_rows(table):
        titles = [column.title for column in QUOTED_COLUMNS]
        lines += ["", "## Published elsewhere", "", markdown_table(titles, quoted_cells(quoted)), "", SOURCE]
    if failures := failures_of(table):
        lines += ["", "## Failed", "", *(f"- {line}" for line in failures)]
    lines += ["", "## Notes", "", *(f"- {note}" for note in notes_of(table))]
    lines += ["", "## Repeat it", "", *(f"    {command}" for command in commands_of(table)), ""]
    return "\n".join(lines)


def title_of(table: Table) -> str:
    """What the report is of."""
    tasks = _named(record.get("task", {}).get("name") for record in table.records)
    models = _named(Path(str(record.get("config", {}).get("model"))).name for record in table.records)
    kind = "Scaling of" if table.benches else "Runs of" if len(table.rows) > 1 else "A run of"
    return f"{kind} {tasks or 'nothing that finished'}" + (f" with {models}" if models else "")


def _named(names: Iterable[str | None]) -> str:
    return ", ".join(dict.fromkeys(name for name in names if name))


def commands_of(table: Table) -> list[str]:
    """The commands that repeat what was measured."""
    commands = [bench.command for bench in table.benches]
    commands += [turn.command for source in table.sources if source.bench is None for turn in source.turns]
    return list(dict.fromkeys(commands))


def cells_of(table: Table, columns: Sequence[Column]) -> list[list[Cell]]:
    """The cells of the measured rows that have something to show."""
    return [[column.of(row) for column in columns] for row in table.rows if row.turns]


def quoted_cells(quoted: Sequence[Quoted]) -> list[list[Cell]]:
    """The cells of published results, in `QUOTED_COLUMNS`."""
    return [[column.of_quoted(one) for column in QUOTED_COLUMNS] for one in quoted]


def markdown_table(titles: Sequence[str], rows: Sequence[Sequence[Cell]]) -> str:
    """A Markdown table with columns of even width."""
    lines = [list(titles), *([cell.whole_text.replace("|", "\\|") for cell in row] for row in rows)]
    widths = [max(len(line[i]) for line in lines) for i in range(len(titles))]
    lines.insert(1, ["-" * width for width in widths])
    return "\n".join(
        "| " + " | ".join(text.ljust(width) for text, width in zip(line, widths, strict=True)) + " |" for line in lines
    )


# ---- CSV and JSON


def as_csv(table: Table) -> str:
    """One line a row, exact numbers, deviations in columns of their own; quoted rows at the end, marked."""
    columns = columns_of(table)
    file = io.StringIO()
    writer = csv.writer(file, lineterminator="\n")
    names = [name for c in columns for name in ([c.name] if c.is_text else [c.name, f"{c.name}_deviation"])]
    writer.writerow(["origin", *names])
    for row in table.rows:
        writer.writerow(["measured" if row.turns else "failed", *_exact(columns, [c.of(row) for c in columns])])
    for quoted in quoted_rows(table):
        cells = [c.of_quoted(quoted) for c in columns]
        writer.writerow([f"quoted, {quoted.setting}", *_exact(columns, cells)])
    return file.getvalue()


def _exact(columns: Sequence[Column], cells: Sequence[Cell]) -> list[object]:
    values: list[object] = []
    for column, cell in zip(columns, cells, strict=True):
        values += [cell.text] if column.is_text else [cell.value, cell.deviation]
    return values


def as_json(table: Table, compared: Sequence[Comparison] = ()) -> dict[str, Any]:
    """Every number of the report, with those of every run."""
    return {
        "title": title_of(table),
        "metric": table.metric,
        "rows": [_row_json(row, table.metric) for row in table.rows],
        "baseline": [_comparison_json(one) for one in compared],
        "quoted": [dataclasses.asdict(quoted) for quoted in quoted_rows(table)],
        "quoted_from": SOURCE,
        "notes": notes_of(table),
        "commands": commands_of(table),
        "benches": [dataclasses.asdict(bench) for bench in table.benches],
    }


SPREADS = (
    "samples_per_s", "tokens_per_s", "step_s", "startup_s", "training_s", "other_s", "wall_s", "step_bytes", "cost",
)  # fmt: skip
"""Numbers of a run that vary from run to run."""


def _comparison_json(one: Comparison) -> dict[str, Any]:
    return {
        "size": one.label, "number": one.quantity.name, "before": dataclasses.asdict(one.before),
        "now": dataclasses.asdict(one.now), "worse_by": one.worse_by, "noise": one.noise, "verdict": one.verdict,
    }  # fmt: skip


def _row_json(row: Row, metric: str | None) -> dict[str, Any]:
    spreads: dict[str, Spread | None] = {name: row.spread(name) for name in SPREADS}
    spreads |= {"speedup": row.speedup, "efficiency": row.efficiency, "against_transformers": row.against}
    spreads |= {} if metric is None else {metric: row.metric(metric)}
    return {
        "source": row.source, "size": row.size, "trainer": row.trainer, "hosts": row.hosts, "ideal_speedup": row.ideal,
        **{name: row.first(name) for name in ("ranks", "threads", "global_batch", "learning_rate")},
        **{name: None if spread is None else dataclasses.asdict(spread) for name, spread in spreads.items()},
        "failures": list(row.failures),
        "runs": [
            {"name": turn.name, "round": turn.round, "seed": turn.seed, **dataclasses.asdict(one)}
            for turn, one in zip(row.turns, row.measures, strict=True)
        ],
    }  # fmt: skip
