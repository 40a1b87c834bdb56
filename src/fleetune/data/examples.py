"""Rows to validated examples; what cannot be used is listed with its place."""

from __future__ import annotations

import re
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field
from itertools import islice
from typing import Literal, NamedTuple

from fleetune.data.labels import CellError, Label, LabelReader
from fleetune.data.sources import MISSING, Cell, Row, Source
from fleetune.data.tasks import Columns
from fleetune.errors import DataError

OnBadRow = Literal["error", "skip"]

BAD_ROWS_LISTED = 1000
FURTHER_SHOWN = 5
# How far to look for further bad rows after the first: about a second of reading.
FURTHER_ROWS_CHECKED = 100_000

_LONE_SURROGATE = re.compile("[\ud800-\udfff]")


class Example(NamedTuple):
    """One or two texts, or the words of a sentence, as they stand in the file, and the label."""

    row: int
    """Its number in the source; see `Row.number`."""
    texts: tuple[str, ...]
    label: Label | None
    """None if unlabelled."""
    id: str | None = None
    """Its identifier, where the kind of task has them."""
    remark: str | None = None
    """What was read otherwise than it stands in the file."""


@dataclass(frozen=True, kw_only=True)
class BadRow:
    """A row that cannot be used."""

    row: int
    column: str | None
    """None: the row as a whole."""
    reason: str

    def __str__(self) -> str:
        return f"row {self.row}{f', column {self.column!r}' if self.column else ''}: {self.reason}"


class BadRowLog:
    """Counts bad rows, and lists the first ones."""

    def __init__(self, total: int = 0, listed: tuple[BadRow, ...] = ()) -> None:
        self.total = total
        self._listed = list(listed)

    @property
    def listed(self) -> tuple[BadRow, ...]:
        """The first bad rows, in file order."""
        return tuple(self._listed)

    def add(self, bad: BadRow) -> None:
        """Count a row, and keep it while there is room."""
        self.total += 1
        if len(self._listed) < BAD_ROWS_LISTED:
            self._listed.append(bad)


@dataclass(frozen=True, kw_only=True)
class Reading:
    """How a source is read."""

    columns: Columns
    labels: LabelReader | None
    """None: labels are not looked at."""
    label_optional: bool
    """Whether rows may be unlabelled, as in test splits."""
    on_bad_row: OnBadRow
    """"error": the first bad row ends the reading. "skip": it is logged."""
    max_rows: int | None = None
    """Only the first rows are read, good or bad; None: all."""
    texts: ExampleReader = field(default_factory=lambda: TextReader())
    """What an example consists of."""

    @property
    def reads_labels(self) -> bool:
        """Whether the label column is looked at."""
        return self.labels is not None and self.columns.label is not None

    @property
    def wanted(self) -> tuple[str, ...]:
        """The columns that are read: of the texts, of the label, of the identifier."""
        columns = self.columns
        label = columns.label if self.reads_labels else None
        return (*columns.texts, *(name for name in (label, columns.id) if name is not None))

    def label_of(self, cells: Cells) -> Label | None:
        """The label among the cells of the columns that are wanted; None if there is none.

        Raises:
            CellError: The cell is no label of the task.
        """
        if self.labels is None or not self.reads_labels:
            return None
        cell = cells[len(self.columns.texts)]
        return self.labels.read_if_given(cell) if self.label_optional else self.labels.read(cell)


Cells = tuple[Cell, ...]
ReadRow = Callable[[Row], Example | BadRow]


class ExampleReader(ABC):
    """What an example consists of."""

    @abstractmethod
    def rules(self) -> str:
        """All that decides what is read beside columns and labels, as a text; part of the key of cached tokens."""

    @abstractmethod
    def start(self, reading: Reading) -> ReadRow:
        """Begin with the rows of a source; each is given to the function that is returned, in their order."""


class TextReader(ExampleReader):
    """One text or two."""

    def rules(self) -> str:
        """See `ExampleReader.rules`."""
        return "texts"

    def start(self, reading: Reading) -> ReadRow:
        """See `ExampleReader.start`."""
        return lambda row: _checked(row, reading)


