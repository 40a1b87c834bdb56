"""The host plan: how many ranks a host has, with how many threads each, on which cores, with which memory.

Every rank works the same plan out by itself and takes its own part, so nothing has to be sent. The plan is a function
of what the host shows, the settings and the environment; `pinning.py` carries a part out.
"""

from __future__ import annotations

import itertools
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any

from fleetune.hardware.allocators import preloaded_allocator
from fleetune.hardware.host import HostFacts, choose_threads
from fleetune.hardware.topology import Core, Topology, format_cpu_list

_KEPT_VARIABLES = {
    "KMP_AFFINITY": "Intel's and LLVM's OpenMP read it; GNU's, which torch's own builds use, does not",
    "KMP_BLOCKTIME": "Intel's and LLVM's OpenMP read it; GNU's, which torch's own builds use, does not",
    "GOMP_CPU_AFFINITY": "GNU's OpenMP binds each thread as it says",
    "OMP_PLACES": "OpenMP binds each thread as it says",
    "OMP_PROC_BIND": "OpenMP binds each thread, among the CPUs that its rank has",
    "CCL_WORKER_COUNT": "oneCCL alone reads it; its workers share the rank's cores",
    "LD_PRELOAD": "nothing else is preloaded",
    "MALLOC_CONF": "jemalloc alone reads it",
}
"""Variable of the published guides -> what comes of it. OMP_NUM_THREADS has a line of its own, that of the threads."""

# Spellings that name CPUs by their number, and so leave no choice.
_NAMES_CPUS = {"GOMP_CPU_AFFINITY": r"\d", "KMP_AFFINITY": r"proclist|explicit", "OMP_PLACES": r"\{"}

# How much of its threads a rank may lose by keeping to one NUMA node, before it gets cores of several. An assumption,
# not measured on such machines: products of several nodes' cores fetch half their operands from afar.
_WORTH_OF_ONE_NODE = 1 / 3


@dataclass(frozen=True, kw_only=True)
class RankPart:
    """What one rank of a host has to itself."""

    local_rank: int
    threads: int
    cpus: tuple[int, ...]
    """Logical CPUs it computes on."""
    is_pinned: bool
    """Whether it is to keep itself to them; if not, they are where it may run anyway."""
    nodes: tuple[int, ...]
    """NUMA nodes that these are on; empty where none are shown."""
    memory_node: int | None
    """NUMA node whose memory it prefers; None to leave that to the kernel."""


@dataclass(frozen=True, kw_only=True)
class HostPlan:
    """The parts of a host's ranks, and why they are as they are."""

    hostname: str
    parts: tuple[RankPart, ...]
    """In the order of local ranks. A rank that its launcher bound knows only its own."""
    reasons: Mapping[str, str]
    """What was decided, or a variable of the user's -> one line about it."""
    allocators: tuple[str, ...]
    """Names of those found on this host, beside the C library's."""
    notices: tuple[str, ...] = ()
    """What was overruled, a line for each: a run says it, whoever does not ask for the reasons."""

    def part_of(self, local_rank: int) -> RankPart:
        return next(part for part in self.parts if part.local_rank == local_rank)

    def to_dict(self) -> dict[str, Any]:
        return asdict(self)

    @classmethod
    def from_dict(cls, told: Mapping[str, Any]) -> HostPlan:
        """The plan that `to_dict` gave, after JSON."""
        parts = [{**part, "cpus": tuple(part["cpus"]), "nodes": tuple(part["nodes"])} for part in told["parts"]]
        lists = {name: tuple(told[name]) for name in ("allocators", "notices")}
        return cls(**{**told, **lists, "parts": tuple(RankPart(**part) for part in parts)})

    def lines(self) -> list[str]:
        """The plan of one host as text."""
        return plan_lines({self.hostname: self})

    def cores_in_short(self) -> str:
        """Which cores the ranks have, as one line."""
        parts = [f"rank {p.local_rank}: {format_cpu_list(p.cpus)}" for p in self.parts if p.is_pinned]
        return f"pinned, {'; '.join(parts)}" if parts else self.reasons["cores"]


def plan_lines(plans: Mapping[str, HostPlan], more: Sequence[tuple[str, str]] = ()) -> list[str]:
    """The plans of a run's hosts as text: a table of the ranks, then a line for each decision.

    Args:
        plans: Name of a host -> its plan, in the order of ranks.
        more: Topic and line of what follows from them.
    """
    rows = [("rank", "host", "cores", "NUMA node", "threads", "allocator found")]
    first_rank = 0
    for name, plan in plans.items():
        rows += [_row(first_rank + part.local_rank, name, plan, part) for part in plan.parts]
        first_rank += len(plan.parts)
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    table = ["  ".join(map(str.ljust, row, widths)).rstrip() for row in rows]
    reasons = [*_reasons(plans), *more]
    width = max(len(topic) for topic, _ in reasons)
    return [*table, "", *(f"{topic:<{width}}  {line}" for topic, line in reasons)]


