from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from fleetune.data.inputs import PreparedInputs, prepare_inputs
from fleetune.data.tasks import Columns, custom_task, find_task
from fleetune.data.tokens import TokenTable
from fleetune.errors import ConfigError, DataError

from .conftest import WordTokenizer

Write = Callable[[str, str | bytes], Path]
OWN = custom_task("classification", text_columns=("body",), label_column="stars", labels=("0", "1"))


def prepare_all(path: Path, task: Any = OWN, **changes: Any) -> PreparedInputs:
    plain = {"task": task, "tokenizer": WordTokenizer(), "cache_dir": path.parent / "cache", "max_seq_length": 64}
    return prepare_inputs(path, **{**plain, **changes})


def prepare(path: Path, task: Any = OWN, **changes: Any) -> TokenTable:
    return prepare_all(path, task, **changes).table


def test_row_numbers_are_kept_and_labels_not_looked_at(write: Write) -> None:
    table = prepare(write("new.csv", "stars,body\ngarbage,a\n,\n?,b\n"), on_bad_row="skip")
    assert (table.rows.tolist(), table.labels) == ([2, 4], None)
    assert [str(bad) for bad in table.bad_rows] == ["row 3, column 'body': the text is empty"]


def test_the_tasks_column_is_taken_in_silence(write: Write) -> None:
    prepared = prepare_all(write("new.csv", "text,body,more\na,b,c\n"))
    assert (prepared.table.columns, prepared.notices) == (Columns(texts=("body",), label=None), ())


@pytest.mark.parametrize(
    ("task", "header", "chosen"),
    [
        (OWN, "text", ("text",)),
        (OWN, "id,Title,Label", ("Title",)),
        (OWN, "stars,title", ("title",)),
        (find_task("mrpc"), "idx,premise,hypothesis,Quality", ("premise", "hypothesis")),
        (find_task("mrpc"), "other,sentence1", ("sentence1", "other")),
    ],
)
def test_the_only_columns_that_can_be_texts_are_taken_and_it_is_told(
    write: Write, task: Any, header: str, chosen: tuple[str, ...]
) -> None:
    path = write("new.csv", f"{header}\n{','.join('a' for _ in header.split(','))}\n")
    prepared = prepare_all(path, task)
    assert prepared.table.columns == Columns(texts=chosen, label=None)
    (notice,) = prepared.notices
    assert notice.startswith(f"{path}: there is no column '")
    assert notice.endswith(f": text from {' and '.join(map(repr, chosen))}")


@pytest.mark.parametrize(
    ("task", "header", "reason"),
    [
        (OWN, "title,text", "there is no column 'body': the columns are 'title', 'text'"),
        (OWN, "id,bdy,sentence", "there is no column 'body': the columns are 'id', 'bdy', 'sentence' .nearest: 'bdy'."),
        (OWN, "id,label", "there is no column 'body': the columns are 'id', 'label'"),
        (
            find_task("rte"),
            "a,b,sentnce1",
            "there is no column 'sentence1' and no column 'sentence2': the columns are .*nearest: 'sentnce1'",
        ),
        (find_task("rte"), "sentence1,b,c", "there is no column 'sentence2': the columns are"),
        (find_task("rte"), "text", "there is no column 'sentence1' and no column 'sentence2'"),
    ],
)
def test_columns_are_never_guessed_among_several(write: Write, task: Any, header: str, reason: str) -> None:
    path = write("new.csv", f"{header}\n{','.join('a' for _ in header.split(','))}\n")
    with pytest.raises(DataError, match=rf"new\.csv: {reason}.*: name the text with --text_column_names"):
        prepare(path, task)


def test_a_file_taken_to_have_no_header_is_told(write: Write) -> None:
    prepared = prepare_all(write("new.tsv", "gj04\t1\t\ta b\n"), find_task("cola"))
    assert prepared.notices[0].endswith("read as a file without a header line, text from cell 4 of 4")


def test_damaged_tokens_that_were_made_anew_are_told(write: Write) -> None:
    path = write("new.csv", "body\na\n")
    (prepare(path).folder / "meta.json").write_text("{")
    assert "damaged and were made anew" in prepare_all(path).notices[0]


def test_columns_named_must_be_there_and_as_many_as_the_task_reads(write: Write) -> None:
    path = write("new.csv", "one,two\na,b\n")
    assert prepare(path, text_column_names=("two",)).columns.texts == ("two",)
    with pytest.raises(DataError, match=r"no column 'three'.*: name the text with --text_column_names"):
        prepare(path, text_column_names=("three",))
    with pytest.raises(DataError, match="no column 'body'"):
        prepare(write("only.csv", "title\na\n"), text_column_names=("body",))
    with pytest.raises(ConfigError, match="names 2 columns, the model reads 1"):
        prepare(path, text_column_names=("one", "two"))
    with pytest.raises(ConfigError, match="names 1 column, the model reads 2"):
        prepare(path, find_task("rte"), text_column_names=("one",))


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


def test_a_long_text_is_cut_and_not_refused(write: Write) -> None:
    table = prepare(write("new.csv", f"body\n{'a ' * 100_000}\nb\n"))
    assert (table.lengths.tolist(), table.num_bad_rows) == ([64, 3], 0)
