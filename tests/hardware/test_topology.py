"""Topology of real machines' text files; the expected cores are those of the machines' published layouts."""

from __future__ import annotations

import os
from collections.abc import Iterable
from dataclasses import replace
from pathlib import Path

import pytest

from fleetune.hardware.topology import Topology, format_cpu_list, launcher_cpus, parse_cpu_list, read_topology
from tests.hardware import machines
from tests.hardware.machines import Machine


def topology(machine: Machine, root: Path, affinity: Iterable[int] | None = None, **more: str) -> Topology:
    """Of a machine whose kernel lets the process run on `affinity`, or on all CPUs."""
    allowed = range(len(machine.cpus)) if affinity is None else affinity
    return read_topology(machine.write(root, **more), affinity=set(allowed))


def cores_by_node(found: Topology) -> dict[int | None, list[tuple[int, ...]]]:
    nodes: dict[int | None, list[tuple[int, ...]]] = {}
    for core in found.cores:
        nodes.setdefault(core.node, []).append(core.cpus)
    return nodes


@pytest.mark.parametrize(
    ("machine", "cores", "memory_gib"),
    [(machines.C5_9XLARGE, 18, 72), (machines.C6I_16XLARGE, 32, 128), (machines.R7IZ_METAL_16XL, 32, 512)],
    ids=["c5.9xlarge", "c6i.16xlarge", "r7iz.metal-16xl"],
)
def test_one_socket_with_siblings_far_apart(machine: Machine, cores: int, memory_gib: int, tmp_path: Path) -> None:
    found = topology(machine, tmp_path)
    assert [core.cpus for core in found.cores] == [(n, n + cores) for n in range(cores)]
    assert {(core.socket, core.node, core.l3) for core in found.cores} == {(0, 0, 0)}
    assert [core.l2 for core in found.cores] == list(range(cores))
    assert [(node.number, node.memory_bytes) for node in found.memory_nodes] == [(0, memory_gib << 30)]
    assert found.num_cpus == 2 * cores


def test_two_sockets_with_clusters(tmp_path: Path) -> None:
    found = topology(machines.TWO_SOCKETS_SNC2, tmp_path)
    nodes = cores_by_node(found)
    assert nodes[0] == [(n, n + 40) for n in (0, 1, 2, 5, 6, 10, 11, 12, 15, 16)]
    assert nodes[3] == [(n, n + 40) for n in (23, 24, 27, 28, 29, 33, 34, 37, 38, 39)]
    assert [(core.socket, core.node) for core in found.cores[::10]] == [(0, 0), (0, 1), (1, 2), (1, 3)]
    assert found.memory_nodes[1].distances == {0: 11, 1: 10, 2: 21, 3: 21}


def test_two_sockets_numbered_in_turn(tmp_path: Path) -> None:
    nodes = cores_by_node(topology(machines.TWO_SOCKETS_NO_SMT, tmp_path))
    assert nodes == {0: [(n,) for n in range(0, 24, 2)], 1: [(n,) for n in range(1, 24, 2)]}


def test_several_caches_a_node(tmp_path: Path) -> None:
    found = topology(machines.EPYC_NPS4, tmp_path)
    assert [(core.cpus[0], core.node, core.l3) for core in found.cores if core.node == 1] == [
        *((8, 1, 8), (9, 1, 8), (10, 1, 8), (11, 1, 8)),
        *((12, 1, 12), (13, 1, 12), (14, 1, 12), (15, 1, 12)),
    ]


def test_arm(tmp_path: Path) -> None:
    found = topology(machines.C7G_16XLARGE, tmp_path)
    assert cores_by_node(found) == {0: [(n,) for n in range(64)]}


def test_arm_that_shows_next_to_nothing(tmp_path: Path) -> None:
    found = topology(machines.GRAVITON_BARE, tmp_path)
    assert cores_by_node(found) == {None: [(n,) for n in range(16)]}
    assert {(core.socket, core.l3) for core in found.cores} == {(None, None)}
    assert found.memory_nodes == ()
    assert found.memory_near(0) is None


def test_a_cpuset_in_the_middle_of_adjacent_siblings(tmp_path: Path) -> None:
    found = topology(machines.ADJACENT_SMT, tmp_path)
    assert cores_by_node(found) == {0: [(8, 9), (10, 11), (12, 13), (14, 15)]}
    assert found.allowed_cpus == tuple(range(8, 16))
    assert found.num_cpus == 32


def test_a_mask_that_cuts_cores_in_half(tmp_path: Path) -> None:
    """Of the cores (8,9) and (14,15) one sibling is left."""
    found = topology(machines.ADJACENT_SMT, tmp_path, affinity=range(9, 15))
    assert cores_by_node(found) == {0: [(9,), (10, 11), (12, 13), (14,)]}


def test_memory_without_cores(tmp_path: Path) -> None:
    found = topology(machines.CXL, tmp_path)
    assert [node.number for node in found.memory_nodes] == [0, 1]
    assert found.memory_near(0) == 0


def test_memory_nodes_of_the_cpuset_only(tmp_path: Path) -> None:
    found = topology(replace(machines.TWO_SOCKETS_C6I, memory_allowed="1"), tmp_path)
    assert [node.number for node in found.memory_nodes] == [1]
    assert found.memory_near(0) == 1


