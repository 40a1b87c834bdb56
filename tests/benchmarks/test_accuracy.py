"""The accuracy benchmark: its statistics by hand, what it skips and refuses, and the whole of it on the tiny model."""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from benchmarks import accuracy
from benchmarks.accuracy import accuracy_table, difference, epochs_of, moments, parse_options, summarise, verdict
from tests.conftest import REPOSITORY, environment, write_pairs


def a_run(arm: str, seed: int, accuracy: float, recipe: dict[str, Any] | None = None) -> dict[str, Any]:
    last = {"epoch": 3.0, "accuracy": accuracy, "f1": accuracy + 0.1, "loss": 1.0 - accuracy}
    first = last | {"epoch": 1.0, "accuracy": 0.0}
    return {"arm": arm, "seed": seed, "recipe": recipe or {}, "epochs": [first, last]}


@pytest.fixture
def data_dir(tmp_path: Path) -> Path:
    """A folder like MRPC's, of tiny pairs."""
    folder = tmp_path / "mrpc"
    folder.mkdir()
    for seed, (split, count) in enumerate({"train": 60, "dev": 20}.items()):
        path = write_pairs(folder / f"{split}.csv", count, seed)
        text = path.read_text().replace(",cat\n", ",equivalent\n").replace(",other\n", ",not_equivalent\n")
        path.write_text(text)
    return folder


def test_moments_by_hand() -> None:
    assert moments([1.0, 2.0, 3.0, 6.0]) == pytest.approx(
        {"mean": 3.0, "standard_deviation": (14 / 3) ** 0.5, "standard_error": (14 / 3) ** 0.5 / 2}
    )


def test_difference_in_standard_errors() -> None:
    ours, theirs = {"mean": 0.9, "standard_error": 0.03}, {"mean": 1.0, "standard_error": 0.04}
    assert difference(ours, theirs) == pytest.approx(
        {"of_means": -0.1, "in_standard_errors": -2.0, "in_standard_errors_of_trainer": -2.5}
    )


def test_no_standard_errors_without_spread() -> None:
    same = {"mean": 0.9, "standard_error": 0.0}
    assert difference(same, same)["in_standard_errors"] is None


def test_summary_is_of_the_last_epoch() -> None:
    runs = [
        a_run("trainer", 1, 0.80),
        a_run("trainer", 2, 0.82),
        a_run("fleetune", 1, 0.81),
        a_run("fleetune", 2, 0.83),
    ]
    summary = summarise(runs)
    assert summary["arms"]["trainer"]["accuracy"]["mean"] == pytest.approx(0.81)
    assert summary["arms"]["fleetune"]["f1"]["mean"] == pytest.approx(0.92)
    assert summary["difference"]["accuracy"]["of_means"] == pytest.approx(0.01)
    lines = accuracy_table(summary).splitlines()
    assert lines[2].startswith("| trainer            | 0.8100 ± 0.0100 (0.0141) ")
    assert "| +0.0100 = +0.71 standard errors" in lines[4]


def test_verdict_compares_with_one_standard_error_of_the_trainer() -> None:
    trainer = [a_run("trainer", 1, 0.80), a_run("trainer", 2, 0.82)]
    near = summarise([*trainer, a_run("fleetune", 1, 0.805), a_run("fleetune", 2, 0.833)])
    far = summarise([*trainer, a_run("fleetune", 1, 0.79), a_run("fleetune", 2, 0.80)])
    assert "is within one standard error" in verdict(near)
    assert "is NOT within one standard error" in verdict(far)


def test_epochs_are_read_from_either_log() -> None:
    evaluation = {"eval_accuracy": 0.7, "eval_f1": 0.8, "eval_loss": 0.5, "eval_runtime": 1.0}
    log = [{"loss": 0.6, "epoch": 0.5}, evaluation | {"epoch": 1}, {"train_loss": 0.6, "epoch": 1}]
    assert epochs_of(log) == [{"epoch": 1.0, "accuracy": 0.7, "f1": 0.8, "loss": 0.5}]


