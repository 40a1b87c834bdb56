"""Sentences of words: reading, alignment of tags with tokens, cuts."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from fleetune.data.dataset import TaskData, prepare_data
from fleetune.data.inputs import open_inputs
from fleetune.data.labels import CellError, ClassReader
from fleetune.data.sources import MISSING
from fleetune.data.words import TagReader, words_in
from fleetune.errors import ConfigError, DataError
from tests.data.conftest import Settings, WordTokenizer

Write = Callable[[str, str | bytes], Path]
Make = Callable[..., Settings]


@pytest.fixture(scope="module")
def pieces() -> Any:
    """A word-piece tokenizer with the words a, b, c and the pieces ##b, ##c."""
    from tokenizers import Tokenizer, models, pre_tokenizers, processors
    from transformers import PreTrainedTokenizerFast

    words = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "a", "b", "c", "##b", "##c"]
    backend = Tokenizer(models.WordPiece({word: i for i, word in enumerate(words)}, unk_token="[UNK]"))
    backend.pre_tokenizer = pre_tokenizers.BertPreTokenizer()
    backend.post_processor = processors.TemplateProcessing(
        single="[CLS] $A [SEP]", pair="[CLS] $A [SEP] $B:1 [SEP]:1", special_tokens=[("[CLS]", 2), ("[SEP]", 3)]
    )
    return PreTrainedTokenizerFast(
        tokenizer_object=backend, pad_token="[PAD]", unk_token="[UNK]", cls_token="[CLS]", sep_token="[SEP]",
        model_max_length=64, model_input_names=["input_ids", "token_type_ids", "attention_mask"],
    )  # fmt: skip


def prepare(make_settings: Make, train: Path, tokenizer: Any, **changes: Any) -> TaskData:
    return prepare_data(make_settings(train_file=train, **changes), tokenizer, splits=["train"])


def test_the_first_piece_of_a_word_gets_its_tag(make_settings: Make, write: Write, pieces: Any) -> None:
    data = prepare(make_settings, write("train.conll", "abc B-X\na I-X\n\nb O\n"), pieces)
    table = data.splits["train"]
    assert (data.task.problem, data.task.labels) == ("token_classification", ("B-X", "I-X", "O"))
    # [CLS] a ##b ##c a [SEP], [CLS] b [SEP]
    assert table.token_ids.tolist() == [2, 4, 7, 8, 4, 3, 2, 5, 3]
    assert table.labels is not None
    assert table.labels.tolist() == [-100, 0, -100, -100, 1, -100, -100, 2, -100]
    assert table.places is not None
    assert table.places.tolist() == [-1, 0, -1, -1, 1, -1, -1, 0, -1]
    assert table.labels_of_tokens
    assert [table.num_targets(np.array(chosen)) for chosen in ([0], [1], [1, 0], [])] == [2, 1, 3, 0]
    assert list(table.notes or ()) == [
        {"row": 1, "words": ["abc", "a"], "tags": ["B-X", "I-X"]}, {"row": 4, "words": ["b"], "tags": ["O"]},
    ]  # fmt: skip
    assert table.head(1).labels is not None
    assert len(table.head(1).labels) == 6  # type: ignore[arg-type]


def test_a_long_sentence_is_cut_behind_a_word_and_counted(make_settings: Make, write: Write, pieces: Any) -> None:
    # 7 tokens: [CLS], 5 pieces, [SEP]. "a abc ab": 1, 3 and 2 pieces: the last word would be cut in two.
    # "abcbcbc": 7 pieces: there is no word before it, so its first five stay.
    data = prepare(
        make_settings, write("t.conll", "a O\nabc X\nab X\n\na O\n\nabcbcbc X\nb O\n"), pieces, max_seq_length=7
    )
    table = data.splits["train"]
    assert table.lengths.tolist() == [6, 3, 7]
    assert table.token_ids.tolist()[:6] == [2, 4, 4, 7, 8, 3]
    assert table.counts == {"sentences cut": 2, "words cut off": 2}
    told = (
        "2 sentences cut, 2 words cut off: row 1: the last 1 of 3 words cut off; row 7: the last 1 of 2 words cut off"
    )
    assert any(told in notice for notice in data.notices)
    again = prepare(make_settings, Path(table.source), pieces, max_seq_length=7)  # from the cache
    assert again.notices == data.notices


@pytest.mark.parametrize("tags", [["B-X", "O"], [1, 2]])
def test_lists_of_names_or_ids(make_settings: Make, write: Write, pieces: Any, tags: list[Any]) -> None:
    lines = [json.dumps({"tokens": ["a", "b"], "ner_tags": tags}), json.dumps({"tokens": ["c"], "ner_tags": tags[1:]})]
    data = prepare(make_settings, write("a.jsonl", "\n".join(lines)), pieces)
    assert data.task.labels == tuple(map(str, tags))
    assert data.task.metrics == (("precision", "recall", "f1", "accuracy") if tags[0] == "B-X" else ("accuracy",))


def test_ids_of_a_task_that_knows_its_tags(make_settings: Make, write: Write, pieces: Any, tmp_path: Path) -> None:
    write("conll/train.jsonl", '{"tokens": ["a", "b"], "ner_tags": [3, 0]}\n{"tokens": ["b"], "ner_tags": ["B-PER"]}')
    write("conll/valid.txt", "a B-LOC\n")
    settings = make_settings(task="conll2003", data_dir=tmp_path / "conll")
    data = prepare_data(settings, pieces)
    labels = data.splits["train"].labels
    assert labels is not None
    assert labels.tolist() == [-100, 3, 0, -100, -100, 1, -100]
    assert list(data.splits) == ["train", "validation"]


