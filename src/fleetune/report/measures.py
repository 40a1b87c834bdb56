"""What one run measured: speed, times, bytes, metrics, from its record and from the bench around it."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from fleetune.report.turns import Bench, Turn

BESIDE_TRAINING = ("evaluation", "checkpoints", "prediction", "output")
"""Phases of a record that are neither start-up nor training."""
NOT_METRICS = ("runtime", "samples", "per_second", "total")


@dataclass(frozen=True, kw_only=True)
class Measures:
    """The numbers of one run; None where it does not tell."""

    ranks: int | None = None
    threads: int | None = None
    """Of all ranks together: the cores in use."""
    global_batch: int | None = None
    learning_rate: float | None = None
    samples_per_s: float | None = None
    tokens_per_s: float | None = None
    step_s: float | None = None
    """Of an update."""
    startup_s: float | None = None
    """From the command to the first update, less what is not start-up."""
    training_s: float | None = None
    """Of all updates of the full run, evaluations and checkpoints left out."""
    other_s: float | None = None
    """Evaluations, checkpoints, predictions and the output."""
    wall_s: float | None = None
    """From the command to the end."""
    step_bytes: float | None = None
    """That a rank sends in an update, by the counters of its host's interfaces."""
    cost: float | None = None
    """Of the run, in the currency of the price."""
    metrics: dict[str, float] = field(default_factory=dict)
    is_extrapolated: bool = False
    """Whether times of the full run follow from a part of it."""


def measure(turn: Turn, bench: Bench | None) -> Measures:
    """The numbers of a run.

    Args:
        turn: The run.
        bench: That it was a run of, if it was.
    """
    record = turn.record
    if not record:
        return Measures()
    plan, seconds = record.get("plan", {}), record.get("seconds", {})
    by_steps = bench is not None and bench.mode == "steps"
    speed = steady_speed(record, bench.discarded_steps) if bench is not None and by_steps else whole_speed(record)
    startup_s, other_s = startup_of(turn), sum(around_of(record).values())
    training_s = seconds.get("training")
    if bench is not None and by_steps:
        training_s = None if speed.step_s is None else speed.step_s * full_steps(plan, bench.settings)
    wall_s = None
    if startup_s is not None and training_s is not None:
        wall_s = startup_s + training_s + (0.0 if by_steps else other_s)
    price = None if bench is None else bench.price_per_hour
    return Measures(
        ranks=plan.get("processes"),
        threads=threads_of(record),
        global_batch=plan.get("global_batch_size"),
        learning_rate=plan.get("learning_rate"),
        samples_per_s=speed.samples_per_s,
        tokens_per_s=speed.tokens_per_s,
        step_s=speed.step_s,
        startup_s=startup_s,
        training_s=training_s,
        other_s=None if by_steps else other_s,
        wall_s=wall_s,
        step_bytes=step_bytes_of(record),
        cost=None if price is None or wall_s is None else price * turn.hosts * wall_s / 3600,
        metrics={} if by_steps else metrics_of(record),
        is_extrapolated=by_steps,
    )


# ---- speed


@dataclass(frozen=True, kw_only=True)
class Speed:
    """Of a run's updates."""

    samples_per_s: float | None = None
    tokens_per_s: float | None = None
    step_s: float | None = None


def steady_speed(record: Mapping[str, Any], discarded_steps: int) -> Speed:
    """The speed of the updates behind the discarded ones; of all where the record does not tell their times.

    Tokens are those of the run's average sample: a record counts them over all updates.
    """
    seconds = step_seconds(record)[discarded_steps:]
    if not seconds:
        return whole_speed(record)
    steps = range(discarded_steps, discarded_steps + len(seconds))
    samples = sum(samples_of_step(record["plan"], step) for step in steps)
    throughput = record.get("throughput", {})
    tokens_per_sample = throughput["tokens"] / throughput["samples"] if throughput.get("samples") else None
    rate = samples / sum(seconds)
    return Speed(
        samples_per_s=rate,
        tokens_per_s=None if tokens_per_sample is None else rate * tokens_per_sample,
        step_s=sum(seconds) / len(seconds),
    )


def step_seconds(record: Mapping[str, Any]) -> list[float]:
    """Wall time of every update, evaluations and checkpoints taken out; empty where the record has means only."""
    told = record.get("time", {}).get("step_s", {})
    return list(told["seconds"]) if told.get("steps_each") == 1 else []


