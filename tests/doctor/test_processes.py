"""Listeners and leftovers, real ones of this machine."""

from __future__ import annotations

import os
import socket
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from pathlib import Path

import pytest

from fleetune.doctor.processes import read_listeners, read_remains, what_runs
from tests.conftest import environment


@pytest.fixture
def sleeper() -> Iterator[subprocess.Popen[bytes]]:
    """What a killed launcher would leave: a process with a launcher's variable."""
    process = subprocess.Popen(["sleep", "60"], env=environment(FLEETUNE_LAUNCHER="local"))
    yield process
    process.kill()
    process.wait()


def test_a_listener_is_told_with_its_process() -> None:
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        listener.listen()
        port = listener.getsockname()[1]
        (found,) = [one for one in read_listeners(range(port, port + 1)) if one.port == port]
    assert (found.address, found.pid) == ("127.0.0.1", os.getpid())
    assert found.process is not None
    assert found.process.startswith(("python", "pytest"))


def test_a_process_of_a_launcher_is_a_leftover(sleeper: subprocess.Popen[bytes], tmp_path: Path) -> None:
    deadline = time.monotonic() + 10
    while True:  # until the child has become another program
        (found,) = [one for one in read_remains(tmp_path).running if one.pid == sleeper.pid] or (None,)
        if (found is not None and found.what == "sleep") or time.monotonic() > deadline:
            break
    assert found is not None
    assert (found.what, found.is_orphan) == ("sleep", False)


def test_unfinished_files_of_the_cache_are_leftovers_when_they_are_old(tmp_path: Path) -> None:
    folder = tmp_path / "tokens"
    old, young, whole = folder / "a.partial", folder / "b.partial", folder / "c"
    for path in (old, young, whole):
        path.mkdir(parents=True)
    long_ago = time.time() - 2 * 24 * 3600
    os.utime(old, (long_ago, long_ago))
    os.utime(whole, (long_ago, long_ago))
    assert read_remains(tmp_path).partial == (str(old),)


def test_shared_memory_that_nobody_has_open_is_a_leftover(tmp_path: Path) -> None:
    folder = Path("/dev/shm")
    if not os.access(folder, os.W_OK):
        pytest.skip("no /dev/shm")
    unused, used = folder / f"torch_{os.getpid()}_unused", folder / f"torch_{os.getpid()}_used"
    try:
        unused.touch()
        with used.open("wb"):
            found = read_remains(tmp_path).shared_memory
    finally:
        unused.unlink()
        used.unlink()
    assert str(unused) in found
    assert str(used) not in found


@pytest.mark.parametrize(
    ("words", "told"),
    [
        (["/usr/bin/python3", "-m", "fleetune", "train", "--hub_token", "hf_x"], "python3 -m fleetune train"),
        (["/opt/venv/bin/python", "-u", "-m", "http.server", "29500"], "python -m http.server"),
        (["/opt/venv/bin/python", "/opt/venv/bin/fleetune", "train", "--seed", "1"], "fleetune train"),
        (["python3.11", "/home/u/run_glue.py", "--password", "x"], "python3.11 run_glue.py"),
        (["/usr/sbin/sshd", "-D"], "sshd"),
        (["sshd: root@notty"], "sshd:"),
        ([], "a process without a name"),
    ],
)
def test_arguments_are_not_told(words: Sequence[str], told: str) -> None:
    assert what_runs(words) == told


def test_a_doctor_is_no_leftover(tmp_path: Path) -> None:
    probe = subprocess.Popen(
        [sys.executable, "-m", "fleetune.doctor.probe", "node1"], stdin=subprocess.PIPE, env=environment()
    )
    assert probe.stdin is not None
    try:
        time.sleep(0.5)
        assert probe.pid not in [one.pid for one in read_remains(tmp_path).running]
    finally:
        probe.stdin.close()
        assert probe.wait(20) == 0
