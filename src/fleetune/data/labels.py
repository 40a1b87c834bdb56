"""Labels: from the cells of a file to class ids or scores."""

from __future__ import annotations

import difflib
import math
import re
from abc import ABC, abstractmethod
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from numbers import Number
from typing import Any

import numpy as np
from numpy.typing import NDArray

from fleetune.data.sources import MISSING, Cell, Source
from fleetune.data.tasks import Problem, Task
from fleetune.data.wording import counted
from fleetune.errors import DataError

# More classes than this, and more than half as many as rows: the column is no class label.
MANY_CLASSES = 50
NAMES_SHOWN = 12
# With fractions among them, labels of which so many are numbers are more likely scores with strays than classes.
NUMBERS_THAT_SUGGEST_SCORES = 0.9
UNLABELLED = "-1"

_WHOLE_NUMBER = re.compile(r"[+-]?\d+\.0*")
_TRUTH = {"false": 0, "true": 1}


Label = int | float | tuple[Any, ...]
"""A class id or a score; flags of classes, tags of words, or answers."""


class CellError(ValueError):
    """A cell cannot be used; the text is the reason, without its place."""


def label_text(cell: Cell) -> str:
    """The text of a label cell: 1, 1.0, "1.0" and " 1 " are all "1"; true is "true"; a null is "".

    Raises:
        CellError: The cell is a list, an object or the like.
    """
    if cell is None or cell is MISSING:
        return ""
    if isinstance(cell, bool):
        return str(cell).lower()
    if not isinstance(cell, str | Number):
        raise CellError(f"the label is no text or number, found {cell!r} ({type(cell).__name__})")
    if isinstance(cell, float) and cell.is_integer():
        return str(int(cell))
    text = str(cell).strip()
    return str(int(text.split(".")[0])) if _WHOLE_NUMBER.fullmatch(text) else text


def as_number(text: str) -> float | None:
    """The number a text stands for (it may be nan or infinite), or None."""
    try:
        return None if "_" in text else float(text)
    except ValueError:
        return None


class LabelReader(ABC):
    """Turns label cells into what is learned."""

    dtype: type[np.int64] | type[np.float32]
    """Of the label array."""

    @abstractmethod
    def rules(self) -> str:
        """All that decides what `read` gives, as a text; part of the key of cached labels."""

    @abstractmethod
    def read(self, cell: Cell) -> Label:
        """What a cell says.

        Raises:
            CellError: The cell is no label of the task.
        """

    def array(self, labels: Sequence[Label | None]) -> NDArray[Any]:
        """Labels of consecutive examples as an array; a place without one holds anything."""
        return np.array([0 if label is None else label for label in labels], dtype=self.dtype)

    def read_if_given(self, cell: Cell) -> Label | None:
        """As `read`, but None where the cell is empty, or is a -1 that is no label of the task.

        Raises:
            CellError: As in `read`.
        """
        text = label_text(cell)
        if not text:
            return None
        try:
            return self.read(cell)
        except CellError:
            if text == UNLABELLED:
                return None
            raise


