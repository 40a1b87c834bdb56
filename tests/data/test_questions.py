"""Questions: reading, answers and their places, windows."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from fleetune.config import RunConfig
from fleetune.data.dataset import TaskData, prepare_data
from fleetune.data.inputs import open_inputs
from fleetune.data.questions import Answer, AnswerReader
from fleetune.data.sources import MISSING
from fleetune.errors import ConfigError, DataError
from tests.data.conftest import Settings, WordTokenizer

Write = Callable[[str, str | bytes], Path]
Make = Callable[..., Settings]

CONTEXT = "a b c d good bad film a b c"


def row(number: int, **changes: Any) -> dict[str, Any]:
    answers = {"text": ["good bad"], "answer_start": [8]}
    return {"id": f"q{number}", "question": "a film", "context": CONTEXT, "answers": answers, **changes}


def lines(*rows: dict[str, Any]) -> str:
    return "\n".join(map(json.dumps, rows))


def official(*rows: dict[str, Any]) -> str:
    """SQuAD's own layout: answers are a list of objects."""
    paragraphs = []
    for cells in rows:
        texts = zip(cells["answers"]["text"], cells["answers"]["answer_start"], strict=True)
        answers = [{"text": text, "answer_start": start} for text, start in texts]
        question = {name: cell for name, cell in cells.items() if name != "context"} | {"answers": answers}
        paragraphs.append({"context": cells["context"], "qas": [question]})
    return json.dumps({"version": "1.1", "data": [{"title": "t", "paragraphs": paragraphs}]})


def prepare(make_settings: Make, train: Path, tokenizer: Any, **changes: Any) -> TaskData:
    settings = make_settings(**{"train_file": train, "task": "squad", "max_seq_length": 64, "doc_stride": 4, **changes})
    return prepare_data(settings, tokenizer, splits=["train"])


@pytest.mark.parametrize("layout", ["hub", "official"])
def test_one_window(make_settings: Make, write: Write, fast_tokenizer: Any, layout: str) -> None:
    path = write("train.json", official(row(1)) if layout == "official" else json.dumps([row(1)]))
    table = prepare(make_settings, path, fast_tokenizer).splits["train"]
    # [CLS] a film [SEP] a b c d good bad film a b c [SEP]; the answer is the words 4 and 5 of the context.
    assert table.token_ids.tolist() == [2, 4, 10, 3, 4, 5, 6, 7, 8, 9, 10, 4, 5, 6, 3]
    assert table.type_ids is not None
    assert table.type_ids.tolist() == [0] * 4 + [1] * 11
    assert table.labels is not None
    assert table.labels.tolist() == [[8, 9]]
    assert table.places is not None
    assert table.places.tolist() == [
        *[[-1, -1]] * 4, [0, 1], [2, 3], [4, 5], [6, 7], [8, 12], [13, 16], [17, 21], [22, 23], [24, 25], [26, 27],
        [-1, -1],
    ]  # fmt: skip
    assert list(table.notes or ()) == [{"row": 1, "id": "q1", "context": CONTEXT, "answers": ["good bad"]}]


def test_parquet_has_the_hubs_columns(make_settings: Make, tmp_path: Path, fast_tokenizer: Any) -> None:
    import pyarrow
    import pyarrow.parquet

    path = tmp_path / "train.parquet"
    pyarrow.parquet.write_table(pyarrow.Table.from_pylist([row(1), row(2)]), path)
    table = prepare(make_settings, path, fast_tokenizer).splits["train"]
    assert table.labels is not None
    assert table.labels.tolist() == [[8, 9], [8, 9]]


def test_windows_overlap_and_those_without_the_whole_answer_say_none(
    make_settings: Make, write: Write, fast_tokenizer: Any
) -> None:
    # 25 tokens: 3 special ones and 2 of the question leave 20 of a context of 30 words; 4 overlap.
    context = " ".join(["a"] * 17 + ["good", "bad"] + ["b"] * 11)
    answers = {"text": ["good bad", "bad"], "answer_start": [34, 39]}
    path = write("train.jsonl", lines(row(1, context=context, answers=answers), row(2)))
    data = prepare(make_settings, path, fast_tokenizer, max_seq_length=25)
    table = data.splits["train"]
    assert table.example_of is not None
    assert table.example_of.tolist() == [0, 0, 1]
    assert table.rows.tolist() == [1, 1, 2]
    assert table.lengths.tolist() == [25, 3 + 2 + 14, 15]
    assert table.labels is not None
    # Words 17 and 18, from 0: tokens 4 + 17 and 4 + 18 of the first window. The second begins with word 16.
    assert table.labels.tolist() == [[21, 22], [5, 6], [8, 9]]
    assert (table.num_examples, len(table)) == (2, 3)
    assert f"{path}: 2 questions in 3 windows of up to 25 tokens" in data.notices
    # With an overlap of 2, the second window begins with "bad": the answer is whole in the first one alone.
    again = prepare(make_settings, path, fast_tokenizer, max_seq_length=25, doc_stride=2).splits["train"]
    assert again.labels is not None
    assert again.labels.tolist() == [[21, 22], [0, 0], [8, 9]]


