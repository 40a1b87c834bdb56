"""Backend `ccl` between three hosts of the lab: the network carries, and what is lost is a host or its link."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Callable, Iterator

import pytest

from fleetune.comm.backends.native import build_native
from fleetune.comm.backends.oneccl import find_oneccl
from fleetune.errors import BackendError
from fleetune.kernels.library import cache_folder
from lab import Lab
from lab.host import Host
from tests.comm.backends.ccl_rank import LOST
from tests.conftest import REPOSITORY

pytestmark = pytest.mark.slow
NAMES = ("node1", "node2", "node3")

Play = Callable[[str], list["subprocess.Popen[str]"]]


@pytest.fixture
def lab() -> Iterator[Lab]:
    if reason := Lab.unavailable():
        pytest.skip(reason)
    try:
        build_native(find_oneccl().part(), lambda line: None)
    except BackendError as error:
        pytest.skip(str(error))
    with Lab.up(NAMES, mbit=1000) as lab:
        yield lab


@pytest.fixture
def play(lab: Lab) -> Iterator[Play]:
    """Starts a rank of a scene on each host."""
    started: list[subprocess.Popen[str]] = []

    def play(scene: str) -> list[subprocess.Popen[str]]:
        command = [sys.executable, "-W", "ignore", "-m", "tests.comm.backends.ccl_rank", scene]
        env = {
            "WORLD_SIZE": "3", "LOCAL_WORLD_SIZE": "1", "MASTER_ADDR": lab[NAMES[0]].address, "MASTER_PORT": "29511",
            "PYTHONPATH": f"{REPOSITORY}/src:{REPOSITORY}", "OMP_NUM_THREADS": "1", "FLEETUNE_PEER_SILENCE_S": "4",
            "XDG_CACHE_HOME": str(cache_folder().parent), "CXX": os.environ.get("CXX", ""),
        }  # fmt: skip
        for rank, name in enumerate(NAMES):
            environ = {**env, "RANK": str(rank)}
            started.append(lab[name].start(command, env=environ, cwd=REPOSITORY, stderr=subprocess.PIPE))
        return started

    yield play
    for stream in (stream for process in started for stream in (process.stdout, process.stderr)):
        assert stream is not None
        stream.close()  # those of a lost host are open; its processes end with the lab


def test_calls_and_messages_cross_the_network(play: Play) -> None:
    for process in play("messages"):
        out, errors = process.communicate(timeout=200)
        assert (process.returncode, out) == (0, "done\n"), errors


@pytest.mark.parametrize(
    ("lose", "reason"),
    [
        (Host.cut, "was not heard of for 4 s: its host is down or frozen, or the network is cut"),
        (Host.freeze, "was not heard of for 4 s: its host is down or frozen, or the network is cut"),
        (Host.kill, f"rank {LOST} on host node{LOST + 1} "),
    ],
    ids=["the link is cut", "the host is frozen", "the host dies"],
)
def test_a_lost_host_is_named_on_the_others(lab: Lab, play: Play, lose: Callable[[Host], None], reason: str) -> None:
    ranks = play("lost with its host")
    for process in ranks:
        assert process.stdout is not None
        assert process.stdout.readline() == "joined\n", process.communicate()
    lose(lab[NAMES[LOST]])
    for process in (process for rank, process in enumerate(ranks) if rank != LOST):
        out, errors = process.communicate(timeout=100)
        assert process.returncode == 1, errors
        assert f"rank {LOST} on host {NAMES[LOST]} " in errors
        assert reason in errors
        assert "raised again" in out
