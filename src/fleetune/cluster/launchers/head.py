"""The head of a run on several hosts: brings up the agents, hands on what they say, and ends them all."""

from __future__ import annotations

import contextlib
import queue
import signal
import sys
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from fleetune.cluster.hosts import Host
from fleetune.cluster.job import Job, is_our_own, stop_notice
from fleetune.cluster.launchers.agent import BEAT_S, Message
from fleetune.cluster.launchers.connection import Connection, Said
from fleetune.cluster.launchers.local import PEER_FAILED, UNATTENDED_GRACE_S, say
from fleetune.cluster.launchers.rank_logs import RankLogs
from fleetune.cluster.launchers.signals import STOP_SIGNALS, stop_signals_to
from fleetune.errors import LaunchError

_MORE_ERRORS_S = 10.0
"""After one host has failed, what others get to fail in, so that one message names all."""
_CAUSE_GRACE_S = 3.0
"""After a rank that only lost another, what the other's host gets to tell why."""
_ENDING_S = 8.0
"""What agents get to end their ranks in, before their connections are closed: they end them with grace themselves."""
_STOPPED = tuple(128 + signum for signum in STOP_SIGNALS)


@dataclass(frozen=True, kw_only=True)
class _Failure:
    """Why a run ends early."""

    host: str
    status: int
    words: str
    rank: int | None = None


