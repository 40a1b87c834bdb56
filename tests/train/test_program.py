"""The whole program on a tiny model: the exact files it leaves, and what plain transformers makes of them."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
import torch
from transformers import AutoModelForSequenceClassification, AutoTokenizer, TrainerState, pipeline

from fleetune import RunConfig, finetune
from fleetune.cluster.network import free_port
from fleetune.kernels.library import load_kernels
from fleetune.report.record import read_record
from tests.conftest import TinyData, Train, environment, fleetune, losses_of, read_json

MODEL_FILES = {"config.json", "model.safetensors", "tokenizer.json", "tokenizer_config.json"}
CHECKPOINT_FILES = MODEL_FILES | {"manifest.json", "optimizer.safetensors", "run_state.json", "trainer_state.json"}
RESULT_FILES = {"all_results.json", "eval_results.json", "train_results.json", "trainer_state.json", "record.json",
                "README.md"}  # fmt: skip


@pytest.fixture(scope="module")
def finished(tiny_model: Path, tiny_data: TinyData, cache_dir: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A finished run of 2 epochs, with predictions of the test split."""
    output = tmp_path_factory.mktemp("run") / "out"
    finetune(
        RunConfig(
            model=str(tiny_model), train_file=tiny_data.train, validation_file=tiny_data.validation,
            test_file=tiny_data.test, do_predict=True, cache_dir=cache_dir, output_dir=output, learning_rate=3e-3,
            num_train_epochs=8, logging_steps=2, threads=1,
        )
    )  # fmt: skip
    return output


def test_the_output_folder_holds_exactly_these_files(finished: Path) -> None:
    names = {p.name for p in finished.iterdir()}
    predictions = {"predictions_validation.jsonl", "predictions_test.jsonl", "predict_results_custom.txt"}
    best = read_json(finished / "trainer_state.json")["best_global_step"]
    kept = {"checkpoint-48", f"checkpoint-{42 if best == 48 else best}"}  # the newest and the best, two in all
    assert names == MODEL_FILES | RESULT_FILES | predictions | kept | {"runs"}
    assert {p.name for p in (finished / "checkpoint-48").iterdir()} == CHECKPOINT_FILES
    assert [p.name.split(".")[0] for p in (finished / "runs").iterdir()] == ["events"]


def test_plain_transformers_loads_the_model_and_computes_the_same_predictions(
    finished: Path, tiny_data: TinyData
) -> None:
    model = AutoModelForSequenceClassification.from_pretrained(finished).eval()
    tokenizer = AutoTokenizer.from_pretrained(finished)
    assert model.config.id2label == {0: "cat", 1: "other"}
    assert model.config.label2id == {"cat": 0, "other": 1}
    rows = [line.split(",") for line in tiny_data.validation.read_text().splitlines()[1:]]
    inputs = tokenizer([r[0] for r in rows], [r[1] for r in rows], padding=True, return_tensors="pt")
    with torch.no_grad():
        probabilities = model(**inputs).logits.softmax(dim=-1).numpy()
    lines = [json.loads(line) for line in (finished / "predictions_validation.jsonl").read_text().splitlines()]
    found = np.array([[line["probabilities"][name] for name in ("cat", "other")] for line in lines])
    np.testing.assert_allclose(found, probabilities, atol=2e-6)  # written with 6 digits
    assert [line["row"] for line in lines] == list(range(2, 27))
    assert [line["label"] for line in lines] == [r[2] for r in rows]


def test_the_pipeline_reads_the_folder(finished: Path, tiny_data: TinyData) -> None:
    classify = pipeline("text-classification", str(finished), device="cpu")
    first, second, _ = tiny_data.validation.read_text().splitlines()[1].split(",")
    said = classify({"text": first, "text_pair": second})
    line = json.loads((finished / "predictions_validation.jsonl").read_text().splitlines()[0])
    assert said["label"] == line["prediction"]
    assert said["score"] == pytest.approx(line["probabilities"][line["prediction"]], abs=1e-5)


def test_it_learns(finished: Path) -> None:
    """The loss falls from that of guessing, ln 2, to a small one."""
    losses = losses_of(finished)
    assert losses[0] == pytest.approx(np.log(2), abs=0.1)
    assert losses[-1] < 0.45


