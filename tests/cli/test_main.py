"""`fleetune` itself: its overview at once, unknown commands, and errors as one message with an exit status."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

import fleetune
from fleetune.cli import main, train
from fleetune.errors import CheckpointError, ConfigError, DataError, FleetuneError, PeerError
from tests.conftest import environment
from tests.conftest import fleetune as run_fleetune

HEAVY = ("torch", "transformers", "numpy", "pyarrow", "sklearn")


@pytest.mark.parametrize(
    "words",
    [
        "['--help']",
        "['train', '--help']",
        "['evaluate', '--help']",
        "['predict', '--help']",
        "['build-kernels', '--help']",
        "['plan', '--help']",
        "['setup', '--help']",
        "['doctor', '--help']",
        "['env', '--help']",
        "['--version']",
    ],
)
def test_help_imports_nothing_heavy(words: str) -> None:
    script = (
        "import sys\n"
        "from fleetune.cli.main import main\n"
        "try:\n"
        f"    main({words})\n"
        "except SystemExit as end:\n"
        "    assert end.code == 0, end.code\n"
        f"sys.exit(','.join(m for m in {HEAVY} if m in sys.modules))"
    )
    result = subprocess.run(
        [sys.executable, "-c", script], capture_output=True, text=True, env=environment(), timeout=60, check=False
    )  # fmt: skip
    assert result.stderr == "\n"  # no module's name
    assert result.stdout


def test_help_answers_at_once() -> None:
    """In no more CPU time than five times that of Python with a few of its own modules; torch would take far more."""
    python = min(cpu_seconds("-c", "import argparse, dataclasses, subprocess") for _ in range(5))
    assert min(cpu_seconds("-m", "fleetune", "--help") for _ in range(5)) < 5 * max(python, 0.02)


def cpu_seconds(*words: str) -> float:
    """What Python uses of the CPU for a command; times are in hundredths of a second."""
    before = os.times()
    subprocess.run([sys.executable, *words], env=environment(), stdout=subprocess.DEVNULL, check=True)
    after = os.times()
    return after.children_user + after.children_system - before.children_user - before.children_system


@pytest.mark.parametrize("word", [[], ["--help"], ["-h"], ["help"]])
def test_overview_names_every_command(word: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    assert main.run(word) == 0
    told = capsys.readouterr()
    for command in (
        "train",
        "evaluate",
        "predict",
        "launch",
        "plan",
        "doctor",
        "setup",
        "env",
        "demo",
        "build-kernels",
    ):
        assert f"\n  {command} " in told.out
    assert told.err == ""


@pytest.mark.parametrize("word", ["--version", "-V", "version"])
def test_version(word: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main.run([word]) == 0
    assert capsys.readouterr().out == f"fleetune {fleetune.__version__}\n"


@pytest.mark.parametrize(
    ("word", "near"), [("trian", " (did you mean train?)"), ("evalute", " (did you mean evaluate?)"), ("qqq", "")]
)
def test_an_unknown_command_is_refused_and_the_nearest_named(
    word: str, near: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main.run([word]) == 2
    told = capsys.readouterr()
    assert told.out == ""
    assert told.err.startswith(f"fleetune: {word!r} is not a command{near}\n")
    assert "usage: fleetune COMMAND" in told.err


def test_every_command_is_a_module_with_a_run() -> None:
    for command in main.COMMANDS:
        assert callable(__import__(f"fleetune.cli.{command.replace('-', '_')}", fromlist=["run"]).run)


@pytest.mark.parametrize(
    ("error", "status", "text"),
    [
        (ConfigError(["one", "two"]), 2, "error: one\ntwo\n"),
        (
            DataError("is empty", file="a.csv", row=3, column="label"),
            2,
            "error: a.csv, row 3, column 'label': is empty\n",
        ),
        (CheckpointError("torn"), 1, "error: torn\n"),
        (FleetuneError("general"), 1, "error: general\n"),
        (KeyboardInterrupt(), 130, "\ninterrupted: nothing more was written\n"),
    ],
)
def test_errors_are_a_message_and_a_status(
    error: BaseException, status: int, text: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def fail(words: list[str]) -> int:
        raise error

    monkeypatch.setattr(train, "run", fail)
    assert main.run(["train"]) == status
    assert capsys.readouterr() == ("", text)


def test_a_rank_whose_peer_failed_says_nothing(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def fail(words: list[str]) -> int:
        raise PeerError

    monkeypatch.setattr(train, "run", fail)
    assert main.run(["train"]) == PeerError.exit_status != 1
    assert capsys.readouterr() == ("", "")


def test_another_rank_than_the_first_says_which_it_is(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """2 ranks, as torchrun describes them."""
    told = {"RANK": "1", "WORLD_SIZE": "2", "LOCAL_RANK": "1", "LOCAL_WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1",
            "MASTER_PORT": "29500"}  # fmt: skip
    for name, value in told.items():
        monkeypatch.setenv(name, value)

    def fail(words: list[str]) -> int:
        raise ConfigError("no")

    monkeypatch.setattr(train, "run", fail)
    assert main.run(["train"]) == 2
    assert capsys.readouterr().err == "error on rank 1: no\n"


def test_a_mistake_of_ours_keeps_its_traceback(monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(words: list[str]) -> int:
        raise ZeroDivisionError

    monkeypatch.setattr(train, "run", fail)
    with pytest.raises(ZeroDivisionError):
        main.run(["train"])


def test_errors_go_to_stderr_without_a_traceback(tmp_path: Path) -> None:
    result = run_fleetune("train", "--learning_rat", "1", "--output_dir", tmp_path / "out", check=False)
    assert result.returncode == 2
    assert result.stdout == ""
    assert result.stderr == "error: --learning_rat is not a setting (did you mean learning_rate?)\n"
    assert not (tmp_path / "out").exists()


def test_a_reader_that_goes_away_is_no_error() -> None:
    """As in `fleetune train --help | head -1`."""
    command = [sys.executable, "-m", "fleetune", "train", "--print_config"]
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, env=environment()) as process:
        assert process.stdout is not None
        assert process.stderr is not None
        process.stdout.close()
        assert process.stderr.read() == b""
        assert process.wait(timeout=30) in (0, 141)
