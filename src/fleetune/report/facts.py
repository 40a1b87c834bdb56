"""What a report tells of its runs beside their numbers: hosts, plans, versions, settings that differ."""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Mapping
from typing import Any

from fleetune.report.rows import Row, Table

Facts = list[tuple[str, str]]
"""Name and text, in the order in which they are shown."""

PER_SIZE = (
    "output_dir",
    "cache_dir",
    "overwrite_output_dir",
    "overwrite_cache",
    "resume_from_checkpoint",
    "logging_steps",
)
"""Settings whose differences say nothing about a run."""


def hosts_in_words(table: Table) -> str:
    """When it was measured and on what, in one line: the first ranks' hosts; each kind once."""
    started = min((record.get("started", "") for record in table.records), default="")
    hosts = [record["host"] for record in table.records if record.get("host") and "trainer" not in record]
    kinds = dict.fromkeys(_host_in_words(host) for host in hosts)
    return ", ".join(filter(None, [started[:16].replace("T", " "), *kinds]))


def _host_in_words(host: Mapping[str, Any]) -> str:
    cores, memory = host.get("usable_cores"), host.get("memory_bytes")
    told = [str(host.get("cpu_model", "unknown CPU"))]
    told += [f"{cores} usable core{'' if cores == 1 else 's'}"] if cores else []
    told += [f"{memory / 2**30:.0f} GiB"] if memory else []
    return ", ".join(told)


# ---- plans


def plans_of(table: Table) -> list[tuple[str, Facts]]:
    """The plan of each row's first run, by the row's label."""
    return [(row.label, plan_of(row)) for row in table.rows if row.turns]


def plan_of(row: Row) -> Facts:
    """How a run divided its hosts, what it computed in, and how gradients travelled."""
    record = row.turns[0].record
    plan = record.get("plan", {})
    facts: Facts = []
    for name, told in (
        ("ranks", _ranks(record)),
        ("global batch", _batch(plan)),
        ("learning rate", _rate(plan)),
        ("steps", _steps(plan)),
        ("arithmetic", _arithmetic(plan)),
        ("pinning", _pinning(plan.get("host"))),
    ):
        facts += [(name, told)] if told else []
    for line in plan.get("exchange", []):
        name, _, told = line.partition("  ")
        facts.append((name, told.strip()))
    reasons = (plan.get("host") or {}).get("reasons", {})
    return facts + [(f"why these {name}", told) for name, told in reasons.items()]


def _ranks(record: Mapping[str, Any]) -> str:
    by_host = {
        host: [member.get("threads") for member in members]
        for host, members in itertools.groupby(record.get("roster", []), key=lambda member: member.get("host"))
    }
    if by_host:
        return "; ".join(f"{host or 'a host'}: {_times(threads)}" for host, threads in by_host.items())
    plan = record.get("plan", {})
    return f"{plan['processes']} x {plan['threads']} threads" if {"processes", "threads"} <= plan.keys() else ""


def _times(threads: list[Any]) -> str:
    counts = {count: len(list(group)) for count, group in itertools.groupby(sorted(threads, key=str))}
    return " and ".join(f"{ranks} x {count} thread{'' if count == 1 else 's'}" for count, ranks in counts.items())


def _batch(plan: Mapping[str, Any]) -> str:
    if "global_batch_size" not in plan:
        return ""
    accumulation = plan.get("accumulation", 1)
    more = f" x {accumulation} accumulation steps" if accumulation > 1 else ""
    return f"{plan['global_batch_size']} examples = {plan['processes']} x {plan['micro_batch_size']}{more}"


def _rate(plan: Mapping[str, Any]) -> str:
    if "learning_rate" not in plan:
        return ""
    scaled = f"({plan['base_learning_rate']:g} for one process, --scale_lr {plan['scale_lr']})"
    return f"{plan['learning_rate']:g} {scaled}, {plan['lr_scheduler']}, {plan['warmup_steps']} warm-up steps"


def _steps(plan: Mapping[str, Any]) -> str:
    if "total_steps" not in plan:
        return ""
    return f"{plan['total_steps']:,}; an epoch of {plan['num_examples']:,} examples has {plan['steps_per_epoch']:,}"


def _arithmetic(plan: Mapping[str, Any]) -> str:
    told = [plan.get("dtype"), f"kernels: {plan['kernels']}" if plan.get("kernels") else None]
    told += ["no padding" if plan["unpadded"] else "padded"] if "unpadded" in plan else []
    return ", ".join(filter(None, told))


def _pinning(host: Mapping[str, Any] | None) -> str:
    if not host:
        return ""
    parts = host.get("parts", [])
    told = [
        f"rank {part['local_rank']}: CPUs {', '.join(map(str, part['cpus']))}"
        + ("" if part["is_pinned"] else ", not pinned")
        for part in parts
    ]
    return f"{host.get('hostname', 'host')}: {'; '.join(told)}"


# ---- versions and settings


def versions_of(table: Table) -> Facts:
    """Versions of all records; where they differ, all of them."""
    names = dict.fromkeys(name for record in table.records for name in record.get("versions", {}))
    return [(name, " / ".join(_different(r.get("versions", {}).get(name) for r in table.records))) for name in names]


def _different(values: Iterable[str | None]) -> list[str]:
    return list(dict.fromkeys(value for value in values if value is not None))


def differing_settings(table: Table) -> list[tuple[str, ...]]:
    """Settings in which rows differ: name, then its value in each row."""
    settings = [row.turns[0].record.get("config", {}) for row in table.rows if row.turns]
    names = dict.fromkeys(name for one in settings for name in one if name not in PER_SIZE)
    told = [(name, *(_value(one.get(name)) for one in settings)) for name in names]
    return [line for line in told if len(set(line[1:])) > 1]


def _value(value: Any) -> str:
    if value is None:
        return "none"
    return ", ".join(map(str, value)) if isinstance(value, list) else str(value)
