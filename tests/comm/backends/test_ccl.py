"""Backend `ccl` between real processes on this machine: what it alone promises, and how it fails.

What all backends promise is in test_conformance.py. 2 or 3 ranks, as a test says.
"""

from __future__ import annotations

import importlib.metadata
import os
import signal
import socket
import subprocess
import sys
from collections.abc import Callable, Iterator, Sequence

import pytest

from fleetune.cluster.network import free_port
from fleetune.comm.backends.oneccl import find_oneccl
from fleetune.errors import BackendError
from tests.comm.backends.ccl_rank import LOST
from tests.conftest import REPOSITORY, environment

Ranks = list[subprocess.Popen[str]]
Play = Callable[..., Ranks]


@pytest.fixture(scope="module", autouse=True)
def _is_built() -> None:
    """Before the first test, whose limits do not count it."""
    try:
        found = find_oneccl()
    except BackendError as error:
        pytest.skip(str(error))
    from fleetune.comm.backends.native import build_native

    build_native(found.part(), lambda line: None)


@pytest.fixture
def play() -> Iterator[Play]:
    """Starts the ranks of a scene, and ends those that are left."""
    started: Ranks = []

    def play(scene: str, num_ranks: int, **changes: str) -> Ranks:
        port = str(free_port("127.0.0.1"))
        for rank in range(num_ranks):
            started.append(
                subprocess.Popen(
                    [sys.executable, "-W", "ignore", "-m", "tests.comm.backends.ccl_rank", scene],
                    cwd=REPOSITORY, text=True, stdout=subprocess.PIPE, stderr=subprocess.PIPE,
                    env=environment(
                        RANK=str(rank), WORLD_SIZE=str(num_ranks), MASTER_ADDR="127.0.0.1", MASTER_PORT=port,
                        LOCAL_WORLD_SIZE=str(num_ranks), OMP_NUM_THREADS="1",
                        TORCH_CPP_LOG_LEVEL="ERROR",  # torch warns where a name has a device, as in cpu:gloo
                    ) | changes,
                )
            )  # fmt: skip
        return started

    yield play
    for process in started:
        process.send_signal(signal.SIGCONT)
        process.kill()
        process.communicate()


def ends(ranks: Sequence[subprocess.Popen[str]]) -> list[tuple[int, str, str]]:
    """Exit status, output and errors of ranks that end by themselves."""
    told = []
    for process in ranks:
        out, errors = process.communicate(timeout=200)
        told.append((process.returncode, out, errors))
    return told


@pytest.mark.parametrize(
    ("scene", "num_ranks"), [("lifecycle", 3), ("rounding", 3), ("messages", 3), ("futures", 2), ("left_open", 2)]
)
def test_a_scene_ends_well_and_in_silence(play: Play, scene: str, num_ranks: int) -> None:
    for status, out, errors in ends(play(scene, num_ranks)):
        assert (status, out, errors) == (0, "done\n", "")


@pytest.mark.parametrize(
    ("scene", "reason"),
    [
        ("killed", "has died: its connection was closed"),
        ("failed", "has left the group"),
        ("left", "has left the group"),
        ("frozen", "was not heard of for 3 s: its host is down or frozen, or the network is cut"),
    ],
)
def test_a_lost_rank_is_named_on_all_others_which_leave_with_the_error(play: Play, scene: str, reason: str) -> None:
    ranks = play(scene, 3, FLEETUNE_PEER_SILENCE_S="3")
    others = [process for rank, process in enumerate(ranks) if rank != LOST]
    for status, out, errors in ends(others):
        assert status == 1, errors
        expected = f"rank {LOST} on host {socket.gethostname()} {reason}"
        assert expected in out, errors
        assert "raised again" in out
        assert "DistBackendError: ccl: " in errors
        assert expected in errors
    if scene != "frozen":
        ((status, _, errors),) = ends([ranks[LOST]])
        assert status == {"killed": -signal.SIGKILL, "failed": 1, "left": 0}[scene], errors
        assert ("a mistake of rank 1" in errors) == (scene == "failed")


def test_who_comes_too_late_is_told_that_the_others_have_given_up(play: Play) -> None:
    told = ends(play("late", 3))
    assert [status for status, _, _ in told] == [1, 1, 1]
    texts = [errors for _, _, errors in told]
    assert "allreduce timed out: not complete after 3 s" in texts[0] + texts[2]
    assert "has given up: ccl: allreduce timed out: not complete after 3 s" in texts[LOST]


def test_without_liveness_only_the_timeout_tells(play: Play) -> None:
    ranks = play("late", 2, FLEETUNE_PEER_SILENCE_S="0")
    ((status, _, errors),) = ends(ranks[:1])
    assert status == 1
    assert "allreduce timed out" in errors


def test_a_silence_that_is_no_time_is_refused(play: Play) -> None:
    ((status, _, errors),) = ends(play("left_open", 1, FLEETUNE_PEER_SILENCE_S="soon"))
    assert status == 1
    assert "FLEETUNE_PEER_SILENCE_S=soon: a number of seconds is expected" in errors


def test_a_group_of_one_needs_nobody(play: Play) -> None:
    ((status, out, errors),) = ends(play("left_open", 1))
    assert (status, out, errors) == (0, "done\n", "")


def test_the_old_name_is_this_module_on_request() -> None:
    script = (
        "import fleetune.comm.ccl as ccl\n"
        "ccl.alias_oneccl_bindings()\n"
        "import oneccl_bindings_for_pytorch as old\n"
        "assert old is ccl and ccl.settings_table() == ()\n"
        "import torch.distributed as dist\n"
        "assert dist.Backend('CCL') == 'ccl' and dist.BackendConfig(dist.Backend('cpu:ccl'))\n"
    )
    before = {name: value for name, value in os.environ.items() if name.startswith(("CCL_", "FI_"))}
    result = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, env=environment())
    assert (result.returncode, result.stderr) == (0, "")
    assert before == {name: value for name, value in os.environ.items() if name.startswith(("CCL_", "FI_"))}


def test_versions_of_the_extra_are_those_of_pyproject() -> None:
    wanted = (REPOSITORY / "pyproject.toml").read_text()
    for package in ("oneccl-cpu-devel", "impi-rt"):
        assert f'"{package}=={importlib.metadata.version(package)}"' in wanted
