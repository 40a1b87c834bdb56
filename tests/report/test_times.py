"""What a record tells of times: parts that add up, means, and a line of words."""

from __future__ import annotations

import json
import time
from typing import Any

import pytest

from fleetune.report.times import mean_of, rank_figures, time_line, times_of
from fleetune.timing.clock import Clock
from fleetune.timing.clocks import FORWARD_BACKWARD, LOOP, OTHER, RankClocks
from fleetune.timing.interface import Traffic
from fleetune.timing.parts import PARTS, names_of
from fleetune.timing.steps import StepTimes

S = 1_000_000_000


def a_rank(monkeypatch: pytest.MonkeyPatch, computing_s: int) -> tuple[dict[str, Any], StepTimes]:
    """The figures of a rank that starts for 7 s, takes one step, evaluates for 3 s, and does something else for 1 s."""
    now = [100 * S]
    monkeypatch.setattr(time, "perf_counter_ns", lambda: now[0])
    clocks = RankClocks(Clock("imports", 95 * S))
    clocks.main.switch("setup")
    now[0] += 2 * S
    times = StepTimes(clocks)
    clocks.main.switch(OTHER)
    with clocks.during(LOOP):
        times.open()
        times.begin()
        with clocks.during(FORWARD_BACKWARD):
            now[0] += computing_s * S
        clocks.sent_bytes += 10 * computing_s
        times.own_s()
        times.end(0.0)
        with clocks.during("evaluation"):
            now[0] += 3 * S
        times.close()
    now[0] += S
    return rank_figures(clocks, times), times


def test_parts_add_up_to_the_wall_time(monkeypatch: pytest.MonkeyPatch) -> None:
    figures, _ = a_rank(monkeypatch, 20)
    assert figures["wall_s"] == 7 + 20 + 3 + 1
    for group in PARTS:
        assert tuple(figures[group]) == names_of(group)
    assert {name: s for group in PARTS for name, s in figures[group].items() if s} == {
        "imports": 5, "setup": 2, "framework": 20, "evaluation": 3, "other": 1,
    }  # fmt: skip
    assert sum(s for group in PARTS for s in figures[group].values()) == figures["wall_s"]
    assert (figures["sent_bytes"], figures["interface"]) == (200, None)


def test_the_mean_is_over_ranks(monkeypatch: pytest.MonkeyPatch) -> None:
    (first, times), (second, _) = a_rank(monkeypatch, 20), a_rank(monkeypatch, 30)
    first["interface"] = {"name": "eth0", "sent_bytes": 1, "received_bytes": 2}
    told = times_of([first, second], times)
    assert json.loads(json.dumps(told)) == told
    mean = told["mean"]
    assert (mean["wall_s"], mean["steps"]["framework"], mean["around"]["evaluation"]) == (36, 25, 3)
    assert (mean["sent_bytes"], mean["interface"]) == (250, None)
    assert [figures["rank"] for figures in told["per_rank"]] == [0, 1]
    assert told["per_rank"][1]["steps"]["framework"] == 30
    assert told["per_rank"][0]["interface"] == first["interface"]
    assert (told["num_steps"], told["step_s"]) == (1, {"steps_each": 1, "seconds": [20.0]})
    assert mean_of([first]) == first | {"interface": None}


def test_the_line_says_the_greatest_first() -> None:
    mean = {
        "wall_s": 100.0,
        "start_up": dict.fromkeys(names_of("start_up"), 0.0) | {"imports": 6.25, "model": 1.0},
        "steps": {"products": 40.0, "attention": 8.0, "kernels": 12.0, "framework": 4.0, "optimizer": 6.0,
                  "communication": 8.0, "waiting": 1.6, "data": 0.3, "rest": 0.1},
        "around": {"evaluation": 10.0, "checkpoints": 2.5, "prediction": 0.0, "output": 0.2, "other": 0.05},
        "hidden_communication": 16.0,
    }  # fmt: skip
    assert time_line({"mean": mean}) == (
        "time: steps 80.0 s (matrix products 50%, other kernels 15%, attention 10%, exposed communication 10%, "
        "optimizer 8%, PyTorch and Python 5%, waiting for the slowest rank 2%, hidden communication beside them 20%), "
        "start-up 7.2 s, evaluation 10.0 s, checkpoints 2.5 s"
    )


def test_a_run_without_a_step_has_a_line_too() -> None:
    mean = {group: dict.fromkeys(names_of(group), 0.0) for group in PARTS}
    mean["start_up"]["model"] = 2.0
    assert time_line({"mean": {**mean, "wall_s": 2.0, "hidden_communication": 0.0}}) == (
        "time: steps 0.0 s, start-up 2.0 s"
    )


def test_traffic_is_told_by_its_interface(monkeypatch: pytest.MonkeyPatch) -> None:
    _, times = a_rank(monkeypatch, 1)
    times.traffic = Traffic(name="eth1", sent_bytes=5, received_bytes=6)
    assert rank_figures(RankClocks(), times)["interface"] == {"name": "eth1", "sent_bytes": 5, "received_bytes": 6}
