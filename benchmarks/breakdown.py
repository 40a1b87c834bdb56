"""Where the time of fleetune's update goes, from the profiler's record of single operations."""

from __future__ import annotations

import dataclasses
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from fnmatch import fnmatchcase

import torch

from benchmarks.arms import Arm
from benchmarks.summary import markdown_table
from fleetune.data.batches import Indices

PRODUCTS, ATTENTION, OPTIMIZER, OTHER = "matrix products", "attention", "optimizer", "other kernels"
REST = "idle and Python"
"""Wall time in which no operation ran: the interpreter, autograd's and the optimizer's bookkeeping, waiting."""

CATEGORIES: tuple[tuple[str, tuple[str, ...]], ...] = (
    (PRODUCTS, ("fleetune::product*", "fleetune::linear*", "aten::mm", "aten::addmm", "aten::linear", "aten::matmul")),
    (ATTENTION, ("fleetune::attention*", "aten::bmm", "aten::baddbmm*", "aten::*scaled_dot_product*", "aten::*flash*")),
    (
        OPTIMIZER,
        (
            *("fleetune::adamw*", "fleetune::squared_norm*", "fleetune::clip*"),
            *("aten::_fused_adamw*", "aten::_foreach_*", "aten::linalg_vector_norm", "aten::clamp"),
        ),
    ),
    (OTHER, ("fleetune::*", "aten::*")),
)
"""Part of the step -> patterns of the names of operations; the first that fits counts. No fit: `REST`."""

NUM_LARGEST = 15


@dataclass(frozen=True, kw_only=True)
class OperationTime:
    """What an operation took in the profiled updates, calls of other operations from within it left out."""

    name: str
    calls: int
    self_s: float


@dataclass(frozen=True, kw_only=True)
class Breakdown:
    """The parts of an update; they add up to its wall time."""

    updates: int
    """How many were profiled."""
    update_ms: float
    """Mean wall time of one, the profiler's own cost included."""
    parts_ms: Mapping[str, float]
    largest: Sequence[Mapping[str, object]]
    """The operations that took most: name, part, calls and ms an update."""


def category_of(operation: str) -> str:
    """The part of the step that an operation belongs to."""
    for category, patterns in CATEGORIES:
        if any(fnmatchcase(operation, pattern) for pattern in patterns):
            return category
    return REST


def break_down(wall_s: float, updates: int, operations: Sequence[OperationTime]) -> Breakdown:
    """Divide the wall time of some updates among the parts.

    Args:
        wall_s: Of all the updates together.
        updates: How many they were.
        operations: What the profiler saw on the thread that trains.

    Raises:
        ValueError: The operations took longer than the wall time: they were not those of one thread.
    """
    seconds = dict.fromkeys([category for category, _ in CATEGORIES], 0.0)
    for operation in operations:
        category = category_of(operation.name)
        if category != REST:
            seconds[category] += operation.self_s
    rest = wall_s - sum(seconds.values())
    if rest < 0:
        raise ValueError(f"the operations took {sum(seconds.values()):.3f} s of {wall_s:.3f} s: more than one thread's")
    most = sorted(operations, key=lambda operation: -operation.self_s)[:NUM_LARGEST]
    return Breakdown(
        updates=updates,
        update_ms=1e3 * wall_s / updates,
        parts_ms={name: 1e3 * value / updates for name, value in (seconds | {REST: rest}).items()},
        largest=[
            {
                "name": operation.name,
                "part": category_of(operation.name),
                "calls": operation.calls / updates,
                "ms": 1e3 * operation.self_s / updates,
            }
            for operation in most
        ],
    )


def profile(arm: Arm, batches: Sequence[Indices]) -> Breakdown:
    """Let an arm take some further updates under the profiler.

    The wall time is that of the whole turn, so that no operation lies outside it.
    """
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU], acc_events=True) as profiler:
        began = time.perf_counter()
        arm.take(batches)
        wall_s = time.perf_counter() - began
    operations = [
        OperationTime(name=event.key, calls=event.count, self_s=1e-6 * event.self_cpu_time_total)
        for event in profiler.key_averages()
    ]
    return break_down(wall_s, len(batches), operations)


def to_json(breakdown: Breakdown) -> dict[str, object]:
    """For the result file."""
    return dataclasses.asdict(breakdown)


def breakdown_table(breakdown: Breakdown) -> str:
    """The parts as Markdown, with their sum."""
    rows = [
        [name, f"{part_ms:,.1f}", f"{part_ms / breakdown.update_ms:.1%}"]
        for name, part_ms in breakdown.parts_ms.items()
    ]
    return markdown_table(("part of an update", "ms", "share"), [*rows, ["all", f"{breakdown.update_ms:,.1f}", ""]])
