"""A rank takes its part: where its threads run and what happens where the system forbids something."""

from __future__ import annotations

import dataclasses
import errno
import json
import os
import platform
import subprocess
import sys
from typing import Any

import pytest

from fleetune.hardware import pinning
from fleetune.hardware.host import read_host
from fleetune.hardware.host_plan import RankPart, plan_host
from fleetune.hardware.pinning import is_bound_by_launcher, plan_this_host, take_part, take_place
from fleetune.hardware.topology import Core, read_topology
from tests.conftest import environment

ALL = frozenset(range(8))


def part(**changes: Any) -> RankPart:
    whole: dict[str, Any] = {
        "local_rank": 0,
        "threads": 1,
        "cpus": (0,),
        "is_pinned": False,
        "nodes": (0,),
        "memory_node": None,
    }
    return RankPart(**{**whole, **changes})


SCRIPT = """
import json, os, re, sys
from pathlib import Path
from fleetune.hardware.host_plan import RankPart
from fleetune.hardware.pinning import take_part
cpus, when = tuple(json.loads(sys.argv[1])), sys.argv[2]
if when == "late":
    import torch
    torch.ones(1 << 20).exp()  # the pool is there
lines = take_part(RankPart(local_rank=0, threads=2, cpus=cpus, is_pinned=True, nodes=(), memory_node=None))
import torch
threads = torch.get_num_threads()
a = torch.randn(512, 512, requires_grad=True)
(a @ a).exp().sum().backward()
tasks = [path.read_text() for path in Path("/proc/self/task").glob("*/status")]
print(json.dumps([lines, threads, [re.search(r"Cpus_allowed_list:\\s*(.*)", task)[1] for task in tasks]]))
"""


@pytest.mark.parametrize("when", ["early", "late"])
def test_all_of_torchs_threads_stay_inside(when: str) -> None:
    """Pinned before torch is loaded, and, as when Python code calls fleetune, after."""
    cpu = max(os.sched_getaffinity(0))
    result = subprocess.run(
        [sys.executable, "-c", SCRIPT, f"[{cpu}]", when],
        capture_output=True, text=True, check=True, timeout=120, env=environment(),
    )  # fmt: skip
    lines, threads, masks = json.loads(result.stdout)
    assert lines == []
    assert threads == 2 or when == "late"
    assert len(masks) >= threads
    assert set(masks) == {str(cpu)}


@pytest.fixture(autouse=True)
def _own_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("OMP_NUM_THREADS", "1")  # restored afterwards


def test_cpus_that_are_gone_are_a_line(monkeypatch: pytest.MonkeyPatch) -> None:
    before = os.sched_getaffinity(0)
    assert take_part(part(cpus=(1000,), is_pinned=True)) == ["not pinned to CPUs 1000: Invalid argument"]
    assert os.sched_getaffinity(0) == before


def test_an_unpinned_part_changes_nothing() -> None:
    before = os.sched_getaffinity(0)
    assert take_part(part()) == []
    assert os.sched_getaffinity(0) == before


# ---- memory


class Kernel:
    """Stands in for the two system calls; a number below 0 is an error."""

    def __init__(self, *, get: int = 0, policy: int = 0, put: int = 0) -> None:
        self.get, self.policy, self.put = get, policy, put
        self.preferred: list[int] = []

    def __call__(self, number: int, *arguments: Any) -> int:
        if number == 239:
            arguments[0]._obj.value = self.policy
            return self.get
        assert number == 238
        mode, mask, bits = arguments
        assert mode == 1
        assert bits == 64 * len(mask) + 1
        self.preferred = [64 * i + bit for i, word in enumerate(mask) for bit in range(64) if word >> bit & 1]
        return self.put


