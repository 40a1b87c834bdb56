"""Run the program of another launcher, mpirun or srun, as if it were our own: stop it, end it, say what went wrong.

    run_program(program, outputs) -> exit status

What such a program makes of a signal, and how it tells which rank failed, differs; `Program` says it as data.
"""

from __future__ import annotations

import contextlib
import os
import shlex
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from fleetune.cluster.launchers.local import FORCED_GRACE_S, PEER_FAILED, PEER_GRACE_S, say
from fleetune.cluster.launchers.processes import RankExit, end_with_parent
from fleetune.cluster.launchers.signals import STOP_SIGNALS, stop_signals_to
from fleetune.cluster.outputs import RankOutputs
from fleetune.errors import LaunchError

_GLANCE_S = 0.1
_STOPPED = frozenset(128 + number for number in (*STOP_SIGNALS, signal.SIGUSR1, signal.SIGKILL))
_WORDS_SHOWN = 20


@dataclass(frozen=True, kw_only=True)
class Failure:
    """A rank that failed, as its launcher tells it."""

    rank: int
    status: int
    """Its exit status, or 128 + signal number."""

    def in_words(self, host: str) -> str:
        """One line for the user."""
        killed_by = self.status - 128 if self.status > 128 else None
        for_memory = None if killed_by == signal.SIGKILL else False  # the kernel's counters are on that host
        words = RankExit(self.rank, self.status, killed_by, for_memory).in_words()
        return words.replace(f"rank {self.rank}", f"rank {self.rank} on {host}", 1)


@dataclass(frozen=True, kw_only=True)
class Program:
    """The program of another launcher, and its manners."""

    command: tuple[str, ...]
    environ: Mapping[str, str] = field(repr=False)
    log: Path
    """What the program itself prints, beside its ranks."""
    pass_on: Mapping[signal.Signals, signal.Signals]
    """What asks the ranks to stop -> what the program has to be sent, so that it reaches them and nothing more."""
    force: tuple[signal.Signals, ...]
    """What makes the program end its ranks at once."""
    failures: Callable[[str, RankOutputs], Sequence[Failure]]
    """From what the program said: the ranks that failed, the first one first."""
    stop_notice: str
    """What the user is told when the ranks are asked to stop."""


def run_program(program: Program, outputs: RankOutputs) -> int:
    """Run it to its end, with its ranks' output shown and kept.

    The first Ctrl-C or SIGTERM is passed on to the ranks, which may take their time to save; a second one ends them.
    SIGHUP, of a terminal that is closed, asks to stop like SIGTERM.

    Returns:
        0; or the status of the rank that failed first; or 128 + signal number when the run was stopped.

    Raises:
        LaunchError: It cannot be started, or ended without a rank that failed.
    """
    received: list[signal.Signals] = []
    with stop_signals_to(received.append), _started(program, outputs) as process:
        watch = _Watch(program, process, outputs)
        while process.poll() is None:
            outputs.pump(_GLANCE_S)
            while received:
                watch.on_signal(received.pop(0))
            watch.look_around()
        outputs.drain()
    return watch.verdict()


class _Watch:
    """What is known while the program runs, and what follows from it."""

    def __init__(self, program: Program, process: subprocess.Popen[bytes], outputs: RankOutputs) -> None:
        self._program, self._process, self._outputs = program, process, outputs
        self._asked: signal.Signals | None = None
        self._forced: signal.Signals | None = None
        self._is_ending = False
        self._due_at: float | None = None
        """When the ranks are ended, or the program is killed that does not end them; by the monotonic clock."""

    def on_signal(self, number: signal.Signals) -> None:
        if self._asked is None:
            self._asked = number
            say(self._program.stop_notice)
            self._send(self._program.pass_on[number])
        elif number != signal.SIGHUP and self._forced is None:  # a closed terminal is told twice
            self._forced = number
            self._force()

    def look_around(self) -> None:
        """End all ranks when one has told that it failed, and kill a program that does not do so."""
        failed = [status for status in self._outputs.statuses.values() if status != 0]
        if failed and not self._is_ending and self._due_at is None:
            grace_s = PEER_GRACE_S if set(failed) == {PEER_FAILED} else FORCED_GRACE_S
            self._due_at = time.monotonic() + grace_s
        if self._due_at is not None and time.monotonic() > self._due_at:
            if self._is_ending:
                self._send(signal.SIGKILL)
            else:
                self._force()

    def _force(self) -> None:
        self._is_ending = True
        for number in self._program.force:
            self._send(number)
        self._due_at = time.monotonic() + 2 * FORCED_GRACE_S

    def _send(self, number: signal.Signals) -> None:
        with contextlib.suppress(ProcessLookupError):
            os.kill(self._process.pid, number)

    def verdict(self) -> int:
        """Exit status of the run; a failure is told, its reason last."""
        code = self._process.returncode
        status = 128 - code if code < 0 else code
        if self._forced is not None:
            return 128 + self._forced
        said = _end_of(self._program.log)
        told = [Failure(rank=rank, status=status) for rank, status in self._outputs.statuses.items() if status]
        failure = _first_cause([*told, *self._program.failures(said, self._outputs)])
        if self._asked is not None and (failure is None or failure.status in _STOPPED):
            return 128 + self._asked  # whatever the program's own status: MPICH's is 0 when SIGTERM ended its ranks
        if status == 0 and failure is None:
            return 0
        if failure is None:
            raise LaunchError(f"{shlex.join(self._program.command[:1])} failed with exit status {status}:\n{said}")
        self._tell(failure)
        return failure.status

    def _tell(self, failure: Failure) -> None:
        output = self._outputs.ranks.get(failure.rank)
        if output is None:
            say(failure.in_words("a host that it never reached us from"))
            return
        if failure.rank != 0:  # the first rank's words are on the terminal already
            for line in output.last_lines(_WORDS_SHOWN):
                print(line, file=sys.stderr)
        say(f"{failure.in_words(output.host)} (its output: {output.log})")


def _first_cause(failures: Sequence[Failure]) -> Failure | None:
    """Not one that failed because another had."""
    causes = [failure for failure in failures if failure.status != PEER_FAILED]
    return next(iter(causes or failures), None)


def _end_of(log: Path, num_bytes: int = 20000) -> str:
    with contextlib.suppress(OSError):
        return log.read_bytes()[-num_bytes:].decode(errors="replace").strip()
    return ""


@contextlib.contextmanager
def _started(program: Program, outputs: RankOutputs) -> Iterator[subprocess.Popen[bytes]]:
    """The program, in a session of its own: a terminal's Ctrl-C is for us. When we are killed, it is told to end."""
    try:
        with program.log.open("wb") as log:
            process = subprocess.Popen(
                program.command,
                env={**outputs.variable(), **program.environ},
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=subprocess.STDOUT,
                start_new_session=True,
                preexec_fn=end_with_parent(signal.SIGHUP),
            )
    except OSError as error:
        raise LaunchError(f"cannot start {program.command[0]}: {error.strerror}") from error
    try:
        yield process
    finally:
        if process.poll() is None:
            process.kill()
            process.wait()
