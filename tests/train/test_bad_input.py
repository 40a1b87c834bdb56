"""What a person reads when a model, a tokenizer, a label or a folder is not what the run needs."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file
from transformers import AutoModelForSequenceClassification

from fleetune import RunConfig, finetune
from fleetune.errors import CheckpointError, ConfigError, DataError, ModelError, OutputError, TrainingError
from tests.conftest import TinyData, make_tiny_model, read_json


@pytest.fixture
def settings(tiny_model: Path, tiny_data: TinyData, cache_dir: Path, tmp_path: Path) -> dict[str, Any]:
    return {
        "model": str(tiny_model), "train_file": tiny_data.train, "validation_file": tiny_data.validation,
        "cache_dir": cache_dir, "output_dir": tmp_path / "out", "max_steps": 1, "report_to": "none", "threads": 1,
    }  # fmt: skip


def copied(model: Path, tmp_path: Path, *without: str) -> Path:
    folder = tmp_path / "copy"
    shutil.copytree(model, folder)
    for name in without:
        (folder / name).unlink()
    return folder


def test_a_model_folder_without_weights(settings: dict[str, Any], tiny_model: Path, tmp_path: Path) -> None:
    folder = copied(tiny_model, tmp_path, "model.safetensors")
    with pytest.raises(ModelError, match="copy: the folder holds no weights"):
        finetune(RunConfig(**settings | {"model": folder}))


def test_a_folder_that_is_no_model(settings: dict[str, Any], tmp_path: Path) -> None:
    with pytest.raises(ModelError, match=r"no config.json: this is not a folder of a Hugging Face model"):
        finetune(RunConfig(**settings | {"model": tmp_path}))


def test_a_tokenizer_that_is_missing(settings: dict[str, Any], tiny_model: Path, tmp_path: Path) -> None:
    folder = copied(tiny_model, tmp_path, "tokenizer.json", "tokenizer_config.json")
    with pytest.raises(ModelError, match=r"the folder holds no tokenizer .* name one with --tokenizer_name"):
        finetune(RunConfig(**settings | {"model": folder}))
    record = finetune(RunConfig(**settings | {"model": folder, "tokenizer_name": tiny_model}))
    assert record.status == "finished"


def test_weights_that_are_damaged(settings: dict[str, Any], tiny_model: Path, tmp_path: Path) -> None:
    folder = copied(tiny_model, tmp_path)
    weights = folder / "model.safetensors"
    weights.write_bytes(weights.read_bytes()[:1000])
    with pytest.raises(ModelError, match=f"{folder}: the weights cannot be loaded"):
        finetune(RunConfig(**settings | {"model": folder}))


def test_weights_of_another_architecture(settings: dict[str, Any], tiny_model: Path, tmp_path: Path) -> None:
    folder = copied(tiny_model, tmp_path)
    config = read_json(folder / "config.json")
    (folder / "config.json").write_text(json.dumps({**config, "model_type": "electra", "architectures": None}))
    with pytest.raises(ModelError, match="weights of a ElectraForSequenceClassification are missing"):
        finetune(RunConfig(**settings | {"model": folder}))


def test_a_name_that_is_neither_a_folder_nor_on_the_hub(settings: dict[str, Any]) -> None:
    with pytest.raises(ModelError, match=r"--model no-such-model: the config cannot be loaded \(neither a folder"):
        finetune(RunConfig(**settings | {"model": "no-such-model"}))


def test_a_tokenizer_with_more_tokens_than_the_model(
    settings: dict[str, Any], tiny_model: Path, tmp_path: Path
) -> None:
    small = make_tiny_model(tmp_path / "small", vocab_size=10)
    with pytest.raises(ModelError, match="the tokenizer has 21 tokens, the model embeds only 10"):
        finetune(RunConfig(**settings | {"model": small}))


@pytest.fixture
def classifier(settings: dict[str, Any]) -> Path:
    """A fine-tuned classifier with the labels cat (0) and other (1)."""
    finetune(RunConfig(**settings | {"output_dir": Path(settings["output_dir"]).with_name("classifier")}))
    return Path(settings["output_dir"]).with_name("classifier")


def renamed(classifier: Path, names: list[str]) -> Path:
    config = read_json(classifier / "config.json")
    config |= {"id2label": dict(enumerate(names)), "label2id": {n: i for i, n in enumerate(names)}}
    (classifier / "config.json").write_text(json.dumps(config))
    return classifier


def test_labels_in_another_order_are_aligned_by_name(
    settings: dict[str, Any], classifier: Path, tiny_data: TinyData
) -> None:
    """The checkpoint says OTHER is 0 and CAT is 1; the data must follow it, and the head stays as it was."""
    renamed(classifier, ["OTHER", "CAT"])
    finetune(RunConfig(**settings | {"model": classifier, "learning_rate": 1e-12}))
    out = Path(settings["output_dir"])
    assert read_json(out / "config.json")["id2label"] == {"0": "other", "1": "cat"}
    before = load_file(classifier / "model.safetensors")["classifier.weight"]
    torch.testing.assert_close(load_file(out / "model.safetensors")["classifier.weight"], before, atol=1e-6, rtol=0)
    truth = [line.rsplit(",", 1)[1] for line in tiny_data.validation.read_text().splitlines()[1:]]
    lines = [json.loads(line) for line in (out / "predictions_validation.jsonl").read_text().splitlines()]
    assert [line["label"] for line in lines] == truth
    loss = -np.mean([np.log(line["probabilities"][line["label"]]) for line in lines])
    assert read_json(out / "eval_results.json")["eval_loss"] == pytest.approx(loss, abs=1e-4)


def test_a_head_of_other_labels_is_replaced_and_said_so(settings: dict[str, Any], classifier: Path) -> None:
    renamed(classifier, ["yes", "no"])
    record = finetune(RunConfig(**settings | {"model": classifier, "learning_rate": 1e-12, "seed": 7}))
    assert "the checkpoint's head is of other labels: it was replaced by a new one" in record.notices
    before = load_file(classifier / "model.safetensors")["classifier.weight"]
    after = load_file(Path(settings["output_dir"]) / "model.safetensors")["classifier.weight"]
    assert not torch.allclose(before, after, atol=1e-3)


def test_a_head_of_another_size_is_replaced_and_said_so(settings: dict[str, Any], classifier: Path) -> None:
    model = AutoModelForSequenceClassification.from_pretrained(classifier, num_labels=5, ignore_mismatched_sizes=True)
    model.save_pretrained(classifier)
    record = finetune(RunConfig(**settings | {"model": classifier}))
    assert any("classifier.weight" in notice for notice in record.notices)
    assert read_json(Path(settings["output_dir"]) / "config.json")["id2label"] == {"0": "cat", "1": "other"}


@pytest.mark.parametrize("task", ["mrcp", "MRPCC"])
def test_an_unknown_task_is_refused_with_the_nearest(settings: dict[str, Any], task: str) -> None:
    with pytest.raises(ConfigError, match="mrpc"):
        finetune(RunConfig(**settings | {"task": task}))


def test_one_class_only(settings: dict[str, Any], tmp_path: Path) -> None:
    path = tmp_path / "one.csv"
    path.write_text("text,label\nred cat,a\nbig cat,a\n")
    with pytest.raises(DataError, match="one"):
        finetune(RunConfig(**settings | {"train_file": path, "do_eval": False}))


def test_a_folder_with_other_files_is_not_written_into(settings: dict[str, Any]) -> None:
    folder = Path(settings["output_dir"])
    folder.mkdir()
    (folder / "thesis.tex").write_text("precious")
    with pytest.raises(OutputError, match="is not empty and holds no run of fleetune"):
        finetune(RunConfig(**settings))
    assert [p.name for p in folder.iterdir()] == ["thesis.tex"]


def test_a_bad_run_leaves_an_earlier_one_alone(settings: dict[str, Any], tmp_path: Path) -> None:
    """--overwrite_output_dir takes effect only when the new run is known to be able to start."""
    finetune(RunConfig(**settings))
    out = Path(settings["output_dir"])
    before = sorted(p.name for p in out.iterdir())
    with pytest.raises(ModelError):
        finetune(RunConfig(**settings | {"model": tmp_path, "overwrite_output_dir": True}))
    assert sorted(p.name for p in out.iterdir()) == before


def test_a_learning_rate_that_wrecks_the_model(settings: dict[str, Any]) -> None:
    with pytest.raises(TrainingError, match=r"the loss of step \d+ is not finite .* lower --learning_rate"):
        finetune(RunConfig(**settings | {"learning_rate": 1e38, "max_steps": 10, "max_grad_norm": 0}))
    assert read_json(Path(settings["output_dir"]) / "record.json")["status"] == "failed"


def test_a_metric_that_the_task_does_not_have(settings: dict[str, Any]) -> None:
    with pytest.raises(ConfigError, match=r"metric_for_best_model acuracy: .* \(did you mean accuracy\?\)"):
        finetune(RunConfig(**settings | {"metric_for_best_model": "acuracy"}))


def test_a_length_beyond_the_models_positions_is_lowered_and_said_so(settings: dict[str, Any]) -> None:
    record = finetune(RunConfig(**settings | {"max_seq_length": 500}))
    assert "max_seq_length is lowered to 64: the model has no more positions" in record.notices


def test_a_checkpoint_that_is_not_there(settings: dict[str, Any], tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match="there is no such folder"):
        finetune(RunConfig(**settings | {"resume_from_checkpoint": str(tmp_path / "checkpoint-9")}))


@pytest.fixture
def small_disk(tmp_path: Path) -> Iterator[Path]:
    """A file system of 1 MB."""
    folder = tmp_path / "disk"
    folder.mkdir()
    mounted = os.geteuid() == 0 and subprocess.run(
        ["mount", "-t", "tmpfs", "-o", "size=1m", "tmpfs", str(folder)], check=False, capture_output=True
    )
    if not mounted or mounted.returncode != 0:
        pytest.skip("mounting a small file system needs root")
    yield folder
    subprocess.run(["umount", "-l", str(folder)], check=True)


def test_too_small_a_disk_is_refused_before_training(settings: dict[str, Any], small_disk: Path) -> None:
    (small_disk / "filler").write_bytes(b"x" * 800_000)
    with pytest.raises(OutputError, match=r"the disk has 0 MB free, the model and \d checkpoints need 1 MB"):
        finetune(RunConfig(**settings | {"output_dir": small_disk / "out", "save_total_limit": 3, "num_train_epochs": 9,
                                         "max_steps": None}))  # fmt: skip


def test_a_disk_that_fills_up_while_training_keeps_the_checkpoints_before(
    settings: dict[str, Any], small_disk: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The room was there at the start; somebody else then takes it."""
    monkeypatch.setattr("fleetune.train.program.check_room", lambda *args: None)
    chosen = settings | {"output_dir": small_disk / "out", "save_strategy": "steps", "save_steps": 1, "max_steps": 9,
                         "save_total_limit": None, "eval_strategy": "no"}  # fmt: skip
    with pytest.raises(OutputError, match="the disk is full"):
        finetune(RunConfig(**chosen))
    saved = sorted((small_disk / "out").glob("checkpoint-*"))
    assert saved
    assert not list((small_disk / "out").glob(".checkpoint*"))
    subprocess.run(["mount", "-o", "remount,size=8m", str(small_disk)], check=True)
    record = finetune(RunConfig(**chosen | {"resume_from_checkpoint": "auto"}))
    assert record.status == "finished"
    assert record.resumed_at_step == len(saved)


def test_code_that_a_model_folder_ships_is_not_run_unasked(
    settings: dict[str, Any], tiny_model: Path, tmp_path: Path
) -> None:
    folder, trace = copied(tiny_model, tmp_path), tmp_path / "ran"
    (folder / "modeling_odd.py").write_text(f"open({str(trace)!r}, 'w').close()\nclass OddConfig: pass\n")
    config = read_json(folder / "config.json")
    config |= {"model_type": "odd", "auto_map": {"AutoConfig": "modeling_odd.OddConfig"}}
    (folder / "config.json").write_text(json.dumps(config))
    with pytest.raises(ModelError, match="config cannot be loaded"):
        finetune(RunConfig(**settings | {"model": folder}))
    assert not trace.exists()