@pytest.fixture
def _x86(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(platform, "machine", lambda: "x86_64")


@pytest.mark.usefixtures("_x86")
@pytest.mark.parametrize("node", [0, 3, 63, 64, 130])
def test_the_node_is_preferred(node: int) -> None:
    kernel = Kernel()
    assert take_part(part(memory_node=node), system_call=kernel) == []
    assert kernel.preferred == [node]


@pytest.mark.usefixtures("_x86")
@pytest.mark.parametrize(
    ("kernel", "line"),
    [
        (Kernel(get=-errno.EPERM, put=-errno.EPERM), "memory is not bound to NUMA node 1: this container forbids it"),
        (Kernel(get=-errno.ENOSYS, put=-errno.ENOSYS), "memory is not bound to NUMA node 1: this kernel has no NUMA"),
        (Kernel(put=-errno.EINVAL), "memory is not bound to NUMA node 1: Invalid argument"),
        (Kernel(policy=2), "the memory policy that was set from outside is kept, as by numactl"),
    ],
)
def test_what_is_forbidden_is_a_line(kernel: Kernel, line: str) -> None:
    assert take_part(part(memory_node=1), system_call=kernel) == [line]


def test_an_unknown_machine(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(platform, "machine", lambda: "riscv64")
    assert take_part(part(memory_node=1)) == ["memory is not bound to NUMA node 1: not known how on riscv64"]


def test_what_was_overruled_is_among_the_notices_of_a_place(monkeypatch: pytest.MonkeyPatch) -> None:
    """torchrun's own OMP_NUM_THREADS=1 is replaced where there are more cores, and a run has to say so."""
    monkeypatch.setenv("OMP_NUM_THREADS", "1")  # taking a place may set it
    facts = dataclasses.replace(read_host(), cpu_quota=None)
    cores = tuple(Core(cpus=(cpu,), socket=0, node=0, l2=cpu, l3=0) for cpu in range(4))
    topology = dataclasses.replace(read_topology(), cores=cores)
    environ = {"OMP_NUM_THREADS": "1", "TORCHELASTIC_RUN_ID": "x", "GOMP_CPU_AFFINITY": "0-3"}  # so that none is pinned
    plan = plan_host(topology, facts, environ=environ, processes=2)
    place = take_place(plan, 0)
    assert place.part.threads == 2
    (notice,) = place.notices
    assert notice.startswith("OMP_NUM_THREADS=1 is torchrun's own default, not a choice: using 2 threads per rank")


def test_this_kernel_takes_the_policy_or_says_why() -> None:
    """In a process of its own, whose memory it may change."""
    script = (
        "from fleetune.hardware.host_plan import RankPart\n"
        "from fleetune.hardware.pinning import take_part\n"
        "part = RankPart(local_rank=0, threads=1, cpus=(0,), is_pinned=False, nodes=(0,), memory_node=0)\n"
        "first, again = take_part(part), take_part(part)\n"
        "told = open('/proc/self/numa_maps').read() if not first else ''\n"
        "assert first or ('prefer' in told and 'set from outside' in again[0]), (first, again, told[:200])\n"
    )
    subprocess.run([sys.executable, "-c", script], check=True, timeout=60, env=environment())


# ---- launchers


@pytest.mark.parametrize(
    ("own", "launcher", "variable", "environ", "is_bound"),
    [
        (frozenset({0}), ALL, "OMPI_COMM_WORLD_RANK", {}, True),
        (ALL, ALL, "RANK", {}, False),
        (frozenset({0}), frozenset(), "RANK", {}, False),
        (frozenset({0, 1}), ALL, "SLURM_PROCID", {"SLURM_CPU_BIND_TYPE": "mask_cpu:"}, True),
        (frozenset({0, 1}), ALL, "SLURM_PROCID", {"SLURM_CPU_BIND_TYPE": "none"}, False),
        (frozenset({0, 1}), ALL, "SLURM_PROCID", {}, False),
        (frozenset({0}), ALL, "OMPI_COMM_WORLD_RANK", {"SLURM_CPU_BIND_TYPE": "none"}, True),
    ],
    ids=["mpirun binds", "torchrun", "unknown", "srun binds", "srun --cpu-bind=none", "srun", "mpirun within Slurm"],
)
def test_who_bound_the_rank(
    own: frozenset[int], launcher: frozenset[int], variable: str, environ: dict[str, str], is_bound: bool
) -> None:
    assert is_bound_by_launcher(own, launcher, variable, environ) == is_bound


def test_every_rank_of_this_host_finds_its_own_part() -> None:
    plans = [
        plan_this_host({"RANK": str(n)}, processes=2, threads=None, local_rank=n, rank_variable="RANK") for n in (0, 1)
    ]
    assert plans[0] == plans[1]
    if plans[0].parts[0].is_pinned:
        assert not set(plans[0].part_of(0).cpus) & set(plans[1].part_of(1).cpus)


def test_a_rank_that_is_bound_plans_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(pinning, "launcher_cpus", lambda variable, environ: frozenset(range(1024)))
    plan = plan_this_host({}, processes=2, threads=None, local_rank=1, rank_variable="OMPI_COMM_WORLD_RANK")
    assert [part.local_rank for part in plan.parts] == [1]
    assert set(plan.part_of(1).cpus) == os.sched_getaffinity(0)
