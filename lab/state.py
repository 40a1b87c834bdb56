"""State folders of labs: which exist, whose owner lives, and taking down those whose owner does not.

A lab's owner holds a lock on its state folder. The kernel releases it when the process, and the command that it was
just running, have ended, however they ended.
"""

from __future__ import annotations

import contextlib
import fcntl
import os
import shutil
import signal
import threading
from collections.abc import Iterator
from pathlib import Path

from lab import cgroups, network
from lab.commands import LabError, inherited_locks
from lab.network import Network
from lab.processes import end_processes

ROOT = Path("/var/tmp")
"""Not a folder that hosts have of their own: their files are read inside, too."""
PREFIX = "fleetune-lab-"


def folder_of(number: int) -> Path:
    """A lab's state folder."""
    return ROOT / group_of(number)


def host_folder(number: int, host: str) -> Path:
    """A host's part of its lab's state folder."""
    return folder_of(number) / "hosts" / host


def group_of(number: int) -> str:
    """Name of a lab's control groups."""
    return f"{PREFIX}{number}"


@contextlib.contextmanager
def claimed() -> Iterator[int]:
    """A lab's number for as long as the block lasts; then everything of that lab is taken down.

    Dead labs are taken down first. Then it is the first number whose addresses and names nobody uses.
    """
    with _machine_lock():
        _sweep()
        number, lock = _claim()
    with _taken_down(number, lock):
        yield number


def sweep() -> list[int]:
    """Take down the labs whose owners have ended.

    Returns:
        Their numbers.
    """
    with _machine_lock():
        return _sweep()


def living() -> list[int]:
    """Numbers of the labs whose owners live."""
    with _machine_lock():
        found = [(number, _try_lock(folder_of(number))) for number in _numbers()]
        for _, lock in found:
            if lock is not None:
                os.close(lock)
        return [number for number, lock in found if lock is None]


def take_down(number: int) -> None:
    """Remove everything that a lab has or left; the state folder last, so that an interrupted attempt is repeated."""
    lab = Network(number=number)
    cgroups.thaw_remains(group_of(number))
    for namespace in network.namespaces(lab):
        end_processes(network.NAMESPACES / namespace)
    cgroups.remove(group_of(number))
    network.remove(lab)
    mounted = [line for line in Path("/proc/self/mountinfo").read_text().splitlines() if str(folder_of(number)) in line]
    assert not mounted, f"what hosts mount is seen by hosts only, but here is {mounted}: not deleting through that"
    shutil.rmtree(folder_of(number))


def _claim() -> tuple[int, int]:
    """Number and lock of a lab that is now this process's."""
    for number in network.NUMBERS:
        if not folder_of(number).exists() and network.is_free(Network(number=number)):
            folder_of(number).mkdir(mode=0o755)
            lock = _try_lock(folder_of(number))
            assert lock is not None, "nobody else makes labs while we hold the machine's lock"
            (folder_of(number) / "owner").write_text(str(os.getpid()))
            return number, lock
    first, last = (Network(number=n).subnet for n in (network.NUMBERS[0], network.NUMBERS[-1]))
    raise LabError(f"no free address range for a lab: everything from {first} to {last} is in use on this machine")


@contextlib.contextmanager
def _taken_down(number: int, lock: int) -> Iterator[None]:
    inherited_locks.add(lock)
    try:
        yield
    finally:
        with _ctrl_c_waits():
            try:
                take_down(number)
            finally:
                inherited_locks.remove(lock)
                os.close(lock)


@contextlib.contextmanager
def _ctrl_c_waits() -> Iterator[None]:
    """A second Ctrl-C comes into force at the end of the block. Only the main thread has to do with them."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    came: list[int] = []
    before = signal.signal(signal.SIGINT, lambda number, _: came.append(number))
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, before)
        if came:
            signal.raise_signal(signal.SIGINT)


@contextlib.contextmanager
def _machine_lock() -> Iterator[None]:
    """Only one process at a time looks for labs or makes one. A lock on a folder leaves no file behind."""
    descriptor = os.open(ROOT, os.O_RDONLY | os.O_DIRECTORY)
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX)
        yield
    finally:
        os.close(descriptor)


def _try_lock(folder: Path) -> int | None:
    """The descriptor that holds the lock; `None` while another process does."""
    descriptor = os.open(folder, os.O_RDONLY | os.O_DIRECTORY)
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        os.close(descriptor)
        return None
    return descriptor


def _numbers() -> list[int]:
    """Of all state folders that are root's own: anybody may put a folder here."""
    folders = [path for path in ROOT.glob(f"{PREFIX}*") if path.is_dir() and path.lstat().st_uid == os.geteuid()]
    return sorted(int(number) for path in folders if (number := path.name.removeprefix(PREFIX)).isdecimal())


def _sweep() -> list[int]:
    dead = [(number, lock) for number in _numbers() if (lock := _try_lock(folder_of(number))) is not None]
    for number, lock in dead:
        with _taken_down(number, lock):
            pass
    return [number for number, _ in dead]
