"""Plans of real machines, worked out by hand from their published layouts."""

from __future__ import annotations

import json
from collections.abc import Iterable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from fleetune.errors import ConfigError
from fleetune.hardware.host import read_host
from fleetune.hardware.host_plan import HostPlan, plan_host, plan_lines
from fleetune.hardware.topology import format_cpu_list, read_topology
from tests.hardware import machines
from tests.hardware.machines import Machine
from tests.hardware.test_host import V1_MOUNTS, V2_MOUNT


@pytest.fixture
def plan(tmp_path: Path) -> Any:
    """Plan a machine: settings as for `plan_host`, files by path, and the mask of the process."""

    def make(
        machine: Machine, *, affinity: Iterable[int] | None = None, files: dict[str, str] | None = None, **wishes: Any
    ) -> HostPlan:
        allowed = set(range(len(machine.cpus)) if affinity is None else affinity)
        root = machine.write(tmp_path, **(files or {}))
        topology, facts = read_topology(root, affinity=allowed), read_host(root, affinity=allowed)
        return plan_host(topology, facts, **{"environ": {}, **wishes})

    return make


def table(plan: HostPlan) -> list[tuple[str, int, int | None]]:
    """CPUs, threads and memory node of each rank."""
    return [(format_cpu_list(part.cpus), part.threads, part.memory_node) for part in plan.parts]


@pytest.mark.parametrize(
    ("machine", "expected"),
    [
        (machines.C5_9XLARGE, [("0-17", 18, None)]),
        (machines.C6I_16XLARGE, [("0-31", 32, None)]),
        (machines.R7IZ_METAL_16XL, [("0-31", 32, None)]),
        (
            machines.TWO_SOCKETS_SNC2,
            [
                ("0-2,5-6,10-12,15-16", 10, 0),
                ("3-4,7-9,13-14,17-19", 10, 1),
                ("20-22,25-26,30-32,35-36", 10, 2),
                ("23-24,27-29,33-34,37-39", 10, 3),
            ],
        ),
        (
            machines.TWO_SOCKETS_NO_SMT,
            [("0,2,4,6,8,10,12,14,16,18,20,22", 12, 0), ("1,3,5,7,9,11,13,15,17,19,21,23", 12, 1)],
        ),
        (machines.EPYC_NPS4, [("0-7", 8, 0), ("8-15", 8, 1), ("16-23", 8, 2), ("24-31", 8, 3)]),
        (machines.C7G_16XLARGE, [("0-63", 64, None)]),
        (machines.GRAVITON_BARE, [("0-15", 16, None)]),
        (machines.TWO_SOCKETS_C6I, [("0-31", 32, 0), ("32-63", 32, 1)]),
        (machines.CXL, [("0-31", 32, 0)]),
        (machines.ADJACENT_SMT, [("8,10,12,14", 4, None)]),
    ],
    ids=[
        *("c5.9xlarge", "c6i.16xlarge", "r7iz.metal-16xl", "2 x Xeon SNC-2", "2 x Xeon", "EPYC NPS4", "c7g.16xlarge"),
        *("Graviton without nodes", "c6i.32xlarge", "CXL", "cpuset 8-15"),
    ],
)
def test_defaults(machine: Machine, expected: list[tuple[str, int, int | None]], plan: Any) -> None:
    made = plan(machine)
    assert table(made) == expected
    assert all(part.is_pinned for part in made.parts)
    assert [part.local_rank for part in made.parts] == list(range(len(expected)))


# ---- ranks


def test_two_ranks_on_one_node(plan: Any) -> None:
    made = plan(machines.C5_9XLARGE, processes=2)
    assert table(made) == [("0-8", 9, None), ("9-17", 9, None)]
    assert made.reasons["ranks"] == "2, as the settings or the launcher say"