def _row(rank: int, name: str, plan: HostPlan, part: RankPart) -> tuple[str, str, str, str, str, str]:
    cores = format_cpu_list(part.cpus)
    return (
        str(rank),
        name,
        cores if part.is_pinned else f"any of {cores}",
        format_cpu_list(part.nodes) or "not shown",
        str(part.threads),
        ", ".join(plan.allocators) or "none",
    )


def _reasons(plans: Mapping[str, HostPlan]) -> list[tuple[str, str]]:
    """Topic and line of each decision: once where all hosts agree, else with the hosts that it is about."""
    said: dict[tuple[str, str], list[str]] = {}
    for name, plan in plans.items():
        for topic, line in plan.reasons.items():
            said.setdefault((topic, line), []).append(name)
    topics = list(dict.fromkeys(topic for topic, _ in said))
    ordered = sorted(said.items(), key=lambda entry: topics.index(entry[0][0]))
    return [
        (topic, line if len(names) == len(plans) else f"{line} ({', '.join(names)})")
        for (topic, line), names in ordered
    ]


Share = tuple[Core, ...]
"""Cores for one rank."""


def plan_host(
    topology: Topology,
    facts: HostFacts,
    *,
    environ: Mapping[str, str],
    processes: int | None = None,
    threads: int | None = None,
    bound_rank: int | None = None,
    allocators: Sequence[str] = (),
) -> HostPlan:
    """Plan the ranks of one host.

    Args:
        topology: What the process may use.
        facts: Name and quota of the host.
        environ: Environment of the ranks.
        processes: Ranks on this host, as the user or an outer launcher decided; None for one per NUMA node.
        threads: Threads of each rank, as the user decided; None to derive them.
        bound_rank: Local rank of this process, if its launcher gave it CPUs of its own: those of `topology`.
        allocators: Names of those found on this host.

    Raises:
        ConfigError: A number of threads, in the settings or in OMP_NUM_THREADS, that is none.
    """
    domains, quota, is_bound = _domains(topology), facts.cpu_quota, bound_rank is not None
    count = processes or (_default_count(domains) if _why_loose(topology, 1, quota, environ) is None else 1)
    shares = [topology.cores] if is_bound else _shares(domains, count)
    most, cause = _most_threads(shares, count, quota)
    chosen, notice = choose_threads(environ, most * count, count, threads)
    loose = _BOUND if is_bound else _why_loose(topology, count, quota, environ)
    if loose is not None:
        shares = [topology.cores] * len(shares)
    reasons = {
        "ranks": _ranks_line(domains, count, is_asked=processes is not None, is_loose=loose is not None),
        "threads": notice or f"{chosen} a rank{_who_chose(environ, is_asked=threads is not None) or cause}",
        "cores": loose or _cores_line(shares, chosen),
        "memory": _memory_line(topology, is_pinned=loose is None),
        "allocator": _allocator_line(allocators, environ),
        **dict(_lines_from_outside(topology, environ)),
    }
    parts = [
        _part(local_rank, share, chosen, topology, is_pinned=loose is None)
        for local_rank, share in enumerate(shares, start=bound_rank or 0)
    ]
    return HostPlan(
        hostname=facts.hostname, parts=tuple(parts), reasons=reasons, allocators=tuple(allocators),
        notices=() if notice is None else (notice,),
    )  # fmt: skip


def _part(local_rank: int, share: Share, threads: int, topology: Topology, *, is_pinned: bool) -> RankPart:
    nodes = tuple(sorted({core.node for core in share if core.node is not None}))
    one_each = is_pinned and threads <= len(share)
    chooses_memory = is_pinned and len(nodes) == 1 and len(topology.memory_nodes) > 1
    return RankPart(
        local_rank=local_rank,
        threads=threads,
        cpus=tuple(sorted(cpu for core in share for cpu in (core.cpus[:1] if one_each else core.cpus))),
        is_pinned=is_pinned,
        nodes=nodes,
        memory_node=topology.memory_near(nodes[0]) if chooses_memory else None,
    )


# ---- ranks


def _domains(topology: Topology) -> list[Share]:
    """The cores by NUMA node, or by socket where the system shows no nodes."""
    domains: dict[tuple[bool, int | None], list[Core]] = {}
    for core in topology.cores:
        has_node = core.node is not None
        domains.setdefault((has_node, core.node if has_node else core.socket), []).append(core)
    return [tuple(cores) for cores in domains.values()]


def _default_count(domains: Sequence[Share]) -> int:
    """One rank per domain, without those so small that their ranks would idle more cores than they bring.

    Ranks do equal shares of every step, so all have as many threads as the one with the fewest cores.
    """
    sizes = sorted(map(len, domains), reverse=True)
    return max(range(1, len(sizes) + 1), key=lambda count: (count * sizes[count - 1], count))


def _ranks_line(domains: Sequence[Share], count: int, *, is_asked: bool, is_loose: bool) -> str:
    place = "socket" if domains[0][0].node is None else "NUMA node"
    if is_asked:
        return f"{count}, as the settings or the launcher say"
    if is_loose:
        return "1: more could not be told to keep to a NUMA node each"
    if len(domains) == 1:
        return "1: one NUMA node has all usable cores" if place == "NUMA node" else "1: no NUMA nodes are shown"
    if count == len(domains):
        return f"{count}: one per {place} that has usable cores"
    sizes = ", ".join(str(len(domain)) for domain in domains)
    return f"{count}, for {len(domains)} {place}s of {sizes} usable cores: all ranks would wait for one on so few"


