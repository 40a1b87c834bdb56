"""Run one command as several ranks on this machine, and leave nothing behind.

    plan_local(command, ...) -> LocalPlan      what would be run, printable
    run_local(plan)          -> exit status    runs it

Every rank leads a session of its own. So a terminal's Ctrl-C reaches the launcher alone, which passes it on
once and waits; and whatever a rank starts can be ended with it, as one process group.
"""

from __future__ import annotations

import contextlib
import ctypes
import os
import select
import shlex
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from fleetune.cluster.launchers.guard import ALL_WELL
from fleetune.cluster.network import free_port
from fleetune.cluster.rank import RankInfo, as_environment
from fleetune.errors import ConfigError, LaunchError, PeerError
from fleetune.hardware.host import usable_cores

# Status of a rank that ends because another one failed, and so is never the one to report.
PEER_FAILED = PeerError.exit_status
# What a peer of a failed rank gets between SIGTERM and SIGKILL, and what the user's second Ctrl-C leaves.
PEER_GRACE_S = 5.0
FORCED_GRACE_S = 2.0

_STOP_SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
_STOPPED = tuple(128 + signum for signum in _STOP_SIGNALS)
_PR_SET_PDEATHSIG = 1
_LOOK_AROUND_S = 0.05

_OFTEN: dict[int, str] = {
    signal.SIGKILL: "often the kernel's out-of-memory killer; free memory or use fewer processes",
    signal.SIGBUS: "often a full /dev/shm or disk under a memory-mapped file; `df -h` shows it",
    signal.SIGILL: "often a library built for a newer CPU than this one; reinstall it on this machine",
    signal.SIGSEGV: "a crash in native code; run again with PYTHONFAULTHANDLER=1 to see where",
}


@dataclass(frozen=True, kw_only=True)
class LocalPlan:
    """One command as ranks of this machine. As a text, it is what would be typed to start them by hand."""

    command: tuple[str, ...]
    environ: Mapping[str, str] = field(repr=False)
    """What all ranks inherit; not shown, since it may hold secrets."""
    ranks: tuple[Mapping[str, str], ...]
    """Per rank, the variables set on top."""
    warnings: tuple[str, ...] = ()

    def __str__(self) -> str:
        lines = [f"warning: {warning}" for warning in self.warnings]
        for variables in self.ranks:
            settings = " ".join(f"{name}={shlex.quote(value)}" for name, value in variables.items())
            lines.append(f"{settings} {shlex.join(self.command)}")
        return "\n".join(lines)


def plan_local(
    command: Sequence[str],
    *,
    processes: int,
    threads: int,
    environ: Mapping[str, str],
    main_port: int | None = None,
    cores: int | None = None,
) -> LocalPlan:
    """Plan a run of several ranks on this machine.

    Args:
        command: Program and arguments, the same for all ranks.
        processes: Count of ranks.
        threads: OMP_NUM_THREADS of each rank.
        environ: What the ranks inherit, usually `os.environ`.
        main_port: TCP port where the ranks meet; a free one when not given.
        cores: Usable cores, for the warning; this machine's when not given.

    Raises:
        ConfigError: No command, or fewer than one process or thread.
    """
    told = {"processes": processes, "threads": threads}
    problems = [f"{name}={value}: 1 or more is expected" for name, value in told.items() if value < 1]
    problems += [] if command else ["no command to run was given"]
    if problems:
        raise ConfigError(problems)
    port = free_port() if main_port is None else main_port
    shared = {
        "GLOO_SOCKET_IFNAME": environ.get("GLOO_SOCKET_IFNAME") or "lo",
        "OMP_NUM_THREADS": str(threads),
        "FLEETUNE_LAUNCHER": "local",
        "PYTHONUNBUFFERED": "1",  # lines of several ranks come in the order in which they were written
    }
    return LocalPlan(
        command=tuple(command),
        environ=dict(environ),
        ranks=tuple(as_environment(_rank(rank, processes, port)) | shared for rank in range(processes)),
        warnings=_warnings(processes, threads, usable_cores() if cores is None else cores),
    )


