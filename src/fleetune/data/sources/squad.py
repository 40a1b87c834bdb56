"""The official layout of SQuAD, articles with paragraphs with questions, as a stream of questions."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence

from fleetune.data.sources.rows import MISSING, Cell, Row, Source
from fleetune.errors import DataError

COLUMNS = ("id", "title", "context", "question", "answers", "is_impossible")


class SquadFile(Source):
    """Articles read as one row a question, with the columns of the hub; `is_impossible` in version 2.

    Args:
        articles: A file of articles, whose "paragraphs" have a "context" and "qas".

    Raises:
        DataError: It holds no question.
    """

    def __init__(self, articles: Source) -> None:
        self.name = articles.name
        self.columns = COLUMNS
        self._articles = articles
        self._num_questions = sum(1 for _ in self._questions())
        if self._num_questions == 0:
            raise DataError("the file holds no question", file=self.name)

    def rows(self, columns: Sequence[str]) -> Iterator[Row]:
        """Stream every question, numbered from 1; see `Source.rows`."""
        for number, found in enumerate(self._questions(), start=1):
            if isinstance(found, str):
                yield Row(number, (), found)
            else:
                yield Row(number, tuple(found.get(name, MISSING) for name in columns))

    def digest(self) -> str:
        """See `Source.digest`."""
        return self._articles.digest()

    def total_rows(self) -> int | None:
        """Number of questions."""
        return self._num_questions

    def _questions(self) -> Iterator[Mapping[str, Cell] | str]:
        """The cells of each question, or what is wrong where one is expected."""
        for row in self._articles.rows(("title", "paragraphs")):
            title, paragraphs = row.cells if row.problem is None else (None, None)
            if not isinstance(paragraphs, list):
                yield row.problem or f"article {row.number} has no list of paragraphs"
                continue
            for number, paragraph in enumerate(paragraphs, start=1):
                place = f"paragraph {number} of article {row.number}"
                yield from _of_paragraph(paragraph, {} if title is MISSING else {"title": title}, place)


def _of_paragraph(paragraph: Cell, cells: Mapping[str, Cell], place: str) -> Iterator[Mapping[str, Cell] | str]:
    questions = paragraph.get("qas") if isinstance(paragraph, dict) else None
    if not isinstance(paragraph, dict) or not isinstance(questions, list):
        yield f'{place} is no object with "context" and "qas"'
        return
    for question in questions:
        if isinstance(question, dict):
            yield {**cells, **({"context": paragraph["context"]} if "context" in paragraph else {}), **question}
        else:
            yield f"a question of {place} is no object"
