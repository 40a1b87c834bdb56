"""Hosts that are alike, and one that is not."""

from __future__ import annotations

from fleetune.doctor.checks.across import same_hardware
from fleetune.doctor.finding import Status
from tests.doctor.made_up import FACTS, changed, examination, trouble, view


def test_alike() -> None:
    (found,) = same_hardware(examination())
    assert (found.status, found.hosts) == (Status.OK, ("node1", "node2", "node3"))
    assert found.reason == "all alike: Intel Xeon Platinum 8375C, 32 usable cores, 128 GB"


def test_one_differs() -> None:
    small = changed("machine", usable_cores=8, isa=("avx2",))
    (found,) = same_hardware(examination(view(1), view(2, small), view(3)))
    assert (found.status, found.hosts) == (Status.WARNING, ("node2",))
    assert found.reason == (
        "other hardware than most hosts: avx2, not avx2 avx512f avx512_vnni; 8 usable cores, not 32 usable cores"
    )


def test_a_host_without_python_is_compared_too() -> None:
    plain = view(2, None, plain=FACTS.machine, trouble=trouble("no python"))
    (found,) = same_hardware(examination(view(1), plain))
    assert found.hosts == ("node1", "node2")


def test_a_single_host_is_like_itself() -> None:
    assert same_hardware(examination(view(1))) == []