def run_local(plan: LocalPlan) -> int:
    """Start the ranks, wait for all, and say in one line which one failed.

    The first SIGINT or SIGTERM is passed on to all ranks, which may take their time to save; a second one
    ends them. SIGHUP (a closed terminal) is passed on as SIGTERM. When a rank fails, the others are ended.
    Whatever ranks leave running is ended too, also when the launcher itself is killed. Only in the
    main thread are signals received.

    Returns:
        The status of the first rank that failed; else 128 + signal number when ranks were stopped; else 0.

    Raises:
        LaunchError: The command cannot be started.
    """
    for warning in plan.warnings:
        _say(f"warning: {warning}")
    with _SignalInbox() as inbox, _Ranks() as ranks:
        ranks.start(plan)
        return _Watch(ranks, inbox).until_all_ended()


def _rank(rank: int, processes: int, port: int) -> RankInfo:
    return RankInfo(
        rank=rank,
        world_size=processes,
        local_rank=rank,
        local_world_size=processes,
        launcher="local",
        main_address="127.0.0.1",
        main_port=port,
    )


def _warnings(processes: int, threads: int, cores: int) -> tuple[str, ...]:
    if processes * threads <= cores:
        return ()
    asked = f"{processes} processes with {threads} thread{'s' if threads > 1 else ''} each"
    return (f"{asked} share {cores} usable core{'s' if cores > 1 else ''} and will wait for each other",)


# ---- the ranks as processes


@dataclass(frozen=True)
class _Exit:
    """How a rank ended."""

    rank: int
    status: int
    """Its exit status, or 128 + signal number."""
    killed_by: int | None = None
    """Signal number."""

    def in_words(self) -> str:
        if self.killed_by is None:
            return f"rank {self.rank} failed with exit status {self.status}"
        known = self.killed_by in set(signal.Signals)  # most real-time signals have no name
        name = signal.Signals(self.killed_by).name if known else f"signal {self.killed_by}"
        hint = f": {_OFTEN[self.killed_by]}" if self.killed_by in _OFTEN else ""
        return f"rank {self.rank} was killed by {name}{hint}"


class _Ranks:
    """The process groups of the ranks. Leaving the context kills what is left of them.

    Ranks that ended stay unreaped until then: as long as a zombie leads the group, its number means no other
    process.
    """

    def __init__(self) -> None:
        self._processes: list[subprocess.Popen[bytes]] = []
        self._ended: set[int] = set()
        self._guard: subprocess.Popen[str] | None = None

    def __enter__(self) -> _Ranks:
        return self

    def __exit__(self, *_: object) -> None:
        self.signal(signal.SIGKILL)
        for process in self._processes:
            process.wait()
        self._tell_guard(ALL_WELL)
        if self._guard is not None:
            with contextlib.suppress(OSError):
                self._guard.__exit__(None, None, None)  # closes the pipe and waits

    def start(self, plan: LocalPlan) -> None:
        """Start all ranks. After a `LaunchError`, those already started end with the context."""
        self._guard = _start_guard()
        for variables in plan.ranks:
            self._start_one(plan.command, {**plan.environ, **variables})

    def _start_one(self, command: Sequence[str], environ: Mapping[str, str]) -> None:
        with _as_launch_error(command):
            process = subprocess.Popen(
                command,
                env=environ,
                stdin=subprocess.DEVNULL,
                start_new_session=True,
                preexec_fn=_end_with_parent(),
            )
        self._processes.append(process)
        self._tell_guard(str(process.pid))

    def _tell_guard(self, line: str) -> None:
        if self._guard is not None and self._guard.stdin is not None:
            with contextlib.suppress(OSError, ValueError):  # a dead guard is no reason to end a run
                print(line, file=self._guard.stdin, flush=True)

    def running(self) -> bool:
        return len(self._ended) < len(self._processes)

    def newly_ended(self) -> list[_Exit]:
        """Ranks that ended since the last call; first those killed by a signal, which no peer can have caused."""
        running = [rank for rank in range(len(self._processes)) if rank not in self._ended]
        ends = [end for rank in running if (end := _peek_exit(rank, self._processes[rank].pid)) is not None]
        self._ended.update(end.rank for end in ends)
        return sorted(ends, key=lambda end: end.killed_by is None)

    def signal(self, signum: signal.Signals) -> None:
        """Send a signal to all ranks and to what they started, as a terminal would."""
        for process in self._processes:
            with contextlib.suppress(ProcessLookupError, PermissionError):
                os.killpg(process.pid, signum)

    def left_behind(self) -> list[int]:
        """Living processes in the ranks' groups."""
        groups = {process.pid for process in self._processes}
        return [pid for pid, group, state in _processes() if group in groups and state not in "ZX"]


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


