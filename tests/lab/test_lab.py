"""Labs come up whole, and leave nothing, however they end."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from lab import Lab, LabError, cgroups, network, ssh, state
from lab.network import Network
from tests.conftest import REPOSITORY
from tests.lab.conftest import left_of


@pytest.fixture(autouse=True)
def _needs_a_lab(request: pytest.FixtureRequest) -> None:
    if (reason := Lab.unavailable()) and "unavailable" not in request.node.name:
        pytest.skip(reason)


def test_nothing_is_left() -> None:
    settings = Path("/proc/sys/net/ipv4/tcp_allowed_congestion_control").read_text()
    with Lab.up(["alpha", "beta"], mbit=100) as lab:
        started = lab["alpha"].start(["sleep", "1000"])
        lab["beta"].freeze()
        assert len(left_of(lab.number)) >= 9
    assert left_of(lab.number) == []
    assert started.communicate()[0] == ""
    assert started.returncode == -signal.SIGKILL
    assert Path("/proc/sys/net/ipv4/tcp_allowed_congestion_control").read_text() == settings


@pytest.mark.parametrize("end", [ZeroDivisionError, KeyboardInterrupt])
def test_nothing_is_left_after_an_exception(end: type[BaseException]) -> None:
    numbers = []
    with pytest.raises(end), Lab.up(1) as lab:  # noqa: PT012
        numbers.append(lab.number)
        raise end
    assert left_of(numbers[0]) == []


def test_a_second_ctrl_c_waits(monkeypatch: pytest.MonkeyPatch) -> None:
    numbers = []
    take_down = state.take_down
    monkeypatch.setattr(state, "take_down", lambda number: [os.kill(os.getpid(), signal.SIGINT), take_down(number)])
    with pytest.raises(KeyboardInterrupt), Lab.up(1) as lab:
        numbers.append(lab.number)
    assert left_of(numbers[0]) == []


def test_nothing_is_left_when_a_host_does_not_boot(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("lab.host.INSIDE", ("sh", "-c", "echo no luck >&2; exit 1"))
    taken_down: list[int] = []
    take_down = state.take_down
    monkeypatch.setattr(state, "take_down", lambda number: [taken_down.append(number), take_down(number)])
    with pytest.raises(LabError, match="node1 does not boot: no luck"), Lab.up(2):
        pass
    assert left_of(taken_down[0]) == []


def test_two_labs_do_not_meet() -> None:
    with Lab.up(1) as one, Lab.up(1) as other:
        assert one.number != other.number
        assert {one.number, other.number} <= set(state.living())
        assert not {one.number, other.number} & set(state.sweep())
        reached = one["node1"].run(["ip", "route", "get", other["node1"].address])
        assert "Network is unreachable" in reached.stderr
    assert left_of(one.number) + left_of(other.number) == []


def test_lab_of_a_killed_process_is_taken_down() -> None:
    script = (
        "import time\nfrom lab import Lab\n"
        "with Lab.up(1) as lab:\n    lab['node1'].freeze()\n    print(lab.number, flush=True)\n    time.sleep(100)"
    )
    with subprocess.Popen([sys.executable, "-c", script], cwd=REPOSITORY, stdout=subprocess.PIPE, text=True) as owner:
        assert owner.stdout is not None
        number = int(owner.stdout.readline())
        owner.kill()
    assert len(left_of(number)) >= 6
    with Lab.up(1):
        pass
    assert left_of(number) == []


def test_no_lab_is_taken_down_under_a_running_command() -> None:
    """Such as an `ip` that makes something while its owner is killed."""
    script = (
        "from lab import commands, state\n"
        "with state.claimed() as number:\n    print(number, flush=True)\n    commands.call('sleep', '1.5')"
    )
    with subprocess.Popen([sys.executable, "-c", script], cwd=REPOSITORY, stdout=subprocess.PIPE, text=True) as owner:
        assert owner.stdout is not None
        number = int(owner.stdout.readline())
        time.sleep(0.3)
        owner.kill()
    assert number in state.living()
    assert number not in state.sweep()
    time.sleep(1.5)
    assert number in state.sweep()


def test_by_hand() -> None:
    program = [sys.executable, "-m", "lab"]
    with subprocess.Popen(
        [*program, "up", "2", "--mbit", "100"], cwd=REPOSITORY, stdout=subprocess.PIPE, text=True
    ) as owner:
        assert owner.stdout is not None
        node1, node2, last = (owner.stdout.readline() for _ in range(3))
        assert node1.split()[0] == "node1"
        assert "Ctrl-C" in last
        number = node2.split("--lab ")[1].split()[0]
        ran = subprocess.run(
            [*program, "run", "--lab", number, "node2", "--", "sh", "-c", "hostname; exit 5"],
            cwd=REPOSITORY, capture_output=True, text=True,
        )  # fmt: skip
        down = subprocess.run([*program, "down"], cwd=REPOSITORY, capture_output=True, text=True)
        owner.send_signal(signal.SIGINT)
        assert owner.wait(timeout=20) == 0
    assert (ran.returncode, ran.stdout, ran.stderr) == (5, "node2\n", "")
    assert down.stdout.startswith("taken down: nothing\n")
    assert f"lab {number} is process {owner.pid}'s" in down.stdout
    assert left_of(int(number)) == []


def test_names_and_folders_are_checked_first(tmp_path: Path) -> None:
    for names, keep, problem in (
        (["a b"], [], "'a b' is no host name"),
        (["one", "one"], [], "all different"),
        (0, [], "0 hosts"),
        (1, ["/usr"], "/usr cannot be kept visible"),
    ):
        with pytest.raises(LabError, match=problem), Lab.up(names, keep=keep):
            pass


def test_addresses_in_use_are_not_taken(monkeypatch: pytest.MonkeyPatch) -> None:
    free = Network(number=90)
    assert network.is_free(free)
    subprocess.run(["ip", "route", "add", "unreachable", "10.90.0.64/26"], check=True)
    try:
        assert not network.is_free(free)
    finally:
        subprocess.run(["ip", "route", "delete", "unreachable", "10.90.0.64/26"], check=True)


def test_unavailable_tells_why(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(os, "geteuid", lambda: 1000)
    assert Lab.unavailable() == "a lab of several hosts needs root"
    monkeypatch.setattr(os, "geteuid", lambda: 0)
    monkeypatch.setattr(ssh, "SERVER", tmp_path / "sshd")
    assert Lab.unavailable(with_ssh=True) == f"no {tmp_path}/sshd: install openssh-server"
    monkeypatch.setattr(cgroups, "MOUNTS", tmp_path / "mounts")
    (tmp_path / "mounts").write_text("proc /proc proc rw 0 0\n")
    assert "no cgroup controller for CPU time" in (cgroups.no_cpu_controller() or "")
    monkeypatch.setattr("lab.commands.SYSTEM_PATH", str(tmp_path))
    assert "no command `unshare`" in (Lab.unavailable() or "")
