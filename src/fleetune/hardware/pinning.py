"""A rank takes its part of the host: it keeps to its cores and prefers the memory beside them.

    plan = plan_this_host(...)              every rank works out the same
    place = take_place(plan, local_rank)    in the rank itself, before `import torch`

The order matters. OpenMP's library reads its variables, and the CPUs it may use, when torch loads it; threads inherit
CPUs and memory policy from the thread that starts them.
"""

from __future__ import annotations

import contextlib
import ctypes
import errno
import os
import platform
import sys
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from fleetune.hardware.allocators import find_allocators
from fleetune.hardware.host import read_host
from fleetune.hardware.host_plan import HostPlan, RankPart, plan_host
from fleetune.hardware.topology import format_cpu_list, launcher_cpus, read_topology

# From the kernel's uapi headers: (set_mempolicy, get_mempolicy) of each architecture, and the policies.
_SYSTEM_CALLS = {"x86_64": (238, 239), "aarch64": (237, 236)}
_DEFAULT, _PREFERRED = 0, 1

SystemCall = Callable[..., int]
"""libc's `syscall`: returns 0, or the negative number of an error."""


def plan_this_host(
    environ: Mapping[str, str],
    *,
    processes: int | None,
    threads: int | None,
    local_rank: int | None = None,
    rank_variable: str | None = None,
) -> HostPlan:
    """Plan this host from what it shows.

    Args:
        environ: Environment of the ranks, usually `os.environ`.
        processes: Ranks on this host, as the user or an outer launcher decided; None for one per NUMA node.
        threads: Threads of each rank, as the user decided; None to derive them.
        local_rank: Which rank of this host the process is, if it is one.
        rank_variable: Name of the variable in which its launcher told it its rank.

    Raises:
        ConfigError: A number of threads, in the settings or in OMP_NUM_THREADS, that is none.
    """
    is_bound = rank_variable is not None and is_bound_by_launcher(
        frozenset(os.sched_getaffinity(0)), launcher_cpus(rank_variable, environ), rank_variable, environ
    )
    return plan_host(
        read_topology(),
        read_host(),
        environ=environ,
        processes=processes,
        threads=threads,
        bound_rank=local_rank if is_bound else None,
        allocators=[allocator.name for allocator in find_allocators()],
    )


def is_bound_by_launcher(
    own: frozenset[int], launcher: frozenset[int], rank_variable: str, environ: Mapping[str, str]
) -> bool:
    """Whether a launcher gave this rank CPUs of its own (mpirun --bind-to core), and not all its ranks the same.

    Ranks cannot see each other's CPUs before they meet, and those that have taken their parts would mislead. But a
    launcher that binds its ranks is not bound so itself.

    Args:
        own: Logical CPUs on which this rank may run.
        launcher: The same of its launcher; empty when that cannot be told.
        rank_variable: Name of the variable in which the launcher told the rank its number.
        environ: The rank's environment.
    """
    if rank_variable == "SLURM_PROCID" and environ.get("SLURM_CPU_BIND_TYPE", "none").startswith("none"):
        return False  # Slurm's daemon runs outside of the job's cpuset: fewer CPUs than its are the step's, for all
    return own < launcher


@dataclass(frozen=True, kw_only=True)
class Place:
    """The part of a host that a rank has taken."""

    plan: HostPlan
    part: RankPart
    notices: tuple[str, ...]
    """A line for each thing that was overruled, or that this system does not allow."""


def take_place(plan: HostPlan, local_rank: int) -> Place:
    """Keep this process to the part of the host that the plan gives it."""
    part = plan.part_of(local_rank)
    return Place(plan=plan, part=part, notices=(*plan.notices, *take_part(part)))


def take_part(part: RankPart, *, system_call: SystemCall | None = None) -> list[str]:
    """Keep this process to its part of the host: CPUs, threads, memory.

    Args:
        part: Of the host plan.
        system_call: Stands in for the kernel's.

    Returns:
        A line for each thing that this system does not allow; the run goes on without it.
    """
    if "torch" not in sys.modules:
        os.environ["OMP_NUM_THREADS"] = str(part.threads)
    lines = _pin(part) if part.is_pinned else []
    if part.memory_node is not None:
        lines += _prefer(part.memory_node, _kernel if system_call is None else system_call)
    return lines


def _pin(part: RankPart) -> list[str]:
    """Pin every thread that there is already; those to come inherit it."""
    try:
        os.sched_setaffinity(0, part.cpus)
        for task in os.listdir("/proc/self/task"):
            with contextlib.suppress(ProcessLookupError):  # it ended meanwhile
                os.sched_setaffinity(int(task), part.cpus)
    except OSError as error:
        return [f"not pinned to CPUs {format_cpu_list(part.cpus)}: {error.strerror}"]
    return []


# ---- memory


def _prefer(node: int, system_call: SystemCall) -> list[str]:
    """Take this thread's memory, and that of the threads it starts, from a node as long as it has some.

    Preferred and not bound: a node that is full would end the process. A policy that the user set (numactl) stays.
    """
    numbers = _SYSTEM_CALLS.get(platform.machine())
    if numbers is None:
        return [f"memory is not bound to NUMA node {node}: not known how on {platform.machine()}"]
    set_mempolicy, get_mempolicy = numbers
    policy = ctypes.c_int(_DEFAULT)
    failed = system_call(get_mempolicy, ctypes.byref(policy), None, 0, None, 0)
    if not failed and policy.value != _DEFAULT:
        return ["the memory policy that was set from outside is kept, as by numactl"]
    bits = 8 * ctypes.sizeof(ctypes.c_ulong)
    mask = (ctypes.c_ulong * (node // bits + 1))()
    mask[node // bits] = 1 << node % bits
    failed = system_call(set_mempolicy, _PREFERRED, mask, bits * len(mask) + 1)  # the kernel reads one bit less
    if not failed:
        return []
    # Containers forbid it (Docker's seccomp profile: EPERM) or kernels have no NUMA (ENOSYS). Little is lost: by
    # default a page lies on the node of the core that first writes to it.
    reason = {errno.EPERM: "this container forbids it", errno.ENOSYS: "this kernel has no NUMA"}
    return [f"memory is not bound to NUMA node {node}: {reason.get(-failed, os.strerror(-failed))}"]


def _kernel(number: int, *arguments: Any) -> int:
    syscall = ctypes.CDLL(None, use_errno=True).syscall
    syscall.restype = ctypes.c_long
    wide = [ctypes.c_long(argument) if isinstance(argument, int) else argument for argument in (number, *arguments)]
    return 0 if syscall(*wide) == 0 else -ctypes.get_errno()
