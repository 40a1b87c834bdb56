"""The program of another launcher: what it is sent, and what is said when it ends."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import textwrap
import time
from pathlib import Path

import pytest

from fleetune.cluster.launchers.supervised import Failure, Program, run_program
from fleetune.cluster.outputs import RankOutputs
from fleetune.errors import LaunchError
from tests.conftest import environment

STUBBORN = """
import pathlib, signal, sys, time
heard = pathlib.Path(sys.argv[1])
def hear(number, frame):
    with heard.open("a") as file:
        print(signal.Signals(number).name, file=file)
for number in (signal.SIGINT, signal.SIGTERM, signal.SIGUSR1):
    signal.signal(number, hear)
heard.touch()
while True:
    time.sleep(0.05)
"""
"""A program that writes down what it hears, and stays."""

STARTER = """
import signal, sys
from pathlib import Path
from fleetune.cluster.launchers.supervised import Program, run_program
from fleetune.cluster.outputs import RankOutputs
folder = Path(sys.argv[1])
program = Program(
    command=(sys.executable, str(folder / "stubborn.py"), str(folder / "heard")), environ={}, log=folder / "log",
    pass_on={signal.SIGINT: signal.SIGUSR1, signal.SIGTERM: signal.SIGUSR1, signal.SIGHUP: signal.SIGTERM},
    force=(signal.SIGTERM,), failures=lambda said, outputs: [], stop_notice="stopping",
)
with RankOutputs("127.0.0.1", range(20000, 30000), folder, {}) as outputs:
    sys.exit(run_program(program, outputs))
"""


def program(folder: Path, script: str, *failures: Failure) -> Program:
    return Program(
        command=("sh", "-c", script), environ={"PATH": os.environ["PATH"]}, log=folder / "log", pass_on={}, force=(),
        failures=lambda said, outputs: failures, stop_notice="",
    )  # fmt: skip


def run(folder: Path, script: str, *failures: Failure, statuses: dict[int, int] | None = None) -> int:
    with RankOutputs("127.0.0.1", range(20000, 30000), folder, {}) as outputs:
        outputs.statuses = statuses or {}
        return run_program(program(folder, script, *failures), outputs)


def test_a_second_ctrl_c_ends_at_once_whatever_the_program_does(tmp_path: Path) -> None:
    (tmp_path / "stubborn.py").write_text(textwrap.dedent(STUBBORN))
    starter = subprocess.Popen(
        [sys.executable, "-c", STARTER, str(tmp_path)], stderr=subprocess.PIPE, text=True, env=environment()
    )
    wait_for_lines(tmp_path / "heard", 0)
    starter.send_signal(signal.SIGHUP)
    wait_for_lines(tmp_path / "heard", 1)
    starter.send_signal(signal.SIGHUP)  # of one closed terminal it comes twice
    time.sleep(0.5)
    starter.send_signal(signal.SIGINT)
    _, said = starter.communicate(timeout=30)
    assert starter.returncode == 128 + signal.SIGINT
    assert (tmp_path / "heard").read_text().split() == ["SIGTERM", "SIGTERM"]
    assert said == "fleetune: stopping\n"


def test_the_cause_is_told_and_not_a_peer(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Status 76 is of ranks that ended because another had failed."""
    assert run(tmp_path, "exit 76", Failure(rank=1, status=76), Failure(rank=2, status=3)) == 3
    assert "rank 2 on a host that it never reached us from failed with exit status 3" in capsys.readouterr().err


def test_what_ranks_tell_themselves_counts_most(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert run(tmp_path, "exit 1", Failure(rank=0, status=143), statuses={3: 76, 2: 139}) == 139
    assert "rank 2 on a host that it never reached us from was killed by SIGSEGV: a crash" in capsys.readouterr().err


def test_all_is_well(tmp_path: Path) -> None:
    assert run(tmp_path, "echo fine", statuses={0: 0, 1: 0}) == 0


def test_a_program_that_fails_by_itself(tmp_path: Path) -> None:
    with pytest.raises(LaunchError, match=r"(?s)sh failed with exit status 4:\nno daemon"):
        run(tmp_path, "echo no daemon; exit 4")


def test_a_program_that_is_not_there(tmp_path: Path) -> None:
    missing = Program(
        command=("/no/mpirun",), environ={}, log=tmp_path / "log", pass_on={}, force=(), failures=lambda *_: [],
        stop_notice="",
    )  # fmt: skip
    with (
        RankOutputs("127.0.0.1", range(20000, 30000), tmp_path, {}) as outputs,
        pytest.raises(LaunchError, match="cannot start /no/mpirun: No such file"),
    ):
        run_program(missing, outputs)


def wait_for_lines(path: Path, count: int) -> None:
    deadline = time.monotonic() + 30
    while not path.exists() or len(path.read_text().split()) < count:
        assert time.monotonic() < deadline
        time.sleep(0.05)
