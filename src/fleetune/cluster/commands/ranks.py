"""From what a launcher was told about hosts and ranks to the settings that mean the same here."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from fleetune.cluster.commands.retired import ONE_START
from fleetune.cluster.hosts import Host, parse_hosts, read_hostfile
from fleetune.cluster.rank import is_loopback
from fleetune.errors import ConfigError

PLACEMENT = frozenset({"ranks", "ranks_per_host", "num_hosts", "host_rank", "hosts", "hostfile", "network", "port",
                       "interface"})  # fmt: skip
"""Facts of where ranks are: the outer one of two launchers decides them."""


def rank_settings(facts: Mapping[str, str]) -> dict[str, Any]:
    """The settings of `RunConfig` that place the ranks where a launcher would have placed them.

    Args:
        facts: As the launcher's flags tell them.

    Raises:
        ConfigError: Lists numbers that are none, and ranks that do not fit on the hosts.
    """
    numbers = _numbers(facts)
    if numbers.get("host_rank", 0) > 0:
        raise ConfigError(f"this is the command of host number {numbers['host_rank']}: {ONE_START}")
    settings: dict[str, Any] = {"threads": numbers["threads"]} if "threads" in numbers else {}
    if "network" in facts:
        settings["network"] = facts["network"]
    hosts = _hosts(facts)
    total, per_host, num_hosts = (numbers.get(name) for name in ("ranks", "ranks_per_host", "num_hosts"))
    if per_host is None and total is not None and (num_hosts or 1) > 1:
        per_host = _evenly(total, num_hosts or 1)
    if not hosts:
        settings |= _unnamed(total, per_host, num_hosts)
    else:
        settings |= _named(hosts, ranks_of_hosts(hosts, total, per_host, num_hosts), facts)
    if "port" in numbers and {"hosts", "hostfile", "num_hosts"} & set(settings):
        settings["port_range"] = str(numbers["port"])
    return settings


def ranks_of_hosts(
    hosts: Sequence[Host], total: int | None, per_host: int | None, num_hosts: int | None
) -> list[int | None]:
    """Ranks of each host, from the first on; hosts at the end that get none are left out.

    Args:
        hosts: In their order, with slots perhaps.
        total: Ranks of all hosts together.
        per_host: Ranks of one host.
        num_hosts: Hosts that take part.

    Raises:
        ConfigError: The ranks do not fit.
    """
    if num_hosts is not None and num_hosts > len(hosts):
        raise ConfigError(f"{num_hosts} hosts are to take part, but {len(hosts)} are named")
    if per_host is not None:
        total = per_host * (num_hosts or len(hosts)) if total is None else total
        if total > per_host * len(hosts):
            raise ConfigError(
                f"{total} ranks do not fit: {len(hosts)} hosts with {per_host} ranks each have {per_host * len(hosts)}"
            )
        return [min(per_host, total - first) for first in range(0, total, per_host)]
    slots = [host.slots for host in hosts]
    if total is None:
        return list(slots[:num_hosts])
    if any(slot is not None for slot in slots):
        return _filled([slot or 1 for slot in slots], total)
    return [1] * total if total <= len(hosts) else [_evenly(total, len(hosts))] * len(hosts)


def _filled(slots: Sequence[int], total: int) -> list[int | None]:
    """Host after host, until all ranks have a place."""
    if total > sum(slots):
        raise ConfigError(f"{total} ranks do not fit: the hosts have {sum(slots)} slots")
    counts: list[int | None] = []
    for slot in slots:
        if total > 0:
            counts.append(min(slot, total))
        total -= slot
    return counts


def _evenly(total: int, num_hosts: int) -> int:
    if total % num_hosts:
        raise ConfigError(f"{total} ranks on {num_hosts} hosts: as many on each are expected")
    return total // num_hosts


def _numbers(facts: Mapping[str, str]) -> dict[str, int]:
    numbers, problems = {}, []
    for name in ("ranks", "ranks_per_host", "num_hosts", "host_rank", "threads", "port"):
        if not (text := facts.get(name, "")):
            continue
        least = 0 if name == "host_rank" else 1
        if text.isascii() and text.isdecimal() and int(text) >= least:
            numbers[name] = int(text)
        elif text != "-1":  # how Intel's launcher and accelerate say "choose"
            problems.append(f"{text!r} is no number of {name.replace('_', ' ')}: {least} or more is expected")
    if problems:
        raise ConfigError(problems)
    return numbers


def _hosts(facts: Mapping[str, str]) -> tuple[Host, ...]:
    """The hosts that are named; one that is named several times, as Open MPI has it, gets so many ranks."""
    if "hosts" in facts:
        entries = [entry for entry in facts["hosts"].split(",") if entry]
        counted = Counter(entries)
        return parse_hosts([e if n == 1 else f"{e}:{n}" for e, n in counted.items()])
    if "hostfile" in facts:
        return read_hostfile(Path(facts["hostfile"]).expanduser())
    return ()


def _unnamed(total: int | None, per_host: int | None, num_hosts: int | None) -> dict[str, Any]:
    """Without names, ranks are here, unless there are to be more than one host's."""
    if num_hosts is None and total is not None and per_host is not None:
        num_hosts = math.ceil(total / per_host)
    settings: dict[str, Any] = {}
    if (count := per_host if per_host is not None else total) is not None:
        settings["processes"] = count
    if num_hosts is not None and num_hosts > 1:
        settings["num_hosts"] = num_hosts
    return settings


def _named(hosts: Sequence[Host], counts: Sequence[int | None], facts: Mapping[str, str]) -> dict[str, Any]:
    if len(counts) == 1 and is_loopback(hosts[0].name):
        return {} if counts[0] is None else {"processes": counts[0]}
    is_whole = len(counts) == len(hosts) and "hostfile" in facts
    if is_whole and all(count == host.slots for host, count in zip(hosts, counts, strict=True)):
        return {"hostfile": facts["hostfile"]}
    if is_whole and len(set(counts)) == 1:
        return {"hostfile": facts["hostfile"], "processes": counts[0]}
    return {"hosts": ",".join(_entry(host, count) for host, count in zip(hosts, counts, strict=False))}


def _entry(host: Host, count: int | None) -> str:
    """As `--hosts` takes it."""
    name = f"[{host.name}]" if ":" in host.name else host.name
    target = name if host.user is None else f"{host.user}@{name}"
    return target if count is None else f"{target}:{count}"
