"""The models that are measured: the encoder of the [demo] extra, or one of another size with random weights."""

from __future__ import annotations

import argparse
import shutil
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from benchmarks.result_file import shown_path
from fleetune.cli.demo import MODEL_PACKAGE, packaged_model

DEMO = "demo"
SIZES: Mapping[str, Mapping[str, Any]] = {
    "bert-base": {
        "num_hidden_layers": 12,
        "hidden_size": 768,
        "num_attention_heads": 12,
        "intermediate_size": 3072,
        "max_position_embeddings": 512,
    },
}
"""Name -> what makes a BERT of that size; `DEMO` is the encoder of the extra as it is."""
TOKENIZER_FILES = ("tokenizer.json", "tokenizer_config.json", "special_tokens_map.json", "vocab.txt")
SEED = 42

FLOAT32_SETTINGS: Mapping[str, Any] = {"bf16": "false"}
"""What holds fleetune to the arithmetic that its peers compute in."""


def add_size_option(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--size", choices=(DEMO, *SIZES), default=DEMO,
        help=f"{DEMO}: the encoder of {MODEL_PACKAGE}; others: random weights (default: {DEMO})",
    )  # fmt: skip


def model_folder(size: str, folder: Path) -> Path:
    """Folder of a model of that size; made in `folder`, unless it is the packaged one."""
    return packaged_model() if size == DEMO else write_random_model(folder, SIZES[size])


def write_random_model(folder: Path, sizes: Mapping[str, Any]) -> Path:
    """Save a BERT with random weights and the packaged tokenizer, whose vocabulary it embeds."""
    import torch
    from transformers import BertConfig, BertModel

    from fleetune.model.quiet import quiet_transformers

    packaged = packaged_model()
    folder.mkdir(parents=True, exist_ok=True)
    for name in TOKENIZER_FILES:
        if (packaged / name).is_file():
            shutil.copy(packaged / name, folder / name)
    torch.manual_seed(SEED)
    vocab_size = BertConfig.from_pretrained(packaged).vocab_size
    with quiet_transformers():
        BertModel(BertConfig(vocab_size=vocab_size, **sizes)).save_pretrained(folder)
    return folder


def kernels_in_use() -> str:
    """Whether fleetune's kernels are compiled here, in words: a result is of the one or of the other."""
    from fleetune.kernels.library import load_kernels

    kernels = load_kernels()
    return "fleetune's kernels: compiled" if kernels.compiled else f"fleetune's kernels: {kernels.reason}"


def longest_input(model: Path, asked: int) -> int:
    """Tokens an example may have: as many as are asked for, or less where the model has fewer positions."""
    from transformers import AutoConfig

    return min(asked, int(AutoConfig.from_pretrained(model).max_position_embeddings))


def shown_model(model: Path | None, size: str = DEMO) -> str:
    """What a result says of the model: a folder from the repository, the package, or the size."""
    if model is not None:
        return shown_path(model)
    return MODEL_PACKAGE if size == DEMO else f"{size}, random weights"
