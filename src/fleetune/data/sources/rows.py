"""Rows of a file, and the source that streams them."""

from __future__ import annotations

import hashlib
from abc import ABC, abstractmethod
from collections.abc import Iterator, Sequence
from enum import Enum
from pathlib import Path
from typing import Final, NamedTuple

from fleetune.errors import DataError

Cell = object
"""A cell as its format gives it: `str` in text formats; also numbers, bool, None, lists and objects in JSON and
Parquet, and `MISSING`."""


class Missing(Enum):
    """The type of `MISSING`."""

    CELL = "missing"


MISSING: Final = Missing.CELL
"""The cell of a JSON record that lacks the key; a null that is given is None."""

NumberedCells = Iterator[tuple[int, list[str] | str]]
"""Line numbers with the cells of a line, or with what is wrong with it; no cells for a blank line."""

READ_BYTES = 1 << 20


class Row(NamedTuple):
    """One row of a file: its cells, or what is wrong with it."""

    number: int
    """Line number as an editor shows it, counted from 1 with the header; the record's number, counted from 1,
    in JSON arrays, Parquet files and hub data sets."""
    cells: tuple[Cell, ...]
    """One per column asked for, in that order; empty if there is a problem."""
    problem: str | None = None
    """Why the row cannot be split into cells."""


class Source(ABC):
    """Something that streams rows; opening it has read the column names and nothing more."""

    name: str
    """What error messages call it: the path, or the name on the hub."""
    columns: tuple[str, ...]

    @abstractmethod
    def rows(self, columns: Sequence[str]) -> Iterator[Row]:
        """Stream every row, with the cells of these columns (all of them in `self.columns`)."""

    @abstractmethod
    def digest(self) -> str:
        """SHA-256 of the content, in hex; reads all of it in constant memory."""

    @abstractmethod
    def total_rows(self) -> int | None:
        """How many rows there are, where that is known without parsing; None otherwise."""


def file_digest(path: Path) -> str:
    """SHA-256 of a file's bytes, in hex."""
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def count_lines(path: Path) -> int:
    """Number of line feeds in a file."""
    with path.open("rb") as file:
        return sum(block.count(b"\n") for block in iter(lambda: file.read(READ_BYTES), b""))


def without_trailing_blanks(numbered: NumberedCells) -> NumberedCells:
    """Drop the empty lines that end a file; those between rows stay, to be reported as bad rows."""
    blanks: list[int] = []
    for number, cells in numbered:
        if not cells:
            blanks.append(number)
            continue
        yield from ((blank, []) for blank in blanks)
        blanks.clear()
        yield number, cells


def refuse_duplicate_columns(columns: Sequence[str], file: str) -> None:
    """Two columns of one name cannot be told apart; columns without a name are not read anyway.

    Raises:
        DataError: A name occurs twice.
    """
    for name in filter(None, columns):
        times = columns.count(name)
        if times > 1:
            raise DataError(f"the header names this column {times} times", file=file, column=name)
