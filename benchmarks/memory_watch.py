"""Peak memory of every process of a command, read from the kernel's own high-water marks (Linux)."""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path

PROC = Path("/proc")


@dataclass(frozen=True, kw_only=True)
class ProcessPeak:
    """One process of the command."""

    role: str
    """"rank 0", "rank 1" ..., "launcher", or "helper" for what these start."""
    peak_rss_bytes: int
    """Most memory it ever had resident, pages of mapped files and shared libraries included."""


@dataclass(frozen=True, kw_only=True)
class ProcessStatus:
    """What is read of `/proc/<pid>/status`."""

    parent: int
    peak_rss_bytes: int | None
    """None for a process that has ended, and for threads of the kernel."""


class MemoryWatch:
    """Reads the peaks of a process and all its descendants again and again, until the `with` block is left.

    The kernel keeps the peak of each process (`VmHWM`), so nothing is missed between two readings but what a process
    adds after the last one before its end. `getrusage` would name only the largest process, and counts the memory of
    the parent before `exec` too.

    Args:
        root: Process id of the command.
        root_role: What the command itself is.
        interval_s: Time between readings, seconds.
    """

    def __init__(self, root: int, root_role: str, interval_s: float = 0.05) -> None:
        self._root, self._root_role, self._interval_s = root, root_role, interval_s
        self._peaks: dict[int, ProcessPeak] = {}
        self._ended = threading.Event()
        self._thread = threading.Thread(target=self._watch, name="memory-watch", daemon=True)

    def __enter__(self) -> MemoryWatch:
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._ended.set()
        self._thread.join()

    def peaks(self) -> list[ProcessPeak]:
        """What was seen so far, the roles in alphabetical order."""
        return sorted(self._peaks.values(), key=lambda peak: (peak.role, -peak.peak_rss_bytes))

    def _watch(self) -> None:
        while True:
            statuses = read_statuses(PROC)
            for pid in family(self._root, {p: status.parent for p, status in statuses.items()}):
                size = statuses[pid].peak_rss_bytes
                if size is not None:  # the last reading counts: an earlier one may be from before `exec`
                    role = role_of(pid, statuses[pid].parent, self._root, self._root_role)
                    self._peaks[pid] = ProcessPeak(role=role, peak_rss_bytes=size)
            if self._ended.wait(self._interval_s):
                return


def read_statuses(proc: Path) -> dict[int, ProcessStatus]:
    """The status of every process that is there, by process id."""
    found = {}
    for folder in proc.iterdir():
        if folder.name.isdecimal():
            with contextlib.suppress(OSError):  # it may end while it is read
                found[int(folder.name)] = parse_status((folder / "status").read_text())
    return found


def parse_status(text: str) -> ProcessStatus:
    """Understand a `status` file; the format is in proc_pid_status(5)."""
    fields = dict(line.split(":", 1) for line in text.splitlines() if ":" in line)
    peak = fields.get("VmHWM")
    return ProcessStatus(
        parent=int(fields["PPid"]), peak_rss_bytes=None if peak is None else int(peak.split()[0]) * 1024
    )


def family(root: int, parents: Mapping[int, int]) -> Iterator[int]:
    """The process and its descendants, among those whose parent is known."""
    if root in parents:
        yield root
    for pid, parent in parents.items():
        if parent == root and pid != root:
            yield from family(pid, parents)


def role_of(pid: int, parent: int, root: int, root_role: str) -> str:
    """What a process of the command is; ranks have their number in their environment."""
    if pid == root:
        return root_role
    rank = rank_of(pid)
    return "helper" if rank is None or rank == rank_of(parent) else f"rank {rank}"


def rank_of(pid: int) -> str | None:
    """The variable RANK of a process."""
    try:
        entries = (PROC / str(pid) / "environ").read_bytes().split(b"\0")
    except OSError:
        return None
    return next((entry[5:].decode() for entry in entries if entry.startswith(b"RANK=")), None)
