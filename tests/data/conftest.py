"""A small tokenizer, settings with everything left out, and files to write."""

from __future__ import annotations

import os
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import pytest

from fleetune.data.examples import OnBadRow
from fleetune.data.tasks import Problem

os.environ["HF_HUB_OFFLINE"] = "1"

WORDS = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "a", "b", "c", "d", "good", "bad", "film"]
REAL_DATA = Path(__file__).parents[3] / "shared" / "data" / "glue"


class WordTokenizer:
    """Ids by a fixed word list; a stand-in that counts its calls and needs no library."""

    is_fast = False
    model_max_length = 512
    truncation_side = "right"
    special_tokens_map: dict[str, str] = {"unk_token": "[UNK]"}  # noqa: RUF012
    init_kwargs: dict[str, object] = {}  # noqa: RUF012

    def __init__(self, *, type_ids: bool = True, words: list[str] | None = None) -> None:
        self.num_calls = 0
        self.words = words or WORDS
        self.model_input_names = ["input_ids", *(["token_type_ids"] if type_ids else []), "attention_mask"]

    def get_vocab(self) -> dict[str, int]:
        return {word: i for i, word in enumerate(self.words)}

    def num_special_tokens_to_add(self, pair: bool = False) -> int:
        return 3 if pair else 2

    def __call__(self, text: Any, text_pair: Any = None, **options: Any) -> dict[str, Any]:
        self.num_calls += 1
        room = options["max_length"]
        pairs = zip(text, text_pair or [None] * len(text), strict=True)
        rows = [self._encode(first, second, room) for first, second in pairs]
        encoded = {"input_ids": [ids for ids, _ in rows]}
        if "token_type_ids" in self.model_input_names:
            encoded["token_type_ids"] = [types for _, types in rows]
        return encoded

    def _encode(self, first: str, second: str | None, room: int) -> tuple[list[int], list[int]]:
        ids = [2, *self._ids(first), 3]
        types = [0] * len(ids)
        if second is not None:
            more = [*self._ids(second), 3]
            ids, types = ids + more, types + [1] * len(more)
        return ids[:room], types[:room]

    def _ids(self, text: str) -> list[int]:
        return [self.words.index(word) if word in self.words else 1 for word in text.split()]


@dataclass(kw_only=True)
class Settings:
    """What a run's config gives; see `fleetune.data.settings.DataSettings`."""

    cache_dir: Path
    task: str | None = None
    data_dir: Path | None = None
    train_file: Path | None = None
    validation_file: Path | None = None
    test_file: Path | None = None
    dataset_name: str | None = None
    dataset_config_name: str | None = None
    text_column_names: tuple[str, ...] | None = None
    label_column_name: str | None = None
    label_delimiter: str | None = None
    problem_type: Literal["auto"] | Problem = "auto"
    version_2_with_negative: bool = False
    encoding: str | None = None
    on_bad_row: OnBadRow = "error"
    max_seq_length: int = 128
    doc_stride: int = 32
    max_train_samples: int | None = None
    max_eval_samples: int | None = None
    max_predict_samples: int | None = None
    overwrite_cache: bool = False


@pytest.fixture
def word_tokenizer() -> WordTokenizer:
    return WordTokenizer()


@pytest.fixture
def make_settings(tmp_path: Path) -> Callable[..., Settings]:
    def make(**changes: Any) -> Settings:
        return Settings(**{"cache_dir": tmp_path / "cache", **changes})

    return make


@pytest.fixture
def write(tmp_path: Path) -> Callable[[str, str | bytes], Path]:
    """Write a file byte by byte: line ends stay as given."""

    def write_file(name: str, content: str | bytes) -> Path:
        path = tmp_path / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(content.encode() if isinstance(content, str) else content)
        return path

    return write_file


@pytest.fixture(scope="session")
def glue_folder() -> Path:
    if not REAL_DATA.is_dir():
        pytest.skip(f"the GLUE files are not at {REAL_DATA}")
    return REAL_DATA


@pytest.fixture(scope="session")
def fast_tokenizer() -> Any:
    """A word-level tokenizer of the library's own fast kind, with BERT's special tokens and type ids."""
    from tokenizers import Tokenizer, models, pre_tokenizers, processors
    from transformers import PreTrainedTokenizerFast

    backend = Tokenizer(models.WordLevel({word: i for i, word in enumerate(WORDS)}, unk_token="[UNK]"))
    backend.pre_tokenizer = pre_tokenizers.Whitespace()
    backend.post_processor = processors.TemplateProcessing(
        single="[CLS] $A [SEP]",
        pair="[CLS] $A [SEP] $B:1 [SEP]:1",
        special_tokens=[("[CLS]", 2), ("[SEP]", 3)],
    )
    return PreTrainedTokenizerFast(
        tokenizer_object=backend,
        pad_token="[PAD]",
        unk_token="[UNK]",
        cls_token="[CLS]",
        sep_token="[SEP]",
        model_max_length=512,
        model_input_names=["input_ids", "token_type_ids", "attention_mask"],
    )
