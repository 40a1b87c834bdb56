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


def add_shared_options(parser: argparse.ArgumentParser, data: str = "MRPC's") -> None:
    """What the benchmarks of speed and memory have in common: data, model, and the file to write."""
    parser.add_argument("--data_dir", type=Path, help=f"folder of {data} files; none: the usual place, or the example")
    parser.add_argument("--model", type=Path, help=f"folder of the encoder; none: as --size says ({MODEL_PACKAGE})")
    parser.add_argument("--output", type=Path, help="file to write; none: one with the date in benchmarks/results")
    parser.add_argument(
        "--size", choices=(DEMO, *SIZES), default=DEMO,
        help=f"{DEMO}: the encoder of {MODEL_PACKAGE}; others: random weights (default: {DEMO})",
    )  # fmt: skip


def settle_shared_options(parser: argparse.ArgumentParser, options: argparse.Namespace, data_dir: Path) -> None:
    """Refuse two models; take the usual place of the data where none is named and it is there."""
    if options.model is not None and options.size != DEMO:
        parser.error(f"--model excludes --size {options.size}: one model is measured")
    if options.data_dir is None and data_dir.is_dir():
        options.data_dir = data_dir


def shown_shared_options(options: argparse.Namespace) -> dict[str, object]:
    """The same as they repeat a measurement, without the file."""
    return {
        "data_dir": shown_path(options.data_dir) if options.data_dir else None,
        "size": options.size if options.model is None else None,
        "model": shown_path(options.model) if options.model else None,
    }


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
    from fleetune.kernels import contest
    from fleetune.kernels.library import load_kernels

    return f"fleetune's kernels: {load_kernels().reason or contest.kernels_in_use()}"


def longest_input(model: Path, asked: int) -> int:
    """Tokens an example may have: as many as are asked for, or less where the model has fewer positions."""
    from transformers import AutoConfig

    return min(asked, int(AutoConfig.from_pretrained(model).max_position_embeddings))


def shown_model(model: Path | None, size: str = DEMO) -> str:
    """What a result says of the model: a folder from the repository, the package, or the size."""
    if model is not None:
        return shown_path(model)
    return MODEL_PACKAGE if size == DEMO else f"{size}, random weights"
