"""Checks of a host's memory and disks, of its limits, and of what earlier runs left."""

from __future__ import annotations

from fleetune.doctor.examine import Scope
from fleetune.doctor.facts import Disk, Facts, Remains
from fleetune.doctor.finding import Verdict, failure, ok, warning

_GB = 1e9
_FEW_MEMORY, _LITTLE_SHM = 2 * _GB, 0.1 * _GB
"""A small encoder in training takes a gigabyte or two. Docker gives a container 64 MB of /dev/shm."""
_FULL_DISK, _LITTLE_DISK = 0.2 * _GB, 5 * _GB
_FEW_FILES = 1024
"""The usual limit; every connection between ranks is a file."""


def memory(facts: Facts, scope: Scope) -> Verdict | None:
    """Whether there is memory to train in."""
    limit = facts.machine.memory_limit_bytes
    total = facts.machine.memory_bytes if limit is None else limit
    free = min(facts.memory_available_bytes, total)
    told = f"{total / _GB:.0f} GB" + ("" if limit is None else " by a limit of its control group")
    if free < _FEW_MEMORY:
        return warning(f"{free / _GB:.1f} GB of {told} available", "end what else runs there, or give it more memory")
    return ok(told)


def shared_memory(facts: Facts, scope: Scope) -> Verdict | None:
    """fleetune's ranks share memory without /dev/shm; MPI and workers of data loaders do not."""
    size = facts.shm_bytes
    fix = "docker run --shm-size=8g, or: sudo mount -o remount,size=8G /dev/shm"
    if size is None:
        return warning("there is none: MPI and data loaders' workers fail", fix)
    if size < _LITTLE_SHM:
        return warning(f"{size / 1e6:.0f} MB: MPI and data loaders' workers may need more", fix)
    return ok("big enough" if size >= _GB else f"{size / 1e6:.0f} MB")


def disks(facts: Facts, scope: Scope) -> Verdict | None:
    """Whether cache and temporary files have room."""
    closed = [disk for disk in facts.disks if disk.problem is not None]
    if closed:
        told = "; ".join(f"{disk.what} in {disk.path}: {disk.problem}" for disk in closed)
        return failure(f"cannot be written: {told}", "give --cache_dir, XDG_CACHE_HOME or TMPDIR a folder of yours")
    tightest = min(facts.disks, key=lambda disk: disk.free_bytes)
    if tightest.free_bytes < _LITTLE_DISK:
        verdict = failure if tightest.free_bytes < _FULL_DISK else warning
        return verdict(f"{_room(tightest)}", f"make room, or name another place: `df -h {tightest.path}`")
    return ok("room for cache and temporary files")


def _room(disk: Disk) -> str:
    return f"{disk.free_bytes / _GB:.1f} GB free for {disk.what} in {disk.path}"


def open_files(facts: Facts, scope: Scope) -> Verdict | None:
    """Whether a process may have as many files and connections as a run needs."""
    if facts.open_files < _FEW_FILES:
        return warning(
            f"a process may have {facts.open_files} files open: every connection between ranks is one",
            "ulimit -n 65536    (for good: /etc/security/limits.conf)",
        )
    return ok(f"{'at least ' if facts.open_files > _FEW_FILES else ''}{_FEW_FILES} per process")


def leftovers(facts: Facts, scope: Scope) -> Verdict | None:
    """Processes, shared memory and files that nobody will come back for."""
    remains = facts.remains
    told = [*_running(remains), *_files(remains)]
    if not told:
        return ok("none")
    pids = [str(one.pid) for one in remains.running]
    fixes = [f"kill {' '.join(pids)}    (if it is no run of yours)"] if pids else []
    paths = [*remains.shared_memory, *remains.partial]
    fixes += [f"rm -r {' '.join(paths)}"] if paths else []
    return warning("; ".join(told), "; ".join(fixes))


def _running(remains: Remains) -> list[str]:
    return [
        f"`{one.what}` has been running for {_age(one.age_s)} (pid {one.pid}"
        + (", what started it is gone)" if one.is_orphan else ")")
        for one in remains.running
    ]


def _age(seconds: float) -> str:
    for unit, length in (("days", 86400), ("hours", 3600), ("minutes", 60)):
        if seconds >= 2 * length:
            return f"{seconds / length:.0f} {unit}"
    return f"{seconds:.0f} s"


def _files(remains: Remains) -> list[str]:
    told = [f"{len(remains.shared_memory)} unused in /dev/shm"] if remains.shared_memory else []
    return [*told, *([f"{len(remains.partial)} unfinished in the cache"] if remains.partial else [])]
