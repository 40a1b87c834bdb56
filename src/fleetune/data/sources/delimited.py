"""TSV and CSV files as streams of rows."""

from __future__ import annotations

import csv
from collections.abc import Iterator, Sequence
from itertools import islice
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
from fleetune.data.wording import counted
from fleetune.errors import DataError

# Characters. Far above any text, and low enough that a quote left open in a huge file does not fill the memory
# (the reader takes 4 bytes a character). Python's own limit of 131,072 refuses long plain texts.
LONGEST_CELL = 1 << 28

CSV_CURE = "mend the quote (a quote inside a quoted cell is written twice), or save the file as TSV"


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

    A torn row that begins and ends on one line is a row with a problem. One that covers several lines ends the
    reading: its quote may have swallowed any number of good rows, which must not be lost without a word.

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
            DataError: There is none below the header, or a quote swallows the lines after it.
        """
        numbered = without_trailing_blanks(self._records(len(self.columns)))
        next(numbered)
        return _rows(numbered, self, columns, "a comma in a text needs quotes around it")

    def digest(self) -> str:
        """See `Source.digest`."""
        return file_digest(self._path)

    def total_rows(self) -> int | None:
        """Not known: a quoted cell may hold line ends."""
        return None

    def _records(self, num_columns: int | None = None) -> NumberedCells:
        """Records with the line they begin on; `num_columns` is None while the header is read."""
        csv.field_size_limit(max(csv.field_size_limit(), LONGEST_CELL))
        lines = _LastLine(self._lines())
        reader = csv.reader(lines, strict=True)
        while True:
            number = reader.line_num + 1
            try:
                cells = next(reader)
            except StopIteration:
                return
            except csv.Error as error:
                # The reader starts afresh with the next line, so one torn row does not cost the rest.
                yield number, self._problem(error, number, reader.line_num, lines.last)
                continue
            if num_columns is not None and len(cells) != num_columns and reader.line_num > number:
                raise self._swallowed(number, reader.line_num, _wrong_count(len(cells), num_columns))
            yield number, cells

    def _lines(self) -> Iterator[str]:
        return (line + "\n" for line in read_lines(self._path, self._encoding))

    def _problem(self, error: csv.Error, first: int, last: int, line: str) -> str:
        """What is wrong with a torn row of one line.

        Raises:
            DataError: It has swallowed other lines, or goes on in the next one.
        """
        text = str(error)
        if "unexpected end of data" in text:
            raise self._never_closed(self._opening_line(first))
        if "field limit" in text:
            if last > first:
                raise self._never_closed(first)
            return f"a cell is longer than {csv.field_size_limit():,} characters"
        problem, hint = f"not valid CSV: {text}", " (a quote inside a quoted cell is written twice)"
        if "new-line" in text:
            problem = "a carriage return stands alone in a cell without quotes"
            hint = " (lines end with LF or CRLF)"
        if last > first:
            raise self._swallowed(first, last, problem)
        if _ends_in_quotes(line):
            reason = f"{problem}, and a later quote is open at the end of the line: the rows cannot be told apart"
            raise DataError(f"{reason}; {CSV_CURE}", file=self._path, row=first)
        return problem + hint

    def _opening_line(self, first: int) -> int:
        """Line of the quote that is open at the end of the file, in a record that begins at `first`."""
        # Not strict, the reader gives the open cell as it is, with a line end for each of its lines.
        reader = csv.reader(islice(self._lines(), first - 1, None))
        open_cell = next(reader)[-1]
        return first + reader.line_num - open_cell.count("\n")

    def _never_closed(self, row: int) -> DataError:
        reason = "a quote that starts a cell here is never closed, so the rows after it cannot be told apart"
        return DataError(f"{reason}: {CSV_CURE}", file=self._path, row=row)

    def _swallowed(self, first: int, last: int, problem: str) -> DataError:
        lines = counted(last - first, "line")
        reason = f"rows {first} to {last} are read as one, as a quote that opens here swallows {lines}; then {problem}"
        return DataError(f"{reason}: {CSV_CURE}", file=self._path, row=first)


class _LastLine:
    """Hands lines on and keeps the last one."""

    def __init__(self, lines: Iterator[str]) -> None:
        self._lines, self.last = lines, ""

    def __iter__(self) -> Iterator[str]:
        return self

    def __next__(self) -> str:
        self.last = next(self._lines)
        return self.last


def _ends_in_quotes(line: str) -> bool:
    """Whether a line, torn quotes in it passed over, opens a quoted cell that goes on in the next line."""
    # A cell has a line end in it only if it is quoted; a carriage return alone would raise again.
    cells = next(csv.reader([line.replace("\r", " ")]))
    return bool(cells) and cells[-1].endswith("\n")


def _wrong_count(found: int, expected: int, hint: str = "") -> str:
    return f"{counted(found, 'cell')} where the header has {expected}{hint}"


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
            yield Row(number, (), _wrong_count(len(cells), expected, f" ({hint})"))
    if number is None:
        raise DataError("the file has a header and no rows", file=source.name)
