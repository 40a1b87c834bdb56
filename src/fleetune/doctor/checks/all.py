"""All checks, in the order in which they are told."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from fleetune.doctor.checks import across, cpus, links, machine, ports, reaching, software
from fleetune.doctor.examine import Examination, Scope
from fleetune.doctor.facts import Facts
from fleetune.doctor.finding import Finding, Status, Verdict, about, merged

Check = Callable[[Examination], list[Finding]]


def each(name: str, judge: Callable[[Facts, Scope], Verdict | None]) -> Check:
    """A check that looks at one host at a time; it does not apply where it says None."""

    def check(examination: Examination) -> list[Finding]:
        told = [(view.name, judge(view.facts, examination.scope)) for view in examination.views if view.facts]
        return [about(verdict, name, host) for host, verdict in told if verdict is not None]

    return check


CHECKS: tuple[Check, ...] = (
    reaching.ssh,
    reaching.python,
    software.versions,
    each("requirements", software.requirements),
    each("old extensions", software.retired_extensions),
    each("torch", software.torch_imports),
    each("kernels", software.kernels),
    each("allocators", software.allocators),
    across.same_hardware,
    each("CPU", cpus.cpu),
    each("AMX", cpus.amx),
    each("cores", cpus.cores),
    each("threads", cpus.threads),
    each("load", cpus.load),
    each("SMT", cpus.smt),
    each("governor", cpus.governor),
    each("memory", machine.memory),
    each("/dev/shm", machine.shared_memory),
    each("disk", machine.disks),
    each("open files", machine.open_files),
    each("leftovers", machine.leftovers),
    reaching.clocks,
    each("hostname", ports.hostname),
    each("IPv6", ports.ipv6),
    ports.routes,
    each("ports", ports.ports),
    links.connections,
    links.round_trips,
    links.rates,
)


def findings(examination: Examination, more: Sequence[Finding] = ()) -> tuple[Finding, ...]:
    """What all checks found: what is well first, failures last.

    Args:
        examination: What they judge.
        more: What was found before it, such as names that mean nothing.
    """
    found = [*more, *(finding for check in CHECKS for finding in check(examination))]
    order = list(Status)
    return tuple(sorted(merged(found), key=lambda finding: order.index(finding.status)))
