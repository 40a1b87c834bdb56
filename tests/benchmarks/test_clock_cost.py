"""Counts from a trace, costs times counts, and that costs can be measured at all."""

from __future__ import annotations

from typing import Any

import pytest

from benchmarks.clock_cost import counts_of, least_ns, share_of_step, table


def event(name: str, thread: int) -> dict[str, Any]:
    return {"name": name, "ph": "X", "pid": 0, "tid": thread, "ts": 0.0, "dur": 1.0}


def test_counts_are_of_a_step() -> None:
    named = {1: "steps", 2: "training", 3: "gradients"}
    events = [
        {"name": "thread_name", "ph": "M", "tid": thread, "args": {"name": name}} for thread, name in named.items()
    ]
    events += [event("step 3", 1), event("step 4", 1)]
    events += [event(name, 2) for name in ("data", "forward and backward", "optimizer", "rest", "data", "rest")]
    events += [event("matrix products", 2)] * 8 + [event("attention", 2)] * 2 + [event("reduce 0", 3)] * 4
    assert counts_of(events) == {"steps": 1.0, "parts": 3.0, "kernels": 5.0, "exchanges": 2.0}


def test_a_share_is_counts_times_costs_over_the_step() -> None:
    counts = {"parts": 100.0, "kernels": 1000.0}
    assert share_of_step(counts, {"parts": 500.0, "kernels": 50.0}, 0.05) == pytest.approx(1e-4 / 0.05)


def test_the_table_says_whether_it_is_below_the_limit() -> None:
    result = {"counts": {"parts": 100.0}, "costs_ns": {"parts": 500.0}, "step_s": 0.05}
    assert "0.100% of 50.0 ms: below 1%" in table({**result, "share_of_step": 0.001})
    assert "NOT below 1%" in table({**result, "share_of_step": 0.02})


def test_the_cost_of_nothing_is_little() -> None:
    assert least_ns(lambda: None, 100) > 0
