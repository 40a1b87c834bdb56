"""What the checks make of memory, disks, limits and leftovers."""

from __future__ import annotations

from dataclasses import replace

import pytest

from fleetune.doctor.checks import machine
from fleetune.doctor.facts import Disk, Facts, Remains, Running
from fleetune.doctor.finding import Status, Verdict
from tests.doctor.made_up import FACTS, SCOPE, changed


def judged(judge: object, facts: Facts) -> Verdict:
    assert callable(judge)
    verdict = judge(facts, SCOPE)
    assert isinstance(verdict, Verdict)
    return verdict


@pytest.mark.parametrize(
    "judge", [machine.memory, machine.shared_memory, machine.disks, machine.open_files, machine.leftovers]
)
def test_a_healthy_host_is_ok(judge: object) -> None:
    assert judged(judge, FACTS).status is Status.OK


def test_memory() -> None:
    assert judged(machine.memory, FACTS).reason == "128 GB"
    limited = changed("machine", memory_limit_bytes=8_000_000_000)
    assert judged(machine.memory, limited).reason == "8 GB by a limit of its control group"
    short = judged(machine.memory, changed(memory_available_bytes=900_000_000))
    assert (short.status, short.reason) == (Status.WARNING, "0.9 GB of 128 GB available")


@pytest.mark.parametrize(
    ("size", "status", "reason"),
    [
        (None, Status.WARNING, "there is none: MPI and data loaders' workers fail"),
        (64 << 20, Status.WARNING, "67 MB: MPI and data loaders' workers may need more"),
        (500_000_000, Status.OK, "500 MB"),
    ],
)
def test_shared_memory(size: int | None, status: Status, reason: str) -> None:
    verdict = judged(machine.shared_memory, changed(shm_bytes=size))
    assert (verdict.status, verdict.reason) == (status, reason)


@pytest.mark.parametrize(
    ("free", "status"), [(100_000_000, Status.FAILURE), (3_000_000_000, Status.WARNING), (6_000_000_000, Status.OK)]
)
def test_a_disk_fills_up(free: int, status: Status) -> None:
    disks = (FACTS.disks[0], replace(FACTS.disks[1], free_bytes=free))
    verdict = judged(machine.disks, changed(disks=disks))
    assert verdict.status is status
    if status is not Status.OK:
        assert verdict.reason == f"{free / 1e9:.1f} GB free for temporary files in /tmp"
        assert verdict.fix == "make room, or name another place: `df -h /tmp`"


def test_a_disk_that_cannot_be_written() -> None:
    closed = Disk(what="cache", path="/home/u/.cache/fleetune", free_bytes=1, problem="Read-only file system")
    verdict = judged(machine.disks, changed(disks=(closed, FACTS.disks[1])))
    assert verdict.status is Status.FAILURE
    assert verdict.reason == "cannot be written: cache in /home/u/.cache/fleetune: Read-only file system"


def test_few_open_files() -> None:
    verdict = judged(machine.open_files, changed(open_files=256))
    assert verdict.status is Status.WARNING
    assert verdict.reason.startswith("a process may have 256 files open")


def test_leftovers_are_told_with_how_to_be_rid_of_them() -> None:
    remains = Remains(
        running=(Running(pid=4242, what="python -m fleetune train", age_s=7300, is_orphan=True),),
        shared_memory=("/dev/shm/torch_1_2", "/dev/shm/torch_1_3"),
        partial=("/home/u/.cache/fleetune/tokens/x.partial",),
    )
    assert judged(machine.leftovers, changed(remains=remains)) == Verdict(
        status=Status.WARNING,
        reason=(
            "`python -m fleetune train` has been running for 2 hours (pid 4242, what started it is gone); 2 unused in "
            "/dev/shm; 1 unfinished in the cache"
        ),
        fix=(
            "kill 4242    (if it is no run of yours); rm -r /dev/shm/torch_1_2 /dev/shm/torch_1_3 "
            "/home/u/.cache/fleetune/tokens/x.partial"
        ),
    )
