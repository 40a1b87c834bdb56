"""Model cards: what the hub reads of them, what they tell, and whose they are."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Any

import pytest
from huggingface_hub import ModelCard

from fleetune.config import RunConfig
from fleetune.data.tasks import custom_task, find_task
from fleetune.hub.card import CARD, command, is_ours, model_card, write_card
from fleetune.report.record import RunRecord

METRICS: dict[str, float | None] = {"eval_loss": 0.5, "eval_accuracy": 0.875, "eval_f1": 0.9, "eval_samples": 408,
                                    "eval_runtime": 1.5, "eval_samples_per_second": 272.0}  # fmt: skip


def record_of(metrics: dict[str, float | None] = METRICS, of_task: Any = None, **settings: Any) -> RunRecord:
    config = RunConfig(**{"task": "mrpc", "data_dir": "/home/ann/secret/MRPC", "model": "bert-base-uncased",
                          "output_dir": "/home/ann/out", "learning_rate": 5e-5, "hosts": ("node1", "node2"),
                          **settings})  # fmt: skip
    task = find_task(config.task or "") if of_task is None else of_task
    plan = {"num_examples": 3668, "num_tokens": 195_000, "global_batch_size": 32, "learning_rate": 1e-4, "epochs": 3.0,
            "lr_scheduler": "linear", "warmup_steps": 0, "dtype": "float32", "kernels": "compiled", "unpadded": True,
            "processes": 2, "threads": 8}  # fmt: skip
    return RunRecord(
        config=config.to_dict(), plan=plan, task=dataclasses.asdict(task), versions={"fleetune": "0.1.0", "torch": "2"},
        host={"hostname": "annes-host", "cpu_model": "AMD | EPYC", "usable_cores": 16, "memory_bytes": 64_000_000_000},
        roster=[{"host": "node1", "place": "a", "address": "10.0.0.1"}, {"host": "node2", "place": "b"}],
        started="2026-12-01T01:00:00+0000", step=345, seconds={"training": 83.6}, throughput={"samples_per_s": 53.9},
        metrics=metrics, notices=["/home/ann/secret/MRPC/train.tsv: 2 bad rows left out: row 3: empty"],
        bad_rows={"train": {"count": 2, "first": []}},
    )  # fmt: skip


def data_of(card: str) -> Any:
    return ModelCard(card).data


def test_the_hub_reads_results_with_their_split() -> None:
    data = data_of(model_card(record_of(), "my-model"))
    assert (data.pipeline_tag, data.library_name, data.base_model) == (
        "text-classification", "transformers", "bert-base-uncased",
    )  # fmt: skip
    assert data.datasets == ["nyu-mll/glue"]
    assert data.metrics == ["accuracy", "f1"]
    results = [(r.metric_type, r.metric_value, r.dataset_split, r.dataset_config) for r in data.eval_results]
    assert results == [("accuracy", 0.875, "validation", "mrpc"), ("f1", 0.9, "validation", "mrpc")]
    assert {r.dataset_name for r in data.eval_results} == {"mrpc"}


def test_both_splits_of_mnli_are_named() -> None:
    metrics: dict[str, float | None] = {"eval_accuracy": 0.75, "eval_accuracy_mm": 0.5, "eval_loss_mm": 1.0}
    data = data_of(model_card(record_of(metrics, of_task=find_task("mnli")), "m"))
    results = [(r.metric_type, r.metric_value, r.dataset_split) for r in data.eval_results]
    assert results == [("accuracy", 0.75, "validation_matched"), ("accuracy", 0.5, "validation_mismatched")]


def test_files_of_ones_own_have_no_data_set(tmp_path: Path) -> None:
    task = custom_task("token_classification", text_columns=("words",), label_column="tags", labels=("B-X", "O"))
    metrics: dict[str, float | None] = {"eval_f1": 0.25, "eval_precision": None}
    record = record_of(metrics, task, task=None, data_dir=None, train_file="/home/ann/secret/a.jsonl",
                       model=str(tmp_path), validation_file="/home/ann/secret/b.jsonl")  # fmt: skip
    card = model_card(record, "m")
    data = data_of(card)
    assert (data.get("datasets"), data.get("base_model"), data.pipeline_tag) == (None, None, "token-classification")
    (result,) = data.eval_results  # one that is undefined is no result
    assert (result.dataset_name, result.dataset_type, result.metric_value) == ("b.jsonl", "own-files", 0.25)
    assert "| columns | words, tags |" in card
    assert "| labels | B-X, O |" in card


def test_a_run_without_an_evaluation_has_no_results() -> None:
    card = model_card(record_of({}), "m")
    assert data_of(card).eval_results is None
    assert "It was not evaluated." in card


def test_the_text_tells_the_record_and_nothing_of_the_users_machines() -> None:
    card = model_card(record_of(), "my-model")
    for line in (
        "# my-model", "`bert-base-uncased`, fine-tuned by fleetune 0.1.0 for mrpc (classification).",
        "| accuracy | 0.8750 | validation |", "Of 408 examples, after the last update.",
        "| training examples | 3,668 |", "| rows left out of train | 2 |", "| updates | 345 |", "| global batch | 32 |",
        "| peak learning rate | 0.0001 |",
        "| `learning_rate` | 5e-05 |", "| hosts | 2 |", "| processes | 2 x 8 threads |", "| CPU | AMD \\| EPYC |",
        "| memory (GB) | 64.0 |", "| training (s) | 83.6 |", "| samples a second | 53.9 |", "| torch | 2 |",
        "- train.tsv: 2 bad rows left out: row 3: empty",
    ):  # fmt: skip
        assert line in card.splitlines(), line
    for private in ("/home", "ann", "node1", "10.0.0.1", "annes-host"):
        assert private not in card, private
    assert "of the best evaluation" in model_card(record_of(load_best_model_at_end=True), "m")


def test_the_command_asks_for_the_same_settings() -> None:
    line = command(record_of(bf16="true", text_column_names=("a", "b")).config)
    assert line == ("fleetune train --task mrpc --data_dir MRPC --text_column_names a,b --model bert-base-uncased "
                    "--learning_rate 5e-05 --bf16 true --output_dir out")  # fmt: skip
    questions = command(record_of(task="squad", push_to_hub=True, load_best_model_at_end=True).config)
    assert "max_seq_length" not in questions
    assert "push_to_hub" not in questions
    assert "--load_best_model_at_end true" in questions


def test_a_card_that_somebody_changed_is_left_alone(tmp_path: Path) -> None:
    assert write_card(tmp_path, record_of(), "one") is None
    assert write_card(tmp_path, record_of(), "two") is None  # our own may be replaced
    path = tmp_path / CARD
    assert "# two" in path.read_text()
    assert is_ours(path.read_text())
    assert is_ours(path.read_text() + "\n")
    path.write_text(path.read_text().replace("# two", "# Two, with care"))
    told = write_card(tmp_path, record_of(), "three")
    assert told is not None
    assert told.startswith(f"{path} is not fleetune's, or was changed: it was left as it is")
    assert "# Two, with care" in path.read_text()


@pytest.mark.parametrize("text", ["", "# My model\n", "<!-- written by fleetune -->\n# x\n"])
def test_a_readme_of_somebody_else_is_left_alone(tmp_path: Path, text: str) -> None:
    (tmp_path / CARD).write_text(text)
    assert write_card(tmp_path, record_of(), "one") is not None
    assert (tmp_path / CARD).read_text() == text
