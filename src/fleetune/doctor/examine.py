"""Asking all hosts at the same time: facts, clocks, who reaches whom, and how fast."""

from __future__ import annotations

import contextlib
import itertools
import os
import re
import secrets
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field, replace
from typing import Any, TypeVar

from fleetune.cluster.hosts import Host
from fleetune.cluster.remote import CONNECT_TIMEOUT_S, FAILED, python_command, ssh_command
from fleetune.doctor.conversation import Conversation, NoAnswerError
from fleetune.doctor.facts import Facts, from_json
from fleetune.doctor.meter import SECRET_LENGTH, Attempt, Transfer, is_slow
from fleetune.doctor.plain_host import read_plain_host
from fleetune.doctor.processes import PROBE
from fleetune.errors import LaunchError
from fleetune.hardware.host import HostFacts

T = TypeVar("T")
Pair = tuple[str, str]
"""Names of the host that speaks, and of the one that is spoken to."""
Say = Callable[[str], None]
"""Called with what is being done."""

_OF_THREADS = ("OMP_", "GOMP_", "KMP_", "MKL_", "CCL_", "DNNL_", "ONEDNN_", "LD_PRELOAD", "MALLOC_", "FLEETUNE_KERNELS")
"""Beginnings of the variables of the user's that a run would give its ranks, and that the checks look at."""

_PAIR_TIMEOUT_S = 5.0
_TRANSFER_S, _SHORTEST_TRANSFER_S, _ALL_TRANSFERS_S = 0.4, 0.15, 20.0
_CLOCK_ROUNDS = 5
_SHARE_FOR_TORCH = 3 / 4
"""Of the patience with a host: what it may spend on importing torch, so that it still answers."""


@dataclass(frozen=True, kw_only=True)
class Scope:
    """What is looked at, and for how long."""

    ports: range
    """Those that rank 0 may listen on."""
    has_own_ports: bool = False
    """Whether the user named them."""
    network: str | None = None
    cache_dir: str = "~/.cache/fleetune"
    timeout_s: int = 60
    environ: Mapping[str, str] = field(default_factory=lambda: os.environ)
    """The user's."""


@dataclass(frozen=True, kw_only=True)
class Trouble:
    """Why a host did not answer as it should."""

    kind: str
    """ssh, silent, no python, no fleetune, other fleetune or failed."""
    said: str
    within_s: float = 0.0
    """How long was waited for a host that is silent."""


@dataclass(frozen=True, kw_only=True)
class Clock:
    """A host's clock against that of this machine."""

    offset_s: float
    """Above 0: it is ahead."""
    uncertainty_s: float
    """Half of the round trip."""


@dataclass(frozen=True, kw_only=True)
class Place:
    """Where the probe of a host listened."""

    address: str | None
    """None: no address leads to the head, or is in the network that was asked for."""
    interface: str | None = None
    ports: tuple[int, ...] = ()
    problem: str | None = None


@dataclass(frozen=True, kw_only=True)
class View:
    """One host, as it was seen."""

    host: Host
    facts: Facts | None = None
    plain: HostFacts | None = None
    """What was read without Python, where that was the only way."""
    python: str = ""
    """Which Python there is, where fleetune's is missing."""
    trouble: Trouble | None = None
    clock: Clock | None = None
    place: Place | None = None

    @property
    def name(self) -> str:
        return self.host.name

    @property
    def machine(self) -> HostFacts | None:
        return self.facts.machine if self.facts is not None else self.plain


@dataclass(frozen=True, kw_only=True)
class Examination:
    """All that the checks judge."""

    scope: Scope
    views: tuple[View, ...]
    """In the order of the hosts: the head is the first."""
    to_itself: str | None = None
    """What ssh said when this machine was to connect to itself: nothing when it could; None where that was not
    tried."""
    attempts: tuple[tuple[str, Attempt], ...] = ()
    """Name of the host that tried -> how it went; for each pair and port, and each host to itself."""
    transfers: tuple[tuple[str, Transfer], ...] = ()
    """Name of the sender -> how fast it was; for each pair that reached each other."""


def examine(hosts: Sequence[Host], scope: Scope, say: Say) -> Examination:
    """Look at all hosts. Starts a probe on each, which ends with this function.

    Args:
        hosts: Resolved; the first is the head.
        scope: What is looked at.
        say: Told what is being done.
    """
    several = len(hosts) > 1
    with contextlib.ExitStack() as ending, ThreadPoolExecutor(max_workers=len(hosts) + 1) as pool:
        say(f"asking {len(hosts)} hosts" if several else f"asking {hosts[0].name}")
        talks = {host.name: ending.enter_context(_start_probe(host, scope)) for host in hosts}
        itself = next((host for host in hosts if host.is_here and several), None)
        to_itself = pool.submit(_ssh_to_itself, itself, scope) if itself is not None else None
        views = list(pool.map(lambda host: _first_look(host, talks[host.name], scope), hosts))
        round_of = _Round(pool, talks, scope)
        views = round_of.place(views)
        say("connecting every host to every other" if several else "connecting it to itself")
        attempts = round_of.attempts(views)
        transfers = round_of.transfers(views, attempts, say)
        for talk in talks.values():  # side by side, since a host that is cut off takes its time
            pool.submit(talk.close)
    return Examination(
        scope=scope, views=tuple(views), to_itself=None if to_itself is None else to_itself.result(),
        attempts=tuple(attempts), transfers=tuple(transfers),
    )  # fmt: skip


