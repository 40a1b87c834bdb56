"""Processes of a host, found by the network namespace that they are in, and ended one by one."""

from __future__ import annotations

import contextlib
import os
import signal
import time
from collections.abc import Callable
from pathlib import Path

from lab.commands import LabError


def processes_in(namespace: Path) -> list[int]:
    """Processes of the machine that are in a network namespace."""
    wanted = namespace.stat()
    return [int(path.name) for path in Path("/proc").glob("[0-9]*") if _is_in(path, wanted)]


def end_processes(namespace: Path) -> None:
    """Kill every process in a network namespace and wait for the end of the last one.

    The file of a namespace that a lab died making is no namespace, and nothing is in it.
    """

    def ended() -> bool:
        for pid in processes_in(namespace):
            _kill_if_in(pid, namespace.stat())
        return not processes_in(namespace)

    if not wait_until(ended, timeout_s=10):
        raise LabError(f"processes in {namespace} do not end: {processes_in(namespace)}")


def wait_until(holds: Callable[[], bool], *, timeout_s: float) -> bool:
    """Ask again and again; whether it held within the time."""
    deadline = time.monotonic() + timeout_s
    while not holds():
        if time.monotonic() > deadline:
            return False
        time.sleep(0.01)
    return True


def _kill_if_in(pid: int, wanted: os.stat_result) -> None:
    """A process's number may already be another's: the handle is taken first, then the place is checked again."""
    with contextlib.suppress(ProcessLookupError):
        handle = os.pidfd_open(pid)
        try:
            if _is_in(Path("/proc") / str(pid), wanted):
                signal.pidfd_send_signal(handle, signal.SIGKILL)
        finally:
            os.close(handle)


def _is_in(process: Path, wanted: os.stat_result) -> bool:
    with contextlib.suppress(OSError):  # it may have ended by now
        return os.path.samestat((process / "ns" / "net").stat(), wanted)
    return False