def test_results_agree_with_the_predictions_file(finished: Path) -> None:
    lines = [json.loads(line) for line in (finished / "predictions_validation.jsonl").read_text().splitlines()]
    results = read_json(finished / "eval_results.json")
    assert results["eval_accuracy"] == pytest.approx(np.mean([line["prediction"] == line["label"] for line in lines]))
    loss = -np.mean([np.log(line["probabilities"][line["label"]]) for line in lines])
    assert results["eval_loss"] == pytest.approx(loss, abs=1e-4)
    assert results["eval_samples"] == 25
    everything = read_json(finished / "all_results.json")
    assert everything == {**read_json(finished / "train_results.json"), **results}


def test_transformers_reads_the_trainer_state(finished: Path) -> None:
    state = TrainerState.load_from_json(str(finished / "trainer_state.json"))
    assert (state.global_step, state.max_steps, state.epoch, state.num_train_epochs) == (48, 48, 8.0, 8.0)
    assert [e["step"] for e in state.log_history if "loss" in e] == list(range(2, 49, 2))
    assert [e["step"] for e in state.log_history if "eval_accuracy" in e] == list(range(6, 49, 6))
    assert state.best_global_step in range(6, 49, 6)
    assert state.best_metric == max(e["eval_accuracy"] for e in state.log_history if "eval_accuracy" in e)


def test_the_record_tells_the_run(finished: Path) -> None:
    record = read_record(finished)
    assert record is not None
    assert (record.status, record.step, record.resumed_at_step) == ("finished", 48, None)
    assert record.plan["global_batch_size"] == 16
    assert record.plan["total_steps"] == 48
    assert record.config["learning_rate"] == 3e-3
    assert record.task["labels"] == ["cat", "other"]
    assert record.versions["torch"] == torch.__version__
    assert record.host["usable_cores"] >= 1
    assert record.throughput["samples"] == 8 * 90
    padded = 1 - record.throughput["tokens"] / 8 / (90 * 64)  # the model has 64 positions
    assert record.throughput["padding_avoided"] == pytest.approx(padded)
    assert record.throughput["samples_per_s"] == pytest.approx(720 / record.seconds["training"])
    assert set(record.seconds) >= {"data", "model", "training", "evaluation", "checkpoints", "output", "prediction"}
    assert record.metrics == read_json(finished / "eval_results.json")


def test_test_predictions_have_the_layout_of_run_glue(finished: Path) -> None:
    lines = (finished / "predict_results_custom.txt").read_text().splitlines()
    predicted = [
        json.loads(line)["prediction"] for line in (finished / "predictions_test.jsonl").read_text().splitlines()
    ]
    assert lines == ["index\tprediction", *(f"{i}\t{name}" for i, name in enumerate(predicted))]
    assert len(predicted) == 7


def test_evaluate_gives_the_metrics_of_the_run(finished: Path, tmp_path: Path) -> None:
    for processes in (1, 3):
        output = tmp_path / f"{processes}.json"
        fleetune("evaluate", finished, "--output", output, "--processes", processes, "--threads", 1)
        found, expected = read_json(output), read_json(finished / "eval_results.json")
        for name in ("eval_accuracy", "eval_f1_macro", "eval_loss", "eval_samples"):
            assert found[name] == pytest.approx(expected[name], rel=1e-6)


def test_predict_gives_the_predictions_of_the_run_on_any_number_of_processes(
    finished: Path, tiny_data: TinyData, tmp_path: Path
) -> None:
    expected = (finished / "predictions_test.jsonl").read_text().splitlines()
    for processes in (1, 3):
        output = tmp_path / f"{processes}.jsonl"
        fleetune("predict", finished, "--input", tiny_data.test, "--output", output, "--processes", processes)
        found = output.read_text().splitlines()
        for line, reference in zip(found, expected, strict=True):
            told, known = json.loads(line), json.loads(reference)
            assert (told["row"], told["prediction"]) == (known["row"], known["prediction"])
            assert told["probabilities"] == pytest.approx(known["probabilities"], abs=2e-6)
            assert "label" not in told


@pytest.mark.parametrize(("wish", "dtype"), [("false", "float32"), ("1", "bfloat16")])
def test_evaluate_says_what_computes(finished: Path, wish: str, dtype: str) -> None:
    lines = fleetune("evaluate", finished, "--threads", 1, "--bf16", wish).stdout.splitlines()
    (told,) = (line for line in lines if line.startswith("arithmetic"))
    assert told.startswith(f"arithmetic: {dtype}, kernels: {load_kernels().name}")


