"""Which files of a model are read; a model of the hub on several ranks. On several hosts: tests/train/test_hosts.py."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest

from fleetune.config import RunConfig
from fleetune.errors import ModelError
from fleetune.model.adapter_folder import base_of
from fleetune.model.here import _MODEL, _TOKENIZER, _find
from tests.conftest import Train, fleetune, read_json


def test_the_files_that_are_read(tiny_model: Path, tmp_path: Path) -> None:
    """Weights in safetensors rather than the older file; neither optimizer nor checkpoints of a finished run."""
    folder = tmp_path / "model"
    shutil.copytree(tiny_model, folder)
    for name in ("optimizer.safetensors", "pytorch_model.bin", "README.md", "modeling_own.py", "record.json"):
        (folder / name).touch()
    (folder / "checkpoint-5").mkdir()
    config = RunConfig(model=str(folder))
    found, names = _find(config, str(folder), "model", _MODEL)
    assert found == folder
    expected = ["config.json", "model.safetensors", "record.json", "tokenizer.json", "tokenizer_config.json"]
    assert [name for name in names if name != "special_tokens_map.json"] == expected
    with_code = config.replace(trust_remote_code=True)
    assert "modeling_own.py" in _find(with_code, str(folder), "model", _MODEL)[1]
    assert "model.safetensors" not in _find(config, str(folder), "tokenizer", _TOKENIZER)[1]
    (folder / "model.safetensors").unlink()
    assert "pytorch_model.bin" in _find(config, str(folder), "model", _MODEL)[1]


def test_the_files_of_an_adapter_and_of_its_model(tiny_model: Path, tmp_path: Path) -> None:
    names = ("adapter_config.json", "adapter_model.safetensors", "adapter_head.json", "README.md")
    for name in names:
        (tmp_path / name).touch()
    told = {"peft_type": "LORA", "base_model_name_or_path": str(tiny_model)}
    (tmp_path / "adapter_config.json").write_text(json.dumps(told))
    config = RunConfig(model=str(tmp_path))
    assert _find(config, str(tmp_path), "model", _MODEL) == (tmp_path, sorted(names[:3]))
    assert base_of(config) == str(tiny_model)
    assert base_of(config.replace(base_model="somewhere/else")) == "somewhere/else"
    (tmp_path / "adapter_model.safetensors").unlink()
    with pytest.raises(ModelError, match=r"an adapter_config.json and no adapter_model.safetensors"):
        _find(config, str(tmp_path), "model", _MODEL)
    (tmp_path / "adapter_config.json").write_text("{}")
    with pytest.raises(ModelError, match="is not as peft writes it"):
        _find(config, str(tmp_path), "model", _MODEL)


def test_a_folder_without_weights_is_refused(tmp_path: Path) -> None:
    (tmp_path / "config.json").touch()
    with pytest.raises(ModelError, match="holds no weights"):
        _find(RunConfig(model=str(tmp_path)), str(tmp_path), "model", _MODEL)


def hub_cache(home: Path, model: Path) -> Path:
    """A model as the hub's own cache keeps it."""
    repository = home / "hub" / "models--someone--tiny"
    commit = "0123456789abcdef0123456789abcdef01234567"
    (repository / "refs").mkdir(parents=True)
    (repository / "refs" / "main").write_text(commit)
    shutil.copytree(model, repository / "snapshots" / commit)
    return repository / "snapshots" / commit


def test_two_ranks_train_a_model_of_the_hubs_cache(
    train: Train, tiny_model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Offline: the first rank finds it, the other is told where."""
    hub_cache(tmp_path / "home", tiny_model)
    monkeypatch.setenv("HF_HOME", str(tmp_path / "home"))
    by_name = train("hub", model="someone/tiny", processes=2, max_steps=2)
    by_folder = train("folder", processes=2, max_steps=2)
    assert (by_name / "model.safetensors").read_bytes() == (by_folder / "model.safetensors").read_bytes()
    assert read_json(by_name / "record.json")["config"]["model"] == "someone/tiny"


def test_a_name_that_is_not_to_be_had_is_told_once(tmp_path: Path) -> None:
    file = tmp_path / "train.csv"
    file.write_text("text,label\na,b\n")
    result = fleetune(
        "train", "--model", "someone/none", "--train_file", file, "--do_eval", "false",
        "--output_dir", tmp_path / "out",
        "--processes", 2, "--threads", 1, check=False,
    )  # fmt: skip
    assert result.returncode == ModelError.exit_status
    assert result.stderr.count("--model someone/none: the config cannot be loaded (neither a folder here nor") == 1
