"""The memory benchmark: its file, its summary by hand, and a small run of the whole."""

from __future__ import annotations

import csv
import json
import subprocess
import sys
from itertools import islice
from pathlib import Path

import pytest

from benchmarks.data_memory import NUM_SEED_PAIRS, Measurement, large_table, memory_table, summarise, write_large_table
from benchmarks.memory_watch import ProcessPeak
from tests.conftest import REPOSITORY, environment


def measurement(processes: int, cache: str, seconds: float, megabytes: list[int]) -> Measurement:
    peaks = [ProcessPeak(role=f"rank {i}", peak_rss_bytes=n * 10**6) for i, n in enumerate(megabytes)]
    return Measurement(
        repeat=0, processes=processes, threads=1, cache=cache, seconds_to_training=seconds,
        seconds_to_first_update=seconds + 1, seconds_in_all=9.0, phases={}, tokens=1, peaks=peaks,
    )  # fmt: skip


def test_summary_by_hand() -> None:
    summary = summarise(
        [
            measurement(1, "empty", 30.0, [700]),
            measurement(2, "empty", 40.0, [600, 900]),
            measurement(1, "empty", 20.0, [800]),
        ]
    )
    assert [(entry["processes"], entry["cache"]) for entry in summary] == [(1, "empty"), (2, "empty")]
    assert summary[0]["seconds_to_training"] == {"minimum": 20.0, "median": 25.0, "maximum": 30.0}
    assert summary[0]["seconds_to_first_update"] == {"minimum": 21.0, "median": 26.0, "maximum": 31.0}
    assert summary[1]["largest_peak_bytes"]["maximum"] == 900 * 10**6
    assert "| 25.0 (20.0 to 30.0) " in memory_table(summary).splitlines()[2]
    assert "| 900 (900 to 900) " in memory_table(summary).splitlines()[3]


def test_the_file_is_the_same_every_time_and_no_row_comes_twice(tmp_path: Path) -> None:
    first = write_large_table(tmp_path / "a.csv", 2 * NUM_SEED_PAIRS)
    assert first.read_bytes() == write_large_table(tmp_path / "b.csv", 2 * NUM_SEED_PAIRS).read_bytes()
    with first.open(newline="") as file:
        rows = [tuple(row) for row in csv.reader(file)]
    assert rows[0] == ("sentence1", "sentence2", "label")
    assert len(set(rows)) == len(rows) == 2 * NUM_SEED_PAIRS + 1


def test_a_shorter_file_is_the_beginning_of_a_longer_one() -> None:
    assert list(large_table(5)) == list(islice(large_table(50), 5))


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_a_small_run_of_the_whole(packaged_model: Path, tmp_path: Path) -> None:
    output = tmp_path / "memory.json"
    result = subprocess.run(
        [sys.executable, "-m", "benchmarks.data_memory", "--rows", "20000", "--repeats", "1", "--output", str(output)],
        capture_output=True, text=True, timeout=580, env=environment(), cwd=REPOSITORY, check=False,
    )  # fmt: skip
    assert result.returncode == 0, f"{result.stdout}\n{result.stderr}"
    assert "| processes | token cache |" in result.stdout

    content = json.loads(output.read_text())
    assert content["command"] == "python -m benchmarks.data_memory --rows 20000 --repeats 1 --processes 1 2"
    runs = content["measurements"]
    assert [(run["processes"], run["cache"]) for run in runs] == [
        (1, "empty"), (1, "filled"), (2, "empty"), (2, "filled"),
    ]  # fmt: skip
    for run in runs:
        ranks = [peak for peak in run["peaks"] if peak["role"].startswith("rank ")]
        assert [peak["role"] for peak in ranks] == [f"rank {i}" for i in range(run["processes"])]
        assert all(100e6 < peak["peak_rss_bytes"] < 4e9 for peak in ranks)
        assert run["tokens"] > 20_000 * 10
        assert 0 < run["seconds_to_training"] < run["seconds_to_first_update"] < run["seconds_in_all"]
    by_kind = {(run["processes"], run["cache"]): run for run in runs}
    for processes in (1, 2):
        tokenised, found = by_kind[processes, "empty"], by_kind[processes, "filled"]
        assert found["tokens"] == tokenised["tokens"]
        assert found["phases"]["data"] < tokenised["phases"]["data"]
