from __future__ import annotations

from collections.abc import Callable
from decimal import Decimal
from pathlib import Path

import pytest

from fleetune.data.labels import CellError, ClassReader, ScoreReader, discover_labels, label_text
from fleetune.data.sources import MISSING, open_source
from fleetune.errors import DataError

Write = Callable[[str, str | bytes], Path]
MRPC = ClassReader(("not_equivalent", "equivalent"), ids_allowed=True)
STSB = ScoreReader((0.0, 5.0))


@pytest.mark.parametrize(
    ("cell", "text"),
    [
        (1, "1"),
        (1.0, "1"),
        ("1.0", "1"),
        (" 1 ", "1"),
        ("0.00", "0"),
        ("-1.0", "-1"),
        (1.5, "1.5"),
        (None, ""),
        (MISSING, ""),
        (True, "true"),
        (False, "false"),
        (Decimal("1.50"), "1.50"),
        ("1.0.0", "1.0.0"),
    ],
)
def test_spellings_of_a_whole_number_are_one_label(cell: object, text: str) -> None:
    assert label_text(cell) == text


@pytest.mark.parametrize("cell", ["1", 1, "1.0", 1.0, True, "true", "equivalent", "EQUIVALENT", " Equivalent "])
def test_glue_labels_by_number_or_name(cell: object) -> None:
    assert MRPC.read(cell) == 1
    assert MRPC.read(0) == MRPC.read("0") == MRPC.read(False) == MRPC.read("not_equivalent") == 0


@pytest.mark.parametrize(
    ("cell", "reason"),
    [
        ("", "the label is empty"),
        (None, "the label is empty"),
        (MISSING, "the column is missing in this row"),
        (["equivalent"], r"the label is no text or number, found \['equivalent'\] \(list\)"),
        ({"id": 1}, r"the label is no text or number, found \{'id': 1\} \(dict\)"),
        ("-1", "the label is -1, as in test splits"),
        (-1, "the label is -1, as in test splits"),
        (2, "the label 2 is out of range; expected 0 or not_equivalent, 1 or equivalent"),
        ("0.5", "the label 0.5 is out of range"),
        ("equivalant", r"the label 'equivalant' is unknown \(nearest: 'equivalent'\)"),
        ("maybe", "the label 'maybe' is unknown; expected 0 or"),
    ],
)
def test_what_is_no_glue_label(cell: object, reason: str) -> None:
    with pytest.raises(CellError, match=reason):
        MRPC.read(cell)


def test_labels_of_ones_own_are_names_only() -> None:
    reader = ClassReader(("bad", "good"))
    assert reader.read("Good") == 1
    with pytest.raises(CellError, match="the label '1' is unknown; expected bad, good"):
        reader.read(1)


def test_names_that_differ_in_case_only_stay_apart() -> None:
    reader = ClassReader(("A", "a", "b"))
    assert [reader.read(name) for name in ("A", "a", "B")] == [0, 1, 2]


@pytest.mark.parametrize(("cell", "score"), [("5.000", 5.0), (0, 0.0), (" 3.8", 3.8), ("1e0", 1.0)])
def test_scores(cell: object, score: float) -> None:
    assert STSB.read(cell) == score


@pytest.mark.parametrize(
    ("cell", "reason"),
    [
        ("", "the score is empty"),
        (MISSING, "the column is missing in this row"),
        ([1.0], "the label is no text or number"),
        ("high", "the score 'high' is not a number"),
        (True, "is not a number"),
        ("nan", "is not a finite number"),
        (float("inf"), "is not a finite number"),
        ("5.1", "the score 5.1 is outside 0 to 5"),
        (-1, "the score -1 is outside 0 to 5 .*test splits"),
    ],
)
def test_what_is_no_score(cell: object, reason: str) -> None:
    with pytest.raises(CellError, match=reason):
        STSB.read(cell)


def test_minus_one_is_not_given_unless_it_is_a_label() -> None:
    assert MRPC.read_if_given(-1) is MRPC.read_if_given("-1") is MRPC.read_if_given("") is None
    assert STSB.read_if_given("-1.0") is None
    assert ClassReader(("-1", "0", "1")).read_if_given("-1") == 0
    assert ScoreReader().read_if_given(-1) == -1.0
    with pytest.raises(CellError, match="unknown"):
        MRPC.read_if_given("hidden")