def test_answers_that_are_elsewhere_are_moved_and_listed(
    make_settings: Make, write: Write, fast_tokenizer: Any
) -> None:
    rows = [
        row(1, answers={"text": ["good bad"], "answer_start": [5]}),  # at 8
        row(2, answers={"text": ["b"], "answer_start": [20]}),  # at 2, 13 (in "bad") and 24: the last is nearest
        row(3, answers={"text": ["  film "], "answer_start": [15]}),  # blanks are no part of it: right as it stands
        row(4, answers={"text": ["zebra", "film"], "answer_start": [0, 17]}),
    ]
    path = write("train.jsonl", lines(*rows))
    data = prepare(make_settings, path, fast_tokenizer)
    table = data.splits["train"]
    assert table.labels is not None
    assert table.labels.tolist() == [[8, 9], [12, 12], [10, 10], [10, 10]]
    assert [(remark.row, remark.reason) for remark in table.remarks] == [
        (1, "the answer 'good bad' is at 8, not at 5"),
        (2, "the answer 'b' is at 24, not at 20"),
        (4, "the answer 'zebra' is not in the context: it counts in the score alone"),
    ]
    assert any("3 questions with other answers than they say: row 1: the answer" in line for line in data.notices)


def test_an_answer_that_is_nowhere(make_settings: Make, write: Write, fast_tokenizer: Any) -> None:
    path = write("a.jsonl", lines(row(1), row(2, answers={"text": ["zebra"], "answer_start": [0]})))
    with pytest.raises(DataError, match="row 2, column 'answers': the answer 'zebra' is not in the context"):
        prepare(make_settings, path, fast_tokenizer)
    data = prepare(make_settings, path, fast_tokenizer, on_bad_row="skip")
    assert len(data.splits["train"]) == 1
    # A question to evaluate counts in the score all the same; there is nothing that a loss could be of.
    settings = make_settings(task="squad", validation_file=path, max_seq_length=64, doc_stride=4)
    table = prepare_data(settings, fast_tokenizer, splits=["validation"]).splits["validation"]
    assert table.labels is not None
    assert table.labels.tolist() == [[8, 9], [-100, -100]]


@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        ({"context": " "}, "column 'context': the context is empty"),
        ({"context": None}, "the context is empty .null."),
        ({"question": ""}, "column 'question': the question is empty"),
        ({"question": 3.5, "context": ["x"]}, "a text was expected"),
        ({"id": "q1"}, "column 'id': the id 'q1' is that of row 1 too"),
        ({"id": ""}, "the id is empty"),
        ({"answers": {"text": [], "answer_start": []}}, "the question has no answer: say --task squad_v2"),
        ({"answers": {"text": [" "], "answer_start": [0]}}, "an answer has no text"),
        ({"answers": {"text": ["a"], "answer_start": []}}, "1 answer without as many places"),
        ({"answers": {"text": ["a"], "answer_start": [-1]}}, "the answer 'a' begins at -1"),
        ({"answers": "a"}, "answers with text and answer_start were expected, found 'a'"),
        ({"answers": None}, "the answers are missing"),
    ],
)
def test_rows_that_cannot_be_used(
    make_settings: Make, write: Write, fast_tokenizer: Any, changes: dict[str, Any], reason: str
) -> None:
    with pytest.raises(DataError, match=f"row 2.*{reason}"):
        prepare(make_settings, write("a.jsonl", lines(row(1), row(2, **changes))), fast_tokenizer)


def test_questions_without_an_answer_in_version_2(make_settings: Make, write: Write, fast_tokenizer: Any) -> None:
    empty = {"text": [], "answer_start": []}
    path = write("a.jsonl", lines(row(1, answers=empty), row(2)))
    data = prepare(make_settings, path, fast_tokenizer, task="squad_v2")
    own = prepare(make_settings, path, fast_tokenizer, task=None, problem_type="question_answering",
                  version_2_with_negative=True)  # fmt: skip
    for found in (data, own):
        labels = found.splits["train"].labels
        assert labels is not None
        assert labels.tolist() == [[0, 0], [8, 9]]
        assert found.task.best_metric == "f1"
        assert "best_exact_thresh" in found.task.metrics


