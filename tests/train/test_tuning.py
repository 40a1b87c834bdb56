"""The whole program with frozen parts, with low-rank updates, with another loss: files, ranks, going on."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import transformers
from safetensors.numpy import load_file

from fleetune import RunConfig, finetune
from fleetune.errors import ConfigError, ModelError
from tests.conftest import TinyData, Train, fleetune, losses_of, make_tiny_model, read_json
from tests.train.test_resume import history

LORA: dict[str, Any] = {"lora_r": 4, "lora_alpha": 8, "lora_dropout": 0.1, "learning_rate": 1e-2}
TUNINGS: dict[str, dict[str, Any]] = {
    "lora": LORA,
    "lora of all, bfloat16": LORA | {"lora_target_modules": "all-linear", "bf16": "true"},
    "frozen": {"freeze": "embeddings,layers:1"},
    "frozen in the middle": {"freeze": "layers:1"},
    "other loss": {"label_smoothing_factor": 0.1, "class_weights": "balanced", "layerwise_lr_decay": 0.8},
    "recomputed": {"gradient_checkpointing": "true"},
}
ADAPTER_FILES = {"adapter_config.json", "adapter_model.safetensors", "adapter_head.json"}


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """With dropout, and with a pooler in its checkpoint."""
    return make_tiny_model(tmp_path_factory.mktemp("models") / "tiny", dropout=0.1)


def config_of(data: TinyData, model: Path, cache_dir: Path, output: Path, **settings: Any) -> RunConfig:
    chosen = {"learning_rate": 1e-2, "scale_lr": "none", "report_to": "none", "threads": 1, "logging_steps": 1,
              "num_train_epochs": 2, **settings}  # fmt: skip
    return RunConfig(model=str(model), train_file=data.train, validation_file=data.validation, cache_dir=cache_dir,
                     output_dir=output, **chosen)  # fmt: skip


def trained_weights(output: Path) -> dict[str, np.ndarray]:
    name = "adapter_model.safetensors"
    return load_file(output / (name if (output / name).is_file() else "model.safetensors"))


@pytest.mark.slow
@pytest.mark.parametrize("name", TUNINGS)
def test_two_processes_equal_one(train: Train, model: Path, name: str) -> None:
    settings = {"model": model, "save_strategy": "no"} | TUNINGS[name]
    one = train("one", per_device_train_batch_size=32, **settings)
    two = train("two", per_device_train_batch_size=16, processes=2, **settings)
    loose = "bf16" in settings
    np.testing.assert_allclose(losses_of(two), losses_of(one), rtol=5e-3 if loose else 2e-5)
    if not loose:
        for key, expected in trained_weights(one).items():
            np.testing.assert_allclose(trained_weights(two)[key], expected, rtol=1e-3, atol=2e-5, err_msg=key)


@pytest.mark.slow
@pytest.mark.parametrize("processes", [1, 2])
@pytest.mark.parametrize("name", TUNINGS)
def test_resumed_equals_uninterrupted(train: Train, model: Path, name: str, processes: int) -> None:
    settings = {
        "model": model, "processes": processes, "save_strategy": "steps", "save_steps": 2, "save_total_limit": "none",
        "per_device_train_batch_size": 32 // processes, "weight_decay": 0.01,
    } | TUNINGS[name]  # fmt: skip
    whole = train("whole", **settings)
    resumed = train("resumed", **settings, resume_from_checkpoint=whole / "checkpoint-2")
    for key, expected in trained_weights(whole).items():
        np.testing.assert_array_equal(trained_weights(resumed)[key], expected, err_msg=key)
    optimizer = "checkpoint-6/optimizer.safetensors"
    assert (resumed / optimizer).read_bytes() == (whole / optimizer).read_bytes()
    assert history(resumed) == history(whole)


def test_an_adapter_is_the_output_and_is_evaluated_and_predicted(
    tiny_data: TinyData, model: Path, cache_dir: Path, tmp_path: Path
) -> None:
    config = config_of(tiny_data, model, cache_dir, tmp_path / "out", **LORA, num_train_epochs=6,
                       test_file=tiny_data.test, do_predict=True, save_total_limit=1)  # fmt: skip
    record = finetune(config)
    output = tmp_path / "out"
    names = {path.name for path in output.iterdir()}
    assert names >= ADAPTER_FILES
    assert not names & {"model.safetensors", "config.json"}, "transformers would take it for a whole model"
    assert losses_of(output)[-1] < 0.8 * losses_of(output)[0]
    told = read_json(output / "adapter_config.json")
    assert (told["base_model_name_or_path"], told["r"], told["lora_alpha"]) == (str(model), 4, 8)
    assert any(re.fullmatch(r"2,\d\d\d of 2\d,\d\d\d parameters learn \(.*%\)", line) for line in record.notices)
    assert "low-rank updates of 4 linear layers: query, value" in record.notices
    moments = load_file(next(output.glob("checkpoint-*")) / "optimizer.safetensors")
    assert {key.split("/")[0] for key in moments} >= {"adapter.lora_A.0", "model.classifier.weight"}
    assert not [key for key in moments if "query" in key or "embeddings" in key]
    fleetune("evaluate", output, "--output", tmp_path / "e.json", "--threads", 1)
    found, expected = read_json(tmp_path / "e.json"), read_json(output / "eval_results.json")
    for key in ("eval_loss", "eval_accuracy", "eval_f1_macro"):
        if key in expected:
            assert found[key] == pytest.approx(expected[key], rel=1e-4), key
    fleetune("predict", output, "--input", tiny_data.test, "--output", tmp_path / "p.jsonl", "--threads", 1,
             "--processes", 2)  # fmt: skip
    lines = [json.loads(line) for line in (tmp_path / "p.jsonl").read_text().splitlines()]
    known = [json.loads(line) for line in (output / "predictions_test.jsonl").read_text().splitlines()]
    assert [line["prediction"] for line in lines] == [line["prediction"] for line in known]


@pytest.mark.filterwarnings("ignore:.*is_gradient_checkpointing.* is deprecated:FutureWarning")
def test_peft_reads_the_output_and_its_logits_are_equal(
    tiny_data: TinyData, model: Path, cache_dir: Path, tmp_path: Path
) -> None:
    peft = pytest.importorskip("peft")
    finetune(config_of(tiny_data, model, cache_dir, tmp_path / "out", **LORA))
    tokenizer = transformers.AutoTokenizer.from_pretrained(tmp_path / "out")
    rows = [line.split(",")[:2] for line in tiny_data.validation.read_text().splitlines()[1:]]
    base = transformers.AutoModelForSequenceClassification.from_pretrained(model, num_labels=2)
    ready = peft.PeftModel.from_pretrained(base, str(tmp_path / "out")).eval()
    lines = [json.loads(line) for line in (tmp_path / "out" / "predictions_validation.jsonl").read_text().splitlines()]
    names = read_json(tmp_path / "out" / "adapter_head.json")["id2label"]
    with torch.no_grad():
        for (first, second), line in zip(rows, lines, strict=True):
            shares = ready(**tokenizer(first, second, return_tensors="pt")).logits[0].softmax(0)
            for i, share in enumerate(shares.tolist()):
                assert line["probabilities"][names[str(i)]] == pytest.approx(share, abs=1e-5)


def test_merged_on_request(tiny_data: TinyData, model: Path, cache_dir: Path, tmp_path: Path) -> None:
    """Over a folder with an adapter, of which nothing stays; the checkpoints are adapters still."""
    again = {"overwrite_output_dir": True}
    for name, more in (("out", {}), ("out", again | {"lora_merge": True}), ("apart", {"lora_merge": True}),
                       ("apart", again)):  # fmt: skip
        finetune(config_of(tiny_data, model, cache_dir, tmp_path / name, **LORA, **more))
    output = tmp_path / "out"
    assert not ADAPTER_FILES & {path.name for path in output.iterdir()}
    assert {path.name for path in next(output.glob("checkpoint-*")).iterdir()} >= ADAPTER_FILES
    assert {path.name for path in (tmp_path / "apart").iterdir()} >= ADAPTER_FILES
    assert not {"model.safetensors", "config.json"} & {path.name for path in (tmp_path / "apart").iterdir()}
    merged = transformers.AutoModelForSequenceClassification.from_pretrained(output)
    assert sorted(merged.config.label2id) == ["cat", "other"]
    for folder, name in ((output, "m"), (tmp_path / "apart", "a")):
        fleetune("evaluate", folder, "--output", tmp_path / f"{name}.json", "--threads", 1)
    found, expected = read_json(tmp_path / "m.json"), read_json(tmp_path / "apart" / "eval_results.json")
    assert found["eval_loss"] == pytest.approx(expected["eval_loss"], rel=1e-4)
    assert read_json(tmp_path / "a.json")["eval_loss"] == pytest.approx(found["eval_loss"], rel=1e-5)


def test_a_whole_model_replaces_an_adapter_and_goes_on_from_it(
    tiny_data: TinyData, model: Path, cache_dir: Path, tmp_path: Path
) -> None:
    finetune(config_of(tiny_data, model, cache_dir, tmp_path / "adapter", **LORA, num_train_epochs=6))
    more = {"learning_rate": 1e-12, "num_train_epochs": 1}
    finetune(config_of(tiny_data, tmp_path / "adapter", cache_dir, tmp_path / "whole", **more))
    assert (tmp_path / "whole" / "model.safetensors").is_file()
    found, expected = (read_json(tmp_path / name / "eval_results.json")["eval_loss"] for name in ("whole", "adapter"))
    assert found == pytest.approx(expected, rel=1e-4)
    with pytest.raises(ConfigError, match="an adapter cannot have an adapter of its own"):
        finetune(config_of(tiny_data, tmp_path / "adapter", cache_dir, tmp_path / "twice", **LORA))
    moved = tmp_path / "moved"
    told = tmp_path / "adapter" / "adapter_config.json"
    told.write_text(told.read_text().replace(str(model), str(moved)))
    away = config_of(tiny_data, tmp_path / "adapter", cache_dir, tmp_path / "away", **more)
    with pytest.raises(ModelError, match=r"of the model .*moved, and there is no such folder: .*--base_model"):
        finetune(away)
    finetune(away.replace(base_model=str(model), max_steps=1))
    fleetune("evaluate", tmp_path / "adapter", "--base_model", model, "--output", tmp_path / "e.json", "--threads", 1)
    assert read_json(tmp_path / "e.json")["eval_loss"] == pytest.approx(expected, rel=1e-4)


def test_frozen_weights_stay_and_have_no_moments(
    tiny_data: TinyData, model: Path, cache_dir: Path, tmp_path: Path
) -> None:
    finetune(config_of(tiny_data, model, cache_dir, tmp_path / "out", freeze="embeddings,layers:1"))
    before, after = load_file(model / "model.safetensors"), load_file(tmp_path / "out" / "model.safetensors")
    stayed = {key for key, value in before.items() if np.array_equal(after[f"bert.{key}"], value)}
    assert stayed == {key for key in before if key.startswith(("embeddings.", "encoder.layer.0."))}
    moments = load_file(next((tmp_path / "out").glob("checkpoint-*")) / "optimizer.safetensors")
    assert not [key for key in moments if "embeddings" in key or "layer.0" in key]


def test_gradient_checkpointing_gives_the_same_weights_bit_for_bit(
    tiny_data: TinyData, model: Path, cache_dir: Path, tmp_path: Path
) -> None:
    for name, on in (("plain", False), ("again", True)):
        finetune(config_of(tiny_data, model, cache_dir, tmp_path / name, gradient_checkpointing=on))
    plain, again = (tmp_path / name / "model.safetensors" for name in ("plain", "again"))
    assert plain.read_bytes() == again.read_bytes()


@pytest.mark.parametrize("settings", [{"freeze": "layers:1"}, {"lora_r": 2}, {"layerwise_lr_decay": 0.9}], ids=str)
def test_models_whose_parts_are_not_known_are_refused_by_name(
    tiny_data: TinyData, cache_dir: Path, tmp_path: Path, settings: dict[str, Any]
) -> None:
    model = make_tiny_model(tmp_path / "model", position_embedding_type="relative_key")
    with pytest.raises(ConfigError, match=f"--{next(iter(settings))}: the parts of a bert are not known here"):
        finetune(config_of(tiny_data, model, cache_dir, tmp_path / "out", **settings))


def test_gradient_checkpointing_of_a_padded_model(tiny_data: TinyData, cache_dir: Path, tmp_path: Path) -> None:
    model = make_tiny_model(tmp_path / "model", dropout=0.1, position_embedding_type="relative_key")
    for name, on in (("plain", False), ("again", True)):
        finetune(config_of(tiny_data, model, cache_dir, tmp_path / name, gradient_checkpointing=on, max_steps=3))
    np.testing.assert_allclose(losses_of(tmp_path / "again"), losses_of(tmp_path / "plain"), rtol=1e-6)


def test_early_stopping_keeps_the_best_and_says_so(
    tiny_data: TinyData, model: Path, cache_dir: Path, tmp_path: Path
) -> None:
    """At a learning rate of nothing no evaluation is better than the first one."""
    settings = {
        "learning_rate": 1e-12, "eval_strategy": "steps", "eval_steps": 1, "save_strategy": "steps", "save_steps": 1,
        "early_stopping_patience": 2, "early_stopping_threshold": 1e-4, "load_best_model_at_end": True,
        "metric_for_best_model": "loss", "num_train_epochs": 3, "save_total_limit": None,
    }  # fmt: skip
    record = finetune(config_of(tiny_data, model, cache_dir, tmp_path / "out", **settings))
    assert (record.status, record.step) == ("finished", 3)
    told = "stopped early at step 3 of 18: 2 evaluations in a row were no better than the best eval_loss: "
    assert re.fullmatch(told + r"0\.\d{4} at step \d", record.notices[-1])
    state = transformers.TrainerState.load_from_json(str(tmp_path / "out" / "trainer_state.json"))
    callback = state.stateful_callbacks["EarlyStoppingCallback"]
    assert callback["attributes"] == {"early_stopping_patience_counter": 2}
    resumed = finetune(config_of(tiny_data, model, cache_dir, tmp_path / "resumed", **settings,
                                 resume_from_checkpoint=str(tmp_path / "out" / "checkpoint-2")))  # fmt: skip
    assert resumed.step == 3
    assert history(tmp_path / "resumed") == history(tmp_path / "out")
    ended = finetune(config_of(tiny_data, model, cache_dir, tmp_path / "ended", **settings,
                               resume_from_checkpoint=str(tmp_path / "out" / "checkpoint-3")))  # fmt: skip
    assert ended.step == 3, "a run that has stopped early does not go on"
    patient = settings | {"early_stopping_patience": 4}
    longer = finetune(config_of(tiny_data, model, cache_dir, tmp_path / "longer", **patient,
                                resume_from_checkpoint=str(tmp_path / "out" / "checkpoint-3")))  # fmt: skip
    assert longer.step == 5


@pytest.mark.slow
def test_all_ranks_stop_early_after_the_same_step(train: Train, model: Path) -> None:
    settings = {"model": model, "learning_rate": 1e-12, "eval_strategy": "steps", "eval_steps": 2,
                "save_strategy": "no", "early_stopping_patience": 2, "early_stopping_threshold": 1e-4,
                "metric_for_best_model": "loss", "num_train_epochs": 5, "per_device_train_batch_size": 8}  # fmt: skip
    output = train("out", processes=3, **settings)
    record = read_json(output / "record.json")
    assert (record["status"], record["step"]) == ("finished", 6)
    assert "the weights of the last step are kept" in record["notices"][-1]
