"""Sentences of words to tokens: each tag becomes the label of the first token of its word."""

from __future__ import annotations

import os
from collections.abc import Sequence
from typing import Any

import numpy as np

from fleetune.data.examples import BadRow, Example
from fleetune.data.tokens.table import UNLABELLED
from fleetune.data.tokens.tokenizing import Encoder, TokenBlock, flat
from fleetune.data.wording import counted
from fleetune.errors import ConfigError

NO_WORD = -1


class WordEncoder(Encoder):
    """A sentence as one sequence; one that is too long is cut behind the last word that fits.

    Args:
        labels: Names of the tags, for the notes.
    """

    most_examples = 1024

    def __init__(self, labels: Sequence[str]) -> None:
        self._labels = tuple(labels)

    def rules(self) -> str:
        """See `Encoder.rules`."""
        return f"words, {self._labels!r}"

    def adapt(self, tokenizer: Any, max_length: int) -> None:
        """See `Encoder.adapt`: a word is tokenised as if a blank stood before it."""
        require_fast(tokenizer, "tags of words")
        from tokenizers.pre_tokenizers import ByteLevel

        splitter = tokenizer.backend_tokenizer.pre_tokenizer
        if isinstance(splitter, ByteLevel):
            splitter.add_prefix_space = True

    def encode(self, examples: Sequence[Example], tokenizer: Any, max_length: int) -> TokenBlock:
        """See `Encoder.encode`."""
        kept = [len(example.texts) for example in examples]
        encodings = _encodings(tokenizer, [example.texts for example in examples], None)
        for i, encoding in enumerate(encodings):
            if len(encoding.ids) > max_length:
                kept[i] = _words_that_fit(encoding, max_length)
                encodings[i] = _encodings(tokenizer, [examples[i].texts[: kept[i]]], max_length)[0]
        places = [_first_tokens(encoding.word_ids) for encoding in encodings]
        lengths = np.fromiter((len(e.ids) for e in encodings), np.int64, len(encodings))
        labelled = all(example.label is not None for example in examples)
        return TokenBlock(
            token_ids=flat([e.ids for e in encodings], np.int32, lengths),
            type_ids=type_ids_of(encodings, tokenizer, lengths),
            lengths=lengths,
            rows=np.fromiter((example.row for example in examples), np.int64, len(examples)),
            labels=tuple(example.label for example in examples),
            targets=flat(list(map(_targets, examples, places)), np.int64, lengths) if labelled else None,
            places=flat(places, np.int32, lengths),
            notes=tuple(map(self._note, examples)),
            **_cuts(examples, kept),
        )

    def _note(self, example: Example) -> dict[str, Any]:
        note: dict[str, Any] = {"row": example.row, "words": example.texts}
        if isinstance(example.label, tuple):
            note["tags"] = [self._labels[tag] for tag in example.label]
        return note


def require_fast(tokenizer: Any, what: str) -> None:
    """Refuse a tokenizer that does not say where its tokens come from.

    Raises:
        ConfigError: It is a slow one.
    """
    if not tokenizer.is_fast:
        raise ConfigError(
            f"{type(tokenizer).__name__} does not say which part of a text a token is: {what} need a fast tokenizer, "
            "with a tokenizer.json; name one with --tokenizer_name"
        )


def type_ids_of(encodings: Sequence[Any], tokenizer: Any, lengths: Any) -> Any:
    """The types of all tokens, if the model has types."""
    if "token_type_ids" not in tokenizer.model_input_names:
        return None
    return flat([encoding.type_ids for encoding in encodings], np.uint8, lengths)


def _encodings(tokenizer: Any, sentences: Sequence[Sequence[str]], max_length: int | None) -> list[Any]:
    os.environ.setdefault("TOKENIZERS_PARALLELISM", "true")
    encoded = tokenizer(
        [list(words) for words in sentences],
        is_split_into_words=True,
        truncation=max_length is not None,
        max_length=max_length,
        padding=False,
        return_attention_mask=False,
        verbose=False,
    )
    return list(encoded.encodings)


def _words_that_fit(encoding: Any, max_length: int) -> int:
    """How many words of a sentence fit as a whole; at least one, which is then cut itself."""
    num_special = sum(word is None for word in encoding.word_ids)
    pieces = [word for word in encoding.word_ids if word is not None]
    beyond = pieces[max_length - num_special]  # the word of the first piece that does not fit
    return max(1, int(beyond))


def _first_tokens(word_ids: Sequence[int | None]) -> list[int]:
    """The number of the word that each token begins, or `NO_WORD`."""
    before = [None, *word_ids[:-1]]
    return [NO_WORD if word is None or word == last else word for word, last in zip(word_ids, before, strict=True)]


def _targets(example: Example, places: Sequence[int]) -> list[int]:
    assert isinstance(example.label, tuple)
    return [UNLABELLED if place == NO_WORD else example.label[place] for place in places]


def _cuts(examples: Sequence[Example], kept: Sequence[int]) -> dict[str, Any]:
    """The remarks about sentences that were cut, and their count."""
    cut = [
        (example, num_kept) for example, num_kept in zip(examples, kept, strict=True) if num_kept < len(example.texts)
    ]
    if not cut:
        return {}
    lost = [len(example.texts) - num_kept for example, num_kept in cut]
    remarks = tuple(
        BadRow(
            row=example.row, column=None, reason=f"the last {num_lost} of {counted(len(example.texts), 'word')} cut off"
        )
        for (example, _), num_lost in zip(cut, lost, strict=True)
    )
    return {"remarks": remarks, "counts": {"sentences cut": len(cut), "words cut off": sum(lost)}}
