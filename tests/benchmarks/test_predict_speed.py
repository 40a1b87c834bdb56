"""The benchmark of prediction: its arithmetic by hand, and the whole of it on the tiny model."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

from benchmarks.predict_speed import Answer, largest_difference, most_probable, speed_table, summarise
from tests.conftest import REPOSITORY, environment


def test_summary_by_hand() -> None:
    rounds = [
        {"seconds": {"fleetune": f, "pipeline": p}, "largest_difference": {"fleetune": d, "pipeline": 0.0}}
        for f, p, d in [(1.0, 3.0, 1e-6), (2.0, 4.0, 3e-6)]
    ]
    summary = summarise(rounds, 100)
    assert summary["fleetune"]["speedup_by_round"] == [3.0, 2.0]
    assert summary["fleetune"]["samples_per_s"] == {"minimum": 50.0, "median": 75.0, "maximum": 100.0}
    assert summary["fleetune"]["largest_difference"] == 3e-6
    lines = speed_table(summary).splitlines()
    assert lines[2].startswith("| pipeline | 29.2 (25.0 to 33.3) ")
    assert "| 2.50 (2.00 to 3.00) " in lines[3]


def test_the_most_probable_class() -> None:
    assert most_probable({"no": 0.4, "yes": 0.6}) == Answer(label="yes", score=0.6)


def test_difference_is_of_the_same_class() -> None:
    ours = [Answer(label="yes", score=0.75), Answer(label="yes", score=0.5625)]
    theirs = [Answer(label="yes", score=0.75), Answer(label="no", score=0.5)]
    assert largest_difference(ours, theirs) == 0.0625


@pytest.mark.slow
def test_all_arms_predict_alike_on_the_tiny_model(tiny_model: Path, tmp_path: Path) -> None:
    output = tmp_path / "speed.json"
    words = ["--rounds", "3", "--examples", "70", "--threads", "1", "--model", tiny_model, "--output", output]
    result = subprocess.run(
        [sys.executable, "-m", "benchmarks.predict_speed", *map(str, words)],
        capture_output=True, text=True, timeout=240, env=environment(), cwd=REPOSITORY, check=False,
    )  # fmt: skip
    assert result.returncode == 0, f"{result.stdout}\n{result.stderr}"
    assert "| pipeline " in result.stdout

    content = json.loads(output.read_text())
    assert content["command"].startswith("python -m benchmarks.predict_speed --rounds 3 --examples 70 --threads 1")
    assert content["examples"] == 70
    assert [r["order"][0] for r in content["rounds"]] == ["pipeline", "fleetune", "fleetune, bfloat16"]
    for r in content["rounds"]:
        assert all(seconds > 0 for seconds in r["seconds"].values())
        assert all(value < 1e-5 for name, value in r["largest_difference"].items() if "bfloat16" not in name)
    assert len(content["summary"]["fleetune"]["speedup_by_round"]) == 2
