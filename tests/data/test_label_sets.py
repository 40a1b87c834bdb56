from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from fleetune.data.dataset import TaskData, prepare_data
from fleetune.data.label_sets import LabelSetReader
from fleetune.data.labels import CellError, ClassReader
from fleetune.data.sources import MISSING
from fleetune.errors import DataError
from tests.data.conftest import Settings, WordTokenizer

Write = Callable[[str, str | bytes], Path]
Make = Callable[..., Settings]


def reader(delimiter: str | None = None) -> LabelSetReader:
    return LabelSetReader(ClassReader(("art", "law", "sea")), 3, delimiter)


@pytest.mark.parametrize(
    ("cell", "delimiter", "flags"),
    [
        (["sea", "art"], None, (1, 0, 1)), ([], None, (0, 0, 0)), (["LAW"], None, (0, 1, 0)), ("law", None, (0, 1, 0)),
        ("sea; art", ";", (1, 0, 1)), ("sea;;", ";", (0, 0, 1)), ("", ";", (0, 0, 0)),
        ({"art": 1, "law": "0", "sea": True}, None, (1, 0, 1)), ({"art": "", "law": 0.0, "sea": "1"}, None, (0, 0, 1)),
    ],
)  # fmt: skip
def test_cells_to_flags(cell: Any, delimiter: str | None, flags: tuple[int, ...]) -> None:
    assert reader(delimiter).read(cell) == flags
    assert reader().array([flags, None]).tolist() == [list(map(float, flags)), [0.0, 0.0, 0.0]]


@pytest.mark.parametrize(
    ("cell", "reason"),
    [
        (["lav"], r"the label 'lav' is unknown \(nearest: 'law'\)"), (["sea", "sea"], "'sea' is given twice"),
        (None, "empty .null."), (MISSING, "empty .null."), ({"art": 2}, "column 'art' is '2': 0 or 1 is expected"),
        ([["art"]], "no text or number"), ("sea;art", "'sea;art' is unknown"),
    ],
)  # fmt: skip
def test_cells_that_are_no_labels(cell: Any, reason: str) -> None:
    with pytest.raises(CellError, match=reason):
        reader().read(cell)


@pytest.mark.parametrize("cell", [None, MISSING, "", "  "])
def test_what_is_not_given_in_a_test_split(cell: Any) -> None:
    assert reader().read_if_given(cell) is None
    assert reader().read_if_given([]) == (0, 0, 0)


def prepare(make_settings: Make, train: Path, **changes: Any) -> TaskData:
    settings = make_settings(train_file=train, **changes)
    return prepare_data(settings, WordTokenizer(), splits=["train"])


def flags_of(data: TaskData) -> list[list[float]]:
    labels = data.splits["train"].labels
    assert labels is not None
    return [list(row) for row in labels.tolist()]


EXPECTED = [[1.0, 0.0, 1.0], [0.0, 0.0, 0.0], [0.0, 1.0, 0.0]]


def test_lists_are_several_labels_unasked(make_settings: Make, write: Write) -> None:
    lines = (
        '{"text": "a", "labels": ["sea", "art"]}',
        '{"text": "b", "labels": []}',
        '{"text": "c", "labels": ["law"]}',
    )
    data = prepare(make_settings, write("a.jsonl", "\n".join(lines)))
    assert (data.task.problem, data.task.labels) == ("multi_label_classification", ("art", "law", "sea"))
    assert flags_of(data) == EXPECTED
    assert "'labels' holds any of 3 labels: art, law, sea" in data.notices[-1]


def test_a_delimiter(make_settings: Make, write: Write) -> None:
    path = write("a.csv", "text,label\na,sea|art\nb,\nc,law\n")
    data = prepare(make_settings, path, problem_type="multi_label_classification", label_delimiter="|")
    assert flags_of(data) == EXPECTED
    with pytest.raises(DataError, match="no row has more than one label: say --label_delimiter"):
        prepare(make_settings, path, problem_type="multi_label_classification")


def test_a_column_of_0_and_1_for_each_label(make_settings: Make, write: Write) -> None:
    path = write("a.csv", "text,art,law,sea\na,1,0,1\nb,0,0,0\nc,0,1,0\n")
    data = prepare(make_settings, path, label_column_name="art,law,sea", text_column_names=("text",))
    assert (data.task.problem, data.task.labels) == ("multi_label_classification", ("art", "law", "sea"))
    assert flags_of(data) == EXPECTED
    with pytest.raises(DataError, match="no column lav: the columns are text, art, law, sea"):
        prepare(make_settings, path, label_column_name="art,lav", problem_type="multi_label_classification")
    bad = write("b.csv", "text,art,law,sea\na,1,0,1\nb,0,maybe,0\n")
    with pytest.raises(DataError, match=r"row 3, column 'art,law,sea': column 'law' is 'maybe': 0 or 1"):
        prepare(make_settings, bad, label_column_name="art,law,sea", text_column_names=("text",))


def test_one_label_alone_is_refused(make_settings: Make, write: Write) -> None:
    with pytest.raises(DataError, match="1 label in all: two or more"):
        prepare(make_settings, write("a.jsonl", '{"text": "a", "label": ["x"]}\n{"text": "b", "label": []}'))