def test_ranks_of_a_node_keep_to_a_cache_each(plan: Any) -> None:
    """8 ranks, 8 L3 caches of 4 cores."""
    made = plan(machines.EPYC_NPS4, processes=8)
    assert [cpus for cpus, _, _ in table(made)] == [f"{n}-{n + 3}" for n in range(0, 32, 4)]


def test_one_rank_over_two_nodes_uses_both(plan: Any) -> None:
    made = plan(machines.TWO_SOCKETS_C6I, processes=1)
    assert table(made) == [("0-63", 64, None)]
    assert made.parts[0].nodes == (0, 1)


def test_three_ranks_stay_each_on_one_of_two_nodes(plan: Any) -> None:
    """16 threads each use 48 of 64 cores; 21 each would have a rank across the sockets."""
    made = plan(machines.TWO_SOCKETS_C6I, processes=3)
    assert table(made) == [("0-15", 16, 0), ("16-31", 16, 0), ("32-63", 16, 1)]
    assert "smallest share" in made.reasons["threads"]


def test_more_ranks_than_cores_share_them(plan: Any) -> None:
    made = plan(machines.ADJACENT_SMT, processes=5)
    assert table(made) == [("8-15", 1, None)] * 5
    assert made.reasons["cores"] == "not pinned: 5 ranks share 4 physical cores"
    assert not any(part.is_pinned for part in made.parts)


def test_sockets_stand_in_for_nodes_that_are_not_shown(plan: Any) -> None:
    machine = replace(
        machines.TWO_SOCKETS_C6I, nodes={}, cpus=[replace(cpu, node=None) for cpu in machines.TWO_SOCKETS_C6I.cpus]
    )
    made = plan(machine)
    assert table(made) == [("0-31", 32, None), ("32-63", 32, None)]
    assert made.reasons["ranks"] == "2: one per socket that has usable cores"
    assert "not shown" in made.lines()[1]


def test_uneven_nodes_after_taskset(plan: Any) -> None:
    """taskset -c 0-55 leaves 32 and 24 cores: two ranks of 24 threads use more than one of 32."""
    made = plan(machines.TWO_SOCKETS_C6I, affinity=range(56))
    assert table(made) == [("0-31", 24, 0), ("32-55", 24, 1)]
    assert made.reasons["allowed"].startswith("CPUs 0-55 of 128: restricted from outside")


def test_a_node_with_hardly_a_core_left_gets_no_rank(plan: Any) -> None:
    """taskset -c 0-33 leaves 32 and 2: two ranks of 2 threads would use 4 of 34 cores."""
    made = plan(machines.TWO_SOCKETS_C6I, affinity=range(34))
    assert table(made) == [("0-31", 32, 0)]
    assert made.reasons["ranks"] == (
        "1, for 2 NUMA nodes of 32, 2 usable cores: all ranks would wait for one on so few"
    )


# ---- quotas


def quota_v2(quota: str) -> dict[str, str]:
    return {
        "proc/self/cgroup": "0::/docker/1f\n",
        "proc/self/mountinfo": V2_MOUNT,
        "sys/fs/cgroup/docker/1f/cpu.max": f"{quota}\n",
    }


QUOTA_V1 = {
    "proc/self/cgroup": "4:cpu,cpuacct:/kubepods/pod1/c1\n",
    "proc/self/mountinfo": V1_MOUNTS,
    "sys/fs/cgroup/cpu,cpuacct/kubepods/pod1/cpu.cfs_quota_us": "250000\n",
    "sys/fs/cgroup/cpu,cpuacct/kubepods/pod1/cpu.cfs_period_us": "100000\n",
    "sys/fs/cgroup/cpu,cpuacct/kubepods/pod1/c1/cpu.cfs_quota_us": "-1\n",
    "sys/fs/cgroup/cpu,cpuacct/kubepods/pod1/c1/cpu.cfs_period_us": "100000\n",
}