def _peek_exit(rank: int, pid: int) -> _Exit | None:
    """How a process ended, if it has, without reaping it."""
    result = os.waitid(os.P_PID, pid, os.WEXITED | os.WNOHANG | os.WNOWAIT)
    if result is None:
        return None
    if result.si_code == os.CLD_EXITED:
        return _Exit(rank, result.si_status)
    return _Exit(rank, 128 + result.si_status, result.si_status)


def _processes() -> Iterator[tuple[int, int, str]]:
    """Process id, group and state of every process; the format is in proc_pid_stat(5)."""
    for entry in Path("/proc").glob("[0-9]*/stat"):
        with contextlib.suppress(OSError):  # it ended meanwhile
            state, _, group = entry.read_text(errors="replace").rpartition(")")[2].split()[:3]
            yield int(entry.parent.name), int(group), state


def _ignore_stops() -> None:
    """What the guard does before it starts: whoever tells every process of a job to stop tells it too."""
    for signum in _STOP_SIGNALS:
        signal.signal(signum, signal.SIG_IGN)


def _end_with_parent() -> Callable[[], None]:
    """What a rank does before it becomes its command: ask the kernel to be killed when the launcher dies.

    SIGKILL, since a launcher that could still say something would have passed a signal on; checkpoints are
    written such that this does no harm to them. The kernel watches the thread that starts the ranks, hence
    the main thread.
    """
    launcher = os.getpid()
    prctl = ctypes.CDLL(None).prctl  # looked up here: after a fork nothing may take a lock
    prctl.argtypes = (ctypes.c_int, *[ctypes.c_ulong] * 4)

    def before_exec() -> None:
        prctl(_PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)
        if os.getppid() != launcher:  # it died before the kernel was told
            os._exit(128 + signal.SIGKILL)

    return before_exec


# ---- waiting for them


class _SignalInbox:
    """Collects the signals that arrive within the context, and wakes up who waits for one.

    Outside the main thread, where Python allows no handlers, it only waits, and looks around often.
    """

    def __init__(self) -> None:
        self._hears = threading.current_thread() is threading.main_thread()
        self._received: list[signal.Signals] = []
        self._before: dict[signal.Signals, signal._HANDLER] = {}

    def __enter__(self) -> _SignalInbox:
        self._reader, self._writer = os.pipe()
        os.set_blocking(self._reader, False)
        os.set_blocking(self._writer, False)
        if not self._hears:
            return self
        self._wakeup_before = signal.set_wakeup_fd(self._writer, warn_on_full_buffer=False)
        for signum in (*_STOP_SIGNALS, signal.SIGCHLD):
            # What is ignored stays so (nohup ignores SIGHUP); but of an ignored SIGCHLD no status could be
            # read.
            if signal.getsignal(signum) is not signal.SIG_IGN or signum == signal.SIGCHLD:
                self._before[signum] = signal.signal(signum, self._receive)
        return self

    def __exit__(self, *_: object) -> None:
        for signum, handler in self._before.items():
            signal.signal(signum, handler)
        if self._hears:
            signal.set_wakeup_fd(self._wakeup_before)
        os.close(self._reader)
        os.close(self._writer)

    def _receive(self, signum: int, _: object) -> None:
        self._received.append(signal.Signals(signum))

    def wait(self, timeout_s: float | None) -> Iterable[signal.Signals]:
        """Signals that asked to stop, in order; none when a rank ended or the time is over."""
        if not self._hears:
            timeout_s = min(_LOOK_AROUND_S, _LOOK_AROUND_S if timeout_s is None else timeout_s)
        select.select([self._reader], [], [], timeout_s)
        with contextlib.suppress(BlockingIOError):
            while os.read(self._reader, 4096):
                pass
        received, self._received = self._received, []
        return [signum for signum in received if signum != signal.SIGCHLD]


