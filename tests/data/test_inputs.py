from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from fleetune.data.inputs import prepare_inputs
from fleetune.data.tasks import Columns, custom_task, find_task
from fleetune.data.tokens import TokenTable
from fleetune.errors import ConfigError, DataError

from .conftest import WordTokenizer

Write = Callable[[str, str | bytes], Path]
OWN = custom_task("classification", text_columns=("body",), label_column="stars", labels=("0", "1"))


def prepare(path: Path, task: Any = OWN, **changes: Any) -> TokenTable:
    plain = {"task": task, "tokenizer": WordTokenizer(), "cache_dir": path.parent / "cache", "max_seq_length": 64}
    return prepare_inputs(path, **{**plain, **changes})


def test_row_numbers_are_kept_and_labels_not_looked_at(write: Write) -> None:
    table = prepare(write("new.csv", "stars,body\ngarbage,a\n,\n?,b\n"), on_bad_row="skip")
    assert (table.rows.tolist(), table.labels) == ([2, 4], None)
    assert [str(bad) for bad in table.bad_rows] == ["row 3, column 'body': the text is empty"]


@pytest.mark.parametrize(
    ("header", "chosen"), [("body", "body"), ("id,text", "text"), ("stars,title", "title"), ("title,more", "title")]
)
def test_the_tasks_column_then_the_usual_names_then_the_first(write: Write, header: str, chosen: str) -> None:
    cells = ",".join("a" for _ in header.split(","))
    assert prepare(write("new.csv", f"{header}\n{cells}\n")).columns == Columns(texts=(chosen,), label=None)


def test_columns_named_must_be_there_and_as_many_as_the_task_reads(write: Write) -> None:
    path = write("new.csv", "one,two\na,b\n")
    assert prepare(path, text_column_names=("two",)).columns.texts == ("two",)
    with pytest.raises(DataError, match="no column 'three'"):
        prepare(path, text_column_names=("three",))
    with pytest.raises(ConfigError, match="names 2 columns, the model reads 1"):
        prepare(path, text_column_names=("one", "two"))


def test_a_pair_task_needs_two_texts(write: Write) -> None:
    with pytest.raises(DataError, match="no text column"):
        prepare(write("new.csv", "text\na\n"), find_task("mrpc"))


@pytest.mark.parametrize(
    ("task", "content", "row"),
    [
        ("mrpc", "index\t#1 ID\t#2 ID\t#1 String\t#2 String\n0\t7\t8\ta\tb\n", 2),
        ("cola", "gj04\t1\t\ta b\n", 1),
        ("cola", "index\tsentence\n0\ta b\n", 2),
    ],
)
def test_glue_files(write: Write, task: str, content: str, row: int) -> None:
    table = prepare(write("new.tsv", content), find_task(task))
    assert table.rows.tolist() == [row]
    assert len(table.token_ids) == (5 if task == "mrpc" else 4)
