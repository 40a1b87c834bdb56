from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from fleetune.data.examples import BadRowLog, Example, Reading, read_examples
from fleetune.data.labels import reader_of
from fleetune.data.sources import open_source
from fleetune.data.tasks import Columns, find_task
from fleetune.errors import DataError

Write = Callable[[str, str | bytes], Path]
HEADER = "sentence1\tsentence2\tlabel\n"


def reading(**changes: Any) -> Reading:
    task = find_task("mrpc")
    plain: dict[str, Any] = {
        "columns": task.layouts[0],
        "labels": reader_of(task),
        "label_optional": False,
        "on_bad_row": "skip",
    }
    return Reading(**{**plain, **changes})


def read(path: Path, **changes: Any) -> tuple[list[Example], list[str]]:
    log = BadRowLog()
    examples = list(read_examples(open_source(path), reading(**changes), log.add))
    assert log.total == len(log.listed)
    return examples, [str(bad) for bad in log.listed]


def test_examples_carry_row_texts_and_label(write: Write) -> None:
    path = write("a.tsv", HEADER + " a \tNA\tequivalent\n")
    assert read(path) == ([Example(2, (" a ", "NA"), 1)], [])


def test_every_bad_row_is_logged_with_its_place(write: Write) -> None:
    path = write("a.tsv", HEADER + "a\t \t1\na\tb\t7\na\tb\na\tb\t0\n\tb\t1\n")
    examples, bad = read(path)
    assert examples == [Example(5, ("a", "b"), 0)]
    assert bad == [
        "row 2, column 'sentence2': the text is empty",
        "row 3, column 'label': the label 7 is out of range; expected 0 or not_equivalent, 1 or equivalent",
        "row 4: 2 cells where the header has 3 (a tab inside a text, or a missing one?)",
        "row 6, column 'sentence1': the text is empty",
    ]


def test_json_nulls_lists_and_half_characters_are_no_texts(write: Write) -> None:
    lines = [
        '{"s": "ok", "label": 1}',
        '{"s": null, "label": 1}',
        '{"s": ["a"], "label": 1}',
        '{"label": 1}',
        '{"s": "\\ud83d", "label": 1}',
        '{"s": true, "label": 1}',
        '{"s": {"a": 1}, "label": 1}',
        '{"s": NaN, "label": 1}',
        '{"s": "ok"}',
        '{"s": "ok", "label": [1]}',
    ]
    path = write("a.jsonl", "\n".join(lines))
    examples, bad = read(path, columns=Columns(texts=("s",), label="label"))
    assert [example.row for example in examples] == [1]
    assert bad == [
        "row 2, column 's': the text is empty (null)",
        "row 3, column 's': a text was expected, found ['a'] (list)",
        "row 4, column 's': the column is missing in this row",
        "row 5, column 's': the text holds U+D83D, half of a surrogate pair",
        "row 6, column 's': a text was expected, found True (bool)",
        "row 7, column 's': a text was expected, found {'a': 1} (dict)",
        "row 8, column 's': the text is empty (null)",
        "row 9, column 'label': the column is missing in this row",
        "row 10, column 'label': the label is no text or number, found [1] (list)",
    ]


def test_json_numbers_are_the_texts_they_would_be_in_csv(write: Write) -> None:
    path = write("a.jsonl", '{"s": 5, "label": 1}\n{"s": 2.5, "label": 0}\n')
    examples, bad = read(path, columns=Columns(texts=("s",), label="label"))
    assert ([example.texts for example in examples], bad) == ([("5",), ("2.5",)], [])


def test_a_missing_label_is_none_in_test_splits(write: Write) -> None:
    path = write("a.jsonl", '{"s": "a", "label": 1}\n{"s": "b"}\n')
    examples, bad = read(path, columns=Columns(texts=("s",), label="label"), label_optional=True)
    assert ([example.label for example in examples], bad) == ([1, None], [])


def test_a_quote_that_swallows_rows_is_not_skipped(write: Write) -> None:
    for content, row in (('"open,b,1\na,b,1\n', 3), ('"open,b,1\na,b,1\nx,"b",1\n', 3)):
        path = write("a.csv", "sentence1,sentence2,label\na,b,1\n" + content)
        for on_bad_row in ("skip", "error"):
            with pytest.raises(DataError) as caught:
                read(path, on_bad_row=on_bad_row)
            assert caught.value.row == row


def test_the_first_bad_row_is_raised_and_five_more_listed(write: Write) -> None:
    path = write("a.tsv", HEADER + "a\tb\t1\n" + "a\tb\t9\n" * 7)
    with pytest.raises(DataError) as caught:
        read(path, on_bad_row="error")
    error = caught.value
    assert (error.file, error.row, error.column) == (str(path), 3, "label")
    lines = str(error).splitlines()
    assert [line for line in lines if "also row" in line] == [
        f"  also row {row}, column 'label': the label 9 is out of range; expected 0 or not_equivalent, 1 or equivalent"
        for row in (4, 5, 6, 7, 8)
    ]
    assert lines[-2:] == ["  and more", "  (--on_bad_row skip leaves bad rows out and lists them)"]


def test_a_lone_bad_row_claims_no_others(write: Write) -> None:
    with pytest.raises(DataError) as caught:
        read(write("a.tsv", HEADER + "a\tb\t9\na\tb\t1\n"), on_bad_row="error")
    assert "also" not in str(caught.value)
    assert "and more" not in str(caught.value)


def test_test_splits_may_be_unlabelled(write: Write) -> None:
    path = write("a.tsv", HEADER + "a\tb\t-1\na\tb\t\na\tb\t1\na\tb\t5\n")
    examples, bad = read(path, label_optional=True)
    assert [example.label for example in examples] == [None, None, 1]
    assert bad[0].startswith("row 5, column 'label': the label 5 is out of range")


def test_minus_one_in_training_says_what_it_means(write: Write) -> None:
    _, bad = read(write("a.tsv", HEADER + "a\tb\t-1\n"))
    assert "as in test splits, which carry -1" in bad[0]


def test_labels_are_not_looked_at_for_predictions(write: Write) -> None:
    examples, bad = read(write("a.tsv", HEADER + "a\tb\tgarbage\n"), labels=None)
    assert (examples, bad) == ([Example(2, ("a", "b"), None)], [])


def test_only_the_first_rows_are_read(write: Write) -> None:
    examples, bad = read(write("a.tsv", HEADER + "a\t\t1\na\tb\t1\na\tb\t9\n"), max_rows=2)
    assert ([example.row for example in examples], len(bad)) == ([3], 1)
