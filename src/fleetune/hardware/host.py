"""What this host offers a process: its CPUs, what it may use of them, and its memory.

Everything is read from text files under a root folder, so that any machine can be a test fixture.
"""

from __future__ import annotations

import math
import os
import platform
import re
from collections.abc import Collection, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path

from fleetune.errors import ConfigError

# Instruction sets that decide which kernels and data types are worth using, in the spelling of /proc/cpuinfo.
ISA_OF_INTEREST = (
    *("avx2", "fma", "avx_vnni", "avx512f", "avx512_vnni", "avx512_bf16", "avx512_fp16"),
    *("amx_tile", "amx_int8", "amx_bf16"),
    *("asimd", "asimdhp", "bf16", "i8mm", "sve", "sve2"),
)

# Arm's /proc/cpuinfo has numbers where x86 has a name: (implementer, part).
_ARM_CORES = {
    ("0x41", "0xd08"): "Arm Cortex-A72",
    ("0x41", "0xd0c"): "Arm Neoverse-N1",
    ("0x41", "0xd40"): "Arm Neoverse-V1",
    ("0x41", "0xd49"): "Arm Neoverse-N2",
    ("0x41", "0xd4f"): "Arm Neoverse-V2",
    ("0xc0", "0xac3"): "Ampere-1",
}


@dataclass(frozen=True, kw_only=True)
class HostFacts:
    """One host, as this process sees it."""

    hostname: str
    cpu_model: str
    isa: tuple[str, ...]
    """Those of `ISA_OF_INTEREST` that the CPU and the kernel offer."""
    allowed_cpus: tuple[int, ...]
    """Logical CPUs on which the process may run."""
    cpu_quota: float | None
    """CPU time per wall-clock time that the cgroups grant, in CPUs; `None` when unlimited."""
    usable_cores: int
    """Smaller of allowed CPUs and quota, in whole CPUs, at least 1."""
    memory_bytes: int
    """Memory of the machine."""
    memory_limit_bytes: int | None
    """Memory that the cgroups grant; `None` when unlimited."""
    kernel: str
    python: str


def read_host(root: Path = Path("/"), *, affinity: Collection[int] | None = None) -> HostFacts:
    """Read the facts of this host.

    Args:
        root: Folder that holds `proc` and `sys`.
        affinity: Logical CPUs the process may run on; the calling thread's own mask when not given.
    """
    allowed = tuple(sorted(os.sched_getaffinity(0) if affinity is None else affinity))
    cpu_info = read_text(root / "proc/cpuinfo")
    quota = cpu_quota(root)
    total = _memory_bytes(read_text(root / "proc/meminfo"))
    return HostFacts(
        hostname=read_text(root / "proc/sys/kernel/hostname").strip(),
        cpu_model=_cpu_model(cpu_info),
        isa=_isa(cpu_info),
        allowed_cpus=allowed,
        cpu_quota=quota,
        usable_cores=_whole_cores(len(allowed), quota),
        memory_bytes=total,
        memory_limit_bytes=memory_limit_bytes(root, total),
        kernel=read_text(root / "proc/sys/kernel/osrelease").strip(),
        python=platform.python_version(),
    )


def usable_cores() -> int:
    """Whole CPUs that this process may use: those it may run on, cut to its cgroups' quota, at least 1."""
    return _whole_cores(len(os.sched_getaffinity(0)), cpu_quota())


def _whole_cores(allowed: int, quota: float | None) -> int:
    return max(1, allowed if quota is None else min(allowed, math.floor(quota)))


# ---- threads


