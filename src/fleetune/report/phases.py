"""Where the time of a run went: of its wall time, and of an update."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from fleetune.report.measures import around_of, time_parts
from fleetune.report.rows import Row
from fleetune.report.spread import Spread

Parts = tuple[tuple[str, float], ...]
"""Name and seconds of each part, in the order in which they are shown."""

LABELS = {
    "products": "matrix products",
    "kernels": "other kernels",
    "framework": "PyTorch and Python",
    "communication": "exposed communication",
    "waiting": "waiting for the slowest rank",
    "rest": "the loop itself",
    "output": "output files",
}
"""Part of a record -> its name here, where they differ."""


def phases_of(row: Row) -> Parts:
    """Seconds of each phase of the wall time, means over the runs."""
    told = {"start-up": row.spread("startup_s"), "training": row.spread("training_s")}
    if not any(one.is_extrapolated for one in row.measures):
        told |= _means([around_of(turn.record) for turn in row.turns])
    return tuple((LABELS.get(name, name), spread.mean) for name, spread in told.items() if spread is not None)


def step_parts_of(row: Row) -> Parts:
    """Seconds of each part of an update, means over ranks and runs, its first step left out; empty where not told."""
    told = [parts for turn in row.turns if (parts := _of_a_step(turn.record))]
    return tuple((LABELS.get(name, name), spread.mean) for name, spread in _means(told).items())


def startup_parts_of(row: Row) -> Parts:
    """Seconds of each part of the start-up, means over ranks and runs; empty where not told.

    What a bench has measured beside them came before the ranks' own clocks, and after: the launcher, Python, the end.
    """
    told = [dict(parts) for turn in row.turns if (parts := time_parts(turn.record, "start_up"))]
    parts = {name: spread.mean for name, spread in _means(told).items()}
    whole = row.spread("startup_s")
    if not parts or whole is None:
        return ()
    beside = whole.mean - sum(parts.values())
    return (*((("launcher", beside),) if beside > 0 else ()), *parts.items())


def hidden_of(row: Row) -> Spread | None:
    """Seconds of communication in an update that computation hides: no part of any sum."""
    return Spread.of(
        told["mean"]["hidden_communication"] / told["num_steps"]
        for told in (turn.record.get("time", {}) for turn in row.turns)
        if told.get("num_steps") and "hidden_communication" in told.get("mean", {})
    )


def _of_a_step(record: Mapping[str, Any]) -> dict[str, float]:
    """Parts of an average update; the first one, which is slower, counts only where it is the only one."""
    steps, first = time_parts(record, "steps"), time_parts(record, "first_step")
    num_steps = record.get("time", {}).get("num_steps", 0)
    if not steps or not num_steps:
        return {}
    if not first or num_steps == 1:
        return {name: seconds / num_steps for name, seconds in steps.items()}
    return {name: (seconds - first[name]) / (num_steps - 1) for name, seconds in steps.items()}


def _means(told: Sequence[Mapping[str, float]]) -> dict[str, Spread]:
    """Mean of each part over those that have it."""
    names = dict.fromkeys(name for one in told for name in one)
    spreads = {name: Spread.of(one.get(name) for one in told) for name in names}
    return {name: spread for name, spread in spreads.items() if spread is not None}


def names_of(parts: Sequence[Parts]) -> tuple[str, ...]:
    """All names that occur, in the order of their first occurrence."""
    return tuple(dict.fromkeys(name for one in parts for name, _ in one))