def test_load_best_model_at_end_keeps_the_weights_of_the_best_evaluation(train: Train) -> None:
    """The loss falls all the way; asked for the greatest, the run must go back to its first evaluation."""
    output = train(
        load_best_model_at_end=True, metric_for_best_model="loss", greater_is_better=True, num_train_epochs=4,
        save_total_limit=1, processes=2,
    )  # fmt: skip
    state = read_json(output / "trainer_state.json")
    by_step = {e["step"]: e["eval_loss"] for e in state["log_history"] if "eval_loss" in e}
    best = max(by_step, key=lambda step: by_step[step])
    assert best == 3
    assert state["best_global_step"] == best
    assert read_json(output / "eval_results.json")["eval_loss"] == pytest.approx(by_step[best], rel=1e-6)
    assert {p.name for p in output.glob("checkpoint-*")} == {f"checkpoint-{best}", f"checkpoint-{max(by_step)}"}


@pytest.mark.parametrize("strategy", ["no", "steps"])
def test_strategies_of_saving_and_evaluating(train: Train, strategy: str) -> None:
    output = train(save_strategy=strategy, save_steps=4, eval_strategy=strategy, eval_steps=3, save_total_limit="none",
                   per_device_train_batch_size=16)  # fmt: skip
    history = read_json(output / "trainer_state.json")["log_history"]
    saved = sorted(p.name for p in output.glob("checkpoint-*"))
    assert saved == ([] if strategy == "no" else ["checkpoint-12", "checkpoint-4", "checkpoint-8"])
    evaluated = [e["step"] for e in history if "eval_loss" in e]
    assert evaluated == ([12] if strategy == "no" else [3, 6, 9, 12])  # the end is always evaluated


def test_without_evaluation_no_validation_file_is_needed(train: Train) -> None:
    output = train(do_eval=False, validation_file=None, max_steps=1)
    assert not (output / "eval_results.json").exists()
    assert not (output / "predictions_validation.jsonl").exists()
    assert read_record(output).status == "finished"


def test_regression(tiny_model: Path, cache_dir: Path, tmp_path: Path) -> None:
    train_file = tmp_path / "train.csv"
    train_file.write_text("text,label\n" + "\n".join(f"{'red ' * (i % 5 + 1)},{(i % 5) / 4}" for i in range(40)) + "\n")
    record = finetune(
        RunConfig(model=str(tiny_model), train_file=train_file, validation_file=train_file, cache_dir=cache_dir,
                  output_dir=tmp_path / "out", learning_rate=3e-3, num_train_epochs=8, report_to="none", threads=1)
    )  # fmt: skip
    assert record.metrics["eval_pearson"] > 0.8
    assert set(record.metrics) >= {"eval_pearson", "eval_spearmanr", "eval_mse", "eval_loss"}
    assert record.metrics["eval_loss"] == pytest.approx(record.metrics["eval_mse"], rel=1e-5)
    model = AutoModelForSequenceClassification.from_pretrained(tmp_path / "out")
    assert (model.config.num_labels, model.config.problem_type) == (1, "regression")
    first = json.loads((tmp_path / "out" / "predictions_validation.jsonl").read_text().splitlines()[0])
    assert set(first) == {"row", "prediction", "label"}


def test_an_unknown_architecture_trains_padded_and_says_so(
    tiny_model: Path, tiny_data: TinyData, cache_dir: Path, tmp_path: Path
) -> None:
    from transformers import DebertaV2Config, DebertaV2Model

    folder = tmp_path / "deberta"
    AutoTokenizer.from_pretrained(tiny_model).save_pretrained(folder)
    sizes = {"vocab_size": 64, "hidden_size": 16, "num_hidden_layers": 2, "num_attention_heads": 2}
    config = DebertaV2Config(**sizes, intermediate_size=32, max_position_embeddings=64, type_vocab_size=2)
    DebertaV2Model(config).save_pretrained(folder)
    words = ["--train_file", tiny_data.train, "--validation_file", tiny_data.validation, "--cache_dir", cache_dir,
             "--model", folder, "--max_steps", 3, "--processes", 2, "--report_to", "none"]  # fmt: skip
    result = fleetune("train", *words, "--output_dir", tmp_path / "out")
    assert "DebertaV2ForSequenceClassification goes through its own forward, on padded batches" in result.stdout
    assert "the flat forward knows no deberta-v2, but bert, roberta" in result.stdout
    assert read_record(tmp_path / "out").plan["unpadded"] is False