# ---- cores


def _shares(domains: Sequence[Share], count: int) -> list[Share]:
    """Cores for each of `count` ranks, neighbours together, as distinct as there are cores."""
    cores = tuple(core for domain in domains for core in domain)
    if count > len(cores):
        return [cores[i % len(cores) :][:1] for i in range(count)]
    across, inside = _cut(cores, count), _shares_inside(domains, count)
    least = min(map(len, across)) * (1 - _WORTH_OF_ONE_NODE)
    return inside if min(map(len, inside)) >= least else across


def _shares_inside(domains: Sequence[Share], count: int) -> list[Share]:
    """Shares of which each lies in one domain: the next rank goes where it leaves the most cores to each."""
    ranks = [0] * len(domains)
    for _ in range(count):
        ranks[max(range(len(domains)), key=lambda i: (len(domains[i]) / (ranks[i] + 1), -i))] += 1
    return [share for domain, number in zip(domains, ranks, strict=True) for share in _cut(domain, number)]


def _cut(cores: Share, count: int) -> list[Share]:
    """Pieces of nearly equal size, each of neighbours."""
    bounds = [len(cores) * i // count for i in range(count + 1)] if count else []
    return [cores[start:end] for start, end in itertools.pairwise(bounds)]


_BOUND = "not pinned: the launcher bound this rank to CPUs of its own"


def _why_loose(topology: Topology, count: int, quota: float | None, environ: Mapping[str, str]) -> str | None:
    """Why ranks are not pinned, as one line; None when they are."""
    cores = len(topology.cores)
    named = next((n for n, spelling in _NAMES_CPUS.items() if re.search(spelling, environ.get(n, ""))), None)
    if named is not None:
        return f"not pinned: {named}={environ[named]} names CPUs"
    if count > cores:
        return f"not pinned: {count} ranks share {cores} physical cores"
    if quota is not None and quota < cores:
        # A quota is time on any core. Containers that all pin to their first cores would sit on the same ones.
        return f"not pinned: a quota of {quota:g} of {cores} cores is time, on whichever cores are free"
    return None


def _cores_line(shares: Sequence[Share], threads: int) -> str:
    own = "" if len(shares) == 1 else "each rank keeps to its own, "
    if threads <= min(map(len, shares)):
        return f"{own}one logical CPU per physical core"
    return f"{own}all logical CPUs: {threads} threads are more than the physical cores"


# ---- threads


def _most_threads(shares: Sequence[Share], count: int, quota: float | None) -> tuple[int, str]:
    """Threads of a rank for which it has physical cores and CPU time, at least 1; and which of the two is scarcer.

    SMT siblings do not count: they share the arithmetic units of their core.
    """
    cores = min(map(len, shares))
    if quota is not None and quota // count < cores:
        return max(1, int(quota // count)), f": a quota of {quota:g} CPUs, rounded down"
    is_even = cores == max(map(len, shares))
    return cores, ": its physical cores" if is_even else ": as many as the smallest share has physical cores"


def _who_chose(environ: Mapping[str, str], *, is_asked: bool) -> str | None:
    told = environ.get("OMP_NUM_THREADS", "").strip()
    if is_asked:
        return ", as --threads says"
    if told and environ.get("FLEETUNE_LAUNCHER") not in ("local", "ssh"):  # ours set it, from this plan
        return f", as OMP_NUM_THREADS={told} says"
    return None


# ---- memory, and what was decided elsewhere


def _memory_line(topology: Topology, *, is_pinned: bool) -> str:
    if not topology.memory_nodes:
        return "left to the kernel: no NUMA nodes are shown"
    if len(topology.memory_nodes) == 1:
        return f"of NUMA node {topology.memory_nodes[0].number}: there is no other"
    if not is_pinned:
        return "left to the kernel: it takes the node of the core that first writes"
    return "a rank on one NUMA node prefers the memory next to it, and takes other when that is full"


def _allocator_line(found: Sequence[str], environ: Mapping[str, str]) -> str:
    preloaded = preloaded_allocator(environ)
    if preloaded is not None:
        return f"{preloaded}, as LD_PRELOAD says"
    if not found:
        return "the C library's: neither tcmalloc nor jemalloc was found"
    return f"the C library's: {' and '.join(found)} would have to measure faster first"


def _lines_from_outside(topology: Topology, environ: Mapping[str, str]) -> Iterator[tuple[str, str]]:
    """What the user, or who started us, had decided before, and what comes of it."""
    allowed = topology.allowed_cpus
    if len(allowed) < topology.num_cpus:
        told = f"CPUs {format_cpu_list(allowed)} of {topology.num_cpus}"
        yield "allowed", f"{told}: restricted from outside, as by a cpuset, taskset, numactl or a launcher"
    for name, effect in _KEPT_VARIABLES.items():
        if environ.get(name):
            yield name, f"{environ[name]} is kept: {effect}"
