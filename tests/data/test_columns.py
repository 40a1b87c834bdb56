from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

from fleetune.data.columns import apply_header, choose_columns, match_layout
from fleetune.data.sources import Source, open_source
from fleetune.data.tasks import Columns, find_task
from fleetune.errors import DataError

Write = Callable[[str, str | bytes], Path]


def source_with(write: Write, *columns: str) -> Source:
    return open_source(write("a.csv", ",".join(columns) + "\n" + ",".join("x" for _ in columns) + "\n"))


@pytest.mark.parametrize(
    ("present", "texts", "label"),
    [
        (("id", "text", "label"), ("text",), "label"),
        (("Label", "Sentence1", "Sentence2"), ("Sentence1", "Sentence2"), "Label"),
        (("premise", "hypothesis", "labels"), ("premise", "hypothesis"), "labels"),
        (("sentence", "question", "label"), ("question", "sentence"), "label"),
        (("text_a", "text_b", "label"), ("text_a", "text_b"), "label"),
        (("text", "sentence", "label"), ("sentence",), "label"),
        (("idx", "review", "label"), ("review",), "label"),
        (("", "title", "body", "more", "label"), ("title", "body"), "label"),
    ],
)
def test_columns_are_chosen_and_it_is_told(
    write: Write, present: tuple[str, ...], texts: tuple[str, ...], label: str
) -> None:
    chosen = choose_columns(source_with(write, *present))
    assert chosen.columns == Columns(texts=texts, label=label)
    assert chosen.notice is not None
    assert all(repr(name) in chosen.notice for name in (*texts, label))


def test_columns_asked_for_are_taken_in_silence(write: Write) -> None:
    chosen = choose_columns(source_with(write, "text", "body", "stars", "label"), texts=("body",), label="stars")
    assert (chosen.columns, chosen.notice) == (Columns(texts=("body",), label="stars"), None)


def test_a_column_asked_for_that_is_missing(write: Write) -> None:
    with pytest.raises(DataError, match=r"no column 'bdy'.*nearest: 'body'"):
        choose_columns(source_with(write, "body", "label"), texts=("bdy",))


def test_no_label_and_no_text(write: Write) -> None:
    with pytest.raises(DataError, match=r"no column 'label': the columns are 'text', 'stars'.*--label_column_name"):
        choose_columns(source_with(write, "text", "stars"))
    with pytest.raises(DataError, match=r"no text column among 'id', 'label'.*--text_column_names"):
        choose_columns(source_with(write, "id", "label"))


def test_hub_and_tsv_columns_are_told_apart(write: Write) -> None:
    layouts = find_task("mrpc").layouts
    hub = match_layout(source_with(write, "sentence1", "sentence2", "label", "idx"), layouts, label_optional=False)
    tsv = match_layout(source_with(write, "Quality", "#1 String", "#2 String"), layouts, label_optional=False)
    assert (hub.texts, hub.label) == (("sentence1", "sentence2"), "label")
    assert (tsv.texts, tsv.label) == (("#1 String", "#2 String"), "Quality")


def test_a_label_column_of_any_layout_comes_before_none(write: Write) -> None:
    source = source_with(write, "sentence1", "sentence2", "score")
    assert match_layout(source, find_task("stsb").layouts, label_optional=True).label == "score"


def test_test_files_may_lack_the_label_and_others_may_not(write: Write) -> None:
    source = source_with(write, "index", "#1 String", "#2 String")
    assert match_layout(source, find_task("mrpc").layouts, label_optional=True).label is None
    with pytest.raises(DataError, match=r"no column 'Quality': the columns are 'index', '#1 String', '#2 String'"):
        match_layout(source, find_task("mrpc").layouts, label_optional=False)


def test_cola_has_no_header_in_training_and_one_in_test(write: Write) -> None:
    layouts = find_task("cola").layouts
    train = open_source(write("train.tsv", "gj04\t1\t\tThey went.\nks08\t0\t*\tThey goed.\n"))
    columns = match_layout(train, layouts, label_optional=False)
    rows = list(apply_header(train, columns).rows([*columns.texts, "label"]))
    assert [(row.number, row.cells) for row in rows] == [(1, ("They went.", "1")), (2, ("They goed.", "0"))]
    test = open_source(write("test.tsv", "index\tsentence\n0\tThey went.\n"))
    assert match_layout(test, layouts, label_optional=True) == Columns(texts=("sentence",), label=None)
