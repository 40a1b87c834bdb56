"""What a rank of another launcher is told, and what it becomes."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from fleetune.cluster import as_rank
from fleetune.cluster.as_rank import group_rank, meeting_place, rank_environment
from fleetune.cluster.network import Interface
from fleetune.cluster.outputs import RankOutputs
from fleetune.cluster.rank import RankInfo
from fleetune.errors import ConfigError
from tests.conftest import environment

ETH0 = Interface(name="eth0", address="10.0.0.1")
IB0 = Interface(name="ib0", address="192.168.7.1")
LO = Interface(name="lo", address="127.0.0.1")
ONE_RANK = {"OMPI_COMM_WORLD_RANK": "0", "OMPI_COMM_WORLD_SIZE": "1", "OMPI_COMM_WORLD_LOCAL_RANK": "0",
            "OMPI_COMM_WORLD_LOCAL_SIZE": "1", "MASTER_PORT": "29500"}  # fmt: skip


def info(rank: int = 0, *, world_size: int = 3, local_rank: int = 0, local_world_size: int = 1,
         launcher: str = "slurm", main_address: str = "node1") -> RankInfo:  # fmt: skip
    return RankInfo(
        rank=rank, world_size=world_size, local_rank=local_rank, local_world_size=local_world_size, launcher=launcher,
        main_address=main_address, main_port=29500,
    )  # fmt: skip


def names(**known: str) -> Callable[[str], list[str]]:
    """Looks up names; addresses mean themselves."""
    return lambda name: [known[name]] if name in known else [name] if name[0].isdigit() else []


def place(
    rank: RankInfo, environ: dict[str, str], among: tuple[Interface, ...], **known: str
) -> tuple[str, str | None]:
    return meeting_place(rank, environ, among=among, look_up=names(**known))


def test_another_host_is_reached_by_its_address() -> None:
    address, _ = place(info(1), {}, (LO, Interface(name="eth0", address="10.0.0.2")), node1="10.0.0.1")
    assert address == "10.0.0.1"


def test_the_first_host_uses_its_own_address() -> None:
    assert place(info(), {}, (LO, ETH0, IB0), node1="10.0.0.1") == ("10.0.0.1", "eth0")


def test_a_name_that_means_127_0_1_1_to_its_host(monkeypatch: pytest.MonkeyPatch) -> None:
    """Its address is that of the route to another host of the step."""
    monkeypatch.setattr(as_rank, "address_towards", {"10.0.0.2": "10.0.0.1"}.get)
    environ = {"SLURM_STEP_NODELIST": "node[1-2]"}
    among = (LO, IB0, ETH0)
    assert place(info(), environ, among, node1="127.0.1.1", node2="10.0.0.2") == ("10.0.0.1", "eth0")
    with pytest.raises(ConfigError, match=r"its name means 127.0.1.1, and no way .*: give --network"):
        place(info(), {}, among, node1="127.0.1.1")


def test_a_network_decides_on_the_first_host_and_on_others() -> None:
    environ = {"FLEETUNE_NETWORK": "192.168.0.0/16"}
    assert place(info(), environ, (LO, ETH0, IB0), node1="10.0.0.1") == ("192.168.7.1", "ib0")
    mine = (LO, Interface(name="eth9", address="10.0.0.2"), Interface(name="ib3", address="192.168.7.2"))
    both = {"node1": ["10.0.0.1", "192.168.7.1"]}.__getitem__
    assert meeting_place(info(1), environ, among=mine, look_up=both) == ("192.168.7.1", "ib3")
    with pytest.raises(ConfigError, match=r"node1 has no address in the network 192.168.0.0/16 that"):
        place(info(1), environ, mine, node1="10.0.0.1")
    with pytest.raises(ConfigError, match=r"--network 172.16.0.0/12: no address of"):
        place(info(), {"FLEETUNE_NETWORK": "172.16.0.0/12"}, (LO, ETH0), node1="10.0.0.1")


def test_a_name_that_nobody_knows() -> None:
    with pytest.raises(ConfigError, match=r"the first rank's host node1 has no address that .* knows: add it"):
        place(info(1), {}, (LO, ETH0))


def test_ranks_of_one_host_need_no_network() -> None:
    alone = info(1, world_size=2, local_rank=1, local_world_size=2, main_address="127.0.0.1")
    assert place(alone, {}, (LO, ETH0)) == ("127.0.0.1", "lo")


def test_the_variables_of_torchrun() -> None:
    rank = info(5, world_size=6, local_rank=1, local_world_size=2, launcher="openmpi", main_address="10.0.0.1")
    given = rank_environment(rank, {"FLEETUNE_RANKS_PER_HOST": "4,2"}, among=(LO, ETH0), look_up=names())
    assert given == {
        "RANK": "5", "WORLD_SIZE": "6", "LOCAL_RANK": "1", "LOCAL_WORLD_SIZE": "2", "MASTER_ADDR": "10.0.0.1",
        "MASTER_PORT": "29500", "GROUP_RANK": "1", "NODE_RANK": "1", "FLEETUNE_LAUNCHER": "openmpi",
        "PYTHONUNBUFFERED": "1", "GLOO_SOCKET_IFNAME": "eth0",
    }  # fmt: skip


def test_the_users_own_interface_stays() -> None:
    environ = {"GLOO_SOCKET_IFNAME": "ib0"}
    assert "GLOO_SOCKET_IFNAME" not in rank_environment(info(), environ, among=(ETH0,), look_up=names(node1="10.0.0.1"))


@pytest.mark.parametrize(
    ("rank", "environ", "expected"),
    [
        (info(3, world_size=4, local_world_size=2, launcher="pmi"), {}, 1),
        (info(3, world_size=5, launcher="pmi"), {"FLEETUNE_RANKS_PER_HOST": "1,2,2"}, 2),
        (info(2, launcher="slurm"), {"SLURM_NODEID": "2"}, 2),
        (info(1, world_size=4, local_world_size=2, launcher="openmpi"), {"SLURM_NODEID": "7"}, 0),
    ],
    ids=["even", "uneven", "slurm", "mpirun within Slurm"],
)
def test_the_number_of_a_host(rank: RankInfo, environ: dict[str, str], expected: int) -> None:
    assert group_rank(rank, environ) == expected


def run(*command: str, **variables: str) -> subprocess.CompletedProcess[str]:
    words = [sys.executable, "-m", "fleetune.cluster.as_rank", "--", *command]
    return subprocess.run(words, capture_output=True, text=True, timeout=60, env=environment(**variables))


def test_it_becomes_the_command_in_its_folder(tmp_path: Path) -> None:
    result = run("sh", "-c", "pwd; echo $RANK/$WORLD_SIZE; exit 7", **ONE_RANK, FLEETUNE_CWD=str(tmp_path))
    assert (result.returncode, result.stdout, result.stderr) == (7, f"{tmp_path}\n0/1\n", "")


def test_a_host_without_the_folder_starts_no_script() -> None:
    """A file of the same name in another folder may be another script."""
    result = run("pwd", **ONE_RANK, FLEETUNE_CWD="/no/such")
    assert (result.returncode, result.stdout) == (2, "")
    assert "there is no folder /no/such, where the script is started: make it there, or start from a" in result.stderr


@pytest.mark.parametrize(
    ("program", "status", "why"),
    [("no-such-program", 127, "No such file or directory"), ("/etc/passwd", 126, "Permission denied")],
)
def test_a_program_that_cannot_be_started_is_named(program: str, status: int, why: str) -> None:
    result = run(program, "x", **ONE_RANK)
    assert result.returncode == status
    assert result.stderr.endswith(f": {program}: {why}\n")


def test_the_threads_that_the_user_wants() -> None:
    assert run("sh", "-c", "echo $OMP_NUM_THREADS", **ONE_RANK, FLEETUNE_THREADS="3").stdout == "3\n"


def test_a_command_that_is_not_there() -> None:
    result = run("no-such-program", **ONE_RANK)
    assert result.returncode == 127
    assert "No such file" in result.stderr


def test_without_a_launcher_it_says_so() -> None:
    result = run("true")
    assert result.returncode == 2
    assert "no variables of mpirun, srun or another launcher are set" in result.stderr


def test_a_head_that_does_not_listen() -> None:
    told = json.dumps({"address": "127.0.0.1", "port": 1, "word": "x", "wants_status": False})
    result = run("true", **ONE_RANK, FLEETUNE_OUTPUT=told)
    assert result.returncode == 1
    assert "cannot reach the head at 127.0.0.1, TCP port 1: Connection refused" in result.stderr


@pytest.mark.parametrize("ends_by", ["itself", "a signal", "a missing program"])
def test_the_head_is_told_how_it_ended(ends_by: str, tmp_path: Path) -> None:
    """And where its output goes, the launcher sees nothing of it."""
    script = "echo $$; kill -9 $$" if ends_by == "a signal" else "echo said; exit 7"
    command = ["no-such-program"] if ends_by == "a missing program" else ["sh", "-c", script]
    with RankOutputs("127.0.0.1", range(20000, 30000), tmp_path, {0: "node7"}, wants_status=True) as outputs:
        process = subprocess.Popen(
            [sys.executable, "-m", "fleetune.cluster.as_rank", "--", *command],
            env=environment(**ONE_RANK, **outputs.variable()), stdout=subprocess.PIPE, text=True,
        )  # fmt: skip
        wait_for_end(process, outputs)
        expected = {"itself": 7, "a signal": 137, "a missing program": 127}[ends_by]
        assert outputs.statuses == {0: expected}
        assert process.communicate()[0] == ""
        assert outputs.ranks[0].log == tmp_path / "node7.0.log"


def test_signals_reach_the_command_below(tmp_path: Path) -> None:
    script = "trap 'echo stopped; exit 3' TERM; echo up; while :; do sleep 0.05; done"
    with RankOutputs("127.0.0.1", range(20000, 30000), tmp_path, {}, wants_status=True) as outputs:
        process = subprocess.Popen(
            [sys.executable, "-m", "fleetune.cluster.as_rank", "--", "sh", "-c", script],
            env=environment(**ONE_RANK, **outputs.variable()),
        )
        while 0 not in outputs.ranks or b"up" not in outputs.ranks[0].tail:
            outputs.pump(0.1)
        os.kill(process.pid, signal.SIGTERM)
        wait_for_end(process, outputs)
        assert process.returncode == 3
        assert outputs.ranks[0].last_lines(2) == ["up", "stopped"]


def wait_for_end(process: subprocess.Popen[str] | subprocess.Popen[bytes], outputs: RankOutputs) -> None:
    deadline = time.monotonic() + 60
    while process.poll() is None:
        outputs.pump(0.1)
        assert time.monotonic() < deadline
    outputs.drain()
