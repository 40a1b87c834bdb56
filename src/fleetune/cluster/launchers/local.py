"""Run one command as several ranks on this machine, and leave nothing behind.

    plan_local(command, ...) -> LocalPlan      what would be run, printable
    run_local(plan)          -> exit status    runs it

Every rank leads a session of its own. So a terminal's Ctrl-C reaches the launcher alone, which passes it on
once and waits; and whatever a rank starts can be ended with it, as one process group.
"""

from __future__ import annotations

import contextlib
import shlex
import signal
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field

from fleetune.cluster.job import is_our_own, stop_notice
from fleetune.cluster.launchers.processes import RankExit, RankProcesses
from fleetune.cluster.launchers.rank_logs import show
from fleetune.cluster.launchers.signals import STOP_SIGNALS, SignalInbox
from fleetune.cluster.network import free_port
from fleetune.cluster.rank import RankInfo, as_environment
from fleetune.errors import ConfigError, PeerError
from fleetune.hardware.host import usable_cores

# Status of a rank that ends because another one failed, and so is never the one to report.
PEER_FAILED = PeerError.exit_status
# What a peer of a failed rank gets between SIGTERM and SIGKILL, and what the user's second Ctrl-C leaves.
PEER_GRACE_S = 5.0
FORCED_GRACE_S = 2.0
# What ranks get to save in after SIGTERM or a closed terminal: nobody will press Ctrl-C again.
UNATTENDED_GRACE_S = 120.0

_STOPPED = tuple(128 + signum for signum in STOP_SIGNALS)


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
        **({} if _at_terminal() else {"PYTHONUNBUFFERED": "1"}),
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
    ends them. SIGHUP (a closed terminal) is passed on as SIGTERM. After either of these two, ranks that do not end are
    ended after `UNATTENDED_GRACE_S`. When a rank fails, the others are ended.
    Whatever ranks leave running is ended too, also when the launcher itself is killed. Only in the
    main thread are signals received.

    Returns:
        The status of the first rank that failed; else 128 + signal number when ranks were stopped; else 0.

    Raises:
        LaunchError: The command cannot be started.
    """
    for warning in plan.warnings:
        say(f"warning: {warning}")
    read = len(plan.ranks) > 1 and not _at_terminal()
    with SignalInbox() as inbox, RankProcesses(_show_line if read else None) as ranks:
        ranks.start(plan.command, [{**plan.environ, **variables} for variables in plan.ranks])
        watch = Watch(ranks, inbox, notice=stop_notice(plan.command), interrupt=_interrupt_of(plan.command))
        watch.until_all_ended()
    if watch.first_failure is not None:
        say(watch.first_failure.in_words())
    return watch.status


def _at_terminal() -> bool:
    """Whether what is written is seen on a terminal: programs then write whole lines by themselves.

    Elsewhere Python writes blocks of 8 KiB, or, unbuffered, the pieces of a line, and lines of several ranks would be
    torn; so those are read and handed on line by line.
    """
    return all(stream is not None and stream.isatty() for stream in (sys.stdout, sys.stderr))


def _show_line(rank: int, stream: str, line: bytes) -> None:
    show(line.decode(errors="replace"), sys.stdout if stream == "out" else sys.stderr)


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


class Watch:
    """What the launcher knows while the ranks of a host run, and what follows from it.

    Args:
        ranks: The ranks, started.
        inbox: Where signals arrive that ask to stop.
        notice: Told when ranks are asked to stop.
        tell: Told what happens while a run is stopped; None to tell the user.
        on_failure: Told of the first rank that failed by itself, at once.
        interrupt: What ranks are sent for a Ctrl-C.
        ends_alone: Whether to end ranks that take long to stop, where nobody is there to ask again.
    """

    def __init__(self, ranks: RankProcesses, inbox: SignalInbox, *, notice: str = "",
                 tell: Callable[[str], None] | None = None, on_failure: Callable[[RankExit], None] = lambda end: None,
                 interrupt: signal.Signals = signal.SIGINT, ends_alone: bool = True) -> None:  # fmt: skip
        self._ranks = ranks
        self._inbox = inbox
        self._notice = notice
        self._tell = say if tell is None else tell
        self._on_failure = on_failure
        self._ends_alone = ends_alone
        self._passed_on = {signal.SIGINT: interrupt, signal.SIGHUP: signal.SIGTERM}
        self._failures: list[RankExit] = []
        """In the order of time; without those ranks that the launcher itself ended."""
        self._stopped: list[RankExit] = []
        self._asked: signal.Signals | None = None
        self._forced: signal.Signals | None = None
        self._ending = False
        """Whether ranks were told to end at once, in contrast to: when they have saved."""
        self._due: tuple[float, signal.Signals] | None = None
        """The next signal for all ranks, and its time by the monotonic clock."""

    def until_all_ended(self) -> None:
        """Wait, and do what signals and failures ask for; leaves no process of the ranks."""
        self._note_exits()
        while self._ranks.running():
            for signum in self._inbox.wait(self._patience_s()):
                self._on_signal(signum)
            self._note_exits()
            self._send_due()
        self._end_what_is_left()

    def _patience_s(self) -> float | None:
        return None if self._due is None else max(0.0, self._due[0] - time.monotonic())

    def _on_signal(self, signum: signal.Signals) -> None:
        if self._asked is None and not self._ending:
            self._asked = signum
            self._tell(self._notice)
            self._ranks.signal(self._passed_on.get(signum, signum))
            if signum != signal.SIGINT and self._ends_alone:
                self._due = (time.monotonic() + UNATTENDED_GRACE_S, signal.SIGTERM)
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
                self._on_failure(self._failures[0])
                self._end_ranks(PEER_GRACE_S)

    def _was_told(self, end: RankExit) -> bool:
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

    @property
    def first_failure(self) -> RankExit | None:
        """The first rank that failed; one that only lost a peer comes last. None after a stop by force."""
        if self._forced is not None or not self._failures:
            return None
        return next((failure for failure in self._failures if failure.status != PEER_FAILED), self._failures[0])

    @property
    def status(self) -> int:
        """Exit status of the run: of the first failure, else 128 + signal number when stopped, else 0."""
        if self._forced is not None:
            return 128 + self._forced
        if self.first_failure is not None:
            return self.first_failure.status
        if not self._stopped:
            return 0
        was_killed = self._stopped[0].status not in _STOPPED
        if self._asked is not None and (was_killed or self._asked == signal.SIGINT):
            return 128 + self._asked
        return self._stopped[0].status


def _interrupt_of(command: Sequence[str]) -> signal.Signals:
    """What ranks of a command are sent for a Ctrl-C.

    Our own take SIGTERM the same, and it ends them cleanly also while Python starts or imports, when a
    KeyboardInterrupt comes out as any error. A script may have a use for KeyboardInterrupt.
    """
    return signal.SIGTERM if is_our_own(command) else signal.SIGINT


def say(line: str) -> None:
    """Tell the user, beside what ranks print."""
    with contextlib.suppress(OSError, ValueError):  # the terminal may be the thing that was closed
        print(f"fleetune: {line}", file=sys.stderr, flush=True)
