"""Traces of some steps: what a rank's threads do when, as JSON that chrome://tracing and Perfetto open.

The format is Chrome's Trace Event Format: complete events ("ph": "X") on threads of processes; here a process is a
rank, and times are microseconds since its first traced step began, which all ranks do at about the same time.
"""

from __future__ import annotations

import json
import time
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

from fleetune.timing.clock import Span
from fleetune.timing.clocks import BLOCKED, FORWARD_BACKWARD, RankClocks
from fleetune.timing.interface import Traffic, read_traffic
from fleetune.timing.parts import PARTS

SKIPPED = 2
"""Steps at the beginning that are not traced where others are left: memory is new to them, and caches are cold."""
_THREADS = {1: "steps", 2: "training", 3: "gradients"}
_STEPS, _MAIN, _EXCHANGE = _THREADS
_LABELS = {part.name: part.label for group in PARTS.values() for part in group} | {
    FORWARD_BACKWARD: "forward and backward",
    BLOCKED: "waiting for other ranks",
}


class KernelSpans(Protocol):
    """Where the stays in kernels are kept."""

    def keep_spans(self, wanted: bool) -> None:
        """Keep them from now on, or no longer."""

    def take_spans(self) -> list[Span]:
        """Those that were kept."""


@dataclass(frozen=True, kw_only=True)
class TracedStep:
    """A step of the trace."""

    number: int
    """From 1."""
    begin_ns: int
    end_ns: int
    sent_bytes: int
    """Gradients given to the network by this rank."""
    traffic: Traffic | None
    """Of the interface that leads to the other hosts, on the first rank of each host."""


class Tracer:
    """Keeps what a rank does over some steps.

    Args:
        clocks: The rank's.
        kernels: Where its kernels' times are.
        num_steps: How many steps are traced.
        steps_left: How many steps will come.
        step: How many were done before.
        interface: The one that leads to the other hosts, if its traffic is this rank's to tell.
    """

    def __init__(self, clocks: RankClocks, kernels: KernelSpans, *, num_steps: int, steps_left: int, step: int,
                 interface: str | None) -> None:  # fmt: skip
        self._clocks, self._kernels, self._interface = clocks, kernels, interface
        skipped = min(SKIPPED, max(0, steps_left - num_steps))
        self._wanted = range(step + skipped, step + skipped + num_steps)
        self._step = step
        self._begin: tuple[int, int, Traffic | None] = 0, 0, None
        self.steps: list[TracedStep] = []
        self._main: list[Span] = []
        self._exchange: list[Span] = []
        self._in_kernels: list[Span] = []

    def begin(self) -> None:
        """A step begins."""
        if self._step not in self._wanted:
            return
        if not self.steps:
            self._keep(True)
        self._begin = time.perf_counter_ns(), self._clocks.sent_bytes, read_traffic(self._interface)

    def end(self) -> None:
        """It ends."""
        if self._step in self._wanted:
            begin_ns, sent_before, before = self._begin
            now = read_traffic(self._interface)
            traffic = None if now is None or before is None else now.since(before)
            self.steps.append(
                TracedStep(
                    number=self._step + 1, begin_ns=begin_ns, end_ns=time.perf_counter_ns(),
                    sent_bytes=self._clocks.sent_bytes - sent_before, traffic=traffic,
                )
            )  # fmt: skip
            if self._step + 1 not in self._wanted:
                self._keep(False)
        self._step += 1

    def stop(self) -> None:
        """No more steps will come."""
        if self._clocks.main.spans is not None:
            self._keep(False)

    def to_json(self, rank: int, host: str) -> str:
        """The trace.

        Args:
            rank: This rank.
            host: The name of its host.
        """
        zero_ns = self.steps[0].begin_ns if self.steps else 0
        events = [
            *_names(rank, host),
            *(_step_event(step, rank, zero_ns) for step in self.steps),
            *_events(_joined(self._main), rank, _MAIN, zero_ns),
            *_events(self._in_kernels, rank, _MAIN, zero_ns),
            *_events(self._exchange, rank, _EXCHANGE, zero_ns),
        ]
        return json.dumps({"traceEvents": events, "displayTimeUnit": "ms"}, separators=(",", ":"))

    def _keep(self, wanted: bool) -> None:
        main, exchange = self._clocks.main, self._clocks.exchange
        main.read()  # what goes on now ends here
        if not wanted:
            self._main, self._exchange = main.spans or [], exchange.spans or []
        main.spans, exchange.spans = ([], []) if wanted else (None, None)
        self._kernels.keep_spans(wanted)
        self._in_kernels = self._kernels.take_spans()


def _names(rank: int, host: str) -> Iterable[dict[str, Any]]:
    yield {"name": "process_name", "ph": "M", "pid": rank, "tid": 0, "args": {"name": f"rank {rank} on {host}"}}
    yield {"name": "process_sort_index", "ph": "M", "pid": rank, "tid": 0, "args": {"sort_index": rank}}
    for thread, name in _THREADS.items():
        yield {"name": "thread_name", "ph": "M", "pid": rank, "tid": thread, "args": {"name": name}}
        yield {"name": "thread_sort_index", "ph": "M", "pid": rank, "tid": thread, "args": {"sort_index": thread}}


def _step_event(step: TracedStep, rank: int, zero_ns: int) -> dict[str, Any]:
    told: dict[str, Any] = {"sent_bytes": step.sent_bytes}
    if step.traffic is not None:
        told |= {
            "interface": step.traffic.name, "interface_sent_bytes": step.traffic.sent_bytes,
            "interface_received_bytes": step.traffic.received_bytes,
        }  # fmt: skip
    span = f"step {step.number}", step.begin_ns, step.end_ns
    return _event(span, rank, _STEPS, zero_ns) | {"args": told}


def _events(spans: Sequence[Span], rank: int, thread: int, zero_ns: int) -> Iterable[dict[str, Any]]:
    return (_event(span, rank, thread, zero_ns) for span in spans)


def _event(span: Span, rank: int, thread: int, zero_ns: int) -> dict[str, Any]:
    name, begin_ns, end_ns = span
    return {"name": _LABELS.get(name, name), "ph": "X", "pid": rank, "tid": thread, "ts": (begin_ns - zero_ns) / 1e3,
            "dur": (end_ns - begin_ns) / 1e3}  # fmt: skip


def _joined(spans: Iterable[Span]) -> list[Span]:
    """The spans with those made one that follow each other in the same part; a look at the clock cuts one in two."""
    joined: list[Span] = []
    for name, begin_ns, end_ns in spans:
        if joined and joined[-1][0] == name and joined[-1][2] == begin_ns:
            joined[-1] = name, joined[-1][1], end_ns
        else:
            joined.append((name, begin_ns, end_ns))
    return joined