class _Watch:
    """What the launcher knows while the ranks run, and what follows from it."""

    def __init__(self, ranks: _Ranks, inbox: _SignalInbox) -> None:
        self._ranks = ranks
        self._inbox = inbox
        self._failures: list[_Exit] = []
        """In the order of time; without those ranks that the launcher itself ended."""
        self._stopped: list[_Exit] = []
        self._asked: signal.Signals | None = None
        self._forced: signal.Signals | None = None
        self._ending = False
        """Whether ranks were told to end at once, in contrast to: when they have saved."""
        self._due: tuple[float, signal.Signals] | None = None
        """The next signal for all ranks, and its time by the monotonic clock."""

    def until_all_ended(self) -> int:
        self._note_exits()
        while self._ranks.running():
            for signum in self._inbox.wait(self._patience_s()):
                self._on_signal(signum)
            self._note_exits()
            self._send_due()
        self._end_what_is_left()
        return self._verdict()

    def _patience_s(self) -> float | None:
        return None if self._due is None else max(0.0, self._due[0] - time.monotonic())

    def _on_signal(self, signum: signal.Signals) -> None:
        if self._asked is None and not self._ending:
            self._asked = signum
            _say("stopping after the current step; press Ctrl-C again to end at once")
            self._ranks.signal(signal.SIGTERM if signum == signal.SIGHUP else signum)
        elif signum != signal.SIGHUP:  # of one closed terminal it comes twice: from the kernel, and from the shell
            self._forced = signum if self._asked is not None else None
            self._end_ranks(FORCED_GRACE_S)

    def _note_exits(self) -> None:
        for end in self._ranks.newly_ended():
            if self._was_told(end):
                self._stopped.append(end)
            elif end.status != 0:
                self._failures.append(end)
        if self._failures and not self._ending and self._due is None:
            if self._failures[0].status == PEER_FAILED:
                # The rank that failed first is still on its way out: let it finish telling why.
                self._due = (time.monotonic() + FORCED_GRACE_S, signal.SIGTERM)
            else:
                self._end_ranks(PEER_GRACE_S)

    def _was_told(self, end: _Exit) -> bool:
        """Whether a rank ended as the user or the launcher wanted, and so did not fail."""
        if self._ending and end.killed_by in (signal.SIGTERM, signal.SIGKILL):
            return True
        return end.status in _STOPPED and (self._ending or self._asked is not None)

    def _end_ranks(self, grace_s: float) -> None:
        self._ending = True
        self._ranks.signal(signal.SIGTERM)
        self._due = (time.monotonic() + grace_s, signal.SIGKILL)

    def _send_due(self) -> None:
        if self._due is None or time.monotonic() < self._due[0]:
            return
        if self._due[1] == signal.SIGTERM:
            self._end_ranks(PEER_GRACE_S)
        else:
            self._ranks.signal(signal.SIGKILL)
            self._due = None

    def _end_what_is_left(self) -> None:
        """End the helpers that ranks left in their groups; most end by themselves once their rank is gone."""
        for signum, grace_s in ((None, 0.5), (signal.SIGTERM, FORCED_GRACE_S), (signal.SIGKILL, 0.5)):
            if signum is not None:
                self._ranks.signal(signum)
            deadline = time.monotonic() + grace_s
            while time.monotonic() < deadline:
                if not self._ranks.left_behind():
                    return
                time.sleep(0.02)

    def _verdict(self) -> int:
        """Exit status of the run; a failure is told in one line."""
        if self._forced is not None:
            return 128 + self._forced
        if self._failures:
            causes = [failure for failure in self._failures if failure.status != PEER_FAILED]
            first = (causes or self._failures)[0]
            _say(first.in_words())
            return first.status
        return self._stopped[0].status if self._stopped else 0


def _say(line: str) -> None:
    with contextlib.suppress(OSError, ValueError):  # the terminal may be the thing that was closed
        print(f"fleetune: {line}", file=sys.stderr, flush=True)