# ---- one host


def probe_command(host: Host, scope: Scope) -> list[str]:
    """What starts the probe of a host."""
    words = ["-m", PROBE, host.name]
    if host.is_here:
        return [sys.executable, *words]
    command = python_command(words, scope.environ)
    return ssh_command(host.target, command, connect_timeout_s=min(CONNECT_TIMEOUT_S, scope.timeout_s))


def _start_probe(host: Host, scope: Scope) -> Conversation:
    command = probe_command(host, scope)
    try:
        return Conversation(command, scope.environ)
    except OSError as error:
        raise LaunchError(f"{command[0]}: {error.strerror}; install openssh-client on this machine") from error


def _first_look(host: Host, talk: Conversation, scope: Scope) -> View:
    """Facts and clock of a host, or why there are none."""
    environ = {name: value for name, value in scope.environ.items() if name.startswith(_OF_THREADS)}
    answer: dict[str, Any] = {}
    try:
        answer = talk.ask(
            "facts", timeout_s=scope.timeout_s, cache_dir=scope.cache_dir,
            ports=[scope.ports[0], scope.ports[-1]], environ=environ,
            patience_s=_SHARE_FOR_TORCH * scope.timeout_s,
        )  # fmt: skip
        facts = from_json(Facts, answer["facts"])
        return View(host=host, facts=facts, clock=_read_clock(talk, scope.timeout_s))
    except NoAnswerError as error:
        return _without_facts(host, _trouble(error), scope)
    except (KeyError, ValueError) as error:
        said = answer.get("problem") or str(error)
        return _without_facts(host, Trouble(kind="other fleetune" if "problem" not in answer else "failed", said=said),
                              scope)  # fmt: skip


def _trouble(error: NoAnswerError) -> Trouble:
    kinds = {None: "silent", FAILED: "ssh", 126: "no python", 127: "no python"}
    kind = kinds.get(error.status, "failed")
    if missing := re.search(r"No module named '?fleetune\b(\.)?", error.said):
        kind = "other fleetune" if missing[1] else "no fleetune"
    return Trouble(kind=kind, said=error.said.strip(), within_s=error.within_s)


def _without_facts(host: Host, trouble: Trouble, scope: Scope) -> View:
    if trouble.kind in ("ssh", "silent") or host.is_here:
        return View(host=host, trouble=trouble)
    plain, python = read_plain_host(host.target, timeout_s=scope.timeout_s)
    return View(host=host, trouble=trouble, plain=plain, python=python)


def _read_clock(talk: Conversation, timeout_s: float) -> Clock:
    """The offset of the question with the shortest way: its answer was made half a round trip ago."""
    rounds = []
    for _ in range(_CLOCK_ROUNDS):
        asked, began = time.time(), time.perf_counter()
        told = float(talk.ask("clock", timeout_s=timeout_s)["time"])
        half = (time.perf_counter() - began) / 2
        rounds.append(Clock(offset_s=told - (asked + half), uncertainty_s=half))
    return min(rounds, key=lambda clock: clock.uncertainty_s)


def _ssh_to_itself(host: Host, scope: Scope) -> str:
    """What ssh says when this machine is to connect to itself; nothing when it can."""
    command = ssh_command(host.target, ["true"], connect_timeout_s=min(CONNECT_TIMEOUT_S, scope.timeout_s))
    try:
        answer = subprocess.run(command, capture_output=True, text=True, errors="replace", timeout=scope.timeout_s)
    except subprocess.TimeoutExpired:
        return "Connection timed out"
    except OSError as error:
        return f"{command[0]}: {error.strerror}"
    return "" if answer.returncode == 0 else answer.stderr.strip() or f"status {answer.returncode}"


# ---- between hosts