def test_mnli_reports_both_validation_splits(tiny_model: Path, cache_dir: Path, tmp_path: Path) -> None:
    """run_glue.py names the metrics of the mismatched split with the suffix _mm."""
    data = tmp_path / "MNLI"
    data.mkdir()
    labels = ("entailment", "neutral", "contradiction")
    for name, count, shift in (("train", 30, 0), ("dev_matched", 9, 0), ("dev_mismatched", 6, 1)):
        animals = ("cat", "dog", "bird")
        rows = [f"{animals[i % 3]},{animals[i % 3]} runs,{labels[(i + shift) % 3]}" for i in range(count)]
        (data / f"{name}.csv").write_text("premise,hypothesis,label\n" + "\n".join(rows) + "\n")
    record = finetune(
        RunConfig(task="mnli", data_dir=data, model=str(tiny_model), cache_dir=cache_dir, output_dir=tmp_path / "out",
                  learning_rate=3e-3, num_train_epochs=30, eval_strategy="no", save_strategy="no",
                  report_to="none", threads=1)
    )  # fmt: skip
    assert record.metrics["eval_samples"] == 9
    assert record.metrics["eval_samples_mm"] == 6
    assert {"eval_accuracy", "eval_accuracy_mm", "eval_loss_mm"} <= set(record.metrics)
    for split, suffix in (("validation_matched", ""), ("validation_mismatched", "_mm")):
        entries = map(json.loads, (tmp_path / "out" / f"predictions_{split}.jsonl").read_text().splitlines())
        right = [entry["prediction"] == entry["label"] for entry in entries]
        assert record.metrics[f"eval_accuracy{suffix}"] == pytest.approx(np.mean(right))
    # The labels of the mismatched split are shifted by one class: what is learned for the one is wrong for the other.
    assert record.metrics["eval_accuracy"] > 0.9
    assert record.metrics["eval_accuracy_mm"] < 0.1
    assert read_json(tmp_path / "out" / "config.json")["id2label"] == dict(zip("012", labels, strict=True))


@pytest.mark.slow
def test_kernels_that_cannot_be_had_are_told_by_the_first_rank_alone(
    finished: Path, tiny_data: TinyData, tmp_path: Path
) -> None:
    words = ["--input", tiny_data.test, "--output", tmp_path / "p.jsonl", "--processes", 3, "--threads", 1]
    result = fleetune("predict", finished, *words, check=False, FLEETUNE_KERNELS="compiled", CXX="/bin/true",
                      XDG_CACHE_HOME=str(tmp_path))  # fmt: skip
    assert result.returncode == 1
    assert [line for line in result.stderr.splitlines() if "error" in line] == [
        "error: CXX=/bin/true is no C++ compiler (asked for its macros, it names none) "
        "(correct or unset CXX, then: fleetune build-kernels)"
    ]


@pytest.mark.slow
def test_a_rank_that_alone_has_no_kernels_says_so(finished: Path, tiny_data: TinyData, tmp_path: Path) -> None:
    """The ranks of an outer launcher, of which one has another environment."""
    port = free_port()
    processes = [
        subprocess.Popen(
            [sys.executable, "-m", "fleetune", "predict", finished, "--input", tiny_data.test, "--output",
             tmp_path / "p.jsonl", "--threads", "1"],
            text=True, stdout=subprocess.PIPE, stderr=subprocess.PIPE, env=environment(
                RANK=str(rank), LOCAL_RANK=str(rank), WORLD_SIZE="2", LOCAL_WORLD_SIZE="2",
                MASTER_ADDR="127.0.0.1", MASTER_PORT=str(port), FLEETUNE_KERNELS=wish),
        )
        for rank, wish in enumerate(("reference", "fast"))
    ]  # fmt: skip
    try:
        first, second = (process.communicate(timeout=120)[1] for process in processes)
    finally:
        for process in processes:
            process.kill()
    assert second == "error on rank 1: FLEETUNE_KERNELS=fast: compiled or reference is expected\n"
    assert "FLEETUNE_KERNELS" not in first