class Head:
    """The agents of a run, and what it knows of them. Leaving the context ends them and their ranks.

    Args:
        job: What the ranks execute.
        hosts: The first has rank 0.
        logs: Where what they say goes.
    """

    def __init__(self, job: Job, hosts: Sequence[Host], logs: RankLogs) -> None:
        self._job, self._hosts, self._logs = job, hosts, logs
        self._events: queue.SimpleQueue[Said | signal.Signals] = queue.SimpleQueue()
        self._connections: dict[str, Connection] = {}
        self._asked: signal.Signals | None = None
        self._is_forced = self._is_ending = False
        self._failures: list[_Failure] = []
        self._statuses: list[int] = []
        self._deadline: tuple[float, Callable[[], None]] | None = None
        self._is_over = threading.Event()

    def __enter__(self) -> Head:
        self._exit = contextlib.ExitStack()
        self._exit.enter_context(stop_signals_to(self._events.put))
        threading.Thread(target=self._beat, name="beat", daemon=True).start()
        return self

    def __exit__(self, *_: object) -> None:
        self._is_over.set()
        for connection in self._connections.values():  # all at once: each may take its time
            connection.tell({"do": "end"})
        for connection in self._connections.values():
            connection.close(grace_s=0.2 if self._is_silent(connection) else _ENDING_S)
        self._logs.close()
        self._exit.close()

    # ---- before the ranks start

    def survey(self, towards: Sequence[str]) -> dict[str, dict[str, Any]]:
        """Bring up the agents, and hear from each host who it is.

        Args:
            towards: How the first host would call the others.

        Returns:
            Host -> what it says of itself, in the order of the hosts.

        Raises:
            LaunchError: A host cannot take part.
        """
        for host in self._hosts:
            self._connections[host.name] = Connection(host, self._job.timeout_s, self._events.put)
        asked: Message = {
            "do": "survey",
            "environ": dict(self._job.environ),
            "cwd": str(self._job.cwd),
            "threads": self._job.threads,
            "network": self._job.network,
            "timeout_s": self._job.timeout_s,
        }
        first = self._hosts[0]
        surveys = self._ask({
            host.name: asked | {"processes": self._job.processes or host.slots,
                                "towards": list(towards) if host is first else None}
            for host in self._hosts
        }, "survey")  # fmt: skip
        self._check_folders(surveys)
        return surveys

    def _check_folders(self, surveys: Mapping[str, Mapping[str, Any]]) -> None:
        """Refuse hosts that lack the working folder and need it: all for a script, the first one for model and data.

        Raises:
            LaunchError: Names them.
        """
        asked = self._hosts[:1] if is_our_own(self._job.command) else self._hosts
        why = "where model and data are looked for" if is_our_own(self._job.command) else "where the script is started"
        lacking = [host.name for host in asked if not surveys[host.name]["has_folder"]]
        if lacking:
            lines = [f"host {name}: there is no folder {self._job.cwd}, {why}" for name in lacking]
            raise LaunchError("\n".join([*lines, "make it there, or start from a folder that is"]))

    def meet(self, address: str) -> tuple[str, int, dict[str, str | None]]:
        """Find a port of the first host, and let each other host connect there.

        Args:
            address: Of the first host.

        Returns:
            Address and port, and for each host the interface that leads there.

        Raises:
            LaunchError: A host does not reach it.
        """
        first = self._hosts[0].name
        asked = {"do": "listen", "address": address, "port_range": self._job.port_range}
        listening = self._ask({first: asked}, "listening")[first]
        port, interfaces = listening["port"], {first: listening["interface"]}
        reach = {"do": "reach", "address": address, "port": port}
        return address, port, interfaces | self._ask({h.name: reach for h in self._hosts[1:]}, "reached")

    def start(self, ranks: Mapping[str, Sequence[Mapping[str, str]]]) -> None:
        """Start the ranks of all hosts.

        Args:
            ranks: Host -> variables of each of its ranks.
        """
        for name, connection in self._connections.items():
            for variables in ranks[name]:
                self._logs.begin(name, int(variables["RANK"]))
            connection.tell({"do": "start", "command": self._job.command, "ranks": ranks[name]})

    def _ask(self, messages: Mapping[str, Message], answer: str) -> dict[str, Any]:
        """Send each host a message, and wait for the answers of all.

        Raises:
            LaunchError: Hosts refused, are gone, or did not answer in time; names all.
            KeyboardInterrupt: A signal asked to stop.
        """
        for name, message in messages.items():
            self._connections[name].tell(message)
        answers, problems = dict[str, Any](), dict[str, str]()
        deadline = time.monotonic() + self._job.timeout_s
        while len(answers) + len(problems) < len(messages) and time.monotonic() < deadline:
            said = self._next(deadline - time.monotonic())
            if isinstance(said, signal.Signals):
                raise KeyboardInterrupt
            if said is None or said.host.name not in messages:
                continue
            if (problem := self._problem(said)) is not None:
                problems[said.host.name] = problem
                deadline = min(deadline, time.monotonic() + _MORE_ERRORS_S)
            elif answer in (said.message or {}):
                answers[said.host.name] = (said.message or {})[answer]
        if len(answers) < len(messages):
            silent = [name for name in messages if name not in answers and name not in problems]
            problems |= {name: f"no answer within {self._job.timeout_s} s (--timeout_s)" for name in silent}
            raise LaunchError("\n".join(f"host {name}: {problem}" for name, problem in problems.items()))
        return {name: answers[name] for name in messages}

    def _problem(self, said: Said) -> str | None:
        if said.message is None:
            return self._connections[said.host.name].why_gone()
        refusal: str | None = said.message.get("refused")
        return refusal

    # ---- while they run

    def watch(self) -> int:
        """Wait until the ranks of all hosts have ended.

        Returns:
            The run's exit status.
        """
        while not all(connection.has_ended for connection in self._connections.values()):
            said = self._next(min(1.0, self._patience_s()))
            if isinstance(said, signal.Signals):
                self._on_signal(said)
            elif said is not None:
                self._on_message(said)
            self._look_around()
        return self._verdict()

    def _next(self, patience_s: float) -> Said | signal.Signals | None:
        """The next event; none after some time."""
        try:
            event = self._events.get(timeout=max(0.0, patience_s))
        except queue.Empty:
            return None
        if isinstance(event, Said) and event.message is not None:
            self._connections[event.host.name].handled()
        return event

    def _beat(self) -> None:
        """Let agents know that the head lives, also while a terminal that is halted (Ctrl-S) keeps it waiting."""
        while not self._is_over.wait(BEAT_S):
            for connection in list(self._connections.values()):
                if not connection.has_ended:
                    connection.tell({"do": "ping"})

    def _patience_s(self) -> float:
        return 1.0 if self._deadline is None else self._deadline[0] - time.monotonic()

    def _on_signal(self, signum: signal.Signals) -> None:
        if self._asked is None and not self._is_ending:
            self._asked = signum
            say(stop_notice(self._job.command))
            self._tell_all({"do": "stop"})
            if signum != signal.SIGINT:
                self._deadline = (time.monotonic() + UNATTENDED_GRACE_S, self._end_all)
        elif signum != signal.SIGHUP:  # of one closed terminal it comes twice
            self._is_forced = self._asked is not None
            self._end_all()

    def _on_message(self, said: Said) -> None:
        connection, message = self._connections[said.host.name], said.message
        if message is None:
            if not connection.has_ended:
                connection.has_ended = True
                self._fail(_Failure(host=said.host.name, status=1, words=f"lost: {connection.why_gone()}"))
        elif "out" in message:
            rank, stream, line = message["out"]
            self._logs.take(said.host.name, rank, stream, line)
        elif "failure" in message:
            self._fail(_Failure(host=said.host.name, **message["failure"]))
        elif "refused" in message:
            connection.has_ended = True
            self._fail(_Failure(host=said.host.name, status=1, words=message["refused"]))
        elif "ended" in message:
            connection.has_ended = True
            self._statuses.append(message["ended"])

    def _fail(self, failure: _Failure) -> None:
        """Note a failure, and end the others: at once, or when the host of the cause had time to speak."""
        if self._asked is not None and failure.status in _STOPPED:
            return
        self._failures.append(failure)
        if self._is_ending:
            return
        if failure.status != PEER_FAILED:
            self._end_all()
        elif self._deadline is None:
            self._deadline = (time.monotonic() + _CAUSE_GRACE_S, self._end_all)

    def _end_all(self) -> None:
        self._is_ending = True
        self._tell_all({"do": "end"})
        self._deadline = (time.monotonic() + _ENDING_S, self._give_up)

    def _give_up(self) -> None:
        """Agents that have not ended by now are out of reach; they end their ranks when they notice."""
        self._deadline = None
        for connection in self._connections.values():
            if not connection.has_ended:
                connection.has_ended = True
                say(f"{connection.host.name} does not say that its ranks have ended: it ends them itself when it "
                     f"has not heard from here for {self._job.timeout_s} s")  # fmt: skip

    def _look_around(self) -> None:
        for connection in self._connections.values():
            if not connection.has_ended and self._is_silent(connection):
                connection.has_ended = True
                words = f"lost: not heard of for {connection.silence_s():.0f} s: is it up, and its link?"
                self._fail(_Failure(host=connection.host.name, status=1, words=words))
        if self._deadline is not None and time.monotonic() >= self._deadline[0]:
            self._deadline[1]()

    def _is_silent(self, connection: Connection) -> bool:
        return connection.silence_s() > self._job.timeout_s

    def _tell_all(self, message: Message) -> None:
        for connection in self._connections.values():
            connection.tell(message)

    def _verdict(self) -> int:
        """Exit status of the run; the first failure is told last."""
        if self._is_forced and self._asked is not None:
            return 128 + self._asked
        if self._failures:
            causes = [failure for failure in self._failures if failure.status != PEER_FAILED]
            self._tell_failure((causes or self._failures)[0])
            return (causes or self._failures)[0].status
        stopped = [status for status in self._statuses if status]
        return 128 + self._asked if stopped and self._asked is not None else (stopped or [0])[0]

    def _tell_failure(self, failure: _Failure) -> None:
        where = ""
        if failure.rank is not None:
            for line in self._logs.last_words(failure.rank):
                print(f"[{failure.host} rank {failure.rank}] {line}", file=sys.stderr)
            where = f" (all it said: {self._logs.path(failure.host, failure.rank)})"
        say(f"{failure.host}: {failure.words}{where}")
