"""The speed benchmark: its arithmetic by hand, and the whole of it on the tiny model."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from benchmarks.arms import padded_tokens
from benchmarks.train_speed import SQUAD_FOLDER, parse_options, roofline, roofline_text, speed_table, summarise
from tests.conftest import REPOSITORY, environment

PADDED, LONGEST = "Trainer, padded to 64", "Trainer, longest of batch"


def a_round(fleetune_s: list[float], trainer_s: list[float], loss: float) -> dict[str, Any]:
    arms = {"fleetune": fleetune_s, PADDED: trainer_s}
    return {
        "examples": [16, 16],
        "tokens": [800, 1000],
        "arms": {name: {"seconds": seconds, "mean_loss": loss} for name, seconds in arms.items()},
    }


def test_summary_by_hand() -> None:
    summary = summarise([a_round([0.5, 0.5], [1.0, 2.0], 0.7), a_round([1.0, 1.0], [2.0, 2.0], 0.5)])
    trainer = summary[PADDED]
    assert trainer["fleetune_speedup_by_round"] == [3.0, 2.0]
    assert trainer["fleetune_speedup"] == {"minimum": 2.0, "median": 2.5, "maximum": 3.0}
    assert trainer["samples_per_s"] == pytest.approx({"minimum": 8.0, "median": (8 + 32 / 3) / 2, "maximum": 32 / 3})
    assert trainer["update_s"] == {"minimum": 1.0, "median": 2.0, "maximum": 2.0}
    assert (trainer["mean_loss_of_first_round"], trainer["mean_loss_of_last_round"]) == (0.7, 0.5)
    assert summary["fleetune"]["tokens_per_s"] == {"minimum": 900.0, "median": 1350.0, "maximum": 1800.0}
    assert summary["fleetune"]["fleetune_speedup_by_round"] == [1.0, 1.0]
    lines = speed_table(summary).splitlines()
    assert lines[2].startswith(f"| {PADDED} | 9.3 (8.0 to 10.7) ")
    assert "| 2.50 (2.00 to 3.00)" in lines[2]
    assert lines[3].startswith("| fleetune ")


def test_roofline_is_taken_within_each_round() -> None:
    rounds = [a_round([1.0, 1.0], [4.0], 0.7), a_round([2.0, 2.0], [8.0], 0.7)]
    for r, seconds in zip(rounds, ([0.5, 1.0], [1.0, 1.0]), strict=True):
        r["arms"]["matrix products"] = {"seconds": seconds, "mean_loss": None, "num_flop": [10**11, 2 * 10**11]}
    found = roofline(rounds, "matrix products")
    assert found["share_by_round"] == [0.75, 0.5]
    assert found["gflop_per_s"] == pytest.approx({"minimum": 150.0, "median": 175.0, "maximum": 200.0})
    assert "take 0.62 (0.50 to 0.75) of fleetune's time, at 175 (150 to 200) GFLOP/s" in roofline_text(
        "matrix products", found
    )
    summary = summarise(rounds)
    assert summary["matrix products"]["fleetune_speedup_by_round"] == [0.75, 0.5]
    assert speed_table(summary).splitlines()[-1].endswith("|                           |")


@pytest.mark.parametrize(
    "words", [["--rounds", "1"], ["--size", "bert-base", "--model", "x"], ["--profile_steps", "0"]]
)
def test_options_that_do_not_fit_are_refused(words: list[str]) -> None:
    with pytest.raises(SystemExit):
        parse_options(words)


def test_padded_tokens() -> None:
    lengths = np.array([3, 7, 5])
    assert padded_tokens(lengths, 128) == 384
    assert padded_tokens(lengths, None) == 21


@pytest.mark.slow
def test_all_arms_train_alike_on_the_tiny_model(tiny_model: Path, tmp_path: Path) -> None:
    """Without dropout, the same weights and batches give the same losses, turn after turn."""
    output = tmp_path / "speed.json"
    words = ["--rounds", "3", "--steps", "2", "--threads", "1", "--model", tiny_model, "--output", output]
    result = subprocess.run(
        [sys.executable, "-m", "benchmarks.train_speed", *map(str, words)],
        capture_output=True, text=True, timeout=240, env=environment(), cwd=REPOSITORY, check=False,
    )  # fmt: skip
    assert result.returncode == 0, f"{result.stdout}\n{result.stderr}"
    assert "| fleetune " in result.stdout

    content = json.loads(output.read_text())
    assert content["command"].startswith(
        "python -m benchmarks.train_speed --rounds 3 --steps 2 --profile_steps 5 --threads 1"
    )
    assert content["trainer_arguments"]["learning_rate"] == content["fleetune_config"]["learning_rate"] == 2e-5
    assert [r["order"][0] for r in content["rounds"]] == ["fleetune", PADDED, LONGEST]
    breakdown = content["breakdown"]
    assert sum(breakdown["parts_ms"].values()) == pytest.approx(breakdown["update_ms"])
    assert all(part_ms >= 0 for part_ms in breakdown["parts_ms"].values())
    assert breakdown["parts_ms"]["matrix products"] > 0 < breakdown["parts_ms"]["optimizer"]
    for r in content["rounds"]:
        assert r["examples"] == [16, 16]
        assert r["arms"][PADDED]["computed_tokens"] == [16 * 64] * 2
        assert r["arms"]["fleetune"]["computed_tokens"] == r["tokens"]
        assert r["arms"]["matrix products"]["computed_tokens"] == r["tokens"]
        for name, arm in r["arms"].items():
            assert len(arm["seconds"]) == 2
            if not name.startswith("matrix products"):
                assert arm["mean_loss"] == pytest.approx(r["arms"]["fleetune"]["mean_loss"], abs=1e-5)
    assert len(content["summary"][PADDED]["fleetune_speedup_by_round"]) == 2


@pytest.mark.slow
@pytest.mark.skipif(not SQUAD_FOLDER.is_dir(), reason="the shared data are not there")
def test_lengths_of_squad(tiny_model: Path, tmp_path: Path) -> None:
    output = tmp_path / "speed.json"
    words = ["--rounds", "2", "--steps", "1", "--profile_steps", "1", "--threads", "1", "--lengths", "squad"]
    words += ["--doc_stride", "16"]
    result = subprocess.run(
        [sys.executable, "-m", "benchmarks.train_speed", *words, "--model", str(tiny_model), "--output", str(output)],
        capture_output=True, text=True, timeout=240, env=environment(), cwd=REPOSITORY, check=False,
    )  # fmt: skip
    assert result.returncode == 0, f"{result.stdout}\n{result.stderr}"
    content = json.loads(output.read_text())
    assert content["notes"][0].split("; ")[1].startswith("SQuAD v1.1, answers as spans: ")
    for r in content["rounds"]:
        ours = r["arms"]["fleetune"]
        for name in ("Trainer, padded to 64", "Trainer, longest of batch"):  # 64: the tiny model has no more positions
            # The softmax of transformers goes over padding, too: with weights that know nothing, the loss of a
            # window of n tokens padded to m is about log(m) in place of log(n).
            assert ours["mean_loss"] - 0.05 < r["arms"][name]["mean_loss"] < ours["mean_loss"] + 0.3
