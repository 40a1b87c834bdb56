"""Questions and long contexts to windows: the question, and a part of the context that overlaps with the next one."""

from __future__ import annotations

import os
from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from fleetune.data.examples import BadRow, Example
from fleetune.data.tokens.table import UNLABELLED
from fleetune.data.tokens.tokenizing import Encoder, TokenBlock, flat
from fleetune.data.tokens.words import require_fast, type_ids_of
from fleetune.errors import ConfigError

SHORTEST_CONTEXT = 16
"""Tokens of the context that a question must leave room for."""
CONTEXT = 1
"""Number of the context among the texts of a sequence."""
NOWHERE = (-1, -1)
NO_ANSWER = 0
"""Token that stands for "no answer": the first."""


class WindowEncoder(Encoder):
    """A question and its context as one sequence or several windows.

    Args:
        stride: Tokens of the context that a window has in common with the next.
    """

    most_examples = 256

    def __init__(self, stride: int) -> None:
        self._stride = stride

    def rules(self) -> str:
        """See `Encoder.rules`."""
        return f"windows, stride {self._stride}"

    def adapt(self, tokenizer: Any, max_length: int) -> None:
        """See `Encoder.adapt`: questions of a quarter of the window must leave room for the stride."""
        require_fast(tokenizer, "answers in texts")
        room = max_length - tokenizer.num_special_tokens_to_add(pair=True) - max_length // 4
        if self._stride >= room:
            raise ConfigError(
                f"--doc_stride {self._stride} is too large for windows of --max_seq_length {max_length} tokens, which "
                f"hold {room} of the context beside a question of {max_length // 4}: give less, or longer windows"
            )

    def encode(self, examples: Sequence[Example], tokenizer: Any, max_length: int) -> TokenBlock:
        """See `Encoder.encode`; a question that leaves less room than the stride gets a smaller one."""
        os.environ.setdefault("TOKENIZERS_PARALLELISM", "true")
        rooms = _rooms(examples, tokenizer, max_length)
        usable = [(example, room) for example, room in zip(examples, rooms, strict=True) if room >= SHORTEST_CONTEXT]
        bad_rows = tuple(
            BadRow(row=example.row, column=None, reason=_no_room(room, max_length))
            for example, room in zip(examples, rooms, strict=True)
            if room < SHORTEST_CONTEXT
        )
        kept = [example for example, _ in usable]
        windows = _windows(usable, tokenizer, max_length, self._stride)
        return _block(kept, windows, tokenizer, bad_rows)


def _no_room(room: int, max_length: int) -> str:
    return (
        f"the question leaves {max(0, room)} of {max_length} tokens for its context, {SHORTEST_CONTEXT} are needed: "
        "longer windows have room (--max_seq_length)"
    )


def _rooms(examples: Sequence[Example], tokenizer: Any, max_length: int) -> list[int]:
    """How many tokens of the context fit beside each question."""
    questions = [example.texts[0] for example in examples]
    encoded = tokenizer(questions, add_special_tokens=False, truncation=False, padding=False, verbose=False)
    num_special = tokenizer.num_special_tokens_to_add(pair=True)
    return [max_length - num_special - len(ids) for ids in encoded["input_ids"]]


def _windows(usable: Sequence[tuple[Example, int]], tokenizer: Any, max_length: int, stride: int) -> list[list[Any]]:
    """The encodings of each example's windows."""
    windows: list[list[Any]] = [[] for _ in usable]
    by_stride: dict[int, list[int]] = {}
    for i, (_, room) in enumerate(usable):
        by_stride.setdefault(stride if room > stride else room // 2, []).append(i)
    for own_stride, members in by_stride.items():
        encoded = tokenizer(
            [usable[i][0].texts[0] for i in members],
            [usable[i][0].texts[1] for i in members],
            truncation="only_second",
            max_length=max_length,
            stride=own_stride,
            return_overflowing_tokens=True,
            padding=False,
            return_attention_mask=False,
            verbose=False,
        )
        for member, encoding in zip(encoded["overflow_to_sample_mapping"], encoded.encodings, strict=True):
            windows[members[member]].append(encoding)
    return windows


def _block(
    examples: Sequence[Example], windows: Sequence[Sequence[Any]], tokenizer: Any, bad_rows: tuple[BadRow, ...]
) -> TokenBlock:
    encodings = [encoding for of_example in windows for encoding in of_example]
    example_of = np.repeat(np.arange(len(examples)), [len(of_example) for of_example in windows])
    lengths = np.fromiter((len(e.ids) for e in encodings), np.int64, len(encodings))
    places = [_places(encoding) for encoding in encodings]
    labelled = all(example.label is not None for example in examples)
    moved = [example for example in examples if example.remark is not None]
    return TokenBlock(
        token_ids=flat([e.ids for e in encodings], np.int32, lengths),
        type_ids=type_ids_of(encodings, tokenizer, lengths),
        lengths=lengths,
        rows=np.array([examples[i].row for i in example_of.tolist()], dtype=np.int64),
        labels=tuple(example.label for example in examples),
        targets=_targets(examples, example_of, places) if labelled else None,
        places=np.concatenate(places) if places else np.empty((0, 2), np.int32),
        example_of=example_of,
        notes=tuple(map(_note, examples)),
        bad_rows=bad_rows,
        remarks=tuple(BadRow(row=example.row, column=None, reason=str(example.remark)) for example in moved),
        counts={"questions with other answers than they say": len(moved)} if moved else {},
    )


def _places(encoding: Any) -> NDArray[np.int32]:
    """The characters of the context that each token of a window stands for, (L, 2)."""
    spans = zip(encoding.sequence_ids, encoding.offsets, strict=True)
    return np.array([offsets if text == CONTEXT else NOWHERE for text, offsets in spans], dtype=np.int32)


def _targets(
    examples: Sequence[Example], example_of: NDArray[np.int64], places: Sequence[NDArray[np.int32]]
) -> NDArray[np.int64]:
    """The first and the last token of the answer in each window, (n, 2)."""
    spans = [_learned_span(example) for example in examples]
    found = [_tokens_of(spans[i], of_window) for i, of_window in zip(example_of, places, strict=True)]
    return np.array(found, dtype=np.int64).reshape(-1, 2)


def _learned_span(example: Example) -> tuple[int, int] | None:
    """The characters of the first answer; empty if the question has none, None where its text is not in the context."""
    assert isinstance(example.label, tuple)
    if not example.label:
        return (0, 0)
    text, start = example.label[0]
    return None if start is None else (start, start + len(text))


def _tokens_of(span: tuple[int, int] | None, places_L2: NDArray[np.int32]) -> tuple[int, int]:
    """The tokens that hold the characters; the first token of all where the window does not hold them all."""
    if span is None:
        return UNLABELLED, UNLABELLED
    start, end = span
    (tokens,) = np.nonzero(places_L2[:, 0] >= 0)
    if start == end or not len(tokens) or places_L2[tokens[0], 0] > start or places_L2[tokens[-1], 1] < end:
        return NO_ANSWER, NO_ANSWER
    first = tokens[np.nonzero(places_L2[tokens, 0] <= start)[0][-1]]
    last = tokens[np.nonzero(places_L2[tokens, 1] >= end)[0][0]]
    return int(first), int(last)


def _note(example: Example) -> dict[str, Any]:
    answers: Iterator[Any] | tuple[()] = iter(example.label) if isinstance(example.label, tuple) else ()
    note: dict[str, Any] = {"row": example.row, "id": example.id, "context": example.texts[1]}
    return note if example.label is None else {**note, "answers": [answer.text for answer in answers]}
