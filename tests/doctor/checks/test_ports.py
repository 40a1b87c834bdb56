"""What the checks make of names, interfaces and ports."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import pytest

from fleetune.doctor.checks import ports
from fleetune.doctor.examine import Place, Scope
from fleetune.doctor.facts import Facts, Listener, Nic
from fleetune.doctor.finding import Status, Verdict
from tests.doctor.made_up import FACTS, SCOPE, changed, examination, view


def judged(judge: object, facts: Facts, scope: Scope = SCOPE) -> Verdict:
    assert callable(judge)
    verdict = judge(facts, scope)
    assert isinstance(verdict, Verdict)
    return verdict


@pytest.mark.parametrize("judge", [ports.hostname, ports.ipv6, ports.ports])
def test_a_healthy_host_is_ok(judge: object) -> None:
    assert judged(judge, FACTS).status is Status.OK


@pytest.mark.parametrize(
    ("addresses", "words", "fix"),
    [
        (("127.0.1.1",), "node1 means 127.0.1.1",
         "sudo sed -i 's/^127.0.1.1[[:space:]].*/10.0.0.11 node1/' /etc/hosts"),
        (("127.0.0.1",), "node1 means 127.0.0.1",
         "put `10.0.0.11 node1` into /etc/hosts, and take node1 away from 127.0.0.1"),
        ((), "node1 cannot be resolved", "echo '10.0.0.11 node1' | sudo tee -a /etc/hosts"),
    ],
)  # fmt: skip
def test_a_name_that_leads_nowhere(addresses: tuple[str, ...], words: str, fix: str) -> None:
    verdict = judged(ports.hostname, changed("network", hostname_addresses=addresses))
    assert verdict.status is Status.WARNING
    assert words in verdict.reason
    assert verdict.fix == fix


def test_ipv6_off_does_no_harm() -> None:
    off = judged(ports.ipv6, changed("network", has_ipv6=False))
    assert (off.status, off.reason) == (Status.OK, "off, which does no harm: IPv4 is used")


# ---- interfaces


def routes(*hosts: tuple[Facts, Place], scope: Scope = SCOPE) -> list[tuple[str, Status, str]]:
    views = [view(number, facts, place=place) for number, (facts, place) in enumerate(hosts, start=1)]
    found = ports.routes(examination(*views, scope=scope))
    return [(one.hosts[0], one.status, one.reason) for one in found]


HERE = Place(address="10.0.0.11", interface="eth0", ports=(20000,))


def test_the_interface_is_named_and_the_others_too() -> None:
    two = changed("network", nics=(FACTS.network.nics[0], Nic(name="ib0", address="192.168.7.1", mtu=1500)))
    assert routes((two, HERE)) == [
        ("node1", Status.OK, "eth0 leads to the other hosts; also there: ib0 (--network chooses)")
    ]


def test_no_route_and_no_address_in_the_network() -> None:
    nowhere = Place(address=None)
    assert routes((FACTS, nowhere)) == [("node1", Status.FAILURE, "no route to the head; it has eth0 10.0.0.11")]
    wanted = replace(SCOPE, network="10.9.0.0/16")
    assert routes((FACTS, nowhere), scope=wanted) == [
        ("node1", Status.FAILURE, "no address in --network 10.9.0.0/16; it has eth0 10.0.0.11")
    ]


def test_packets_of_different_sizes() -> None:
    jumbo = changed("network", nics=(Nic(name="eth0", address="10.0.0.12", mtu=9000),))
    found = routes((FACTS, HERE), (jumbo, Place(address="10.0.0.12", interface="eth0")))
    assert found[-1] == (
        "node1", Status.WARNING,
        "the largest packets (MTU) differ: 1500 on node1, 9000 on node2; large ones may be lost, and transfers stall",
    )  # fmt: skip


# ---- ports


def taken(*told: tuple[int, int | None]) -> Facts:
    return changed(listeners=tuple(
        Listener(port=port, address="0.0.0.0", pid=pid, process=None if pid is None else "python serve.py")
        for port, pid in told
    ))  # fmt: skip


OWN = replace(SCOPE, ports=range(29510, 29512), has_own_ports=True)


@pytest.mark.parametrize(
    ("listening", "scope", "status", "reason", "fix"),
    [
        ([(20000, 7)], SCOPE, Status.OK, "free ones in 20000-29999", None),
        ([(29500, 7)], SCOPE, Status.WARNING,
         "port 29500 by python serve.py (pid 7) has torchrun's usual port; fleetune takes a free one",
         "kill 7, or another --port_range"),
        ([(29510, 7)], OWN, Status.WARNING,
         "of 29510-29511 are taken: 29510 by python serve.py (pid 7); fleetune takes a free one",
         "kill 7, or another --port_range"),
        ([(29510, 7), (29511, None)], OWN, Status.FAILURE,
         "every port of 29510-29511 is taken: 29510 by python serve.py (pid 7), 29511 by another user's process",
         "kill 7, or another --port_range"),
        ([(29510, None), (29511, None)], OWN, Status.FAILURE,
         "every port of 29510-29511 is taken: 29510 by another user's process, 29511 by another user's process",
         "sudo ss -ltnp shows which; or another --port_range"),
    ],
)  # fmt: skip
def test_ports_that_are_taken(
    listening: Sequence[tuple[int, int | None]], scope: Scope, status: Status, reason: str, fix: str | None
) -> None:
    assert judged(ports.ports, taken(*listening), scope) == Verdict(status=status, reason=reason, fix=fix)
