"""What the checks make of ssh, of a host without this Python, and of clocks."""

from __future__ import annotations

import pytest

from fleetune.doctor.checks import reaching
from fleetune.doctor.examine import Clock
from fleetune.doctor.finding import Finding, Status
from tests.doctor.made_up import examination, trouble, view


def test_hosts_that_ssh_reaches_and_the_head_itself() -> None:
    found = reaching.ssh(examination(to_itself=""))
    assert [(one.check, one.hosts, one.status) for one in found] == [
        ("ssh", ("node2",), Status.OK), ("ssh", ("node3",), Status.OK), ("ssh to itself", ("node1",), Status.OK),
    ]  # fmt: skip


@pytest.mark.parametrize(
    ("said", "reason", "fix"),
    [
        ("ssh: connect to host node2 port 22: Connection refused", "ssh: nothing listens on its ssh port",
         "start sshd there, or give the port in ~/.ssh/config"),
        ("ssh: connect to host node2 port 22: Connection timed out", "ssh: no answer",
         "is it up, and does the firewall let ssh (TCP port 22) through?"),
        ("root@node2: Permission denied (publickey).", "ssh: it refuses the key",
         "`ssh-copy-id node2`, or start an agent that has the key"),
    ],
)  # fmt: skip
def test_why_ssh_fails(said: str, reason: str, fix: str) -> None:
    found = reaching.ssh(examination(view(1), view(2, None, trouble=trouble("ssh", said))))
    assert found == [Finding(check="ssh", hosts=("node2",), status=Status.FAILURE, reason=reason, fix=fix)]


def test_a_host_that_is_silent() -> None:
    (found,) = reaching.ssh(examination(view(2, None, trouble=trouble("silent", within_s=60.0))))
    assert (found.status, found.reason) == (Status.FAILURE, "ssh: no answer within 60 s")


def test_a_head_that_cannot_reach_itself_is_a_warning() -> None:
    found = reaching.ssh(examination(view(1), to_itself="Permission denied (publickey)."))
    assert [one.status for one in found] == [Status.WARNING]
    assert found[0].reason.startswith("the head cannot ssh to itself: it refuses the key")


@pytest.mark.parametrize(
    ("kind", "said", "words"),
    [
        ("no python", "sh: 1: /opt/venv/bin/python: not found",
         "this Python is not there (sh: 1: /opt/venv/bin/python: not found); /usr/bin/python3 is Python 3.9.2"),
        ("no fleetune", "No module named fleetune", "Python is there, but fleetune is not installed in it"),
        ("other fleetune", "No module named 'fleetune.doctor'", "another version of fleetune is installed there"),
        ("failed", "MemoryError", "the probe failed: MemoryError"),
    ],
)  # fmt: skip
def test_a_host_without_fleetune(kind: str, said: str, words: str) -> None:
    ill = view(2, None, trouble=trouble(kind, said), python="/usr/bin/python3 is Python 3.9.2")
    well, found = reaching.python(examination(view(1), ill))
    assert (well.hosts, well.status) == (("node1",), Status.OK)
    assert (found.hosts, found.status, found.fix) == (("node2",), Status.FAILURE, "fleetune setup --hosts node2")
    assert words in found.reason


def clocks(*offsets: float, uncertainty: float = 0.001) -> list[Finding]:
    views = [
        view(number, clock=Clock(offset_s=offset, uncertainty_s=uncertainty))
        for number, offset in enumerate(offsets, start=1)
    ]
    return reaching.clocks(examination(*views))


def test_clocks_that_agree() -> None:
    assert [(one.status, one.reason) for one in clocks(0.0, 0.4, -0.2)] == [(Status.OK, "equal within 0.401 s")]


@pytest.mark.parametrize(
    ("offset", "status", "reason"),
    [
        (2.5, Status.WARNING, "its clock is 2.5 s ahead of the head's"),
        (-2.5, Status.WARNING, "its clock is 2.5 s behind the head's"),
        (-3600.0, Status.FAILURE, "its clock is 3600.0 s behind the head's"),
    ],
)
def test_a_clock_that_is_off(offset: float, status: Status, reason: str) -> None:
    (found,) = clocks(0.0, 0.1, offset)
    assert (found.hosts, found.status, found.reason) == (("node3",), status, reason)


def test_a_slow_connection_accuses_no_clock() -> None:
    assert [one.status for one in clocks(0.0, 1.5, uncertainty=0.9)] == [Status.OK]


def test_one_host_has_nothing_to_compare_with() -> None:
    assert clocks(5.0) == []
