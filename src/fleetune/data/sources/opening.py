"""Open a data file by its suffix."""

from __future__ import annotations

import difflib
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

from fleetune.data.sources.conll import ConllFile
from fleetune.data.sources.delimited import CsvFile, TsvFile
from fleetune.data.sources.records import JsonLinesFile, ParquetFile, open_json
from fleetune.data.sources.rows import Source
from fleetune.errors import DataError

Opener = Callable[[Path, str | None], Source]

OPENERS: Mapping[str, Opener] = {
    ".tsv": TsvFile,
    ".csv": CsvFile,
    ".jsonl": JsonLinesFile,
    ".json": open_json,
    ".parquet": lambda path, encoding: ParquetFile(path),
}
COLUMN_OPENERS: Mapping[str, Opener] = {suffix: ConllFile for suffix in (".conll", ".iob", ".bio", ".txt")}
"""Files of words in columns; in a folder they count where there is no other."""


def open_source(path: Path, encoding: str | None = None) -> Source:
    """Open a TSV, CSV, JSON, JSON Lines or Parquet file, or words in CoNLL's columns, as a stream of rows.

    Args:
        path: The file; its suffix tells the format.
        encoding: A Python codec name for the text formats; None: UTF-8, or what a byte-order mark says.

    Raises:
        DataError: There is no such file, it is a folder, of an unknown format, empty, or unreadable.
        ConfigError: The encoding is unknown.
    """
    _require_file(path)
    openers = {**OPENERS, **COLUMN_OPENERS}
    opener = openers.get(path.suffix.lower())
    if opener is None:
        raise DataError(f"the suffix {path.suffix!r} tells no format: expected {', '.join(openers)}", file=path)
    try:
        return opener(path, encoding)
    except OSError as error:
        raise DataError(f"cannot be read: {error.strerror or error}", file=path) from error


def _require_file(path: Path) -> None:
    if path.is_dir():
        raise DataError("this is a folder: name a file in it, or give the folder as --data_dir", file=path)
    if not path.exists():
        raise DataError(f"there is no such file{_nearest_sibling(path)}", file=path)
    if path.stat().st_size == 0:
        raise DataError("the file is empty", file=path)


def _nearest_sibling(path: Path) -> str:
    names = [entry.name for entry in path.parent.iterdir()] if path.parent.is_dir() else []
    near = difflib.get_close_matches(path.name, names, n=1)
    return f": did you mean {near[0]}?" if near else ""


def require_columns(source: Source, columns: Sequence[str]) -> None:
    """Every one of these columns is there.

    Raises:
        DataError: One is missing; the columns present and the nearest name are told.
    """
    for name in columns:
        if name not in source.columns:
            raise DataError(missing_column(source.columns, name), file=source.name)


def missing_column(present: Sequence[str], *names: str) -> str:
    """The sentence that says columns are missing, what is there instead, and what may be the reason."""
    by_folded = {column.casefold(): column for column in present}
    matches = [difflib.get_close_matches(name.casefold(), by_folded, n=1, cutoff=0.5) for name in names]
    near = dict.fromkeys(by_folded[folded] for found in matches for folded in found)
    hint = f" (nearest: {', '.join(map(repr, near))})" if near else ""
    separators = [mark for mark in ";\t|," if len(present) == 1 and mark in present[0]]
    if separators:
        hint = f" (the header holds {separators[0]!r}: is that the separator? .csv needs commas, .tsv tabs)"
    missing = " and no column ".join(map(repr, names))
    return f"there is no column {missing}: the columns are {', '.join(map(repr, present))}{hint}"
