"""Checks of a host's name, addresses and ports."""

from __future__ import annotations

from fleetune.cluster.rank import is_loopback
from fleetune.doctor.examine import Examination, Scope, View
from fleetune.doctor.facts import Facts, Listener, Nic
from fleetune.doctor.finding import Finding, Verdict, about, failure, ok, warning
from fleetune.doctor.processes import TORCHRUN_PORT

_MOST_NAMED = 4
_LINK_LOCAL = ("fe80:", "169.254.")


def hostname(facts: Facts, scope: Scope) -> Verdict | None:
    """Whether the host's own name leads to itself from elsewhere, too."""
    name, found = facts.machine.hostname, facts.network.hostname_addresses
    own = next((nic.address for nic in facts.network.nics if "." in nic.address), "ADDRESS")
    if not found:
        return warning(
            f"its own name {name} cannot be resolved; fleetune does not need that, gloo and MPI by hand do",
            f"echo '{own} {name}' | sudo tee -a /etc/hosts",
        )
    loops = [address for address in found if is_loopback(address)]
    if loops:
        return warning(
            f"its own name {name} means {loops[0]}, which leads nowhere from other hosts; fleetune does not rely on "
            "it, gloo and MPI by hand do",
            f"sudo sed -i 's/^{loops[0]}[[:space:]].*/{own} {name}/' /etc/hosts" if "127.0.1" in loops[0]
            else f"put `{own} {name}` into /etc/hosts, and take {name} away from {loops[0]}",
        )  # fmt: skip
    return ok("resolves to an address of its own")


def ipv6(facts: Facts, scope: Scope) -> Verdict | None:
    """No harm either way."""
    return ok("on" if facts.network.has_ipv6 else "off, which does no harm: IPv4 is used")


# ---- routes


def routes(examination: Examination) -> list[Finding]:
    """Which interface leads to the head, and which others there are."""
    found: list[Finding] = []
    mtus: dict[str, int] = {}
    for view in examination.views:
        if view.facts is None or view.place is None:
            continue
        found.append(about(_route(view, view.facts.network.nics, examination.scope), "interface", view.name))
        for nic in view.facts.network.nics:
            if nic.address == view.place.address:
                mtus[view.name] = nic.mtu
    if len(set(mtus.values())) > 1:
        told = ", ".join(f"{mtu} on {name}" for name, mtu in mtus.items())
        found.append(about(warning(
            f"the largest packets (MTU) differ: {told}; large ones may be lost, and transfers stall",
            "sudo ip link set INTERFACE mtu 1500, on all hosts alike",
        ), "interface", *mtus))  # fmt: skip
    return found


def _route(view: View, nics: tuple[Nic, ...], scope: Scope) -> Verdict:
    place = view.place
    assert place is not None
    listed = ", ".join(f"{nic.name} {nic.address}" for nic in nics if not nic.address.startswith(_LINK_LOCAL))
    if place.problem is not None:
        return failure(f"listening on it failed: {place.problem}", "close what holds the ports, or name others")
    if place.address is None and scope.network is not None:
        return failure(f"no address in --network {scope.network}; it has {listed or 'none'}", "correct --network")
    if place.address is None:
        return failure(f"no route to the head; it has {listed or 'no address'}", "ip route")
    if is_loopback(place.address):
        return ok("this machine alone: loopback")
    others = sorted({nic.name for nic in nics} - {place.interface})
    told = f"{place.interface} leads to the other hosts"
    return ok(f"{told}; also there: {', '.join(others)} (--network chooses)" if others else told)


# ---- ports


def ports(facts: Facts, scope: Scope) -> Verdict | None:
    """Whether rank 0 finds a port, and who has those that are taken."""
    taken = [one for one in facts.listeners if one.port in scope.ports]
    words = f"{scope.ports[0]}-{scope.ports[-1]}" if len(scope.ports) > 1 else f"{scope.ports[0]}"
    if len({one.port for one in taken}) >= len(scope.ports):
        return failure(f"every port of {words} is taken: {_named(taken)}", _kill(taken))
    torchrun = [one for one in facts.listeners if one.port == TORCHRUN_PORT]
    if taken and scope.has_own_ports:
        return warning(f"of {words} are taken: {_named(taken)}; fleetune takes a free one", _kill(taken))
    if torchrun:
        reason = f"port {_named(torchrun)} has torchrun's usual port; fleetune takes a free one"
        return warning(reason, _kill(torchrun))
    return ok(f"free ones in {words}")


def _named(taken: list[Listener]) -> str:
    told = [f"{one.port} by {_process(one)}" for one in taken[:_MOST_NAMED]]
    return ", ".join([*told, *([f"{len(taken) - _MOST_NAMED} more"] if len(taken) > _MOST_NAMED else [])])


def _process(one: Listener) -> str:
    return "another user's process" if one.pid is None else f"{one.process} (pid {one.pid})"


def _kill(taken: list[Listener]) -> str:
    pids = list(dict.fromkeys(str(one.pid) for one in taken if one.pid is not None))
    return (
        f"kill {' '.join(pids)}, or another --port_range"
        if pids
        else "sudo ss -ltnp shows which; or another --port_range"
    )