def options_for(data_dir: Path, model: Path, runs: Path) -> argparse.Namespace:
    words = ["--seeds", "1", "2", "--runs", runs, "--data_dir", data_dir, "--model", model, "--threads", "1"]
    return parse_options([str(word) for word in words])


def test_a_finished_run_is_not_done_again(data_dir: Path, tiny_model: Path, tmp_path: Path) -> None:
    options = options_for(data_dir, tiny_model, tmp_path)
    path = accuracy.run_file(tmp_path, "trainer", 1)
    path.write_text("kept")
    accuracy.do_run(options, "trainer", 1)
    assert path.read_text() == "kept"


def test_a_run_of_another_recipe_is_refused(data_dir: Path, tiny_model: Path, tmp_path: Path) -> None:
    options = options_for(data_dir, tiny_model, tmp_path)
    recipe = accuracy.recipe(options) | {"learning_rate": 1.0}
    accuracy.run_file(tmp_path, "trainer", 1).write_text(json.dumps(a_run("trainer", 1, 0.8, recipe)))
    with pytest.raises(ValueError, match=r"another recipe \(learning_rate\)"):
        accuracy.read_run(options, "trainer", 1)


@pytest.mark.parametrize("words", [["--arm", "trainer"], ["--seed", "1"], ["--seeds", "3", "3"]])
def test_half_a_run_and_one_seed_are_refused(words: list[str], data_dir: Path) -> None:
    with pytest.raises(SystemExit):
        parse_options([*words, "--data_dir", str(data_dir)])


@pytest.mark.slow
def test_the_whole_on_the_tiny_model_goes_on_where_it_stopped(data_dir: Path, tiny_model: Path, tmp_path: Path) -> None:
    runs, output = tmp_path / "runs", tmp_path / "accuracy.json"
    words = [
        *("--seeds", "1", "2", "--runs", runs, "--data_dir", data_dir),
        *("--model", tiny_model, "--threads", "1", "--output", output),
    ]

    def run(*more: str) -> str:
        result = subprocess.run(
            [sys.executable, "-m", "benchmarks.accuracy", *map(str, words), *more],
            capture_output=True, text=True, timeout=240, env=environment(), cwd=REPOSITORY, check=False,
        )  # fmt: skip
        assert result.returncode == 0, f"{result.stdout}\n{result.stderr}"
        return result.stdout

    run("--arm", "trainer", "--seed", "1")
    before = (runs / "trainer-seed1.json").stat().st_mtime_ns
    assert "| fleetune - trainer |" in run()
    assert (runs / "trainer-seed1.json").stat().st_mtime_ns == before
    content = json.loads(output.read_text())
    assert [(r["arm"], r["seed"]) for r in content["runs"]] == [
        ("trainer", 1), ("trainer", 2), ("fleetune", 1), ("fleetune", 2),
    ]  # fmt: skip
    for r in content["runs"]:
        assert [epoch["epoch"] for epoch in r["epochs"]] == [1.0, 2.0, 3.0]
        assert 0.0 <= r["epochs"][-1]["accuracy"] <= 1.0
    assert set(content["summary"]["arms"]) == {"trainer", "fleetune"}


def test_both_arms_begin_with_the_same_head(tiny_model: Path) -> None:
    import torch
    import transformers

    from fleetune.config import RunConfig
    from fleetune.data.tasks import find_task
    from fleetune.model.load import load_classifier, load_model_config

    config = RunConfig(task="mrpc", model=str(tiny_model), seed=3)
    ours = load_classifier(config, load_model_config(config), find_task("mrpc"), pad_token_id=0).hugging_face
    transformers.set_seed(3)
    theirs = transformers.AutoModelForSequenceClassification.from_pretrained(tiny_model, num_labels=2)
    assert torch.equal(ours.classifier.weight, theirs.classifier.weight)