class _Round:
    """Questions that all hosts are asked at the same time, about each other.

    Args:
        pool: Threads, one a host.
        talks: Name of a host -> its probe.
        scope: What is looked at.
    """

    def __init__(self, pool: ThreadPoolExecutor, talks: Mapping[str, Conversation], scope: Scope) -> None:
        self._pool, self._talks, self._scope = pool, talks, scope
        self._secret = secrets.token_hex(SECRET_LENGTH // 2)

    def place(self, views: Sequence[View]) -> list[View]:
        """Let every probe listen: the head's on the way to the others, theirs on the way to the head."""
        networks = [(view, view.facts.network) for view in views if view.facts is not None]
        if not networks:
            return list(views)
        able = [view for view, _ in networks]
        # This machine has not been reached by ssh; where it alone is with the head, ssh came from it.
        ways = [*(network.ssh_address for _, network in networks[1:]), networks[0][1].ssh_client]
        head = self._listen(able[0], next(filter(None, ways), None) if len(able) > 1 else None)
        towards = head.place.address if head.place is not None else None
        others = self._pool.map(lambda view: self._listen(view, towards), able[1:])
        placed = {view.name: view for view in (head, *others)}
        return [placed.get(view.name, view) for view in views]

    def _listen(self, view: View, towards: str | None) -> View:
        ports = self._scope.ports
        answer = self._ask(
            view.name, "listen", towards=towards, network=self._scope.network, ports=[ports[0], ports[-1]],
            secret=self._secret,
        )  # fmt: skip
        place = Place(
            address=answer.get("address"), interface=answer.get("interface"), ports=tuple(answer.get("ports", ())),
            problem=answer.get("problem"),
        )  # fmt: skip
        return replace(view, place=place)

    def attempts(self, views: Sequence[View]) -> list[tuple[str, Attempt]]:
        """Every host connects to every host, itself included."""
        places = _places(views)
        peers = [{"name": name, "address": place.address, "ports": place.ports} for name, place in places.items()]
        asked = self._pool.map(
            lambda name: self._ask(name, "reach", peers=peers, secret=self._secret, connect_s=_PAIR_TIMEOUT_S), places
        )
        return [
            (name, Attempt(**one))
            for name, answer in zip(places, asked, strict=True)
            for one in answer.get("attempts", ())
        ]

    def transfers(
        self, views: Sequence[View], attempts: Sequence[tuple[str, Attempt]], say: Say
    ) -> list[tuple[str, Transfer]]:
        """Every host sends to every other that it reaches, in rounds in which no host has two to talk to.

        What seems slow is measured again, since something else may have been in the way.
        """
        places = _places(views)
        reached = [(source, one) for source, one in attempts if one.outcome == "reached" and source != one.target]
        ports = {(source, one.target): one.port for source, one in reached}
        rounds = [[pair for pair in pairs if pair in ports] for pairs in pairings(list(places))]
        seconds = min(_TRANSFER_S, max(_SHORTEST_TRANSFER_S, _ALL_TRANSFERS_S / max(1, len(rounds))))

        def measure(pair: Pair) -> tuple[Pair, Transfer]:
            return pair, self._transfer(pair, places[pair[1]], ports[pair], seconds)

        made: dict[Pair, Transfer] = {}
        for number, pairs in enumerate(rounds, start=1):
            say(f"measuring the network, {number} of {len(rounds)}")
            made |= self._pool.map(measure, pairs)
        best = max((one.mbit_per_s or 0.0 for one in made.values()), default=0.0)
        for pairs in rounds:
            again = [pair for pair in pairs if is_slow(made[pair].mbit_per_s or 0.0, best)]
            for pair, one in self._pool.map(measure, again):
                made[pair] = max(made[pair], one, key=lambda transfer: transfer.mbit_per_s or 0.0)
        return [(source, one) for (source, _), one in made.items()]

    def _transfer(self, pair: tuple[str, str], place: Place, port: int, seconds: float) -> Transfer:
        source, target = pair
        peer = {"name": target, "address": place.address, "ports": [port]}
        answer = self._ask(
            source, "transfer", peer=peer, secret=self._secret, seconds=seconds, connect_s=_PAIR_TIMEOUT_S
        )
        if "problem" in answer:
            return Transfer(target=target, mbit_per_s=None, said=answer["problem"])
        return Transfer(**answer)

    def _ask(self, name: str, what: str, **details: Any) -> dict[str, Any]:
        try:
            return self._talks[name].ask(what, timeout_s=self._scope.timeout_s, **details)
        except NoAnswerError as error:
            return {"problem": str(error)}


def _places(views: Sequence[View]) -> dict[str, Place]:
    return {view.name: view.place for view in views if view.place is not None and view.place.address is not None}


def pairings(names: Sequence[str]) -> Iterator[list[tuple[str, str]]]:
    """All ordered pairs, in rounds in which each name occurs once: the circle method of tournaments, both ways."""
    circle: list[str | None] = [*names, *([None] if len(names) % 2 else [])]
    half = len(circle) // 2
    for _ in range(len(circle) - 1):
        facing = zip(circle[:half], reversed(circle[half:]), strict=True)
        pairs = [(one, other) for one, other in facing if one is not None and other is not None]
        yield pairs
        yield [(other, one) for one, other in pairs]
        circle = [circle[0], circle[-1], *itertools.islice(circle, 1, len(circle) - 1)]
