"""Folders that hold an adapter in place of a model, and the model that it belongs to. Imports no torch."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from fleetune.config import RunConfig
from fleetune.errors import ModelError

ADAPTER_CONFIG, ADAPTER_WEIGHTS, ADAPTER_HEAD = "adapter_config.json", "adapter_model.safetensors", "adapter_head.json"


def adapter_files_of(folder: Path) -> list[Path]:
    """Where the files of an adapter are, or would be, its config first."""
    return [folder / name for name in (ADAPTER_CONFIG, ADAPTER_WEIGHTS, ADAPTER_HEAD)]


def is_adapter(source: str | Path) -> bool:
    """Whether a folder holds an adapter."""
    return (Path(source) / ADAPTER_CONFIG).is_file()


def read_adapter_config(folder: Path) -> dict[str, Any]:
    """What `adapter_config.json` says.

    Raises:
        ModelError: It cannot be read, or there are no weights of an adapter beside it.
    """
    try:
        settings = json.loads((folder / ADAPTER_CONFIG).read_text(encoding="utf-8"))
        settings["peft_type"], settings["base_model_name_or_path"]
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise ModelError(f"{folder / ADAPTER_CONFIG}: is not as peft writes it ({error!r})") from error
    if not (folder / ADAPTER_WEIGHTS).is_file():
        raise ModelError(f"{folder}: there is an {ADAPTER_CONFIG} and no {ADAPTER_WEIGHTS}: adapters are read from "
                         "safetensors alone")  # fmt: skip
    found: dict[str, Any] = settings
    return found


def base_of(config: RunConfig) -> str:
    """Folder or hub name of the model whose weights are loaded: `--model`, or what the adapter there belongs to.

    Raises:
        ModelError: The adapter does not say, or the folder that it names is not there.
    """
    assert config.model is not None
    if not is_adapter(config.model):
        return config.model
    told = config.base_model or read_adapter_config(Path(config.model))["base_model_name_or_path"]
    if not told:
        raise ModelError(f"{config.model}: the adapter does not say of which model it is: name that with --base_model")
    if not Path(told).exists() and str(told).startswith((".", "/", "~")):
        raise ModelError(f"{config.model}: the adapter is of the model {told}, and there is no such folder: copy it "
                         "there, or say with --base_model where it is")  # fmt: skip
    return str(told)
