"""Texts to blocks of token ids, through a Hugging Face tokenizer that the caller has loaded."""

from __future__ import annotations

import hashlib
import json
import os
from abc import ABC, abstractmethod
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import chain, islice
from typing import Any, Protocol

import numpy as np
from numpy.typing import NDArray

from fleetune.data.examples import BadRow, Example
from fleetune.data.labels import Label
from fleetune.errors import ConfigError

# Large enough to keep all cores busy, small enough that a block of long pairs stays below 100 MB.
BLOCK_EXAMPLES = 4096


class Tokenizer(Protocol):
    """What is used of a `transformers` tokenizer."""

    is_fast: bool
    model_max_length: int
    model_input_names: Sequence[str]
    truncation_side: str

    def __call__(self, text: Any, text_pair: Any = None, **options: Any) -> Mapping[str, Any]: ...

    def num_special_tokens_to_add(self, pair: bool = False) -> int: ...


@dataclass(frozen=True, kw_only=True)
class TokenBlock:
    """The tokens of some consecutive examples: n sequences, which are the examples where `example_of` is None."""

    token_ids: NDArray[np.int32]
    """int32 (T,)."""
    type_ids: NDArray[np.uint8] | None
    """uint8 (T,); None if the tokenizer gives none."""
    lengths: NDArray[np.int64]
    """int64 (n,): tokens of each sequence."""
    rows: NDArray[np.int64]
    """int64 (n,)."""
    labels: tuple[Label | None, ...]
    """As they were read, one for each example."""
    targets: NDArray[np.int64] | None = None
    """Labels as they are learned, where these are of tokens (T,) or are places of tokens (n, 2); None: the others."""
    places: NDArray[np.int32] | None = None
    """int32 (T,): the word that each token begins; or (T, 2): the characters of the context that it is; -1: none."""
    example_of: NDArray[np.int64] | None = None
    """int64 (n,): which of the block's examples each sequence is a window of."""
    notes: tuple[Mapping[str, Any], ...] | None = None
    """What scoring and predictions need to know of each example beside its tokens, JSON-ready."""
    bad_rows: tuple[BadRow, ...] = ()
    """Examples that turned out to be of no use."""
    remarks: tuple[BadRow, ...] = ()
    """Rows that are used otherwise than they stand in the file."""
    counts: Mapping[str, int] = field(default_factory=dict)
    """What is to be counted of them, in words."""


class Encoder(ABC):
    """How examples become tokens."""

    most_examples = BLOCK_EXAMPLES
    """Of a block: fewer where examples are longer, and more than their ids is known of them meanwhile."""

    @abstractmethod
    def rules(self) -> str:
        """All that decides what `encode` gives beside tokenizer and length, as a text; part of the cache's key."""

    @abstractmethod
    def adapt(self, tokenizer: Any, max_length: int) -> None:
        """Make a tokenizer ready, before its identity is taken.

        Raises:
            ConfigError: It cannot be used for this, or not with this length.
        """

    @abstractmethod
    def encode(self, examples: Sequence[Example], tokenizer: Any, max_length: int) -> TokenBlock:
        """The tokens of some examples."""


class TextEncoder(Encoder):
    """One text or two as one sequence; pairs are truncated at the longer text, as the tokenizer does it."""

    def rules(self) -> str:
        """See `Encoder.rules`."""
        return "texts"

    def adapt(self, tokenizer: Any, max_length: int) -> None:
        """See `Encoder.adapt`: every tokenizer will do."""

    def encode(self, examples: Sequence[Example], tokenizer: Any, max_length: int) -> TokenBlock:
        """See `Encoder.encode`."""
        return _tokenise_block(examples, tokenizer, max_length)


def tokenise(
    examples: Iterable[Example], tokenizer: Tokenizer, max_length: int, encoder: Encoder | None = None
) -> Iterator[TokenBlock]:
    """Stream examples into blocks of tokens.

    Args:
        examples: All with the same number of texts.
        tokenizer: Fast ones work on all cores.
        max_length: Tokens a sequence may have, special tokens included.
        encoder: How they become tokens; None: as one text or two.

    Raises:
        ConfigError: `max_length` leaves no room for text.
    """
    # The tokenizer's threads are wanted here; unless the variable is set, a later fork makes it warn.
    os.environ.setdefault("TOKENIZERS_PARALLELISM", "true")
    encoder, remaining = encoder or TextEncoder(), iter(examples)
    while block := list(islice(remaining, min(BLOCK_EXAMPLES, encoder.most_examples))):
        yield encoder.encode(block, tokenizer, max_length)


def _tokenise_block(block: Sequence[Example], tokenizer: Tokenizer, max_length: int) -> TokenBlock:
    num_texts = len(block[0].texts)
    texts = [[example.texts[i] for example in block] for i in range(num_texts)]
    encoded = tokenizer(
        *texts,
        truncation="longest_first",
        max_length=max_length,
        padding=False,
        return_attention_mask=False,
        verbose=False,
    )
    ids, types = encoded["input_ids"], encoded.get("token_type_ids")
    lengths = np.fromiter(map(len, ids), dtype=np.int64, count=len(ids))
    return TokenBlock(
        token_ids=flat(ids, np.int32, lengths),
        type_ids=None if types is None else flat(types, np.uint8, lengths),
        lengths=lengths,
        rows=np.fromiter((example.row for example in block), dtype=np.int64, count=len(block)),
        labels=tuple(example.label for example in block),
    )


def flat(lists: Sequence[Sequence[int]], dtype: type[Any], lengths: NDArray[np.int64]) -> NDArray[Any]:
    """The items of all lists, one after the other."""
    return np.fromiter(chain.from_iterable(lists), dtype=dtype, count=int(lengths.sum()))


def usable_length(tokenizer: Tokenizer, max_length: int, *, pair: bool) -> int:
    """The token limit, lowered to what the model takes.

    Raises:
        ConfigError: There is no room for a token of each text beside the special tokens.
    """
    limit = min(max_length, tokenizer.model_max_length)
    special = tokenizer.num_special_tokens_to_add(pair=pair)
    needed = special + (2 if pair else 1)
    if limit < needed:
        raise ConfigError(
            f"max_seq_length {limit} leaves no room for text: {special} special tokens surround "
            f"{'a pair' if pair else 'a text'}, so at least {needed} is needed"
        )
    return limit


def tokenizer_identity(tokenizer: Any) -> str:
    """SHA-256, in hex, over everything that decides which ids a text gets."""
    parts: dict[str, Any] = {
        "class": type(tokenizer).__name__,
        "inputs": list(tokenizer.model_input_names),
        "truncation_side": tokenizer.truncation_side,
    }
    if tokenizer.is_fast:
        parts["backend"] = _backend_without_call_state(tokenizer.backend_tokenizer.to_str())
    else:
        parts["vocabulary"] = sorted(tokenizer.get_vocab().items())
        parts["special"] = {name: str(token) for name, token in tokenizer.special_tokens_map.items()}
        parts["settings"] = {name: str(value) for name, value in tokenizer.init_kwargs.items()}
    return hashlib.sha256(json.dumps(parts, sort_keys=True).encode()).hexdigest()


def _backend_without_call_state(text: str) -> dict[str, Any]:
    """The tokenizer's JSON without truncation and padding, which every call sets anew."""
    backend: dict[str, Any] = json.loads(text)
    return {name: value for name, value in backend.items() if name not in ("truncation", "padding")}