def test_leading_blanks(make_settings: Make, write: Write, fast_tokenizer: Any) -> None:
    """Those of a question are dropped; those of a context stay, as the answers' places count them."""
    path = write("a.jsonl", lines(row(1, question="  a film", context="   " + CONTEXT,
                                      answers={"text": ["good bad"], "answer_start": [11]})))  # fmt: skip
    table = prepare(make_settings, path, fast_tokenizer).splits["train"]
    assert table.places is not None
    assert table.labels is not None
    assert (table.labels.tolist(), table.places[8].tolist()) == ([[8, 9]], [11, 15])


def test_a_long_question_gets_a_smaller_stride_and_a_longer_one_is_refused(
    make_settings: Make, write: Write, fast_tokenizer: Any
) -> None:
    # Of 64 tokens, a question of 41 words leaves 20 for the context: less than the stride of 24, so it is 10 there:
    # a context of 40 words makes windows from 0, 10 and 20.
    context = " ".join(["a"] * 39 + ["film"])
    answers = {"text": ["film"], "answer_start": [78]}
    rows = [row(1, question="b " * 41, context=context, answers=answers), row(2)]
    table = prepare(make_settings, write("a.jsonl", lines(*rows)), fast_tokenizer, doc_stride=24).splits["train"]
    assert table.example_of is not None
    assert table.example_of.tolist() == [0, 0, 0, 1]
    rows.append(row(3, question="b " * 46))
    path = write("b.jsonl", lines(*rows))
    with pytest.raises(DataError, match="row 3: the question leaves 15 of 64 tokens for its context, 16 are needed"):
        prepare(make_settings, path, fast_tokenizer, doc_stride=24)
    skipped = prepare(make_settings, path, fast_tokenizer, doc_stride=24, on_bad_row="skip").splits["train"]
    assert (skipped.num_examples, skipped.num_bad_rows) == (2, 1)


def test_a_stride_that_is_too_large(make_settings: Make, write: Write, fast_tokenizer: Any) -> None:
    with pytest.raises(ConfigError, match=r"--doc_stride 128 is too large for windows of --max_seq_length 128 tokens"):
        prepare(make_settings, write("a.jsonl", lines(row(1))), fast_tokenizer, max_seq_length=128, doc_stride=128)
    with pytest.raises(ConfigError, match="answers in texts need a fast tokenizer"):
        prepare(make_settings, write("a.jsonl", lines(row(1))), WordTokenizer())


def test_files_of_ones_own(make_settings: Make, write: Write, fast_tokenizer: Any) -> None:
    own = {"frage": "a film", "text": CONTEXT, "antwort": [{"text": "good", "answer_start": 8}]}
    path = write("a.jsonl", lines(own, own))
    named = {"text_column_names": ("frage", "text"), "label_column_name": "antwort"}
    data = prepare(make_settings, path, fast_tokenizer, task=None, problem_type="question_answering", **named)
    table = data.splits["train"]
    assert [note["id"] for note in table.notes or ()] == ["1", "2"]  # the numbers of the rows, where there is no id
    with pytest.raises(ConfigError, match="two are read, of the question and of its context"):
        prepare(make_settings, path, fast_tokenizer, task=None, problem_type="question_answering",
                text_column_names=("frage",))  # fmt: skip
    with pytest.raises(ConfigError, match="say --problem_type question_answering"):
        prepare(make_settings, write("b.jsonl", lines(row(1))), fast_tokenizer, task=None)


def test_inputs_without_answers(make_settings: Make, write: Write, fast_tokenizer: Any) -> None:
    data = prepare(make_settings, write("a.jsonl", lines(row(1))), fast_tokenizer)
    asked = {name: cell for name, cell in row(7).items() if name != "answers"}
    inputs = open_inputs(write("new.jsonl", lines(asked, asked)), task=data.task, tokenizer=fast_tokenizer,
                         max_seq_length=64, doc_stride=4)  # fmt: skip
    (chunk,) = inputs.chunks()
    assert chunk.table is not None
    # Predictions have the number of their row, so that an id may be there twice.
    assert list(chunk.table.notes or ()) == [{"row": row, "id": "q7", "context": CONTEXT} for row in (1, 2)]


