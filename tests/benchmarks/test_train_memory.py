"""The benchmark of training memory: its batches, its summary by hand, and the whole of it on the tiny model."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

from benchmarks.train_memory import Batches, Measurement, drawn_order, memory_table, summarise, with_the_largest
from fleetune.data.demo import Pair
from tests.conftest import REPOSITORY, environment


def measurement(arm: str, repeat: int, megabytes: int) -> Measurement:
    return Measurement(arm=arm, repeat=repeat, peak_rss_bytes=megabytes * 10**6, seconds=1.0)


def test_summary_pairs_the_repeats() -> None:
    summary = summarise(
        [
            *(measurement("fleetune", 0, 500), measurement("trainer-padded", 0, 1000)),
            *(measurement("trainer-padded", 1, 2000), measurement("fleetune", 1, 500)),
        ]
    )
    assert summary["trainer-padded"]["fleetune_share"] == {"minimum": 0.25, "median": 0.375, "maximum": 0.5}
    assert summary["fleetune"]["peak_rss_bytes"]["median"] == 500 * 10**6
    lines = memory_table(summary).splitlines()
    assert lines[2].startswith("| trainer-padded | 1,500 (1,000 to 2,000) | 0.38 (0.25 to 0.50) ")
    assert lines[3].startswith("| fleetune ")


def test_the_largest_batches_are_among_the_first() -> None:
    lengths = np.array([[5, 5], [1, 1], [2, 2], [1, 9], [6, 6]], dtype=np.int64)
    assert with_the_largest(lengths, 3).tolist() == [0, 3, 4]
    assert with_the_largest(lengths, 2).tolist() == [3, 4]
    assert with_the_largest(lengths, 9).tolist() == [0, 1, 2, 3, 4]


def test_fleetune_draws_the_file_in_the_order_of_the_batches() -> None:
    pairs = [Pair(sentence1=str(i), sentence2="", label="") for i in range(48)]
    rows = Batches(pairs=pairs, tokens=np.array([1, 2, 3]), longest=1).in_file_order()
    assert [rows[i] for i in drawn_order(48)] == pairs


@pytest.mark.slow
def test_every_process_trains_the_tiny_model(tiny_model: Path, tmp_path: Path) -> None:
    output = tmp_path / "memory.json"
    words = ["--repeats", "1", "--steps", "2", "--threads", "1", "--model", tiny_model, "--output", output]
    result = subprocess.run(
        [sys.executable, "-m", "benchmarks.train_memory", *map(str, words)],
        capture_output=True, text=True, timeout=240, env=environment(), cwd=REPOSITORY, check=False,
    )  # fmt: skip
    assert result.returncode == 0, f"{result.stdout}\n{result.stderr}"
    assert "| trainer-longest " in result.stdout

    content = json.loads(output.read_text())
    assert content["command"].startswith("python -m benchmarks.train_memory --repeats 1 --steps 2 --threads 1")
    assert len(content["tokens_of_updates"]) == 2
    assert {m["arm"] for m in content["measurements"]} == {"fleetune", "trainer-padded", "trainer-longest"}
    assert all(100e6 < m["peak_rss_bytes"] < 4e9 for m in content["measurements"])