@pytest.mark.parametrize("files", [quota_v2("250000 100000"), QUOTA_V1], ids=["v2", "v1, of the pod"])
def test_a_container_with_two_and_a_half_cpus(files: dict[str, str], plan: Any) -> None:
    made = plan(machines.C5_9XLARGE, files=files)
    assert table(made) == [("0-35", 2, None)]
    assert not made.parts[0].is_pinned
    assert made.reasons["threads"] == "2 a rank: a quota of 2.5 CPUs, rounded down"
    assert made.reasons["cores"] == ("not pinned: a quota of 2.5 of 18 cores is time, on whichever cores are free")


def test_a_quota_over_two_nodes_makes_one_rank(plan: Any) -> None:
    """Two ranks of one thread would use 2 of 3.5 CPUs, and share no node's memory either."""
    made = plan(machines.TWO_SOCKETS_C6I, files=quota_v2("350000 100000"))
    assert table(made) == [("0-127", 3, None)]
    assert made.reasons["ranks"] == "1: more could not be told to keep to a NUMA node each"


@pytest.mark.parametrize(("quota", "processes", "threads"), [("250000", 2, 1), ("50000", 1, 1), ("790000", 2, 3)])
def test_ranks_share_a_quota(quota: str, processes: int, threads: int, plan: Any) -> None:
    made = plan(machines.C5_9XLARGE, files=quota_v2(f"{quota} 100000"), processes=processes)
    assert [part.threads for part in made.parts] == [threads] * processes


def test_a_quota_of_all_cores_pins(plan: Any) -> None:
    """36 CPUs of time are more than 18 physical cores can use."""
    made = plan(machines.C5_9XLARGE, files=quota_v2("3600000 100000"))
    assert table(made) == [("0-17", 18, None)]
    assert made.parts[0].is_pinned


# ---- the user's wishes


def test_fewer_threads_keep_the_whole_share(plan: Any) -> None:
    """Two jobs of 4 threads then do not sit on the same 4 cores."""
    made = plan(machines.C5_9XLARGE, threads=4)
    assert table(made) == [("0-17", 4, None)]
    assert made.reasons["threads"] == "4 a rank, as --threads says"


def test_more_threads_than_cores_get_the_siblings(plan: Any) -> None:
    made = plan(machines.C5_9XLARGE, threads=36)
    assert table(made) == [("0-35", 36, None)]
    assert made.parts[0].is_pinned
    assert made.reasons["cores"] == "all logical CPUs: 36 threads are more than the physical cores"


def test_omp_num_threads_is_honoured(plan: Any) -> None:
    made = plan(machines.C5_9XLARGE, environ={"OMP_NUM_THREADS": "6"})
    assert table(made) == [("0-17", 6, None)]
    assert made.reasons["threads"] == "6 a rank, as OMP_NUM_THREADS=6 says"


@pytest.mark.parametrize(
    "launcher", [{"TORCHELASTIC_RUN_ID": "none"}, {"RAY_RAYLET_PID": "7", "RAY_JOB_ID": "01000000"}]
)
def test_a_launchers_single_thread_is_replaced(launcher: dict[str, str], plan: Any) -> None:
    made = plan(machines.C5_9XLARGE, processes=2, environ={"OMP_NUM_THREADS": "1", **launcher})
    assert table(made) == [("0-8", 9, None), ("9-17", 9, None)]
    assert "own default" in made.reasons["threads"]


def test_threads_that_are_none(plan: Any) -> None:
    with pytest.raises(ConfigError, match="OMP_NUM_THREADS=many"):
        plan(machines.C5_9XLARGE, environ={"OMP_NUM_THREADS": "many"})