def test_chunks_of_windows(make_settings: Make, write: Write, fast_tokenizer: Any, monkeypatch: Any) -> None:
    """Three blocks of one question make a chunk; a question that leaves no room is left out of it."""
    monkeypatch.setattr("fleetune.data.tokens.windows.WindowEncoder.most_examples", 1)
    monkeypatch.setattr("fleetune.data.inputs.BLOCKS_OF_CHUNK", 3)
    data = prepare(make_settings, write("a.jsonl", lines(row(1))), fast_tokenizer)
    long = " ".join(["a"] * 40)
    path = write("new.jsonl", lines(row(1), row(2, question="b " * 60), row(3, context=long), row(4)))
    inputs = open_inputs(path, task=data.task, tokenizer=fast_tokenizer, max_seq_length=25, doc_stride=4,
                         on_bad_row="skip")  # fmt: skip
    first, second = inputs.chunks()
    assert first.table is not None
    assert first.table.example_of is not None
    assert (first.num_rows, [bad.row for bad in first.bad_rows]) == (3, [2])
    assert first.table.example_of.tolist() == [0, 1, 1, 1]
    assert first.table.num_examples == 2
    assert [note["row"] for note in first.table.notes or ()] == [1, 3]
    assert (second.num_rows, second.last_row) == (1, 4)
    with pytest.raises(DataError, match="row 2: the question leaves"):
        next(open_inputs(path, task=data.task, tokenizer=fast_tokenizer, max_seq_length=25, doc_stride=4).chunks())


def test_how_examples_are_blocked_does_not_matter(
    make_settings: Make, write: Write, fast_tokenizer: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    context = " ".join(["a"] * 40)
    rows = [
        row(i, context=f"{context} good bad", answers={"text": ["good bad"], "answer_start": [80]}) for i in range(3)
    ]
    path = write("a.jsonl", lines(*rows, row(9, answers={"text": ["bad"], "answer_start": [0]})))
    whole = prepare(make_settings, path, fast_tokenizer, max_seq_length=25).splits["train"]
    monkeypatch.setattr("fleetune.data.tokens.tokenizing.BLOCK_EXAMPLES", 1)
    single = prepare(make_settings, path, fast_tokenizer, max_seq_length=25, overwrite_cache=True).splits["train"]
    for name in ("token_ids", "offsets", "labels", "places", "example_of", "rows"):
        assert getattr(single, name).tolist() == getattr(whole, name).tolist(), name
    assert list(single.notes or ()) == list(whole.notes or ())
    assert (single.counts, single.remarks, single.num_examples) == (whole.counts, whole.remarks, 4)


def test_a_folder_with_the_publishers_names(
    make_settings: Make, write: Write, fast_tokenizer: Any, tmp_path: Path
) -> None:
    for name in ("train-v1.1", "dev-v1.1", "train-v2.0", "dev-v2.0"):
        write(f"squad/{name}.json", official(row(1)))
    for task, version in (("squad", "v1.1"), ("squad_v2", "v2.0")):
        settings = make_settings(task=task, data_dir=tmp_path / "squad", max_seq_length=64, doc_stride=4)
        data = prepare_data(settings, fast_tokenizer)
        assert {Path(table.source).name for table in data.splits.values()} == {
            f"train-{version}.json",
            f"dev-{version}.json",
        }


def test_answers_of_both_layouts() -> None:
    expected = (Answer("a b", 3), Answer("c", 0))
    assert AnswerReader().read({"text": ["a b", "c"], "answer_start": [3, 0]}) == expected
    assert AnswerReader().read([{"text": " a b", "answer_start": 2}, {"text": "c", "answer_start": 0}]) == expected
    assert AnswerReader().read_if_given(MISSING) is None
    assert AnswerReader().read_if_given([]) == ()


@pytest.mark.parametrize(
    ("settings", "length"),
    [
        ({}, 128), ({"task": "mrpc"}, 128), ({"task": "squad"}, 384), ({"task": "SQuAD-v2"}, 384),
        ({"problem_type": "question_answering"}, 384), ({"task": "squad", "max_seq_length": 200}, 200),
    ],
)  # fmt: skip
def test_the_length_that_is_not_given(settings: dict[str, Any], length: int) -> None:
    assert RunConfig(**settings).max_seq_length == length


def test_the_real_files(make_settings: Make, fast_tokenizer: Any) -> None:
    folder = Path(__file__).parents[3] / "shared" / "data" / "squad"
    if not folder.is_dir():
        pytest.skip(f"the SQuAD files are not at {folder}")
    data = prepare_data(
        make_settings(task="squad", data_dir=folder, max_seq_length=384, doc_stride=128), fast_tokenizer
    )
    assert {name: table.num_examples for name, table in data.splits.items()} == {"train": 899, "validation": 291}
    # Every answer can be read back from the tokens of the windows that hold it.
    for table in data.splits.values():
        assert table.notes is not None
        assert table.labels is not None
        assert table.places is not None
        assert table.example_of is not None
        found = set()
        for window, (first, last) in enumerate(table.labels.tolist()):
            if last:
                note, start = table.notes[table.example_of[window]], int(table.offsets[window])
                text = note["context"][table.places[start + first][0] : table.places[start + last][1]]
                assert note["answers"][0] in text
                found.add(note["id"])
        assert len(found) > 0.99 * table.num_examples