@pytest.mark.parametrize(
    ("cells", "labels"),
    [
        ("10 9 9 10", ("9", "10")),
        ("1.0 0.0 1 0", ("0", "1")),
        ("-1 1 -1", ("-1", "1")),
        ("b a B", ("B", "a", "b")),
        ("10 9 x", ("10", "9", "x")),
    ],
)
def test_classes_come_in_natural_order(write: Write, cells: str, labels: tuple[str, ...]) -> None:
    source = open_source(write("a.csv", "label,text\n" + "".join(f"{cell},x\n" for cell in cells.split())))
    found = discover_labels(source, "label", None)
    assert (found.problem, found.labels) == ("classification", labels)


def test_a_number_that_is_not_whole_makes_it_regression_and_it_is_told(write: Write) -> None:
    source = open_source(write("a.csv", "label,text\n1,x\n2.5,y\nnan,z\n"))
    found = discover_labels(source, "label", None)
    assert (found.problem, found.labels) == ("regression", None)
    assert found.notice is not None
    assert "holds numbers such as 2.5: this is regression" in found.notice
    assert discover_labels(source, "label", "classification").labels == ("1", "2.5", "nan")


@pytest.mark.parametrize(
    ("strays", "reason"),
    [
        ({500: "n/a"}, "row 502, column 'label': 'n/a' is no number, the other 798 labels are: "),
        (
            {7: "none", 9: "n/a"},
            "row 9, column 'label': 'none' is no number, nor is 1 more label; the other 797 labels are: ",
        ),
        (dict.fromkeys(range(79), "x"), "'x' is no number, nor are 78 more labels; the other 720 labels are: "),
    ],
)
def test_a_few_strays_among_scores_are_left_to_the_user(write: Write, strays: dict[int, str], reason: str) -> None:
    cells = [strays.get(i, f"{i % 50 / 10}") for i in range(799)]
    source = open_source(write("a.csv", "label,text\n" + "".join(f"{cell},x\n" for cell in cells)))
    with pytest.raises(DataError, match=f"{reason}say --problem_type regression .with --on_bad_row skip .*classifi"):
        discover_labels(source, "label", None)
    assert discover_labels(source, "label", "regression").labels is None
    assert len(discover_labels(source, "label", "classification").labels or ()) > 50


@pytest.mark.parametrize(
    ("cells", "labels"),
    [("1.5 " * 8 + "x x", ("1.5", "x")), ("1 2 " * 9 + "x", ("1", "2", "x"))],
)
def test_many_strays_or_no_fractions_are_classes(write: Write, cells: str, labels: tuple[str, ...]) -> None:
    source = open_source(write("a.csv", "label,text\n" + "".join(f"{cell},x\n" for cell in cells.split())))
    assert discover_labels(source, "label", None).labels == labels


def test_lists_are_no_classes_and_truth_values_are_in_lower_case(write: Write) -> None:
    lines = ['{"label": ["pos"]}', '{"label": true}', '{"label": {"a": 1}}', '{"label": false}', "{}"]
    source = open_source(write("a.jsonl", "\n".join(lines)))
    found = discover_labels(source, "label", None)
    assert found.labels == ("false", "true")
    assert [ClassReader(found.labels).read(cell) for cell in (False, True)] == [0, 1]
    with pytest.raises(DataError, match=r"row 1, column 'label': the label is no text or number, found \['pos'\]"):
        discover_labels(open_source(write("b.jsonl", lines[0] + "\n" + lines[1])), "label", None)


@pytest.mark.parametrize(
    ("cells", "reason"),
    [
        (["1", "1.0"], "every row has the label '1': there is nothing to learn"),
        (["-1", "-1"], "every row has the label '-1', as in test splits"),
        (["", ""], "every label is empty"),
        (
            [f"id{i}" for i in range(60)],
            "60 different labels in 60 rows are no classes.*--problem_type regression.*--label_column_name",
        ),
    ],
)
def test_columns_that_are_no_classes(write: Write, cells: list[str], reason: str) -> None:
    source = open_source(write("a.csv", "label,text\n" + "".join(f"{cell},x\n" for cell in cells)))
    with pytest.raises(DataError, match=f"column 'label': {reason}"):
        discover_labels(source, "label", None)


def test_many_classes_with_rows_enough_are_fine(write: Write) -> None:
    source = open_source(write("a.csv", "label,text\n" + "".join(f"c{i % 60},x\n" for i in range(120))))
    found = discover_labels(source, "label", None)
    assert found.labels is not None
    assert len(found.labels) == 60
