"""Real benches with the tiny model: ranks of this machine, a kill half-way, a missing host, both trainers."""

from __future__ import annotations

import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from tests.conftest import TinyData, environment, fleetune, read_json

pytestmark = pytest.mark.slow


@pytest.fixture
def words(tiny_model: Path, tiny_data: TinyData, cache_dir: Path, tmp_path: Path) -> list[str]:
    """A bench of the tiny model, without its sizes."""
    settings = {
        "model": tiny_model, "train_file": tiny_data.train, "validation_file": tiny_data.validation, "threads": 1,
        "cache_dir": cache_dir, "output_dir": tmp_path / "bench",
    }  # fmt: skip
    return ["bench", "scaling", *(word for name, value in settings.items() for word in (f"--{name}", str(value)))]


def test_killed_half_way_it_goes_on(words: list[str], tmp_path: Path) -> None:
    command = [*words, "--processes", "1,2", "--steps", "5", "--repeat", "1", "--price_per_hour", "2.72"]
    turns = tmp_path / "bench" / "runs"
    bench = subprocess.Popen([sys.executable, "-m", "fleetune", *command], env=environment(), stdout=subprocess.DEVNULL)
    deadline = time.monotonic() + 200
    while not list(turns.glob("*/turn.json")):
        assert bench.poll() is None
        assert time.monotonic() < deadline
        time.sleep(0.1)
    (first,) = turns.glob("*/turn.json")
    bench.send_signal(signal.SIGKILL)
    bench.wait()
    before = first.read_text()
    result = fleetune(*command)
    assert "1 of 2 runs are there already" in result.stdout
    assert first.read_text() == before
    assert sorted(path.parent.name for path in turns.glob("*/turn.json")) == [
        "1-process-fleetune-round1-seed42", "2-processes-fleetune-round1-seed42",
    ]  # fmt: skip
    check_numbers(tmp_path / "bench")


def check_numbers(folder: Path) -> None:
    """The report's numbers follow from the records."""
    rows = read_json(folder / "report.json")["rows"]
    assert [(row["size"], row["ranks"], row["threads"], row["global_batch"]) for row in rows] == [
        ("1 process", 1, 1, 16), ("2 processes", 2, 2, 32),
    ]  # fmt: skip
    for row in rows:
        (run,) = row["runs"]
        record = read_json(folder / "runs" / run["name"] / "record.json")
        turn = read_json(folder / "runs" / run["name"] / "turn.json")
        assert record["step"] == 6
        assert run["training_s"] == pytest.approx(run["step_s"] * (18 if row["ranks"] == 1 else 9))  # 3 epochs of 90
        assert 0 < run["startup_s"] < turn["wall_s"]
        assert run["cost"] == pytest.approx(2.72 * run["wall_s"] / 3600)
    speeds = [row["samples_per_s"]["mean"] for row in rows]
    assert rows[1]["speedup"]["mean"] == pytest.approx(speeds[1] / speeds[0])


def test_a_host_that_is_not_there_fails_alone(words: list[str], tmp_path: Path) -> None:
    """192.0.2.1 is nobody's: the address is kept for documentation."""
    hosts = ["--hosts", "localhost,192.0.2.1", "--nodes", "1,2"]
    result = fleetune(*words, *hosts, "--steps", "3", "--repeat", "2", check=False)
    assert result.returncode == 1, result.stdout + result.stderr
    assert "192.0.2.1" in next(
        line for line in result.stdout.splitlines() if line.startswith("failed  2 hosts: round 1")
    )
    rows = read_json(tmp_path / "bench" / "report.json")["rows"]
    assert [(row["size"], len(row["runs"]), len(row["failures"])) for row in rows] == [
        ("1 host", 2, 0),
        ("2 hosts", 0, 1),
    ]


def test_to_the_end_beside_the_stock_trainer(words: list[str], tmp_path: Path) -> None:
    """Both trainers on two processes: metrics, times, and the same plan."""
    sizes = ["--processes", "2", "--full", "--repeat", "1", "--against", "transformers"]
    recipe = ["--num_train_epochs", "2", "--learning_rate", "1e-3", "--scale_lr", "none"]
    fleetune(*words, *sizes, *recipe, timeout=290)
    report = read_json(tmp_path / "bench" / "report.json")
    assert report["metric"] == "accuracy"
    ours, stock = report["rows"]
    assert (ours["trainer"], stock["trainer"]) == ("fleetune", "transformers")
    for name in ("ranks", "threads", "global_batch", "learning_rate"):
        assert ours[name] == stock[name]
    for row in (ours, stock):
        assert 0 <= row["accuracy"]["mean"] <= 1
        for run in row["runs"]:
            record = read_json(tmp_path / "bench" / "runs" / run["name"] / "record.json")
            assert record["step"] == 6
            assert not run["is_extrapolated"]
            assert run["wall_s"] == pytest.approx(
                read_json(tmp_path / "bench" / "runs" / run["name"] / "turn.json")["wall_s"]
            )
    history = read_json(tmp_path / "bench" / "runs" / stock["runs"][0]["name"] / "trainer_state.json")["log_history"]
    assert any("eval_accuracy" in entry for entry in history)


def test_a_dry_run_touches_nothing(words: list[str], tmp_path: Path) -> None:
    result = fleetune(*words, "--processes", "1,2", "--dry_run")
    assert "global batch   32 examples = 2 processes x 16" in result.stdout
    assert not (tmp_path / "bench").exists()


def test_problems_are_listed(words: list[str]) -> None:
    result = fleetune(*words, "--processes", "1,x", "--repeat", "many", check=False)
    assert result.returncode == 2
    assert "--processes '1,x': numbers from 1" in result.stderr
    assert "--repeat 'many': a number is expected" in result.stderr
    assert fleetune("bench", "scalling", check=False).returncode == 2
    assert fleetune("bench").stdout.startswith("usage: fleetune bench scaling")
