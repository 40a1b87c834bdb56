"""Host facts from text fixtures, and the number of threads that follows from them."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from fleetune.errors import ConfigError
from fleetune.hardware.host import (
    HostFacts,
    choose_threads,
    cpu_flags,
    cpu_quota,
    memory_limit_bytes,
    read_host,
    threads_per_rank,
    usable_cores,
)

XEON = """\
processor	: 0
vendor_id	: GenuineIntel
model name	: Intel(R) Xeon(R) Platinum 8488C
flags		: fpu sse4_2 fma avx avx2 avx512f avx512_bf16 avx512_vnni amx_bf16 amx_tile amx_int8
vmx flags	: vnmi preemption_timer

processor	: 1
model name	: Intel(R) Xeon(R) Platinum 8488C
"""
GRAVITON3 = """\
processor	: 0
BogoMIPS	: 2100.00
Features	: fp asimd evtstrm aes crc32 asimdhp sve i8mm bf16 dgh rng
CPU implementer	: 0x41
CPU architecture: 8
CPU variant	: 0x1
CPU part	: 0xd40
"""
NO_LIMIT_V1 = "9223372036854771712\n"
V1_MOUNTS = """\
22 28 0:21 / /proc rw,nosuid - proc proc rw
32 31 0:29 / /sys/fs/cgroup/cpu,cpuacct rw,relatime shared:9 - cgroup cgroup rw,cpu,cpuacct
35 31 0:32 / /sys/fs/cgroup/memory rw,relatime shared:10 - cgroup cgroup rw,memory
"""
V2_MOUNT = "30 23 0:26 / /sys/fs/cgroup rw,nosuid shared:4 - cgroup2 cgroup2 rw,nsdelegate\n"


def write(root: Path, files: dict[str, str]) -> Path:
    for name, text in files.items():
        path = root / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
    return root


def host(root: Path, cpu_info: str = XEON, cgroup: str = "0::/\n", mounts: str = V2_MOUNT, **files: str) -> Path:
    """A root folder of a machine with 16 GiB; `files` are named by their path below /sys/fs/cgroup."""
    cgroups = {f"sys/fs/cgroup/{name}": text for name, text in files.items()}
    return write(
        root,
        {
            "proc/cpuinfo": cpu_info,
            "proc/meminfo": "MemTotal:       16777216 kB\nMemFree:         123 kB\n",
            "proc/sys/kernel/hostname": "node1\n",
            "proc/sys/kernel/osrelease": "6.8.0-1012-aws\n",
            "proc/self/cgroup": cgroup,
            "proc/self/mountinfo": mounts,
            **cgroups,
        },
    )


def cores(root: Path, cpus: int) -> int:
    return read_host(root, affinity=range(cpus)).usable_cores


# ---- facts


def test_all_facts_of_an_unlimited_host(tmp_path: Path) -> None:
    facts = read_host(host(tmp_path), affinity={3, 1, 2})
    assert isinstance(facts, HostFacts)
    assert (facts.hostname, facts.kernel) == ("node1", "6.8.0-1012-aws")
    assert facts.cpu_model == "Intel(R) Xeon(R) Platinum 8488C"
    assert set(facts.isa) == {
        *("avx2", "fma", "avx512f", "avx512_vnni", "avx512_bf16"),
        *("amx_tile", "amx_int8", "amx_bf16"),
    }
    assert (facts.allowed_cpus, facts.cpu_quota, facts.usable_cores) == ((1, 2, 3), None, 3)
    assert (facts.memory_bytes, facts.memory_limit_bytes) == (16 << 30, None)


def test_arm_has_features_and_numbers(tmp_path: Path) -> None:
    facts = read_host(host(tmp_path, GRAVITON3), affinity={0})
    assert facts.cpu_model == "Arm Neoverse-V1"
    assert facts.isa == ("asimd", "asimdhp", "bf16", "i8mm", "sve")
    assert " ".join(cpu_flags(tmp_path)) == "fp asimd evtstrm aes crc32 asimdhp sve i8mm bf16 dgh rng"


def test_unknown_arm_core_keeps_its_numbers(tmp_path: Path) -> None:
    facts = read_host(host(tmp_path, GRAVITON3.replace("0xd40", "0xfff")), affinity={0})
    assert facts.cpu_model == "Arm implementer 0x41 part 0xfff"


def test_a_host_that_shows_nothing(tmp_path: Path) -> None:
    facts = read_host(tmp_path, affinity={0, 1})
    assert (facts.cpu_model, facts.isa, facts.usable_cores) == ("unknown", (), 2)
    assert (facts.memory_bytes, facts.memory_limit_bytes) == (0, None)


def test_this_host() -> None:
    facts = read_host()
    assert facts.hostname
    assert facts.allowed_cpus == tuple(sorted(os.sched_getaffinity(0)))
    assert 1 <= facts.usable_cores == usable_cores() <= len(facts.allowed_cpus)
    assert facts.memory_bytes > 1 << 20


# ---- cgroup v2


@pytest.mark.parametrize(
    ("limit", "expected"),
    [("250000 100000", 2), ("max 100000", 8), ("50000 100000", 1), ("1600000 100000", 8)],
    ids=["2.5 CPUs", "none", "half a CPU", "more than the CPUs"],
)
def test_v2_quota_of_a_container(tmp_path: Path, limit: str, expected: int) -> None:
    assert cores(host(tmp_path, **{"cpu.max": f"{limit}\n"}), 8) == expected


def test_v2_nested_takes_the_tightest_on_the_way_up(tmp_path: Path) -> None:
    root = host(
        tmp_path,
        cgroup="0::/kubepods/pod1/worker\n",
        **{
            "kubepods/cpu.max": "600000 100000\n",
            "kubepods/pod1/cpu.max": "300000 100000\n",
            "kubepods/pod1/worker/cpu.max": "max 100000\n",
            "kubepods/pod2/cpu.max": "100000 100000\n",
            "kubepods/memory.max": "8589934592\n",
            "kubepods/pod1/worker/memory.max": "max\n",
        },
    )
    assert cpu_quota(root) == 3.0
    assert memory_limit_bytes(root, 16 << 30) == 8 << 30


def test_v2_path_outside_of_the_namespace_leaves_the_mount_point(tmp_path: Path) -> None:
    root = host(tmp_path, cgroup="0::/../sibling\n", **{"cpu.max": "200000 100000\n"})
    assert cpu_quota(root) == 2.0


# ---- cgroup v1


def test_v1_quota_and_memory_along_the_own_path(tmp_path: Path) -> None:
    root = host(
        tmp_path,
        cgroup="9:memory:/slurm/job7\n4:cpu,cpuacct:/slurm/job7\n1:name=systemd:/\n",
        mounts=V1_MOUNTS,
        **{
            "cpu,cpuacct/cpu.cfs_quota_us": "-1\n",
            "cpu,cpuacct/cpu.cfs_period_us": "100000\n",
            "cpu,cpuacct/slurm/cpu.cfs_quota_us": "40000\n",
            "cpu,cpuacct/slurm/cpu.cfs_period_us": "10000\n",
            "cpu,cpuacct/slurm/job7/cpu.cfs_quota_us": "250000\n",
            "cpu,cpuacct/slurm/job7/cpu.cfs_period_us": "100000\n",
            "memory/memory.limit_in_bytes": NO_LIMIT_V1,
            "memory/slurm/job7/memory.limit_in_bytes": "4294967296\n",
        },
    )
    facts = read_host(root, affinity=range(8))
    assert (facts.cpu_quota, facts.usable_cores) == (2.5, 2)
    assert facts.memory_limit_bytes == 4 << 30


def test_v1_container_that_sees_only_its_own_part(tmp_path: Path) -> None:
    mounts = V1_MOUNTS.replace("0:29 / ", "0:29 /docker/1f ")
    root = host(
        tmp_path,
        cgroup="4:cpu,cpuacct:/docker/1f/inner\n",
        mounts=mounts,
        **{
            "cpu,cpuacct/inner/cpu.cfs_quota_us": "150000\n",
            "cpu,cpuacct/inner/cpu.cfs_period_us": "100000\n",
        },
    )
    assert cpu_quota(root) == 1.5


def test_v1_without_a_limit(tmp_path: Path) -> None:
    root = host(
        tmp_path,
        cgroup="4:cpu,cpuacct:/\n9:memory:/\n",
        mounts=V1_MOUNTS,
        **{
            "cpu,cpuacct/cpu.cfs_quota_us": "-1\n",
            "cpu,cpuacct/cpu.cfs_period_us": "100000\n",
            "memory/memory.limit_in_bytes": NO_LIMIT_V1,
        },
    )
    facts = read_host(root, affinity=range(4))
    assert (facts.cpu_quota, facts.memory_limit_bytes, facts.usable_cores) == (None, None, 4)


def test_hybrid_tree_with_a_space_in_its_mount_point(tmp_path: Path) -> None:
    mounts = V1_MOUNTS + r"41 31 0:38 / /sys/fs/cgroup/uni\040fied rw - cgroup2 cgroup2 rw" + "\n"
    root = host(
        tmp_path,
        cgroup="4:cpu,cpuacct:/\n0::/a\n",
        mounts=mounts,
        **{
            "uni fied/a/cpu.max": "300000 100000\n",
            "cpu,cpuacct/cpu.cfs_quota_us": "-1\n",
            "cpu,cpuacct/cpu.cfs_period_us": "100000\n",
        },
    )
    assert cpu_quota(root) == 3.0


# ---- threads


@pytest.mark.parametrize(("count", "ranks", "expected"), [(8, 2, 4), (7, 2, 3), (2, 2, 1), (1, 4, 1), (64, 1, 64)])
def test_threads_per_rank(count: int, ranks: int, expected: int) -> None:
    assert threads_per_rank(count, ranks) == expected


def test_the_users_request_wins() -> None:
    assert choose_threads({"OMP_NUM_THREADS": "2"}, 8, 2, 3) == (3, None)


@pytest.mark.parametrize(("told", "expected"), [("2", 2), ("3,2", 3), ("", 4), (" ", 4)])
def test_omp_num_threads_is_honoured(told: str, expected: int) -> None:
    assert choose_threads({"OMP_NUM_THREADS": told}, 8, 2, None) == (expected, None)


def test_an_equal_share_when_nothing_is_told() -> None:
    assert choose_threads({}, 8, 2, None) == (4, None)


def test_one_thread_is_honoured_without_torchrun() -> None:
    assert choose_threads({"OMP_NUM_THREADS": "1"}, 8, 2, None) == (1, None)


def test_torchruns_own_single_thread_is_replaced() -> None:
    environ = {"OMP_NUM_THREADS": "1", "TORCHELASTIC_RUN_ID": "none"}
    threads, notice = choose_threads(environ, 8, 2, None)
    assert threads == 4
    assert notice is not None
    assert "OMP_NUM_THREADS=1" in notice
    assert "\n" not in notice


@pytest.mark.parametrize(("count", "ranks"), [(2, 2), (8, 1)], ids=["no more cores", "torchrun sets it not"])
def test_single_thread_under_torchrun_that_stays(count: int, ranks: int) -> None:
    environ = {"OMP_NUM_THREADS": "1", "TORCHELASTIC_RUN_ID": "none"}
    assert choose_threads(environ, count, ranks, None) == (1, None)


RAY = {"RAY_RAYLET_PID": "17", "RAY_JOB_ID": "01000000"}
"""Of every worker process of Ray's."""