def read_examples(
    source: Source, reading: Reading, log: Callable[[BadRow], None], rows: Iterable[Row] | None = None
) -> Iterator[Example]:
    """Stream the examples of a source.

    Args:
        source: An opened source that has the columns.
        reading: How to read it.
        log: Told of the bad rows that are skipped.
        rows: Some of the source's rows, with the cells of the columns that are wanted; None: all.

    Raises:
        DataError: A bad row, with `on_bad_row="error"`; some further ones are listed with it.
    """
    checked = _checked_rows(source, reading, rows)
    for item in checked:
        if isinstance(item, Example):
            yield item
        elif reading.on_bad_row == "error":
            raise _with_further(source.name, item, checked)
        else:
            log(item)


def check_rows(source: Source, reading: Reading) -> int:
    """Read all rows of a source, and count them, good and bad.

    Raises:
        DataError: A bad row, with `on_bad_row="error"`, or none but bad ones.
    """
    log = BadRowLog()
    num_good = sum(1 for _ in read_examples(source, reading, log.add))
    if num_good == 0:
        raise no_examples(source.name, log)
    return num_good + log.total


def no_examples(file: str, log: BadRowLog) -> DataError:
    """The error of a file of which nothing can be used."""
    bad = "the only one is" if log.total == 1 else f"all {log.total} are"
    lines = [f"no row can be used, {bad} bad:", *map(str, log.listed[:FURTHER_SHOWN])]
    return DataError("\n  ".join(lines), file=file)


def _checked_rows(source: Source, reading: Reading, rows: Iterable[Row] | None) -> Iterator[Example | BadRow]:
    read = reading.texts.start(reading)
    for row in islice(source.rows(reading.wanted), reading.max_rows) if rows is None else rows:
        if row.problem is None:
            yield read(row)
        else:
            yield BadRow(row=row.number, column=None, reason=row.problem)


def _checked(row: Row, reading: Reading) -> Example | BadRow:
    texts: list[str] = []
    for column, cell in zip(reading.columns.texts, row.cells, strict=False):
        problem = text_problem(cell)
        if problem is not None:
            return BadRow(row=row.number, column=column, reason=problem)
        texts.append(str(cell))
    try:
        label = reading.label_of(row.cells)
    except CellError as error:
        return BadRow(row=row.number, column=reading.columns.label, reason=str(error))
    return Example(row.number, tuple(texts), label)


def text_problem(cell: Cell) -> str | None:
    """Why a cell cannot be read as a text; None if it can."""
    if cell is MISSING:
        return "the column is missing in this row"
    # A number is the text that the same table has in a CSV file; the nan of Parquet files is a missing value.
    if isinstance(cell, int | float) and not isinstance(cell, bool) and cell == cell:
        return None
    if cell is None or cell != cell:
        return "the text is empty (null)"
    if not isinstance(cell, str):
        return f"a text was expected, found {cell!r} ({type(cell).__name__})"
    if not cell or cell.isspace():
        return "the text is empty"
    # JSON can escape half of a surrogate pair, which no tokenizer takes.
    if not cell.isascii() and (half := _LONE_SURROGATE.search(cell)):
        return f"the text holds U+{ord(half[0]):04X}, half of a surrogate pair"
    return None


def _with_further(file: str, first: BadRow, rest: Iterator[Example | BadRow]) -> DataError:
    """The error for the first bad row, which also lists some of those that follow."""
    further: list[BadRow] = []
    try:
        for item in islice(rest, FURTHER_ROWS_CHECKED):
            if isinstance(item, BadRow):
                further.append(item)
            if len(further) > FURTHER_SHOWN:
                break
    except DataError:
        pass  # A file that breaks off further down is told about when the first bad row is mended.
    lines = [first.reason]
    lines += [f"  also {bad}" for bad in further[:FURTHER_SHOWN]]
    lines += ["  and more"] if len(further) > FURTHER_SHOWN else []
    lines += ["  (--on_bad_row skip leaves bad rows out and lists them)"]
    return DataError("\n".join(lines), file=file, row=first.row, column=first.column)