@pytest.mark.parametrize(
    ("name", "value", "pins"),
    [
        ("KMP_AFFINITY", "granularity=fine,compact,1,0", True),
        ("KMP_AFFINITY", "granularity=fine,proclist=[0-3],explicit", False),
        ("GOMP_CPU_AFFINITY", "0-3", False),
        ("OMP_PLACES", "cores", True),
        ("OMP_PLACES", "{0},{1}", False),
        ("OMP_PROC_BIND", "close", True),
        ("KMP_BLOCKTIME", "1", True),
        ("CCL_WORKER_COUNT", "2", True),
        ("MALLOC_CONF", "background_thread:true", True),
    ],
)
def test_variables_of_the_guides_are_kept_and_shown(name: str, value: str, pins: bool, plan: Any) -> None:
    made = plan(machines.C5_9XLARGE, environ={name: value})
    assert made.reasons[name].startswith(f"{value} is kept: ")
    assert made.parts[0].is_pinned == pins


def test_allocators(plan: Any) -> None:
    made = plan(machines.C5_9XLARGE, allocators=["tcmalloc", "jemalloc"])
    assert made.lines()[1].endswith("  tcmalloc, jemalloc")
    assert "tcmalloc and jemalloc would have to measure faster first" in made.reasons["allocator"]
    preloaded = plan(machines.C5_9XLARGE, environ={"LD_PRELOAD": "/x/libiomp5.so:/x/libjemalloc.so.2"})
    assert preloaded.reasons["allocator"] == "jemalloc, as LD_PRELOAD says"


# ---- ranks of a launcher


def test_a_bound_rank_has_what_its_launcher_gave_it(plan: Any) -> None:
    """mpirun --map-by numa --bind-to numa: the second rank sees the second socket, siblings too."""
    mask = [*range(32, 64), *range(96, 128)]
    made = plan(machines.TWO_SOCKETS_C6I, affinity=mask, processes=2, bound_rank=1)
    assert [part.local_rank for part in made.parts] == [1]
    assert table(made) == [("32-63,96-127", 32, None)]
    assert not made.part_of(1).is_pinned
    assert made.reasons["cores"] == "not pinned: the launcher bound this rank to CPUs of its own"


def test_bound_to_one_core(plan: Any) -> None:
    made = plan(machines.C5_9XLARGE, affinity=[3, 21], processes=18, bound_rank=3)
    assert table(made) == [("3,21", 1, None)]


# ---- as text


def test_the_plan_as_text(plan: Any) -> None:
    assert plan(machines.TWO_SOCKETS_C6I).lines() == [
        "rank  host   cores  NUMA node  threads  allocator found",
        "0     node1  0-31   0          32       none",
        "1     node1  32-63  1          32       none",
        "",
        "ranks      2: one per NUMA node that has usable cores",
        "threads    32 a rank: its physical cores",
        "cores      each rank keeps to its own, one logical CPU per physical core",
        "memory     a rank on one NUMA node prefers the memory next to it, and takes other when that is full",
        "allocator  the C library's: neither tcmalloc nor jemalloc was found",
    ]


def test_the_plan_fits_into_a_record(plan: Any) -> None:
    told = json.loads(json.dumps(plan(machines.TWO_SOCKETS_C6I).to_dict()))
    assert told["parts"][1]["memory_node"] == 1


def test_the_plan_of_several_hosts_numbers_ranks_through_and_says_what_differs(plan: Any) -> None:
    here, there = plan(machines.TWO_SOCKETS_C6I), plan(machines.TWO_SOCKETS_C6I, threads=3)
    lines = plan_lines({"a": here, "b": HostPlan.from_dict(json.loads(json.dumps(there.to_dict())))}, [("more", "x")])
    assert [line.split()[:2] for line in lines[1:5]] == [["0", "a"], ["1", "a"], ["2", "b"], ["3", "b"]]
    told = [line.split(maxsplit=1) for line in lines[lines.index("") + 1 :]]
    threads = [text for topic, text in told if topic == "threads"]
    assert threads == [f"{here.reasons['threads']} (a)", f"{there.reasons['threads']} (b)"]
    assert [text for topic, text in told if topic == "cores"] == [here.reasons["cores"]]
    assert told[-1] == ["more", "x"]