def samples_of_step(plan: Mapping[str, Any], step: int) -> int:
    """Examples of an update, counted from 0: the last one of an epoch takes what is left."""
    done = step % plan["steps_per_epoch"] * plan["global_batch_size"]
    left: int = plan["num_examples"] - done
    return min(int(plan["global_batch_size"]), left)


def whole_speed(record: Mapping[str, Any]) -> Speed:
    """The speed of all updates of a run, as its record has it."""
    throughput, training_s = record.get("throughput", {}), record.get("seconds", {}).get("training")
    steps = record.get("step", 0) - (record.get("resumed_at_step") or 0)
    return Speed(
        samples_per_s=throughput.get("samples_per_s"),
        tokens_per_s=throughput.get("tokens_per_s"),
        step_s=training_s / steps if training_s is not None and steps > 0 else None,
    )


def full_steps(plan: Mapping[str, Any], settings: Mapping[str, Any]) -> int:
    """Updates of the whole run, whose first ones were measured."""
    if settings.get("max_steps"):
        return int(settings["max_steps"])
    return math.ceil(float(settings["num_train_epochs"]) * int(plan["steps_per_epoch"]))


# ---- times, threads, bytes


def startup_of(turn: Turn) -> float | None:
    """Seconds until the first update: what a bench has measured around the run, less what the run tells of the rest.

    A run by itself knows no more than its own parts: how long its launcher took, it cannot tell.
    """
    record = turn.record
    seconds, parts = record.get("seconds", {}), time_parts(record, "start_up")
    if turn.wall_s is not None and "training" in seconds:
        return float(turn.wall_s - seconds["training"] - sum(around_of(record).values()))
    known = parts or {name: seconds[name] for name in ("model", "data") if name in seconds}
    return float(sum(known.values())) if known else None


def around_of(record: Mapping[str, Any]) -> dict[str, float]:
    """Seconds of what is neither start-up nor training."""
    seconds = record.get("seconds", {})
    return time_parts(record, "around") or {name: seconds[name] for name in BESIDE_TRAINING if name in seconds}


def time_parts(record: Mapping[str, Any], group: str) -> dict[str, float]:
    """Parts of the time, means over the ranks: of "start_up", "steps" or "around"; empty in records without them."""
    parts: dict[str, float] = record.get("time", {}).get("mean", {}).get(group, {})
    return parts


def threads_of(record: Mapping[str, Any]) -> int | None:
    """Threads of all ranks."""
    told = [member.get("threads") for member in record.get("roster", [])]
    if told and None not in told:
        return int(sum(told))
    plan = record.get("plan", {})
    return int(plan["processes"] * plan["threads"]) if {"processes", "threads"} <= plan.keys() else None


def step_bytes_of(record: Mapping[str, Any]) -> float | None:
    """Bytes that a rank sends in an update, means over the ranks.

    By the counters of the hosts' interfaces, where there are several hosts; else by those of the exchange, which are 0
    where ranks share memory.
    """
    told = record.get("time", {})
    ranks, steps = told.get("per_rank", []), told.get("num_steps")
    if not ranks or not steps:
        return None
    interfaces = [rank["interface"] for rank in ranks if rank.get("interface")]
    if interfaces:
        return float(sum(one["sent_bytes"] for one in interfaces) / steps / len(ranks))
    counted = [rank["sent_bytes"] for rank in ranks if rank.get("sent_bytes") is not None]
    return float(sum(counted) / steps / len(ranks)) if counted else None


def metrics_of(record: Mapping[str, Any]) -> dict[str, float]:
    """The metrics of the last evaluation, without its timings and the prefix `eval_`."""
    return {
        name.removeprefix("eval_"): value
        for name, value in record.get("metrics", {}).items()
        if is_metric(name) and value is not None
    }


def is_metric(name: str) -> bool:
    """Whether a number of an evaluation says how good the model is."""
    return name.startswith("eval_") and not any(word in name for word in NOT_METRICS)


def best_metric(records: Sequence[Mapping[str, Any]]) -> str | None:
    """The metric by which the task's best checkpoint is chosen, without a prefix."""
    for record in records:
        name = record.get("task", {}).get("best_metric")
        if name:
            return str(name)
    return None