def threads_per_rank(cores: int, local_world_size: int) -> int:
    """Equal share of a host's usable cores, at least 1."""
    return max(1, cores // local_world_size)


def choose_threads(
    environ: Mapping[str, str], cores: int, local_world_size: int, requested: int | None
) -> tuple[int, str | None]:
    """Decide how many threads a rank computes with.

    The user's own request wins, then OMP_NUM_THREADS, then an equal share of the cores. A launcher that sets
    OMP_NUM_THREADS=1 by itself when the user has not set it expresses no wish of the user's.

    Args:
        environ: The rank's environment.
        cores: Usable cores of the host.
        local_world_size: Count of ranks on the host.
        requested: The user's setting, or `None` to derive it.

    Returns:
        The number of threads, and one line to print when a variable was overruled.

    Raises:
        ConfigError: A number of threads that is none.
    """
    share = threads_per_rank(cores, local_world_size)
    if requested is not None:
        if requested < 1:
            raise ConfigError(f"threads={requested}: 1 or more is expected")
        return requested, None
    told = environ.get("OMP_NUM_THREADS", "").split(",")[0].strip()  # a list gives one number per nesting level
    if not told:
        return share, None
    if not (told.isascii() and told.isdecimal() and int(told) >= 1):
        raise ConfigError(
            f"OMP_NUM_THREADS={environ['OMP_NUM_THREADS']} is not a number of 1 or more: correct or unset it"
        )
    launcher = _sets_one_thread(environ, local_world_size)
    if int(told) == 1 and share > 1 and launcher is not None:
        ranks = f"{local_world_size} rank{'s' if local_world_size > 1 else ''}"
        return share, (
            f"OMP_NUM_THREADS=1 is {launcher}'s own default, not a choice: using {share} threads per rank "
            f"({cores} cores, {ranks} on this host); --threads 1 keeps 1"
        )
    return int(told), None


def _sets_one_thread(environ: Mapping[str, str], local_world_size: int) -> str | None:
    """The launcher, if it is one that sets OMP_NUM_THREADS=1 where the user has not set it.

    torchrun does when it starts several ranks on a host. Ray gives each worker the number of CPUs that it was promised,
    which is 1 unless something else was asked for.
    """
    if local_world_size > 1 and "TORCHELASTIC_RUN_ID" in environ:
        return "torchrun"
    return "Ray" if {"RAY_RAYLET_PID", "RAY_JOB_ID"} <= set(environ) else None


# ---- cgroups


def cpu_quota(root: Path = Path("/")) -> float | None:
    """Smallest quota, in CPUs, from the process's own cgroups up to their mounts; `None` when unlimited."""
    quotas = [_v1_quota(folder) for folder in _cgroup_folders(root, "cpu")]
    quotas += [_v2_quota(folder) for folder in _cgroup_folders(root, None)]
    return min((quota for quota in quotas if quota is not None), default=None)


def memory_limit_bytes(root: Path, total: int) -> int | None:
    """Smallest memory limit on the way up; `None` when unlimited, or no less than the machine's `total`."""
    texts = [read_text(folder / "memory.limit_in_bytes").strip() for folder in _cgroup_folders(root, "memory")]
    texts += [read_text(folder / "memory.max").strip() for folder in _cgroup_folders(root, None)]
    # cgroup v1 spells "no limit" as the greatest page-aligned number, v2 as "max".
    return min((int(text) for text in texts if text.isdecimal() and int(text) < total), default=None)


def _v1_quota(folder: Path) -> float | None:
    quota, period = read_text(folder / "cpu.cfs_quota_us").strip(), read_text(folder / "cpu.cfs_period_us").strip()
    return int(quota) / int(period) if quota.isdecimal() and period.isdecimal() and int(period) else None


def _v2_quota(folder: Path) -> float | None:
    quota, _, period = read_text(folder / "cpu.max").strip().partition(" ")
    return int(quota) / int(period) if quota.isdecimal() and period.isdecimal() and int(period) else None


def _cgroup_folders(root: Path, controller: str | None) -> Iterator[Path]:
    """Folders of the process's cgroup and its ancestors, innermost first.

    Args:
        root: Folder that holds `proc` and `sys`.
        controller: A cgroup v1 controller, or `None` for the v2 tree.
    """
    path = _cgroup_path(read_text(root / "proc/self/cgroup"), controller)
    mount = _cgroup_mount(read_text(root / "proc/self/mountinfo"), controller)
    if path is None or mount is None:
        return
    mounted, mount_point = mount
    # A container may see only a part of the tree; of a path outside of that part only the mount point is
    # left.
    inside = path.relative_to(mounted) if path.is_relative_to(mounted) and ".." not in path.parts else Path()
    for folder in (inside, *inside.parents):
        yield root / mount_point.relative_to("/") / folder


def _cgroup_path(cgroups: str, controller: str | None) -> Path | None:
    """Path of the process in a tree, from lines like "4:cpu,cpuacct:/docker/1f" (v1) and "0::/user" (v2)."""
    for line in cgroups.splitlines():
        number, controllers, path = line.split(":", 2)
        if (number == "0" and not controllers) if controller is None else controller in controllers.split(","):
            return Path(path)
    return None


def _cgroup_mount(mounts: str, controller: str | None) -> tuple[Path, Path] | None:
    """Which part of a tree is mounted, and where. The format of a line is in proc_pid_mountinfo(5)."""
    for line in mounts.splitlines():
        before, _, after = line.partition(" - ")
        fields, (kind, _, options) = before.split(), after.split(maxsplit=2)
        is_v1 = kind == "cgroup" and controller in options.split(",")
        if is_v1 if controller is not None else kind == "cgroup2":
            return Path(_unescape(fields[3])), Path(_unescape(fields[4]))
    return None


def _unescape(path: str) -> str:
    return re.sub(r"\\([0-7]{3})", lambda match: chr(int(match[1], 8)), path)


# ---- CPU and memory


def _cpu_model(cpu_info: str) -> str:
    if model := _field(cpu_info, "model name"):
        return model
    implementer, part = _field(cpu_info, "CPU implementer"), _field(cpu_info, "CPU part")
    if not part:
        return "unknown"
    return _ARM_CORES.get((implementer, part), f"Arm implementer {implementer} part {part}")


def cpu_flags(root: Path = Path("/")) -> tuple[str, ...]:
    """All that /proc/cpuinfo says the CPU can do, in its order."""
    return _flags(read_text(root / "proc/cpuinfo"))


def _flags(cpu_info: str) -> tuple[str, ...]:
    return tuple((_field(cpu_info, "flags") or _field(cpu_info, "Features")).split())


def _isa(cpu_info: str) -> tuple[str, ...]:
    flags = _flags(cpu_info)
    return tuple(name for name in ISA_OF_INTEREST if name in flags)


def _field(cpu_info: str, name: str) -> str:
    match = re.search(rf"^{name}[ \t]*:[ \t]*(.*)$", cpu_info, re.MULTILINE)
    return match[1].strip() if match else ""


def _memory_bytes(mem_info: str) -> int:
    match = re.search(r"^MemTotal:\s+(\d+) kB", mem_info, re.MULTILINE)
    return int(match[1]) * 1024 if match else 0


def read_text(path: Path) -> str:
    """The text of a file of the system's; nothing where a kernel or a container does not show it."""
    try:
        return path.read_text(errors="replace")
    except OSError:
        return ""