def test_texts_with_blanks_between_words(make_settings: Make, write: Write, pieces: Any) -> None:
    path = write("a.csv", "words,tags\na b,B-X O\nc,O\n")
    data = prepare(make_settings, path, pieces, problem_type="token_classification")
    assert data.splits["train"].token_ids.tolist() == [2, 4, 5, 3, 2, 6, 3]


def test_another_column_of_tags(make_settings: Make, write: Write, pieces: Any) -> None:
    path = write("a.conll", "1 a DET B-X\n2 b NN O\n")
    data = prepare(make_settings, path, pieces, text_column_names=("2",), label_column_name="3",
                   problem_type="token_classification")  # fmt: skip
    assert (data.task.labels, data.splits["train"].token_ids.tolist()) == (("DET", "NN"), [2, 4, 5, 3])


@pytest.mark.parametrize(
    ("line", "reason"),
    [
        ('{"tokens": ["a", "b"], "ner_tags": ["O"]}', "row 3, column 'ner_tags': 1 tag for 2 words"),
        ('{"tokens": [], "ner_tags": []}', "the sentence has no words"),
        ('{"tokens": ["a"], "ner_tags": []}', "there are no tags"),
        ('{"tokens": ["a", 3], "ner_tags": ["O", null]}', "the label is empty"),
        ('{"tokens": ["a", null], "ner_tags": ["O", "O"]}', r"word 2: the text is empty \(null\)"),
        ('{"tokens": {"a": 1}, "ner_tags": ["O"]}', "a list of words was expected, found"),
        ('{"tokens": ["a"], "ner_tags": 3}', "a list of tags was expected, found 3"),
        ('{"ner_tags": ["O"]}', "the words are missing"),
    ],
)
def test_rows_that_cannot_be_used(make_settings: Make, write: Write, pieces: Any, line: str, reason: str) -> None:
    good = '{"tokens": ["a", "b"], "ner_tags": ["B-X", "O"]}\n'
    with pytest.raises(DataError, match=reason):
        prepare(make_settings, write("a.jsonl", good + good + line), pieces)
    data = prepare(make_settings, write("a.jsonl", good + good + line), pieces, on_bad_row="skip")
    assert (len(data.splits["train"]), data.splits["train"].num_bad_rows) == (2, 1)


def test_blank_words_have_no_tokens_and_no_label(make_settings: Make, write: Write, pieces: Any) -> None:
    path = write("a.jsonl", '{"tokens": ["a", "", " ", "b"], "ner_tags": ["B-X", "O", "O", "O"]}')
    table = prepare(make_settings, path, pieces).splits["train"]
    assert table.places is not None
    assert table.places.tolist() == [-1, 0, 3, -1]


def test_unlabelled_test_splits_and_inputs(make_settings: Make, write: Write, pieces: Any) -> None:
    train, test = write("train.conll", "a B-X\nb O\n"), write("test.txt", "a\nb\n\nc\n")
    data = prepare_data(make_settings(train_file=train, test_file=test), pieces, splits=["train", "test"])
    assert (data.splits["test"].labels, data.splits["test"].num_unlabelled) == (None, 2)
    (chunk,) = open_inputs(test, task=data.task, tokenizer=pieces, max_seq_length=64).chunks()
    assert chunk.table is not None
    assert list(chunk.table.notes or ()) == [{"row": 1, "words": ("a", "b")}, {"row": 4, "words": ("c",)}]


def test_tags_that_are_not_given() -> None:
    reader = TagReader(ClassReader(("O", "X")))
    for cell in (None, MISSING, [], [-1, -1], [None], ""):
        assert reader.read_if_given(cell) is None
    assert reader.read_if_given(["X", "O"]) == (1, 0)
    with pytest.raises(CellError, match="unknown"):
        reader.read_if_given(["X", "Y"])


def test_words_of_a_cell() -> None:
    assert words_in("a  b") == words_in(["a", "b"]) == ("a", "b")


def test_columns_that_cannot_be_told(make_settings: Make, write: Write, pieces: Any) -> None:
    path = write("a.jsonl", '{"text": ["a"], "x": ["O"]}')
    with pytest.raises(DataError, match="name that of the words with --text_column_names"):
        prepare(make_settings, path, pieces, problem_type="token_classification")
    with pytest.raises(DataError, match="1 tag in all"):
        prepare(make_settings, path, pieces, problem_type="token_classification", text_column_names=("text",),
                label_column_name="x")  # fmt: skip


def test_a_slow_tokenizer_is_refused(make_settings: Make, write: Write) -> None:
    with pytest.raises(ConfigError, match=r"WordTokenizer does not say .* tags of words need a fast tokenizer"):
        prepare(make_settings, write("a.conll", "a B-X\nb O\n"), WordTokenizer())


def test_a_word_is_tokenised_as_if_a_blank_stood_before_it(make_settings: Make, write: Write) -> None:
    """Byte-level tokenizers have other ids for a word at the beginning of a text."""
    from tokenizers import Tokenizer, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    letters = ["<unk>", "\u0120", "a", "b"]  # the second one stands for a blank
    backend = Tokenizer(models.BPE({letter: i for i, letter in enumerate(letters)}, [], unk_token="<unk>"))
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=backend, unk_token="<unk>", model_max_length=64)
    table = prepare(make_settings, write("a.conll", "a X\nb O\n"), tokenizer).splits["train"]
    assert table.token_ids.tolist() == [1, 2, 1, 3]
