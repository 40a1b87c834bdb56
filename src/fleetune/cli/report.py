"""`fleetune report`: tables and a page from the records of runs, and whether they are worse than a baseline."""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from pathlib import Path

from fleetune.cli.arguments import make_parser, parse
from fleetune.errors import ConfigError
from fleetune.report.columns import columns_of
from fleetune.report.files import STEM, write_report
from fleetune.report.regression import HEADER, Comparison, compare, comparison_cells, has_regression, verdict_of
from fleetune.report.rows import Table, make_table
from fleetune.report.tables import cells_of, failures_of, markdown_table
from fleetune.report.turns import read_source

DESCRIPTION = """Compare runs: the folder of a bench, output folders of `fleetune train`, or records. Writes one page
that opens without a network, and the same numbers as Markdown, CSV and JSON. With --baseline the exit status is 1 when
something is worse than in the baseline by more than the noise that was measured in both."""


def run(words: Sequence[str]) -> int:
    """Write the report, print its table, and judge it where a baseline is given."""
    parsed = parse(make_report_parser(), words, ("runs", "baseline", "output_dir"))
    paths = [Path(path) for path in parsed.extra["runs"]]
    table = make_table([read_source(path) for path in paths])
    baseline = parsed.extra.get("baseline")
    compared = [] if baseline is None else compare(table, make_table([read_source(Path(baseline))]))
    written = write_report(table, folder_of(parsed.extra.get("output_dir"), paths), compared)
    print(in_words(table, compared))
    print(f"\nreport: {written[0]} (and {', '.join(path.name for path in written[1:])})")
    return 1 if has_regression(compared) else 0


def make_report_parser() -> argparse.ArgumentParser:
    parser = make_parser("report", DESCRIPTION, ())
    parser.add_argument("runs", nargs="+", metavar="RUN", help="folder of a bench or of a run, or a record.json")
    parser.add_argument("--baseline", metavar="RUN", help="what the runs are compared with")
    parser.add_argument(
        "--output_dir", "--output-dir", metavar="FOLDER",
        help=f"where {STEM}.html, .md, .csv and .json go (default: the folder of the only RUN, else this one)",
    )  # fmt: skip
    return parser


def folder_of(asked: str | None, paths: Sequence[Path]) -> Path:
    """Where the files go.

    Raises:
        ConfigError: A file is in the way.
    """
    if asked is None:
        only = paths[0] if len(paths) == 1 else Path()
        return only if only.is_dir() else only.parent
    if Path(asked).exists() and not Path(asked).is_dir():
        raise ConfigError(f"--output_dir {asked}: a file of that name is in the way")
    return Path(asked)


def in_words(table: Table, compared: Sequence[Comparison]) -> str:
    """What the terminal shows."""
    columns = columns_of(table)
    parts = [markdown_table([column.title for column in columns], cells_of(table, columns))]
    parts += [f"failed  {line}" for line in failures_of(table)]
    if compared:
        parts.append(markdown_table(HEADER, comparison_cells(compared)))
        parts.append(verdict_of(compared))
    return "\n\n".join(parts)
