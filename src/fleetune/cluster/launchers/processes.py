"""The ranks of a host as processes, each the leader of a session of its own, and how they ended."""

from __future__ import annotations

import contextlib
import ctypes
import os
import re
import selectors
import shlex
import signal
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import IO

from fleetune.cluster.launchers.guard import ALL_WELL
from fleetune.cluster.launchers.signals import STOP_SIGNALS
from fleetune.errors import LaunchError

Output = Callable[[int, str, bytes], None]
"""(rank, "out" or "err", one line without its end): what ranks write, where it does not go to the launcher's own."""

_PR_SET_PDEATHSIG = 1
_LONGEST_LINE = 1 << 20
_OUTPUT_GRACE_S = 10.0
_OFTEN: dict[int, str] = {
    signal.SIGKILL: "not by the kernel for memory; by a user, a scheduler or a daemon such as systemd-oomd",
    signal.SIGBUS: "often a full /dev/shm or disk under a memory-mapped file; `df -h` shows it",
    signal.SIGILL: "often a library built for a newer CPU than this one; reinstall it on this machine",
    signal.SIGSEGV: "a crash in native code; run again with PYTHONFAULTHANDLER=1 to see where",
}
_FOR_MEMORY = "the kernel ended it because memory was used up; free memory, or use fewer processes or smaller batches"
_PERHAPS_FOR_MEMORY = "often the kernel's out-of-memory killer; free memory or use fewer processes"


@dataclass(frozen=True)
class RankExit:
    """How a rank ended."""

    rank: int
    status: int
    """Its exit status, or 128 + signal number."""
    killed_by: int | None = None
    """Signal number."""
    for_memory: bool | None = False
    """Whether the kernel's out-of-memory killer was at work while it ran; None where the kernel does not tell."""

    def in_words(self) -> str:
        if self.killed_by is None:
            return f"rank {self.rank} failed with exit status {self.status}"
        known = self.killed_by in set(signal.Signals)  # most real-time signals have no name
        name = signal.Signals(self.killed_by).name if known else f"signal {self.killed_by}"
        hint = f": {_OFTEN[self.killed_by]}" if self.killed_by in _OFTEN else ""
        if self.for_memory or self.for_memory is None:
            hint = f": {_FOR_MEMORY if self.for_memory else _PERHAPS_FOR_MEMORY}"
        return f"rank {self.rank} was killed by {name}{hint}"


class RankProcesses:
    """The process groups of the ranks. Leaving the context kills what is left of them.

    Ranks that ended stay unreaped until then: as long as a zombie leads the group, its number means no other
    process.

    Args:
        output: Gets what ranks write; None to let them write to this process's own streams.
    """

    def __init__(self, output: Output | None = None) -> None:
        self._processes: list[subprocess.Popen[bytes]] = []
        self._numbers: list[int] = []
        self._output = None if output is None else _OutputReader(output)
        self._kills_before = memory_kills()
        self._ended: set[int] = set()
        self._guard: subprocess.Popen[str] | None = None

    def __enter__(self) -> RankProcesses:
        return self

    def __exit__(self, *_: object) -> None:
        self.signal(signal.SIGKILL)
        for process in self._processes:
            process.wait()
        if self._output is not None:
            self._output.close()
        self._tell_guard(ALL_WELL)
        if self._guard is not None:
            with contextlib.suppress(OSError):
                self._guard.__exit__(None, None, None)  # closes the pipe and waits

    def start(self, command: Sequence[str], environs: Sequence[Mapping[str, str]]) -> None:
        """Start all ranks, one for each environment; after a `LaunchError`, those already started end with the context.

        Args:
            command: Program and arguments.
            environs: Of each rank; RANK is its number.
        """
        self._guard = _start_guard()
        for environ in environs:
            self._numbers.append(int(environ["RANK"]))
            self._start_one(command, environ)

    def _start_one(self, command: Sequence[str], environ: Mapping[str, str]) -> None:
        stream = None if self._output is None else subprocess.PIPE
        with _as_launch_error(command):
            process = subprocess.Popen(
                command,
                env=environ,
                stdin=subprocess.DEVNULL,
                stdout=stream,
                stderr=stream,
                start_new_session=True,
                preexec_fn=end_with_parent(),
            )
        self._processes.append(process)
        self._tell_guard(str(process.pid))
        if self._output is not None:
            self._output.read(self._numbers[-1], process)

    def _tell_guard(self, line: str) -> None:
        if self._guard is not None and self._guard.stdin is not None:
            with contextlib.suppress(OSError, ValueError):  # a dead guard is no reason to end a run
                print(line, file=self._guard.stdin, flush=True)

    def running(self) -> bool:
        return len(self._ended) < len(self._processes)

    def newly_ended(self) -> list[RankExit]:
        """Ranks that ended since the last call; first those killed by a signal, which no peer can have caused."""
        ends = []
        for index, process in enumerate(self._processes):
            if index not in self._ended and (end := self._peek_exit(index, process.pid)) is not None:
                self._ended.add(index)
                ends.append(end)
        return sorted(ends, key=lambda end: end.killed_by is None)

    def _peek_exit(self, index: int, pid: int) -> RankExit | None:
        """How a rank ended, if it has, without reaping it."""
        result, rank = os.waitid(os.P_PID, pid, os.WEXITED | os.WNOHANG | os.WNOWAIT), self._numbers[index]
        if result is None:
            return None
        if result.si_code == os.CLD_EXITED:
            return RankExit(rank, result.si_status)
        for_memory: bool | None = False
        if result.si_status == signal.SIGKILL:
            kills = memory_kills()
            for_memory = None if kills is None or self._kills_before is None else kills > self._kills_before
        return RankExit(rank, 128 + result.si_status, result.si_status, for_memory)

    def signal(self, signum: signal.Signals) -> None:
        """Send a signal to all ranks and to what they started, as a terminal would."""
        for process in self._processes:
            with contextlib.suppress(ProcessLookupError, PermissionError):
                os.killpg(process.pid, signum)

    def left_behind(self) -> list[int]:
        """Living processes in the ranks' groups."""
        groups = {process.pid for process in self._processes}
        return [pid for pid, group, state in _processes() if group in groups and state not in "ZX"]


