"""Files of words in columns, a blank line between sentences, as in CoNLL's shared tasks: a sentence is a row."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import NamedTuple

from fleetune.data.sources.encoding import read_lines
from fleetune.data.sources.rows import Row, Source, file_digest
from fleetune.data.wording import counted
from fleetune.errors import DataError

WORDS, TAGS = "tokens", "ner_tags"
DOCUMENT_START = "-DOCSTART-"
COMMENT = "#"


class _Word(NamedTuple):
    number: int
    """Of its line."""
    cells: list[str]


class ConllFile(Source):
    """A file of words in columns.

    The columns are named by their numbers, from "1"; besides, the first is "tokens", and the last of several
    "ner_tags". Cells are separated by blanks or tabs. Lines that begin with -DOCSTART- are passed over, and so are
    comments: lines before the first word of a sentence that begin with # and have not the cells of a word.

    Args:
        path: A regular file.
        encoding: A Python codec name; None: UTF-8, or what the byte-order mark says.

    Raises:
        DataError: The file holds no word.
    """

    def __init__(self, path: Path, encoding: str | None = None) -> None:
        self.name = str(path)
        self._path, self._encoding = path, encoding
        self._width = self._cells_of_a_word()
        numbers = [str(i + 1) for i in range(self._width)]
        self._positions = {name: i for i, name in enumerate(numbers)} | {WORDS: 0}
        if self._width > 1:
            self._positions[TAGS] = self._width - 1
        self.columns = tuple(self._positions)

    def rows(self, columns: Sequence[str]) -> Iterator[Row]:
        """Stream every sentence, numbered by the line of its first word; cells are lists of texts."""
        positions = [self._positions[name] for name in columns]
        for words in self._sentences():
            odd = next((word for word in words if len(word.cells) != self._width), None)
            if odd is None:
                yield Row(words[0].number, tuple([word.cells[i] for word in words] for i in positions))
            else:
                found = counted(len(odd.cells), "column")
                yield Row(
                    words[0].number, (), f"line {odd.number} has {found}, the first word of the file {self._width}"
                )

    def digest(self) -> str:
        """See `Source.digest`."""
        return file_digest(self._path)

    def total_rows(self) -> int | None:
        """Not known: sentences would have to be counted."""
        return None

    def _cells_of_a_word(self) -> int:
        for line in read_lines(self._path, self._encoding):
            cells = line.split()
            if cells and cells[0] != DOCUMENT_START and not line.startswith(COMMENT):
                return len(cells)
        raise DataError("the file holds no word", file=self._path)

    def _sentences(self) -> Iterator[list[_Word]]:
        words: list[_Word] = []
        for number, line in enumerate(read_lines(self._path, self._encoding), start=1):
            cells = line.split()
            if not cells or cells[0] == DOCUMENT_START:
                if words:
                    yield words
                    words = []
            elif words or not line.startswith(COMMENT) or len(cells) == self._width:
                words.append(_Word(number, cells))
        if words:
            yield words
