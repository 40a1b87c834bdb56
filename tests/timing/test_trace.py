"""Traces: which steps are kept, and that the spans are those that were taken."""

from __future__ import annotations

import json
import time
from typing import Any

import pytest

from fleetune.timing.clock import Span
from fleetune.timing.clocks import FORWARD_BACKWARD, LOOP, RankClocks
from fleetune.timing.steps import StepTimes
from fleetune.timing.trace import Tracer

US = 1000


class Kernels:
    """Keeps the spans that a test says."""

    def __init__(self) -> None:
        self.keeps, self.spans = False, list[Span]()

    def keep_spans(self, wanted: bool) -> None:
        self.keeps = wanted

    def take_spans(self) -> list[Span]:
        taken, self.spans = self.spans, []
        return taken

    def run(self, name: str, begin_ns: int, end_ns: int) -> None:
        if self.keeps:
            self.spans.append((name, begin_ns, end_ns))


def trace(monkeypatch: pytest.MonkeyPatch, *, wanted: int, left: int, step: int = 0) -> list[dict[str, Any]]:
    """The events of a rank whose steps take 110 us each, 10 of data, 80 of computing, 20 of exchange beside it."""
    now = [0]
    monkeypatch.setattr(time, "perf_counter_ns", lambda: now[0])
    clocks, kernels = RankClocks(), Kernels()
    times = StepTimes(clocks)
    times.tracer = Tracer(clocks, kernels, num_steps=wanted, steps_left=left, step=step, interface=None)
    with clocks.during(LOOP):
        times.open()
        for _ in range(left):
            times.begin()
            with clocks.during("data"):
                now[0] += 10 * US
            with clocks.during(FORWARD_BACKWARD):
                kernels.run("products", now[0] + 5 * US, now[0] + 65 * US)
                clocks.exchange.begin("reduce 1")
                now[0] += 20 * US
                clocks.exchange.end()
                clocks.sent_bytes += 400
                now[0] += 60 * US
            times.own_s()
            now[0] += 20 * US
            times.end(0.0)
        times.close()
    told = json.loads(times.tracer.to_json(3, "node2"))
    assert told["displayTimeUnit"] == "ms"
    events: list[dict[str, Any]] = told["traceEvents"]
    return events


def spans(events: list[dict[str, Any]], thread: str) -> list[tuple[str, float, float]]:
    """(name, begin, duration) of the events of a thread, in microseconds."""
    (number,) = (e["tid"] for e in events if e["name"] == "thread_name" and e["args"]["name"] == thread)
    return [(e["name"], e["ts"], e["dur"]) for e in events if e["ph"] == "X" and e["tid"] == number]


def test_the_steps_after_the_first_two_are_kept(monkeypatch: pytest.MonkeyPatch) -> None:
    events = trace(monkeypatch, wanted=2, left=9)
    assert spans(events, "steps") == [("step 3", 0, 110), ("step 4", 110, 110)]
    assert all(e["pid"] == 3 for e in events)
    assert next(e["args"]["name"] for e in events if e["name"] == "process_name") == "rank 3 on node2"


def test_spans_of_both_threads_and_of_kernels(monkeypatch: pytest.MonkeyPatch) -> None:
    events = trace(monkeypatch, wanted=1, left=9)
    training = spans(events, "training")
    assert [s for s in training if s[0] != "rest" and s[2] > 0] == [
        ("data", 0, 10), ("forward and backward", 10, 80), ("matrix products", 15, 60),
    ]  # fmt: skip
    assert spans(events, "gradients") == [("reduce 1", 10, 20)]
    (step,) = (e for e in events if e["name"] == "step 3")
    assert step["args"] == {"sent_bytes": 400}


@pytest.mark.parametrize(
    ("wanted", "left", "step", "numbers"),
    [(3, 4, 0, [2, 3, 4]), (5, 3, 0, [1, 2, 3]), (1, 20, 40, [43]), (1, 1, 0, [1])],
    ids=["less is skipped in a short run", "all of a shorter one", "a run that goes on", "one step"],
)
def test_short_runs(monkeypatch: pytest.MonkeyPatch, wanted: int, left: int, step: int, numbers: list[int]) -> None:
    events = trace(monkeypatch, wanted=wanted, left=left, step=step)
    assert [name for name, _, _ in spans(events, "steps")] == [f"step {number}" for number in numbers]


def test_no_span_begins_in_one_and_ends_outside_of_it(monkeypatch: pytest.MonkeyPatch) -> None:
    """Viewers need that: events of a thread lie inside of each other, or apart."""
    events = trace(monkeypatch, wanted=3, left=9)
    for thread in ("steps", "training", "gradients"):
        found = [(begin, begin + duration) for _, begin, duration in spans(events, thread)]
        for one in found:
            for other in found:
                assert not (one[0] < other[0] < one[1] < other[1])