class ClassReader(LabelReader):
    """Class names, in any case, to class ids.

    Args:
        labels: Class names in class id order.
        ids_allowed: Whether a cell may also give the class id (0, "0", "0.0", False).
    """

    dtype = np.int64

    def __init__(self, labels: Sequence[str], *, ids_allowed: bool = False) -> None:
        self._labels = tuple(labels)
        self._ids_allowed = ids_allowed
        self._ids = {name: class_id for class_id, name in enumerate(self._labels)}
        self._folded_ids = _unambiguous(self._labels)
        if ids_allowed:
            self._folded_ids |= {str(class_id): class_id for class_id in range(len(self._labels))}
            self._folded_ids |= _TRUTH if len(self._labels) == 2 else {}

    def rules(self) -> str:
        """See `LabelReader.rules`."""
        return f"classes {self._labels!r}, ids {self._ids_allowed}"

    def read(self, cell: Cell) -> int:
        """See `LabelReader.read`."""
        text = label_text(cell)
        class_id = self._ids.get(text)
        if class_id is None:
            class_id = self._folded_ids.get(text.casefold())
        if class_id is None:
            raise CellError(self._reason(text) if text else _empty(cell, "label"))
        return class_id

    def _reason(self, text: str) -> str:
        if text == UNLABELLED:
            return f"the label is -1, as in test splits, which carry -1 for 'not given'; {self._expected()}"
        if self._ids_allowed and as_number(text) is not None:
            return f"the label {text} is out of range; {self._expected()}"
        folded = {name.casefold(): name for name in self._labels}
        near = difflib.get_close_matches(text.casefold(), folded, n=1)
        hint = f" (nearest: {folded[near[0]]!r})" if near else ""
        return f"the label {text!r} is unknown{hint}; {self._expected()}"

    def _expected(self) -> str:
        if self._ids_allowed:
            return f"expected {', '.join(f'{i} or {name}' for i, name in enumerate(self._labels))}"
        return f"expected {listed(self._labels)}"


class ScoreReader(LabelReader):
    """Finite numbers, within a range if the task has one."""

    dtype = np.float32

    def __init__(self, score_range: tuple[float, float] | None = None) -> None:
        self._range = score_range

    def rules(self) -> str:
        """See `LabelReader.rules`."""
        return f"scores {self._range!r}"

    def read(self, cell: Cell) -> float:
        """See `LabelReader.read`."""
        text = label_text(cell)
        score = as_number(text)
        if not text:
            raise CellError(_empty(cell, "score"))
        if score is None or isinstance(cell, bool):
            raise CellError(f"the score {text!r} is not a number")
        if not math.isfinite(score):
            raise CellError(f"the score {text!r} is not a finite number")
        if self._range and not self._range[0] <= score <= self._range[1]:
            hint = " (test splits carry -1 for 'not given')" if text == UNLABELLED else ""
            raise CellError(f"the score {text} is outside {self._range[0]:g} to {self._range[1]:g}{hint}")
        return score


def reader_of(task: Task) -> LabelReader:
    """The reader of a task of classes or scores whose labels are known."""
    if task.problem == "regression":
        return ScoreReader(task.score_range)
    return class_reader_of(task)


def class_reader_of(task: Task) -> ClassReader:
    """The reader of one class of a task whose labels are known."""
    assert task.labels is not None, "the labels of a custom task are discovered first"
    return ClassReader(task.labels, ids_allowed=task.label_ids_allowed)


@dataclass(frozen=True, kw_only=True)
class FoundLabels:
    """What a label column turned out to hold."""

    problem: Problem
    labels: tuple[str, ...] | None
    """Class names in class id order; None for regression."""
    notice: str | None
    """What was decided, where it was left open."""


def discover_labels(source: Source, column: str, problem: Problem | None) -> FoundLabels:
    """Read the label column of a training file: class names in their natural order, or scores.

    Reads the whole column, whatever part of the rows is used: a smaller sample keeps the same class ids.

    Args:
        source: The training split.
        column: Its label column.
        problem: None: regression if all labels are numbers and one is not whole, else classification.

    Raises:
        DataError: There is no label, or one class only, or too many to be classes, or it is open whether a few
            labels among fractions are strays.
    """
    if problem == "regression":
        return FoundLabels(problem="regression", labels=None, notice=None)
    found = _read_texts(source, column)
    counts = found.counts
    fraction = None if problem else _first_fraction(counts)
    if fraction is not None and found.stray is None:
        notice = f"{source.name}: {column!r} holds numbers such as {fraction}: this is regression"
        return FoundLabels(problem="regression", labels=None, notice=notice)
    if fraction is not None and found.num_numbers >= NUMBERS_THAT_SUGGEST_SCORES * counts.total():
        raise _undecided(found, source.name, column)
    labels = in_natural_order(counts)
    if len(labels) < 2 and found.unusable is not None:
        row, reason = found.unusable
        raise DataError(reason, file=source.name, row=row, column=column)
    _refuse_useless(labels, counts.total(), source.name, column)
    notice = f"{source.name}: {column!r} has {len(labels)} classes: {listed(labels)}"
    return FoundLabels(problem="classification", labels=labels, notice=notice)


