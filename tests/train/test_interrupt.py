"""Ctrl-C and SIGTERM: saved at the same step on all ranks, said how to go on; a second Ctrl-C ends at once."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from fleetune.train.interrupt import StopRequest, listening
from tests.conftest import TinyData, environment, fleetune, read_json


@pytest.fixture
def words(tiny_data: TinyData, tiny_model_with_dropout: Path, cache_dir: Path, tmp_path: Path) -> list[str]:
    settings = {
        "model": tiny_model_with_dropout, "train_file": tiny_data.train, "validation_file": tiny_data.validation,
        "cache_dir": cache_dir, "output_dir": tmp_path / "out", "num_train_epochs": 200, "processes": 2, "threads": 1,
        "save_strategy": "no", "eval_strategy": "no", "learning_rate": 1e-3,
    }  # fmt: skip
    return [word for key, value in settings.items() for word in (f"--{key}", str(value))]


Started = subprocess.Popen[str]


@pytest.fixture
def start(words: list[str]) -> Iterator[Callable[[], Started]]:
    running: list[Started] = []

    def run() -> Started:
        running.append(
            subprocess.Popen(
                [sys.executable, "-m", "fleetune", "train", *words],
                stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, env=environment(),
                preexec_fn=lambda: signal.signal(signal.SIGINT, signal.SIG_DFL),  # tests in the background ignore it
            )
        )  # fmt: skip
        return running[-1]

    yield run
    for process in running:
        process.kill()
        process.communicate()


def wait_until_training(process: Started, output: Path) -> None:
    """Until the event file of the tracker has grown: the loop has begun."""
    deadline = time.monotonic() + 120
    while time.monotonic() < deadline and process.poll() is None:
        if any(path.stat().st_size > 200 for path in output.glob("runs/events*")):
            return
        time.sleep(0.05)
    pytest.fail(f"training did not begin: {process.communicate()}")


@pytest.mark.slow
@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_a_signal_saves_and_the_run_can_go_on(
    start: Callable[[], Started], words: list[str], tmp_path: Path, number: signal.Signals
) -> None:
    output = tmp_path / "out"
    process = start()
    wait_until_training(process, output)
    process.send_signal(number)
    stdout, stderr = process.communicate(timeout=60)
    assert process.returncode == 128 + number, stdout + stderr
    step = read_json(output / "record.json")["step"]
    assert 0 < step < 600
    assert f"stopped at step {step}, saved; to go on: the same command with --resume_from_checkpoint" in stdout
    assert read_json(output / "record.json")["status"] == "interrupted"
    assert [p.name for p in output.glob("checkpoint-*")] == [f"checkpoint-{step}"]
    assert "Traceback" not in stderr
    resumed = fleetune("train", *words, "--resume_from_checkpoint")
    assert f"at step {step} of 600" in resumed.stdout
    whole = tmp_path / "whole"
    fleetune("train", *[str(whole) if word == str(output) else word for word in words])
    assert (output / "model.safetensors").read_bytes() == (whole / "model.safetensors").read_bytes()


@pytest.mark.slow
def test_a_second_signal_ends_at_once(start: Callable[[], Started], tmp_path: Path) -> None:
    process = start()
    wait_until_training(process, tmp_path / "out")
    ranks = children_of(process.pid)
    assert len(ranks) >= 2
    for rank in ranks:
        os.kill(rank, signal.SIGSTOP)  # ranks that cannot save: only the second signal can end them
    process.send_signal(signal.SIGINT)
    time.sleep(0.5)
    assert process.poll() is None
    process.send_signal(signal.SIGINT)
    for rank in ranks:
        os.kill(rank, signal.SIGCONT)
    process.communicate(timeout=20)
    assert process.returncode == 128 + signal.SIGINT
    assert not any(is_alive(rank) for rank in ranks)


@pytest.mark.slow
def test_a_signal_before_training_ends_without_a_trace(start: Callable[[], Started]) -> None:
    process = start()
    time.sleep(1.0)  # ranks are importing torch
    process.send_signal(signal.SIGINT)
    _, stderr = process.communicate(timeout=60)
    assert process.returncode == 128 + signal.SIGINT
    assert "Traceback" not in stderr


def test_the_first_signal_is_a_request_and_the_handlers_are_put_back() -> None:
    before = signal.getsignal(signal.SIGTERM)
    with listening() as request:
        assert not request
        os.kill(os.getpid(), signal.SIGTERM)
        assert request
        assert request.signal == signal.SIGTERM
        os.kill(os.getpid(), signal.SIGTERM)  # delivered twice within a second: one request
    assert signal.getsignal(signal.SIGTERM) == before


def test_a_request_is_false_until_received() -> None:
    request = StopRequest()
    assert not request
    request.receive(signal.SIGINT, None)
    assert request


def children_of(pid: int) -> list[int]:
    return [int(child) for child in Path(f"/proc/{pid}/task/{pid}/children").read_text().split()]


def is_alive(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()[0] != "Z"
    except FileNotFoundError:
        return False
