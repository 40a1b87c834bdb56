"""The files of a report: page, Markdown, CSV and JSON, of the same numbers."""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from pathlib import Path

from fleetune.files import write_whole
from fleetune.report.page import page
from fleetune.report.regression import Comparison
from fleetune.report.rows import Table
from fleetune.report.tables import as_csv, as_json, markdown

STEM = "report"


def _as_json_text(table: Table, compared: Sequence[Comparison]) -> str:
    return json.dumps(as_json(table, compared), indent=2, ensure_ascii=False) + "\n"


WRITERS: dict[str, Callable[[Table, Sequence[Comparison]], str]] = {
    "html": page,
    "md": markdown,
    "csv": lambda table, compared: as_csv(table),
    "json": _as_json_text,
}
"""Ending of the name -> what makes the text."""


def write_report(table: Table, folder: Path, compared: Sequence[Comparison] = ()) -> list[Path]:
    """Write all files into a folder, replacing those of an earlier report.

    Args:
        table: The runs.
        folder: Where the files go.
        compared: With those of a baseline, where there is one.

    Returns:
        Their paths, the page first.

    Raises:
        OutputError: The disk is full or cannot be written.
    """
    paths = []
    for ending, make in WRITERS.items():
        text, path = make(table, compared), folder / f"{STEM}.{ending}"
        write_whole(path, lambda unfinished, text=text: _write(unfinished, text))  # type: ignore[misc]
        paths.append(path)
    return paths


def _write(path: Path, text: str) -> None:
    path.write_text(text, encoding="utf-8")
