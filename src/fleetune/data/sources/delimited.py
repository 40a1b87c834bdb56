"""TSV and CSV files as streams of rows."""

from __future__ import annotations

import csv
from collections.abc import Iterator, Sequence
from operator import itemgetter
from pathlib import Path

from fleetune.data.sources.encoding import read_lines
from fleetune.data.sources.rows import (
    NumberedCells,
    Row,
    Source,
    count_lines,
    file_digest,
    refuse_duplicate_columns,
    without_trailing_blanks,
)
from fleetune.errors import DataError


class TsvFile(Source):
    """A tab-separated file in which quotes are plain characters, as in the GLUE folders.

    Args:
        path: A regular file.
        encoding: A Python codec name; None: UTF-8, or what the byte-order mark says.
        header: Names for the columns of a file without a header line; None: the first line is the header.

    Raises:
        DataError: The file is empty, or names a column twice.
    """

    def __init__(self, path: Path, encoding: str | None = None, header: Sequence[str] | None = None) -> None:
        self.name = str(path)
        self._path, self._encoding, self._has_header = path, encoding, header is None
        first = _first_cells(self._cells(), path)
        self.columns = tuple(first if header is None else header)
        if self._has_header:
            refuse_duplicate_columns(self.columns, self.name)

    def fits_header(self, header: Sequence[str]) -> bool:
        """Whether the first line has as many cells as these names."""
        return len(self.columns) == len(header)

    def with_header(self, header: Sequence[str]) -> TsvFile:
        """The same file, its first line taken as a row and its columns named so."""
        return TsvFile(self._path, self._encoding, header)

    def rows(self, columns: Sequence[str]) -> Iterator[Row]:
        """Stream every row; see `Source.rows`.

        Raises:
            DataError: There is none below the header.
        """
        numbered = without_trailing_blanks(self._cells())
        if self._has_header:
            next(numbered)
        return _rows(numbered, self, columns, "a tab inside a text, or a missing one?")

    def digest(self) -> str:
        """See `Source.digest`."""
        return file_digest(self._path)

    def total_rows(self) -> int | None:
        """Lines without the header: a close estimate (blank lines at the end are counted)."""
        return count_lines(self._path) - self._has_header

    def _cells(self) -> NumberedCells:
        for number, line in enumerate(read_lines(self._path, self._encoding), start=1):
            yield number, line.split("\t") if line else []


class CsvFile(Source):
    """A comma-separated file, quoted as RFC 4180 says; a quoted cell may hold line ends.

    Args:
        path: A regular file.
        encoding: A Python codec name; None: UTF-8, or what the byte-order mark says.

    Raises:
        DataError: The file is empty, or names a column twice.
    """

    def __init__(self, path: Path, encoding: str | None = None) -> None:
        self.name = str(path)
        self._path, self._encoding = path, encoding
        self.columns = tuple(_first_cells(self._records(), path))
        refuse_duplicate_columns(self.columns, self.name)

    def rows(self, columns: Sequence[str]) -> Iterator[Row]:
        """Stream every row; see `Source.rows`.

        Raises:
            DataError: There is none below the header.
        """
        numbered = without_trailing_blanks(self._records())
        next(numbered)
        return _rows(numbered, self, columns, "a comma in a text needs quotes around it")

    def digest(self) -> str:
        """See `Source.digest`."""
        return file_digest(self._path)

    def total_rows(self) -> int | None:
        """Not known: a quoted cell may hold line ends."""
        return None

    def _records(self) -> NumberedCells:
        lines = (line + "\n" for line in read_lines(self._path, self._encoding))
        reader = csv.reader(lines, strict=True)
        while True:
            number = reader.line_num + 1
            try:
                yield number, next(reader)
            except StopIteration:
                return
            except csv.Error as error:
                # The reader starts afresh with the next line, so one torn row does not cost the rest.
                yield number, _csv_problem(error)


def _csv_problem(error: csv.Error) -> str:
    text = str(error)
    if "unexpected end of data" in text or "field limit" in text:
        return "a quote that starts a cell here is never closed (a quote inside a cell is written twice)"
    if "new-line" in text:
        return "a carriage return stands alone in a cell without quotes (lines end with LF or CRLF)"
    return f"not valid CSV: {text} (a quote inside a quoted cell is written twice)"


def _first_cells(numbered: NumberedCells, path: Path) -> list[str]:
    for number, cells in numbered:
        if isinstance(cells, str):
            raise DataError(cells, file=path, row=number)
        if not cells:
            raise DataError("the first line is blank: it should name the columns", file=path, row=number)
        return cells
    raise DataError("the file is empty", file=path)


def _rows(numbered: NumberedCells, source: Source, wanted: Sequence[str], hint: str) -> Iterator[Row]:
    positions = [source.columns.index(name) for name in wanted]
    expected, number = len(source.columns), None
    # itemgetter of one position gives the bare cell.
    pick = itemgetter(*positions) if len(positions) > 1 else lambda cells: (cells[positions[0]],)
    for number, cells in numbered:
        if isinstance(cells, str):
            yield Row(number, (), cells)
        elif len(cells) == expected:
            yield Row(number, pick(cells))
        elif not cells:
            yield Row(number, (), "the line is blank")
        else:
            yield Row(number, (), f"{len(cells)} cells where the header has {expected} ({hint})")
    if number is None:
        raise DataError("the file has a header and no rows", file=source.name)
