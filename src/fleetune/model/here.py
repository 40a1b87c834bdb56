"""The model on every host: the first rank's host has it, or fetches it from the hub; the others are sent it."""

from __future__ import annotations

import fnmatch
from collections.abc import Callable, Sequence
from pathlib import Path

from fleetune.comm.folders import FolderContent, folder_here, own_cache
from fleetune.comm.ranks import Ranks
from fleetune.config import RunConfig
from fleetune.errors import ModelError
from fleetune.model.adapter_folder import ADAPTER_CONFIG, ADAPTER_HEAD, ADAPTER_WEIGHTS, base_of, is_adapter
from fleetune.model.load import check_model_folder, reading

_TOKENIZER = (
    "tokenizer*", "vocab*", "merges.txt", "special_tokens_map.json", "added_tokens.json", "spiece.model", "spm.model",
    "sentencepiece*.model", "bpe.codes", "dict.txt", "config.json",
)  # fmt: skip
_SAFE, _OLD = (
    ("model*.safetensors", "model*.safetensors.index.json"),
    ("pytorch_model*.bin", "pytorch_model*.bin.index.json"),
)
_MODEL = (*_TOKENIZER, "record.json")
"""Beside the weights; `record.json` tells the task of a finished run."""


def with_model_here(config: RunConfig, ranks: Ranks, say: Callable[[str], None]) -> RunConfig:
    """The settings with folders of this host as `model` and `tokenizer_name`. All ranks call this.

    Nothing changes for a single process. A name of the hub is fetched by the first rank alone.

    Args:
        config: The settings; folders need be on the first rank's host only.
        ranks: Of the run.
        say: Told, on the first rank, what was sent.

    Raises:
        ModelError: On the first rank: there is no such model.
        OutputError: This host cannot keep it.
        PeerError: Another rank failed.
    """
    if ranks.world_size == 1:
        return config
    assert config.model is not None
    model, tokenizer = config.model, config.tokenizer_name

    def keep_in(content: FolderContent) -> Path:
        return own_cache(config.cache_dir) / "models" / content.digest

    def find_model() -> tuple[Path, Sequence[str]]:
        return _find(config, model, "model", _MODEL)

    changes = {"model": str(folder_here("the model", ranks, find_model, keep_in, say))}
    if is_adapter(changes["model"]):
        changes["base_model"] = str(
            folder_here("the adapter's model", ranks, lambda: _find(config, base_of(config), "model", _MODEL), keep_in,
                        say)
        )  # fmt: skip
    if tokenizer is not None:
        changes["tokenizer_name"] = str(
            folder_here("the tokenizer", ranks, lambda: _find(config, tokenizer, "tokenizer", _TOKENIZER), keep_in, say)
        )
    return config.replace(**changes)


def _find(config: RunConfig, source: str, what: str, patterns: Sequence[str]) -> tuple[Path, Sequence[str]]:
    """The folder of a model or tokenizer, and the files of it that are read."""
    if config.trust_remote_code:
        patterns = (*patterns, "*.py")
    if what == "model":
        check_model_folder(source)
    folder = Path(source)
    if not folder.is_dir():
        folder = _fetch(config, source, what, patterns)
    if what == "model":
        patterns = (*patterns, *_weights(folder))
    return folder, _matching(folder, patterns)


def _weights(folder: Path) -> Sequence[str]:
    if is_adapter(folder):
        return ADAPTER_CONFIG, ADAPTER_HEAD, ADAPTER_WEIGHTS
    return _SAFE if _matching(folder, _SAFE) else _OLD


def _matching(folder: Path, patterns: Sequence[str]) -> list[str]:
    names = [path.name for path in folder.iterdir() if path.is_file()]
    return sorted(name for name in names if any(fnmatch.fnmatchcase(name, pattern) for pattern in patterns))


def _fetch(config: RunConfig, name: str, what: str, patterns: Sequence[str]) -> Path:
    """The files of a hub repository, from the hub's cache or the hub."""
    from huggingface_hub import snapshot_download

    def fetch(wanted: Sequence[str]) -> Path:
        return Path(snapshot_download(name, revision=config.model_revision, allow_patterns=list(wanted)))

    with reading(name, "config" if what == "model" else "tokenizer"):
        if what != "model":
            return fetch(patterns)
        folder = fetch((*patterns, *_SAFE))
        if not _matching(folder, _SAFE):
            folder = fetch((*patterns, *_OLD))
    if not _matching(folder, (*_SAFE, *_OLD)):
        raise ModelError(f"--model {name}: the repository holds no weights ({_SAFE[0]} or {_OLD[0]})")
    return folder
