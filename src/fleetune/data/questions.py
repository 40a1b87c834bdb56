"""Questions about a context, answered by spans of it: rows to examples."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np

from fleetune.data.examples import BadRow, Example, ExampleReader, Reading, ReadRow, text_problem
from fleetune.data.labels import CellError, Label, LabelReader, label_text
from fleetune.data.sources import MISSING, Cell, Row
from fleetune.data.wording import counted

QUESTION_COLUMNS = ("question", "context")
ANSWER_COLUMN, ID_COLUMN = "answers", "id"
SHOWN = 40


class Answer(NamedTuple):
    """A text, and where it begins."""

    text: str
    start: int | None
    """Character of the context; None: it is not in there."""


class AnswerReader(LabelReader):
    """Answers as in SQuAD or on the hub: a list of objects, or an object of lists, with `text` and `answer_start`."""

    dtype = np.int64

    def rules(self) -> str:
        """See `LabelReader.rules`."""
        return "answers"

    def read(self, cell: Cell) -> Label:
        """See `LabelReader.read`; leading and trailing blanks of an answer are no part of it."""
        if cell is None or cell is MISSING:
            raise CellError("the answers are missing in this row: an empty list says that there are none")
        return tuple(_answer(text, start) for text, start in _pairs(cell))

    def read_if_given(self, cell: Cell) -> Label | None:
        """See `LabelReader.read_if_given`."""
        return None if cell is None or cell is MISSING else self.read(cell)


def _pairs(cell: Cell) -> Iterator[tuple[Cell, Cell]]:
    if isinstance(cell, dict) and isinstance(cell.get("text"), (list, tuple)):
        texts, starts = cell["text"], cell.get("answer_start")
        if not isinstance(starts, (list, tuple)) or len(starts) != len(texts):
            raise CellError(f"{counted(len(texts), 'answer')} without as many places in answer_start")
        yield from zip(texts, starts, strict=True)
    elif isinstance(cell, (list, tuple)) and all(isinstance(answer, dict) for answer in cell):
        yield from ((answer.get("text"), answer.get("answer_start")) for answer in cell)
    else:
        raise CellError(f"answers with text and answer_start were expected, found {str(cell)[:SHOWN]!r}")


def _answer(text: Cell, start: Cell) -> Answer:
    if not isinstance(text, str) or not text.strip():
        raise CellError(f"an answer has no text ({text!r})")
    if isinstance(start, bool) or not isinstance(start, int) or start < 0:
        raise CellError(f"the answer {text[:SHOWN]!r} begins at {start!r}: a character of the context is expected")
    return Answer(text.strip(), start + len(text) - len(text.lstrip()))


@dataclass(frozen=True, kw_only=True)
class QuestionReader(ExampleReader):
    """A question and its context; the label is its answers, placed in the context."""

    may_lack_answers: bool
    """Whether a labelled question may have no answer."""
    answers_must_fit: bool
    """Whether one of the answers must be in the context: there is nothing to learn from others, but to score."""
    ids_must_differ: bool = True
    """Whether an id may be there once only: answers are scored, and written into files, by it. To check that, all
    ids are kept in memory."""

    def rules(self) -> str:
        """See `ExampleReader.rules`."""
        return repr(self)

    def start(self, reading: Reading) -> ReadRow:
        """See `ExampleReader.start`."""
        rows_of: dict[str, int] = {}
        return lambda row: self._read(row, reading, rows_of)

    def _read(self, row: Row, reading: Reading, rows_of: dict[str, int]) -> Example | BadRow:
        columns = reading.columns
        for name, cell in zip(columns.texts, row.cells, strict=False):
            if (problem := text_problem(cell)) is not None:
                what = "question" if name == columns.texts[0] else "context"
                return BadRow(row=row.number, column=name, reason=problem.replace("the text", f"the {what}"))
        question, context = map(str, row.cells[:2])
        column = columns.id
        try:
            own_id = _id(row, reading, rows_of if self.ids_must_differ else {})
            column = columns.label
            found = reading.label_of(row.cells)
            answers, moved = (None, None) if found is None else self._placed(found, context)
        except CellError as error:
            return BadRow(row=row.number, column=column, reason=str(error))
        # A question's leading blanks would be cut off first, and count as tokens of it in some tokenizers.
        return Example(row.number, (question.strip(), context), answers, own_id, moved)

    def _placed(self, label: Label, context: str) -> tuple[Label, str | None]:
        """The answers where their text is, and what was moved."""
        assert isinstance(label, tuple)
        if not label and not self.may_lack_answers:
            raise CellError(
                "the question has no answer: say --task squad_v2, or --version_2_with_negative for files of your own"
            )
        placed = [_place(answer, context) for answer in label]
        lost = [answer for answer in placed if answer.start is None]
        if lost and len(lost) == len(placed) and self.answers_must_fit:
            raise CellError(f"the answer {lost[0].text[:SHOWN]!r} is not in the context")
        remarks = [_remark(old, new) for old, new in zip(label, placed, strict=True) if old != new]
        placed.sort(key=lambda answer: answer.start is None)  # the first one is learned
        return tuple(placed), "; ".join(remarks) or None


def _id(row: Row, reading: Reading, rows_of: dict[str, int]) -> str:
    """The question's identifier, or its row number where the file has none."""
    own = label_text(row.cells[-1]) if reading.columns.id is not None else str(row.number)
    if not own:
        raise CellError("the id is empty")
    if own in rows_of:
        raise CellError(f"the id {own!r} is that of row {rows_of[own]} too")
    rows_of[own] = row.number
    return own


def _place(answer: Answer, context: str) -> Answer:
    """The answer at the place of its text that is nearest to where it is said to be."""
    assert answer.start is not None
    if context.startswith(answer.text, answer.start):
        return answer
    places = list(_places(answer.text, context))
    start = min(places, key=lambda place: abs(place - (answer.start or 0))) if places else None
    return answer._replace(start=start)


def _places(text: str, context: str) -> Iterator[int]:
    place = context.find(text)
    while place >= 0:
        yield place
        place = context.find(text, place + 1)


def _remark(said: Answer, found: Answer) -> str:
    if found.start is None:
        return f"the answer {said.text[:SHOWN]!r} is not in the context: it counts in the score alone"
    return f"the answer {said.text[:SHOWN]!r} is at {found.start}, not at {said.start}"