def test_cores_without_memory_use_the_nearest(tmp_path: Path) -> None:
    """As on a two-socket board of which two clusters have no memory modules."""
    nodes = dict(machines.TWO_SOCKETS_SNC2.nodes)
    nodes |= {n: replace(nodes[n], memory_kb=0) for n in (0, 2)}
    found = topology(replace(machines.TWO_SOCKETS_SNC2, nodes=nodes), tmp_path)
    assert [(node, found.memory_near(node)) for node in range(4)] == [(0, 1), (1, 1), (2, 3), (3, 3)]


def without(machine: Machine, **changes: object) -> Machine:
    return replace(machine, cpus=[replace(cpu, **changes) for cpu in machine.cpus])  # type: ignore[arg-type]


def test_core_numbers_where_sibling_lists_are_missing(tmp_path: Path) -> None:
    """Both sockets have cores 0 to 31."""
    expected = topology(machines.TWO_SOCKETS_C6I, tmp_path / "whole").cores
    found = topology(without(machines.TWO_SOCKETS_C6I, siblings=""), tmp_path / "less").cores
    assert [core.cpus for core in found] == [core.cpus for core in expected]


def test_sibling_lists_that_cannot_be(tmp_path: Path) -> None:
    """All CPUs as one core, as firmware without a table of cores reports them."""
    found = topology(without(machines.C7G_16XLARGE, siblings="0-63"), tmp_path)
    assert [core.cpus for core in found.cores] == [(n,) for n in range(64)]


def test_links_where_the_node_folder_is_missing(tmp_path: Path) -> None:
    found = topology(replace(machines.TWO_SOCKETS_C6I, nodes={}), tmp_path)
    assert {node: len(cores) for node, cores in cores_by_node(found).items()} == {0: 32, 1: 32}


def test_sockets_where_no_nodes_are_shown(tmp_path: Path) -> None:
    found = topology(without(replace(machines.TWO_SOCKETS_C6I, nodes={}), node=None), tmp_path)
    assert [(core.socket, core.node) for core in found.cores[::32]] == [(0, None), (1, None)]


def test_cpus_that_are_offline(tmp_path: Path) -> None:
    offline = {f"sys/devices/system/cpu/cpu{n}/online": "0\n" for n in range(18, 36)}
    found = topology(machines.C5_9XLARGE, tmp_path, **offline)
    assert [core.cpus for core in found.cores] == [(n,) for n in range(18)]
    assert found.num_cpus == 18


def test_an_invented_list_of_cpus_is_no_source(tmp_path: Path) -> None:
    """LXCFS shows a container with a quota of 2 CPUs and the cpuset 8-15 the list 0-1."""
    found = topology(machines.ADJACENT_SMT, tmp_path, **{"sys/devices/system/cpu/online": "0-1\n"})
    assert found.allowed_cpus == tuple(range(8, 16))


def test_a_host_that_shows_nothing(tmp_path: Path) -> None:
    found = read_topology(tmp_path, affinity={3, 5})
    assert [core.cpus for core in found.cores] == [(3,), (5,)]
    assert (found.memory_nodes, found.num_cpus) == ((), 2)


def test_this_machine() -> None:
    found = read_topology()
    assert set(found.allowed_cpus) == os.sched_getaffinity(0)
    assert len(found.cores) <= len(found.allowed_cpus) <= found.num_cpus


@pytest.mark.parametrize(
    ("text", "cpus"),
    [("0-3,8\n", {0, 1, 2, 3, 8}), ("5", {5}), ("", set()), ("\n", set()), ("none", set()), ("0, 2-3", {0, 2, 3})],
)
def test_cpu_lists(text: str, cpus: set[int]) -> None:
    assert parse_cpu_list(text) == cpus


@pytest.mark.parametrize(("cpus", "text"), [((8, 1, 0, 2), "0-2,8"), ((5,), "5"), ((), ""), ((0, 2, 4), "0,2,4")])
def test_cpu_lists_as_text(cpus: tuple[int, ...], text: str) -> None:
    assert format_cpu_list(cpus) == text


# ---- launchers


def process(root: Path, pid: str, parent: int, cpus: str, environ: str) -> None:
    (root / "proc" / pid).mkdir(parents=True)
    (root / "proc" / pid / "status").write_text(f"Name:\tx\nPPid:\t{parent}\nCpus_allowed_list:\t{cpus}\n")
    (root / "proc" / pid / "environ").write_text(environ.replace(" ", "\0") + "\0")


def test_the_launcher_is_behind_scripts_of_the_rank(tmp_path: Path) -> None:
    process(tmp_path, "self", 30, "4-7", "X=1 RANK=1")
    process(tmp_path, "30", 20, "4-7", "RANK=1 X=1")  # a script that the launcher started as the rank
    process(tmp_path, "20", 1, "0-15", "X=1")
    assert launcher_cpus("RANK", {"RANK": "1"}, tmp_path) == set(range(16))


def test_a_launcher_that_is_not_shown(tmp_path: Path) -> None:
    process(tmp_path, "self", 0, "4-7", "RANK=1")  # the first process of a container
    assert launcher_cpus("RANK", {"RANK": "1"}, tmp_path) == set()
    assert launcher_cpus("RANK", {"RANK": "1"}, tmp_path / "nothing") == set()
