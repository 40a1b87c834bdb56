from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from fleetune.data.examples import Example
from fleetune.data.tokens import tokenise, tokenizer_identity, usable_length
from fleetune.errors import ConfigError
from tests.data.conftest import WORDS, WordTokenizer

PAIRS = [
    Example(2, ("a b", "good film"), 1),
    Example(3, ("a a a a a a a a", "b"), 0),
    Example(5, ("unheard", "of"), None),
]


def test_ids_by_hand() -> None:
    (block,) = tokenise([Example(2, ("good film", "bad"), 1)], WordTokenizer(), 128)
    # [CLS] good film [SEP] bad [SEP], by their places in the word list.
    assert block.token_ids.tolist() == [2, 8, 10, 3, 9, 3]
    assert block.type_ids is not None
    assert block.type_ids.tolist() == [0, 0, 0, 0, 1, 1]
    assert (block.lengths.tolist(), block.rows.tolist(), block.labels) == ([6], [2], (1,))


@pytest.mark.parametrize("num_texts", [1, 2])
@pytest.mark.parametrize("max_length", [6, 128])
def test_tokens_equal_the_tokenizers_own(fast_tokenizer: Any, num_texts: int, max_length: int) -> None:
    examples = [example._replace(texts=example.texts[:num_texts]) for example in PAIRS]
    (block,) = tokenise(examples, fast_tokenizer, max_length)
    expected = [fast_tokenizer(*example.texts, truncation=True, max_length=max_length) for example in examples]
    assert block.token_ids.tolist() == [i for encoded in expected for i in encoded["input_ids"]]
    assert block.type_ids is not None
    assert block.type_ids.tolist() == [i for encoded in expected for i in encoded["token_type_ids"]]
    assert block.lengths.tolist() == [len(encoded["input_ids"]) for encoded in expected]


def test_tokenizers_without_type_ids() -> None:
    (block,) = tokenise(PAIRS, WordTokenizer(type_ids=False), 128)
    assert block.type_ids is None


def test_blocks_are_cut_and_nothing_is_lost(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("fleetune.data.tokens.tokenizing.BLOCK_EXAMPLES", 2)
    blocks = list(tokenise(PAIRS, WordTokenizer(), 128))
    assert [len(block.lengths) for block in blocks] == [2, 1]
    assert np.concatenate([block.rows for block in blocks]).tolist() == [2, 3, 5]


def test_the_length_is_lowered_to_the_models() -> None:
    assert usable_length(WordTokenizer(), 1000, pair=True) == 512
    assert usable_length(WordTokenizer(), 5, pair=True) == 5
    with pytest.raises(ConfigError, match=r"max_seq_length 4 leaves no room.*at least 5 is needed"):
        usable_length(WordTokenizer(), 4, pair=True)


def test_the_identity_tells_tokenizers_apart() -> None:
    plain = tokenizer_identity(WordTokenizer())
    assert tokenizer_identity(WordTokenizer()) == plain
    assert tokenizer_identity(WordTokenizer(type_ids=False)) != plain
    assert tokenizer_identity(WordTokenizer(words=[*WORDS, "more"])) != plain


def test_the_identity_does_not_change_with_use(fast_tokenizer: Any) -> None:
    fast_tokenizer(["a"], truncation=True, max_length=3, padding="max_length")
    first = tokenizer_identity(fast_tokenizer)
    fast_tokenizer(["a"], truncation=True, max_length=9, padding=False)
    assert tokenizer_identity(fast_tokenizer) == first