@pytest.mark.parametrize(("ranks", "expected"), [(1, 8), (2, 4)])
def test_rays_own_single_thread_is_replaced(ranks: int, expected: int) -> None:
    threads, notice = choose_threads({"OMP_NUM_THREADS": "1", **RAY}, 8, ranks, None)
    assert threads == expected
    assert notice is not None
    assert notice.startswith("OMP_NUM_THREADS=1 is Ray's own default, not a choice: ")


def test_cpus_that_ray_promised_are_honoured() -> None:
    """num_cpus=3 of an actor."""
    assert choose_threads({"OMP_NUM_THREADS": "3", **RAY}, 8, 2, None) == (3, None)


def test_a_driver_that_started_ray_is_no_worker() -> None:
    assert choose_threads({"OMP_NUM_THREADS": "1", "RAY_ADDRESS": "auto"}, 8, 1, None) == (1, None)


@pytest.mark.parametrize("told", ["0", "many", "-2", "²"])
def test_omp_num_threads_that_is_no_number(told: str) -> None:
    with pytest.raises(ConfigError, match=f"OMP_NUM_THREADS={told}"):
        choose_threads({"OMP_NUM_THREADS": told}, 8, 2, None)


def test_no_threads_requested() -> None:
    with pytest.raises(ConfigError, match="threads=0"):
        choose_threads({}, 8, 2, 0)
