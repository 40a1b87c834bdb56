from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from fleetune.data.inputs import CHUNK_ROWS, Chunk, Inputs, open_inputs
from fleetune.data.tasks import Columns, custom_task, find_task
from fleetune.data.tokens import TokenTable
from fleetune.errors import ConfigError, DataError

from .conftest import WordTokenizer

Write = Callable[[str, str | bytes], Path]
OWN = custom_task("classification", text_columns=("body",), label_column="stars", labels=("0", "1"))


def open_file(path: Path, task: Any = OWN, **changes: Any) -> Inputs:
    return open_inputs(path, **{"task": task, "tokenizer": WordTokenizer(), "max_seq_length": 64, **changes})


def only_chunk(path: Path, task: Any = OWN, **changes: Any) -> Chunk:
    (chunk,) = open_file(path, task, **changes).chunks()
    return chunk


def prepare(path: Path, task: Any = OWN, **changes: Any) -> TokenTable:
    table = only_chunk(path, task, **changes).table
    assert table is not None
    return table


def test_row_numbers_are_kept_and_labels_not_looked_at(write: Write) -> None:
    chunk = only_chunk(write("new.csv", "stars,body\ngarbage,a\n,\n?,b\n"), on_bad_row="skip")
    assert chunk.table is not None
    assert (chunk.table.rows.tolist(), chunk.table.labels) == ([2, 4], None)
    assert [str(bad) for bad in chunk.bad_rows] == ["row 3, column 'body': the text is empty"]
    assert (chunk.num_rows, chunk.last_row) == (3, 4)


def test_the_tasks_column_is_taken_in_silence(write: Write) -> None:
    inputs = open_file(write("new.csv", "text,body,more\na,b,c\n"))
    assert (inputs.reading.columns, inputs.notices) == (Columns(texts=("body",), label=None), ())


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
    inputs = open_file(path, task)
    assert inputs.reading.columns == Columns(texts=chosen, label=None)
    (notice,) = inputs.notices
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
    inputs = open_file(write("new.tsv", "gj04\t1\t\ta b\n"), find_task("cola"))
    assert inputs.notices[0].endswith("read as a file without a header line, text from cell 4 of 4")


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
    chunk = only_chunk(write("new.csv", f"body\n{'a ' * 100_000}\nb\n"))
    assert chunk.table is not None
    assert (chunk.table.lengths.tolist(), chunk.bad_rows) == ([64, 3], ())


def test_chunks_are_the_same_wherever_one_begins(write: Write, monkeypatch: pytest.MonkeyPatch) -> None:
    """Seven rows, of which the third is bad, in chunks of two rows, good or bad."""
    monkeypatch.setattr("fleetune.data.inputs.CHUNK_ROWS", 2)
    path = write("new.csv", "body\na\nb b\n \nd\ne\nf f f\ng\n")
    inputs = open_file(path, on_bad_row="skip")
    assert inputs.check() == 7
    chunks = list(inputs.chunks())
    tables = [chunk.table for chunk in chunks]
    assert [None if table is None else table.rows.tolist() for table in tables] == [[2, 3], [5], [6, 7], [8]]
    assert [chunk.num_rows for chunk in chunks] == [2, 2, 2, 1]
    assert [chunk.last_row for chunk in chunks] == [3, 5, 7, 8]
    again = list(inputs.chunks(4))
    assert [chunk.last_row for chunk in again] == [7, 8]
    for found, expected in zip(again, chunks[2:], strict=True):
        assert found.table is not None
        assert expected.table is not None
        assert found.table.token_ids.tolist() == expected.table.token_ids.tolist()


def test_a_chunk_of_bad_rows_alone_has_no_table(write: Write, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("fleetune.data.inputs.CHUNK_ROWS", 2)
    chunks = list(open_file(write("new.csv", "body\n \n \na\n"), on_bad_row="skip").chunks())
    assert [chunk.table is None for chunk in chunks] == [True, False]
    assert [len(chunk.bad_rows) for chunk in chunks] == [2, 0]


def test_bad_rows_are_told_before_the_work_wherever_they_are(write: Write) -> None:
    path = write("new.csv", "body\n" + "a\n" * (CHUNK_ROWS + 5) + " \n")
    with pytest.raises(DataError, match=f"row {CHUNK_ROWS + 7}, column 'body': the text is empty"):
        open_file(path).check()
    assert open_file(path, on_bad_row="skip").check() == CHUNK_ROWS + 6
    assert open_file(path, max_samples=10).check() == 10
    with pytest.raises(DataError, match="no row can be used, the only one is bad"):
        open_file(write("bad.csv", "body\n \n"), on_bad_row="skip").check()
