"""A resumed run equals one that never stopped, bit for bit, on the same number of processes and threads."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from fleetune import RunConfig, finetune
from fleetune.model import precision
from fleetune.train.saving import earlier_dtype
from tests.conftest import TinyData, Train, flags_of, fleetune, read_json


def history(output: Path) -> list[dict[str, Any]]:
    """The log without what a clock measured."""
    entries = read_json(output / "trainer_state.json")["log_history"]
    return [{k: v for k, v in e.items() if "runtime" not in k and "per_second" not in k} for e in entries]


@pytest.mark.slow
@pytest.mark.parametrize("processes", [1, 2, 3])
def test_resumed_equals_uninterrupted(
    train: Train, tmp_path: Path, tiny_model_with_dropout: Path, processes: int
) -> None:
    """With dropout, from the middle of the first epoch, its end, and the middle of the second; three ranks add
    gradients up in an order that depends on DDP's buckets."""
    settings = {
        "model": tiny_model_with_dropout, "processes": processes, "save_strategy": "steps", "save_steps": 1,
        "save_total_limit": "none", "per_device_train_batch_size": 10, "gradient_accumulation_steps": 2,
        "logging_steps": 2, "max_grad_norm": 0.5, "weight_decay": 0.01, "warmup_ratio": 0.2,
    }  # fmt: skip
    whole = train("whole", **settings)
    total = read_json(whole / "trainer_state.json")["global_step"]
    per_epoch = total // 2
    for step in (1, per_epoch, total - 1, total) if processes == 1 else (1, total - 1):
        resumed = train(f"from-{step}", **settings, resume_from_checkpoint=whole / f"checkpoint-{step}")
        assert (resumed / "model.safetensors").read_bytes() == (whole / "model.safetensors").read_bytes()
        last = f"checkpoint-{total}"
        if step < total:
            optimizer = (resumed / last / "optimizer.safetensors").read_bytes()
            assert optimizer == (whole / last / "optimizer.safetensors").read_bytes()
        assert history(resumed) == history(whole)
        assert read_json(resumed / "record.json")["resumed_at_step"] == step


def test_auto_goes_on_in_the_arithmetic_of_the_checkpoint(
    tiny_model: Path, tiny_data: TinyData, cache_dir: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The second probe finds float32 faster."""
    config = RunConfig(
        model=str(tiny_model), train_file=tiny_data.train, do_eval=False, cache_dir=cache_dir,
        output_dir=tmp_path / "out", max_steps=2, save_strategy="steps", save_steps=1, report_to="none", threads=1,
        bf16="auto",
    )  # fmt: skip
    monkeypatch.setattr(precision, "read_host", lambda: SimpleNamespace(isa=("bf16",)))
    monkeypatch.setattr(precision, "probe", lambda model: (2.0, 1.0))
    assert finetune(config).plan["dtype"] == "bfloat16"
    monkeypatch.setattr(precision, "probe", lambda model: (1.0, 2.0))
    first = str(tmp_path / "out" / "checkpoint-1")
    resumed = finetune(config.replace(output_dir=tmp_path / "again", resume_from_checkpoint=first))
    assert (resumed.plan["dtype"], resumed.resumed_at_step) == ("bfloat16", 1)
    assert "--bf16 auto: bfloat16, as in the checkpoint" in resumed.notices
    (tmp_path / "out" / "checkpoint-2" / "run_state.json").write_text("{")
    assert earlier_dtype(config.replace(resume_from_checkpoint="auto")) == "bfloat16"
    assert earlier_dtype(config.replace(resume_from_checkpoint="auto", output_dir=tmp_path / "new")) is None
    assert earlier_dtype(config) is None


def test_a_torn_checkpoint_is_named_and_the_one_before_it_taken(train: Train, tmp_path: Path) -> None:
    settings = {"save_strategy": "steps", "save_steps": 3, "save_total_limit": "none", "num_train_epochs": 2}
    whole = train("out", **settings)
    expected = (whole / "model.safetensors").read_bytes()
    unfinish(whole)
    torn = whole / "checkpoint-12" / "optimizer.safetensors"
    torn.write_bytes(torn.read_bytes()[:-1])
    words = words_of(whole)
    result = fleetune("train", *words, "--resume_from_checkpoint")
    assert "checkpoint-12: torn, optimizer.safetensors has" in result.stdout
    assert f"going on from {whole / 'checkpoint-9'} at step 9 of 12" in result.stdout
    assert (whole / "model.safetensors").read_bytes() == expected


@pytest.mark.slow
def test_an_unfinished_run_is_offered_and_other_settings_are_refused(train: Train) -> None:
    output = train("out", save_strategy="steps", save_steps=5)
    unfinish(output)
    words = words_of(output)
    same = fleetune("train", *words, check=False)
    assert same.returncode == 1
    assert "saved at step 10 of 12: give --resume_from_checkpoint to go on" in same.stderr
    assert "these differ" not in same.stderr
    other = fleetune("train", *words, "--seed", 7, check=False)
    assert "--seed was 42, is 7" in other.stderr
    refused = fleetune("train", *words, "--seed", 7, "--resume_from_checkpoint", check=False)
    assert refused.returncode == 1
    assert "--seed was 42, is 7" in refused.stderr
    assert read_json(output / "record.json")["config"]["seed"] == 42, "a refused run must not touch the record"
    plan = fleetune("train", *words, "--per_device_train_batch_size", 8, "--resume_from_checkpoint", check=False)
    assert "global_batch_size was 16, is 8" in plan.stderr
    finished = fleetune("train", *words, "--resume_from_checkpoint")
    assert "at step 10 of 12" in finished.stdout


def test_nothing_to_resume_starts_from_the_beginning(train: Train) -> None:
    output = train("out", resume_from_checkpoint="auto", max_steps=2)
    assert read_json(output / "record.json")["resumed_at_step"] is None


def test_a_finished_run_is_not_overwritten_unasked(train: Train) -> None:
    output = train("out", max_steps=1)
    before = (output / "model.safetensors").stat().st_mtime_ns
    words = words_of(output)
    refused = fleetune("train", *words, check=False)
    assert "holds a finished run" in refused.stderr
    assert (output / "model.safetensors").stat().st_mtime_ns == before
    fleetune("train", *words, "--overwrite_output_dir")
    assert (output / "model.safetensors").stat().st_mtime_ns > before


def test_a_checkpoint_of_another_model_is_refused(train: Train, tmp_path: Path, tiny_model_with_dropout: Path) -> None:
    output = train("out", save_strategy="steps", save_steps=2, max_steps=2)
    moved = tmp_path / "elsewhere" / "checkpoint-2"
    shutil.copytree(output / "checkpoint-2", moved)
    words = words_of(output)
    fresh = [*words, "--output_dir", tmp_path / "new"]
    del fresh[fresh.index("--output_dir") : fresh.index("--output_dir") + 2]
    result = fleetune(
        "train", *fresh, "--model", tiny_model_with_dropout, "--resume_from_checkpoint", moved, check=False
    )
    assert result.returncode != 0
    assert "the same setting" in result.stderr or "--model was" in result.stderr


def unfinish(output: Path) -> None:
    """Make a finished run look as if it had been killed before its end."""
    record = read_json(output / "record.json")
    (output / "record.json").write_text(json.dumps({**record, "status": "running"}))
    (output / "model.safetensors").unlink()


def words_of(output: Path) -> list[str]:
    """The flags that repeat a run."""
    config = read_json(output / "record.json")["config"]
    skipped = ("resume_from_checkpoint", "overwrite_output_dir")
    return flags_of({key: value for key, value in config.items() if key not in skipped})
