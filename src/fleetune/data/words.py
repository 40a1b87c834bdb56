"""Sentences of words, and a tag for each: rows to examples."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence

import numpy as np

from fleetune.data.examples import BadRow, Example, ExampleReader, Reading, ReadRow, text_problem
from fleetune.data.labels import (
    CellError,
    ClassReader,
    FoundLabels,
    Label,
    LabelReader,
    in_natural_order,
    label_text,
    listed,
)
from fleetune.data.sources import MISSING, Cell, Row, Source
from fleetune.data.tags import mark_spans
from fleetune.data.wording import counted
from fleetune.errors import DataError

WORD_COLUMNS = ("tokens", "words")
TAG_COLUMNS = ("ner_tags", "tags", "pos_tags", "chunk_tags", "labels")


class WordReader(ExampleReader):
    """The words of a sentence: a list of texts, or a text with blanks between them."""

    def rules(self) -> str:
        """See `ExampleReader.rules`."""
        return "words"

    def start(self, reading: Reading) -> ReadRow:
        """See `ExampleReader.start`."""
        return lambda row: _read(row, reading)


class TagReader(LabelReader):
    """Lists of tags, or a text with blanks between them, to class ids.

    Args:
        classes: Reads a tag.
    """

    dtype = np.int64

    def __init__(self, classes: ClassReader) -> None:
        self._classes = classes

    def rules(self) -> str:
        """See `LabelReader.rules`."""
        return f"tags, {self._classes.rules()}"

    def read(self, cell: Cell) -> Label:
        """See `LabelReader.read`."""
        tags = tags_in(cell)
        if not tags:
            raise CellError("there are no tags")
        return tuple(map(self._classes.read, tags))

    def read_if_given(self, cell: Cell) -> Label | None:
        """See `LabelReader.read_if_given`: lists that are empty, or of -1 or null alone, are not given."""
        tags = tags_in(cell)
        return None if set(tags) <= {"", "-1"} else self.read(cell)


def tags_in(cell: Cell) -> list[str]:
    """The texts of the tags of a cell.

    Raises:
        CellError: It is no list of texts or numbers.
    """
    if cell is None or cell is MISSING:
        return []
    if isinstance(cell, str):
        return cell.split()
    if not isinstance(cell, (list, tuple)):
        raise CellError(f"a list of tags was expected, found {cell!r} ({type(cell).__name__})")
    return [label_text(tag) for tag in cell]


def words_in(cell: Cell) -> tuple[str, ...]:
    """The words of a cell.

    Raises:
        CellError: It is no list of texts, or an empty one.
    """
    if cell is None or cell is MISSING:
        raise CellError("the words are missing in this row")
    if isinstance(cell, str):
        cell = cell.split()
    if not isinstance(cell, (list, tuple)):
        raise CellError(f"a list of words was expected, found {cell!r} ({type(cell).__name__})")
    if not cell:
        raise CellError("the sentence has no words")
    for number, word in enumerate(cell, start=1):
        problem = None if word == "" else text_problem(word)
        if problem is not None and not (isinstance(word, str) and word.isspace()):
            raise CellError(f"word {number}: {problem}")
    return tuple(map(str, cell))


def _read(row: Row, reading: Reading) -> Example | BadRow:
    column: str | None = reading.columns.texts[0]
    try:
        words = words_in(row.cells[0])
        column = reading.columns.label
        tags = reading.label_of(row.cells)
        if isinstance(tags, tuple) and len(tags) != len(words):
            raise CellError(f"{counted(len(tags), 'tag')} for {counted(len(words), 'word')}")
    except CellError as error:
        return BadRow(row=row.number, column=column, reason=str(error))
    return Example(row.number, words, tags)


def default_columns(source: Source) -> tuple[str, str] | None:
    """The columns of words and tags by their usual names; None if one is missing."""
    words = next((name for name in WORD_COLUMNS if name in source.columns), None)
    tags = next((name for name in TAG_COLUMNS if name in source.columns), None)
    return None if words is None or tags is None else (words, tags)


def discover_tags(source: Source, column: str) -> FoundLabels:
    """Read the tags of a training file: class names in their natural order.

    Raises:
        DataError: There are fewer than two.
    """
    counts: Counter[str] = Counter()
    for row in source.rows([column]):
        if row.problem is None:
            try:
                counts.update(tags_in(row.cells[0]))
            except CellError:
                continue  # told when the rows are read
    counts.pop("", None)
    labels = in_natural_order(counts)
    if len(labels) < 2:
        raise DataError(
            f"{counted(len(labels), 'tag')} in all: two or more are expected", file=source.name, column=column
        )
    return FoundLabels(problem="token_classification", labels=labels, notice=_notice(source.name, column, labels))


def _notice(file: str, column: str, labels: Sequence[str]) -> str:
    how = "spans are scored" if mark_spans(labels) else "they mark no spans (O, B-..., I-...), so words are scored"
    return f"{file}: {column!r} has {len(labels)} tags: {listed(labels)}; {how}"
