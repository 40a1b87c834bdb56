"""`fleetune env`: the facts of this host, for a bug report."""

from __future__ import annotations

import json
import os
from collections.abc import Iterator, Sequence

from fleetune.cli.arguments import make_parser, parse, tell_notices
from fleetune.cluster.network import DEFAULT_PORTS
from fleetune.doctor.facts import Facts, to_json
from fleetune.doctor.machine import read_facts
from fleetune.hardware.topology import format_cpu_list

DESCRIPTION = """Print the facts of this host for a bug report: versions, CPU, cores, memory, kernels, the variables of
libraries. Secrets are left out."""

_GB = 1e9
_HIDDEN = ("listeners", "remains")
"""Of other programs on this host: no business of a bug report."""


def run(words: Sequence[str]) -> int:
    """Print the facts as text, or as JSON."""
    parser = make_parser("env", DESCRIPTION, frozenset({"cache_dir"}))
    parser.add_argument("--json", action="store_true", help="print them as JSON")
    parsed = parse(parser, words, ("json",))
    facts = read_facts(cache_dir=parsed.config.cache_dir, ports=DEFAULT_PORTS, environ=os.environ)
    if parsed.extra.get("json", False):
        told = {name: value for name, value in to_json(facts).items() if name not in _HIDDEN}
        print(json.dumps(told, indent=2))
        return 0
    tell_notices(parsed)
    rows = [*_software(facts), *_hardware(facts), *_surroundings(facts)]
    width = max(len(name) for name, _ in rows)
    print("\n".join(f"{name:<{width}}  {text}" for name, text in rows))
    return 0


Rows = Iterator[tuple[str, str]]


def _software(facts: Facts) -> Rows:
    software, kernels = facts.software, facts.kernels
    for name, version in software.versions.items():
        yield name, f"{version} ({software.executable})" if name == "python" else version
    yield "fleetune's files", software.sources
    for problem in (*software.unmet, *software.retired, *([kernels.problem] if kernels.problem else [])):
        yield "problem", problem
    yield "compiler", kernels.compiler or kernels.no_compiler or "not known"
    yield "kernels", kernels.wish or (f"built, {kernels.built}" if kernels.built else "not built")


def _hardware(facts: Facts) -> Rows:
    machine, cpus = facts.machine, facts.cpus
    shm = "missing" if facts.shm_bytes is None else f"{facts.shm_bytes / _GB:.1f} GB"
    quota = "" if machine.cpu_quota is None else f", quota of {machine.cpu_quota:g}"
    limit = "" if machine.memory_limit_bytes is None else f", limit {machine.memory_limit_bytes / _GB:.1f} GB"
    yield "host", f"{machine.hostname}, Linux {machine.kernel}"
    yield "CPU", machine.cpu_model
    yield "instructions", " ".join(machine.isa)
    if "amx_tile" in machine.isa:
        yield "AMX", "granted" if cpus.amx_granted else "not granted by the kernel"
    yield (
        "cores",
        (
            f"{cpus.num_cores} physical, CPUs {format_cpu_list(machine.allowed_cpus)} of {cpus.num_online}{quota}, "
            f"{cpus.num_nodes} NUMA nodes"
        ),
    )
    yield "SMT, governor", f"{_shown(cpus.smt)}, {cpus.governor or 'not shown'}"
    yield (
        "memory",
        (
            f"{machine.memory_bytes / _GB:.1f} GB, {facts.memory_available_bytes / _GB:.1f} GB available{limit}, "
            f"/dev/shm {shm}"
        ),
    )
    for disk in facts.disks:
        yield disk.what, f"{disk.path}, {disk.problem or f'{disk.free_bytes / _GB:.1f} GB free'}"


def _shown(value: bool | None) -> str:
    return {True: "on", False: "off", None: "not shown"}[value]


def _surroundings(facts: Facts) -> Rows:
    plan, network = facts.plan, facts.network
    yield "plan", plan.problem or f"{plan.processes} ranks of {plan.threads} threads"
    yield "allocators", f"{', '.join(facts.allocators) or 'none'} found, {facts.preloaded or 'none'} preloaded"
    yield "open files", str(facts.open_files)
    yield "own name means", ", ".join(network.hostname_addresses) or "nothing"
    yield "interfaces", ", ".join(f"{nic.name} {nic.address} mtu {nic.mtu}" for nic in network.nics) or "loopback only"
    yield from facts.variables.items()
