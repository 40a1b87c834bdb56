"""The benchmark of freezing, low-rank updates and recomputed layers: its summary by hand, and all of it once."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

from benchmarks.tuning import FULL, Measurement, arms_of, summarise, tuning_table
from tests.conftest import REPOSITORY, environment


def measurement(arm: str, repeat: int, megabytes: int, seconds: float) -> Measurement:
    return Measurement(arm=arm, repeat=repeat, peak_rss_bytes=megabytes * 10**6, gradient_bytes=megabytes * 1e4,
                       seconds=seconds, losses=(0.7, 0.6))  # fmt: skip


def test_summary_pairs_the_repeats() -> None:
    summary = summarise(
        [
            *(measurement(FULL, 0, 400, 0.2), measurement("--lora_r 8", 0, 100, 0.1)),
            *(measurement("--lora_r 8", 1, 300, 0.1), measurement(FULL, 1, 400, 0.4)),
        ]
    )
    assert list(summary) == [FULL, "--lora_r 8"]
    assert summary["--lora_r 8"]["peak_rss_bytes_share"] == {"minimum": 0.25, "median": 0.5, "maximum": 0.75}
    assert summary["--lora_r 8"]["seconds_share"]["median"] == pytest.approx(0.375)
    lines = tuning_table(summary).splitlines()
    assert lines[3].split("|")[1:5] == [
        " `--lora_r 8` ", " 200 (100 to 300)   ", " 0.50  ", " 2.00 (1.00 to 3.00)    ",
    ]  # fmt: skip


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_every_way_trains_the_tiny_model(tiny_model: Path, tmp_path: Path) -> None:
    """2 ranks; the bytes are those of what learns: of the tiny model's adapter 4 x 2 x 8 x 32, of its head and pooler
    32 x 32 + 32 + 2 x 32 + 2."""
    output = tmp_path / "tuning.json"
    words = ["--repeats", "1", "--steps", "2", "--model", tiny_model, "--output", output]
    result = subprocess.run(
        [sys.executable, "-m", "benchmarks.tuning", *map(str, words)],
        capture_output=True, text=True, timeout=580, env=environment(), cwd=REPOSITORY, check=False,
    )  # fmt: skip
    assert result.returncode == 0, f"{result.stdout}\n{result.stderr}"
    content = json.loads(output.read_text())
    assert content["command"].startswith("python -m benchmarks.tuning --repeats 1 --steps 2 --threads 1")
    found = {m["arm"]: m for m in content["measurements"]}
    assert set(found) == set(content["arms"]) == set(arms_of(tiny_model))
    assert found["--lora_r 8"]["gradient_bytes"] == 4 * (4 * 2 * 8 * 32 + 32 * 32 + 32 + 2 * 32 + 2)
    assert found["--lora_r 8"]["gradient_bytes"] < found["--freeze embeddings"]["gradient_bytes"]
    assert found["--freeze embeddings"]["gradient_bytes"] < found[FULL]["gradient_bytes"]
    assert found["--gradient_checkpointing"]["gradient_bytes"] == found[FULL]["gradient_bytes"]
    assert found["--gradient_checkpointing"]["losses"] == found[FULL]["losses"]
    assert all(100e6 < m["peak_rss_bytes"] < 4e9 for m in found.values())
