"""Where the time of a run went, as its record tells it: figures of each rank, their mean, and one line of words."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict
from typing import Any

from fleetune.timing.clocks import RankClocks
from fleetune.timing.parts import HIDDEN, PARTS, names_of
from fleetune.timing.steps import StepTimes

Figures = dict[str, Any]
"""Seconds of each part by group, and what belongs to them; see `rank_figures`."""

_SHOWN_SHARE = 0.005
"""What is less than this of the steps, or of the whole, is left out of the line of words."""


def rank_figures(clocks: RankClocks, times: StepTimes) -> Figures:
    """What a rank has to tell: seconds of the parts of every group, which add up to `wall_s`.

    Args:
        clocks: Of the rank.
        times: Of its steps.
    """
    ns = clocks.main.read()
    named = {group: {name: ns.get(name, 0) for name in names_of(group)} for group in ("start_up", "around")}
    known = sum(sum(parts.values()) for parts in named.values()) + sum(times.total_ns.values())
    named["around"]["other"] += sum(ns.values()) - known
    return {
        "wall_s": _seconds(sum(ns.values())),
        "start_up": _all_seconds(named["start_up"]),
        "steps": _all_seconds(times.total_ns),
        "around": _all_seconds(named["around"]),
        "first_step": _all_seconds(times.first_ns),
        HIDDEN.name: _seconds(times.hidden_ns),
        "sent_bytes": times.sent_bytes,
        "interface": None if times.traffic is None else asdict(times.traffic),
    }


def times_of(ranks: Sequence[Figures], times: StepTimes) -> dict[str, Any]:
    """The entry `time` of a record.

    Args:
        ranks: The figures of all ranks, in their order.
        times: Of the first rank's steps.
    """
    return {
        "num_steps": times.num_steps,
        "mean": mean_of(ranks),
        "per_rank": [{"rank": rank, **figures} for rank, figures in enumerate(ranks)],
        "step_s": {"steps_each": times.samples.steps_each, "seconds": [round(s, 6) for s in times.samples.seconds]},
    }


def mean_of(ranks: Sequence[Figures]) -> Figures:
    """The mean of every figure over ranks; what is no number of each of them has none."""
    first = ranks[0]
    return {
        name: _mean([figures[name] for figures in ranks]) if name != "interface" else None for name in first
    }  # fmt: skip


def _mean(values: Sequence[Any]) -> Any:
    if isinstance(values[0], Mapping):
        return {name: _mean([value[name] for value in values]) for name in values[0]}
    mean = sum(values) / len(values)
    return round(mean) if all(isinstance(value, int) for value in values) else mean


def time_line(time: Mapping[str, Any]) -> str:
    """Where the time went in one line, the greatest first; of all ranks the mean."""
    mean = time["mean"]
    steps_s, hidden_s = sum(mean["steps"].values()), mean[HIDDEN.name]
    parts = _shares(mean["steps"], PARTS["steps"], steps_s)
    if steps_s > 0 and hidden_s / steps_s >= _SHOWN_SHARE:
        parts.append(f"{HIDDEN.label} beside them {hidden_s / steps_s:.0%}")
    others = [("start-up", sum(mean["start_up"].values()))]
    others += [(part.label, mean["around"][part.name]) for part in PARTS["around"]]
    shown = [f"{label} {s:,.1f} s" for label, s in others if s >= _SHOWN_SHARE * mean["wall_s"]]
    divided = f" ({', '.join(parts)})" if parts else ""
    return ", ".join([f"time: steps {steps_s:,.1f} s{divided}", *shown])


def _shares(seconds: Mapping[str, float], parts: Sequence[Any], whole_s: float) -> list[str]:
    labels = {part.name: part.label for part in parts}
    greatest_first = sorted(seconds, key=lambda name: -seconds[name])
    return [
        f"{labels[name]} {seconds[name] / whole_s:.0%}"
        for name in greatest_first
        if whole_s > 0 and seconds[name] / whole_s >= _SHOWN_SHARE
    ]


def _all_seconds(ns: Mapping[str, int]) -> dict[str, float]:
    return {name: _seconds(value) for name, value in ns.items()}


def _seconds(ns: int) -> float:
    return round(ns / 1e9, 6)
