"""Several labels of one text: from lists, texts with a delimiter, or columns of 0 and 1 to flags of classes."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from fleetune.data.labels import (
    CellError,
    ClassReader,
    FoundLabels,
    Label,
    LabelReader,
    class_reader_of,
    in_natural_order,
    label_text,
    listed,
)
from fleetune.data.sources import MISSING, Cell, JoinedColumns, Source
from fleetune.data.tasks import Task
from fleetune.data.wording import counted
from fleetune.errors import DataError

_FLAGS = {"0": False, "1": True, "false": False, "true": True, "": False}


class LabelSetReader(LabelReader):
    """Lists of class names to a flag for each class; an empty list is the label of a text of no class.

    Args:
        classes: Reads the names.
        num_classes: Count of them.
        delimiter: What stands between the names of a cell of text; None: such a cell holds one name.
    """

    dtype = np.float32

    def __init__(self, classes: ClassReader, num_classes: int, delimiter: str | None = None) -> None:
        self._classes, self._num_classes, self._delimiter = classes, num_classes, delimiter

    def rules(self) -> str:
        """See `LabelReader.rules`."""
        return f"sets of {self._classes.rules()}, delimiter {self._delimiter!r}"

    def read(self, cell: Cell) -> Label:
        """See `LabelReader.read`."""
        flags = [0] * self._num_classes
        for name in names_in(cell, self._delimiter):
            class_id = self._classes.read(name)
            if flags[class_id]:
                raise CellError(f"the label {name!r} is given twice")
            flags[class_id] = 1
        return tuple(flags)

    def read_if_given(self, cell: Cell) -> Label | None:
        """See `LabelReader.read_if_given`; an empty text is no label here, an empty list is."""
        if cell is None or cell is MISSING or (isinstance(cell, str) and not cell.strip()):
            return None
        return self.read(cell)

    def array(self, labels: Sequence[Label | None]) -> NDArray[Any]:
        """See `LabelReader.array`: (n, C)."""
        blank = (0,) * self._num_classes
        return np.array([blank if label is None else label for label in labels], dtype=self.dtype)


def label_set_reader_of(task: Task, delimiter: str | None) -> LabelSetReader:
    """The reader of a task whose labels are known."""
    assert task.labels is not None
    return LabelSetReader(class_reader_of(task), len(task.labels), delimiter)


def names_in(cell: Cell, delimiter: str | None) -> list[str]:
    """The class names that a cell gives.

    Raises:
        CellError: It is neither a list, nor a text or number, nor flags.
    """
    if cell is None or cell is MISSING:
        raise CellError("the labels are empty (null): an empty list or text says that there are none")
    if isinstance(cell, Mapping):
        return [str(name) for name, flag in cell.items() if _is_set(name, flag)]
    parts: Sequence[Any] = [cell]
    if isinstance(cell, (list, tuple)):
        parts = cell
    elif isinstance(cell, str) and delimiter is not None:
        parts = cell.split(delimiter)
    return [text for text in map(label_text, parts) if text]


def _is_set(name: str, flag: Cell) -> bool:
    text = label_text(flag).lower()
    if text not in _FLAGS:
        raise CellError(f"column {name!r} is {text!r}: 0 or 1 is expected")
    return _FLAGS[text]


def with_label_columns(source: Source, label: str | None) -> Source:
    """The source with several columns of 0 and 1 as one, where the name of the label is theirs with commas between.

    Raises:
        DataError: Only some of them are there.
    """
    parts = [part.strip() for part in (label or "").split(",")]
    if label is None or label in source.columns or len(parts) < 2:
        return source
    missing = [part for part in parts if part not in source.columns]
    if len(missing) == len(parts):
        return source  # as a test split, which may be without labels
    if missing:
        raise DataError(f"no column {listed(missing)}: the columns are {listed(source.columns)}", file=source.name)
    return JoinedColumns(source, label, parts)


def discover_label_sets(source: Source, column: str, delimiter: str | None) -> FoundLabels:
    """Read the label column of a training file: the names that occur, in their natural order; flags in theirs.

    Raises:
        DataError: There are fewer than two labels, or no row has several and no delimiter is given.
    """
    counts: Counter[str] = Counter()
    largest, flags = 0, list[str]()
    for row in source.rows([column]):
        if row.problem is not None:
            continue
        cell = row.cells[0]
        if isinstance(cell, Mapping) and not flags:
            flags = [str(name) for name in cell]
        try:
            names = names_in(cell, delimiter)
        except CellError:
            continue  # told when the rows are read
        largest = max(largest, len(names))
        counts.update(names)
    labels = tuple(flags) or in_natural_order(counts)
    if len(labels) < 2:
        raise DataError(
            f"{counted(len(labels), 'label')} in all: two or more are expected", file=source.name, column=column
        )
    if largest < 2 and delimiter is None and not flags:
        raise DataError(
            "no row has more than one label: say --label_delimiter if a cell holds several, or --problem_type "
            "classification",
            file=source.name,
            column=column,
        )
    notice = f"{source.name}: {column!r} holds any of {len(labels)} labels: {listed(labels)}"
    return FoundLabels(problem="multi_label_classification", labels=labels, notice=notice)
