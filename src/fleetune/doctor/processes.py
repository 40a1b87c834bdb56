"""Who listens on which port, and what earlier runs left behind: processes, shared memory, unfinished files."""

from __future__ import annotations

import os
import re
import time
from collections.abc import Iterator, Sequence
from pathlib import Path

import psutil

from fleetune.doctor.facts import Listener, Remains, Running

TORCHRUN_PORT = 29500
"""What torchrun takes when it is not told a port."""

PROBE = "fleetune.doctor.probe"
_OWN = (PROBE, "fleetune.kernels.status", "-m fleetune doctor", "fleetune doctor")
"""What a doctor starts, and itself: no leftovers."""
_OURS = re.compile(r"(\S+ -m )?fleetune\b")
_OF_LAUNCHERS = ("FLEETUNE_LAUNCHER", "FLEETUNE_SETTINGS")
"""Variables that fleetune's launchers set, and no user does."""

# What torch, Open MPI, MPICH, Intel MPI and Python's multiprocessing call their files in /dev/shm.
_SHARED_MEMORY = re.compile(r"torch_|vader_segment|sm_segment|mpich_shar|Intel_MPI|sem\.mp-|psm_|gloo|fleetune")
_UNFINISHED = ("*.partial", ".*.writing")
STALE_S = 24 * 3600.0
_MOST_SHOWN = 20


def read_listeners(ports: range) -> tuple[Listener, ...]:
    """Who listens on ports of a range, or on torchrun's."""
    found = {}
    for connection in _connections():
        port = connection.laddr.port if connection.laddr else None
        if connection.status == psutil.CONN_LISTEN and port is not None and (port in ports or port == TORCHRUN_PORT):
            found[port] = Listener(
                port=port, address=connection.laddr.ip, pid=connection.pid, process=_name_of(connection.pid)
            )
    return tuple(found[port] for port in sorted(found))


def _connections() -> Sequence[psutil._common.sconn]:
    try:
        return list(psutil.net_connections(kind="tcp"))
    except (psutil.Error, OSError):
        return []


def _name_of(pid: int | None) -> str | None:
    try:
        return None if pid is None else what_runs(psutil.Process(pid).cmdline())
    except psutil.Error:
        return None


def what_runs(words: Sequence[str]) -> str:
    """The program of a command line, and what it runs, without arguments: these may hold secrets."""
    if not words:
        return "a process without a name"
    program = Path(words[0].split()[0]).name
    if not re.match(r"python|pypy", program):
        return program
    rest = list(words[1:])
    while rest and rest[0].startswith("-") and rest[0] not in ("-m", "-c"):
        rest.pop(0)
    if rest[:1] == ["-m"]:
        module = " ".join(rest[1:2])
        command = [word for word in rest[2:3] if module == "fleetune" and re.fullmatch(r"[a-z-]+", word)]
        return " ".join([program, "-m", module, *command])
    if rest[:1] and Path(rest[0]).name == "fleetune":  # the command that pip installs
        return " ".join(["fleetune", *rest[1:2]])
    return " ".join([program, *(Path(word).name for word in rest[:1])])


# ---- leftovers


def read_remains(cache_dir: Path) -> Remains:
    """What earlier runs of this user left on this host.

    Args:
        cache_dir: Where tokens and kernels are kept.
    """
    return Remains(
        running=tuple(_running())[:_MOST_SHOWN],
        shared_memory=tuple(_unused(Path("/dev/shm")))[:_MOST_SHOWN],
        partial=tuple(_stale(cache_dir))[:_MOST_SHOWN],
    )


def _running() -> Iterator[Running]:
    """Ranks and launchers of this user, without this process and those that have started it."""
    mine = {os.getpid(), *(parent.pid for parent in psutil.Process().parents())}
    for process in psutil.process_iter():
        try:
            words = process.cmdline()
            if process.pid in mine or process.uids().real != os.getuid() or not _is_ours(process, words):
                continue
            age_s, parent = time.time() - process.create_time(), process.ppid()
            yield Running(pid=process.pid, what=what_runs(words), age_s=age_s, is_orphan=parent in (0, 1))
        except psutil.Error:  # it ended, or hides
            continue


def _is_ours(process: psutil.Process, words: Sequence[str]) -> bool:
    what = what_runs(words)
    if process.status() == psutil.STATUS_ZOMBIE or any(name in what for name in _OWN):
        return False
    return _OURS.match(what) is not None or any(name in process.environ() for name in _OF_LAUNCHERS)


def _unused(folder: Path) -> Iterator[str]:
    """Shared memory of this user, of the kinds that runs make, which no process maps or has open."""
    names = [path for path in _entries(folder) if _SHARED_MEMORY.match(path.name) and _is_mine(path)]
    used = set(_files_in_use()) if names else set()
    yield from (str(path) for path in names if str(path) not in used)


def _files_in_use() -> Iterator[str]:
    for process in psutil.process_iter():
        try:
            yield from (mapped.path for mapped in process.memory_maps())
            yield from (file.path for file in process.open_files())
        except (psutil.Error, OSError):
            continue


def _stale(cache_dir: Path) -> Iterator[str]:
    """Unfinished work in the cache, old enough that nobody is at it."""
    oldest_live = time.time() - STALE_S
    for pattern in _UNFINISHED:
        for place in (cache_dir, *(path for path in _entries(cache_dir) if path.is_dir())):
            for path in place.glob(pattern):
                if path.stat().st_mtime < oldest_live:
                    yield str(path)


def _entries(folder: Path) -> list[Path]:
    try:
        return sorted(folder.iterdir())
    except OSError:
        return []


def _is_mine(path: Path) -> bool:
    try:
        return path.lstat().st_uid == os.getuid()
    except OSError:
        return False