@dataclass(frozen=True, kw_only=True)
class _LabelTexts:
    """The texts of a label column, those of bad rows and empty cells left out."""

    counts: Counter[str]
    num_numbers: int
    """Rows whose label is a number (a nan is then a bad score, not a class)."""
    stray: tuple[int, str] | None
    """Row and text of the first label that is no number."""
    unusable: tuple[int, str] | None
    """Row and reason of the first cell that cannot be a label."""


def _read_texts(source: Source, column: str) -> _LabelTexts:
    counts: Counter[str] = Counter()
    rows: dict[str, int] = {}
    unusable: tuple[int, str] | None = None
    for row in source.rows([column]):
        if row.problem is not None:
            continue
        try:
            text = label_text(row.cells[0])
        except CellError as error:
            unusable = unusable or (row.number, str(error))
            continue
        counts[text] += 1
        rows.setdefault(text, row.number)
    counts.pop("", None)
    # Dicts keep the order of first appearance, so the first stray text is that of the first row with one.
    strays = [text for text in counts if as_number(text) is None]
    return _LabelTexts(
        counts=counts,
        num_numbers=counts.total() - sum(counts[text] for text in strays),
        stray=(rows[strays[0]], strays[0]) if strays else None,
        unusable=unusable,
    )


def _first_fraction(texts: Counter[str]) -> str | None:
    """The first text that is a number and not a whole one."""
    numbers = ((text, as_number(text)) for text in texts)
    return next((t for t, number in numbers if number is not None and number % 1 and math.isfinite(number)), None)


def _undecided(found: _LabelTexts, file: str, column: str) -> DataError:
    assert found.stray is not None
    row, text = found.stray
    more = found.counts.total() - found.num_numbers - 1
    others = "the other" if not more else f"nor {'is' if more == 1 else 'are'} {counted(more, 'more label')}; the other"
    verb = "label is" if found.num_numbers == 1 else "labels are"
    return DataError(
        f"{text!r} is no number, {others} {found.num_numbers} {verb}: say --problem_type regression "
        "(with --on_bad_row skip to leave such rows out), or --problem_type classification",
        file=file,
        row=row,
        column=column,
    )


def in_natural_order(texts: Iterable[str]) -> tuple[str, ...]:
    """Class names by their number, where all are numbers, else by the alphabet."""
    names = list(texts)
    if all(as_number(text) is not None for text in names):
        return tuple(sorted(names, key=lambda text: (float(text), text)))
    return tuple(sorted(names))


def _refuse_useless(labels: Sequence[str], num_rows: int, file: str, column: str) -> None:
    if not labels:
        raise DataError("every label is empty", file=file, column=column)
    if len(labels) == 1:
        hint = ", as in test splits" if labels[0] == UNLABELLED else ": there is nothing to learn"
        raise DataError(f"every row has the label {labels[0]!r}{hint}", file=file, column=column)
    if len(labels) > MANY_CLASSES and len(labels) > num_rows / 2:
        raise DataError(
            f"{len(labels)} different labels in {num_rows} rows are no classes: for numbers to be predicted "
            "say --problem_type regression, for another column --label_column_name",
            file=file,
            column=column,
        )


def _empty(cell: Cell, what: str) -> str:
    return "the column is missing in this row" if cell is MISSING else f"the {what} is empty"


def _unambiguous(labels: Sequence[str]) -> dict[str, int]:
    """Case-folded names to ids, without those that two classes share."""
    times = Counter(name.casefold() for name in labels)
    return {name.casefold(): i for i, name in enumerate(labels) if times[name.casefold()] == 1}


def listed(names: Sequence[str]) -> str:
    """The first names, and how many more there are."""
    more = f" and {len(names) - NAMES_SHOWN} more" if len(names) > NAMES_SHOWN else ""
    return ", ".join(names[:NAMES_SHOWN]) + more