class _OutputReader:
    """Reads the pipes of all ranks in a thread, and hands on whole lines."""

    def __init__(self, output: Output) -> None:
        self._output, self._selector = output, selectors.DefaultSelector()
        self._all_written = False
        self._thread: threading.Thread | None = None

    def read(self, rank: int, process: subprocess.Popen[bytes]) -> None:
        """Read what a rank writes, from now on."""
        for name, pipe in (("out", process.stdout), ("err", process.stderr)):
            assert pipe is not None
            self._selector.register(pipe, selectors.EVENT_READ, (pipe, rank, name, bytearray()))
        if self._thread is None:
            self._thread = threading.Thread(target=self._run, name="output of ranks", daemon=True)
            self._thread.start()

    def close(self) -> None:
        """Hand on what is left, once the ranks have ended."""
        self._all_written = True
        if self._thread is not None:
            self._thread.join(_OUTPUT_GRACE_S)  # so long only where a process of another session still writes

    def _run(self) -> None:
        while self._selector.get_map() or not self._all_written:
            last = self._all_written  # asked before looking: what comes in between is seen the next time
            for key, _ in (found := self._selector.select(timeout=0.1)):
                self._read_some(*key.data)
            if last and not found:  # a process of another session holds the other ends
                break
        for key in list(self._selector.get_map().values()):
            self._close(key.data[0])

    def _close(self, pipe: IO[bytes]) -> None:
        self._selector.unregister(pipe)
        pipe.close()

    def _read_some(self, pipe: IO[bytes], rank: int, name: str, begun: bytearray) -> None:
        begun += (chunk := os.read(pipe.fileno(), 65536))
        *lines, rest = begun.split(b"\n")
        if rest and (not chunk or len(rest) > _LONGEST_LINE):
            lines, rest = [*lines, rest], bytearray()
        begun[:] = rest
        for line in lines:
            self._output(rank, name, bytes(line))
        if not chunk:
            self._close(pipe)


def memory_kills(root: Path = Path("/")) -> int | None:
    """How many processes the kernel has ended since it started because memory was used up, in cgroups too.

    None where the kernel does not tell.
    """
    with contextlib.suppress(OSError):
        if match := re.search(r"^oom_kill (\d+)$", (root / "proc/vmstat").read_text(), re.MULTILINE):
            return int(match[1])
    return None


def _start_guard() -> subprocess.Popen[str]:
    command = [sys.executable, "-I", "-S", str(Path(__file__).with_name("guard.py"))]
    with _as_launch_error(command):
        return subprocess.Popen(
            command,
            stdin=subprocess.PIPE,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
            text=True,
            start_new_session=True,
            preexec_fn=_ignore_stops,
        )


@contextlib.contextmanager
def _as_launch_error(command: Sequence[str]) -> Iterator[None]:
    try:
        yield
    except OSError as error:
        raise LaunchError(
            f"cannot start {shlex.join(command)}: {error.filename or command[0]}: {error.strerror}"
        ) from error


def _processes() -> Iterator[tuple[int, int, str]]:
    """Process id, group and state of every process; the format is in proc_pid_stat(5)."""
    for entry in Path("/proc").glob("[0-9]*/stat"):
        with contextlib.suppress(OSError):  # it ended meanwhile
            state, _, group = entry.read_text(errors="replace").rpartition(")")[2].split()[:3]
            yield int(entry.parent.name), int(group), state


def _ignore_stops() -> None:
    """What the guard does before it starts: whoever tells every process of a job to stop tells it too."""
    for signum in STOP_SIGNALS:
        signal.signal(signum, signal.SIG_IGN)


def end_with_parent(signum: signal.Signals = signal.SIGKILL) -> Callable[[], None]:
    """What a child does before it becomes its command: ask the kernel to be sent a signal when the launcher dies.

    SIGKILL for ranks, since a launcher that could still say something would have passed a signal on; checkpoints are
    written such that this does no harm to them. The kernel watches the thread that starts the ranks, hence
    the main thread.
    """
    launcher = os.getpid()
    prctl = ctypes.CDLL(None).prctl  # looked up here: after a fork nothing may take a lock
    prctl.argtypes = (ctypes.c_int, *[ctypes.c_ulong] * 4)

    def before_exec() -> None:
        prctl(_PR_SET_PDEATHSIG, signum, 0, 0, 0)
        if os.getppid() != launcher:  # it died before the kernel was told
            os._exit(128 + signal.SIGKILL)

    return before_exec
