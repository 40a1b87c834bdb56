"""What the checks make of connections, round trips and rates between hosts."""

from __future__ import annotations

import itertools
from collections.abc import Mapping

import pytest

from fleetune.doctor.checks import links
from fleetune.doctor.examine import Examination
from fleetune.doctor.finding import Status
from fleetune.doctor.meter import Outcome
from tests.doctor.made_up import attempt, examination, transfer

HOSTS = (1, 2, 3)
PAIRS = list(itertools.permutations(HOSTS, 2))
EVERY = list(itertools.product(HOSTS, HOSTS))


def tried(wrong: Mapping[tuple[int, int, int], Outcome], said: str | None = None) -> Examination:
    """All pairs on two ports, some of which went wrong: (source, target, port) -> how."""
    attempts = []
    for (source, target), port in itertools.product(EVERY, (20000, 40001)):
        outcome = wrong.get((source, target, port), "reached")
        attempts.append(attempt(source, target, outcome, port, **({} if outcome == "reached" else {"said": said})))
    return examination(attempts=tuple(attempts))


def test_all_reach_each_other() -> None:
    (found,) = links.connections(tried({}))
    assert (found.status, found.hosts) == (Status.OK, ("node1", "node2", "node3"))
    assert found.reason == "each reaches every other and itself, on 2 ports"


def test_a_firewall_on_one_host_is_a_timeout_to_it() -> None:
    wrong: dict[tuple[int, int, int], Outcome] = {(s, 3, p): "timeout" for s in (1, 2) for p in (20000, 40001)}
    (found,) = links.connections(tried(wrong))
    assert (found.status, found.hosts) == (Status.FAILURE, ("node3",))
    assert found.reason == (
        "timed out: node1 to node3, node2 to node3 on ports 20000, 40001. Packets are dropped without a word, as "
        "firewalls do"
    )
    assert found.fix == (
        "let the hosts talk on all TCP ports: a rule of the cloud's security group, or sudo ufw allow from NETWORK"
    )


def test_a_firewall_that_knows_the_range_only() -> None:
    (found,) = links.connections(tried({(1, 2, 40001): "timeout", (3, 2, 40001): "timeout"}))
    assert found.hosts == ("node2",)
    assert "The port range is open, but ranks' own connections take any port above 32768" in found.reason


def test_refused_is_told_apart_from_a_timeout() -> None:
    found = links.connections(tried({(1, 2, 20000): "refused", (2, 3, 20000): "timeout"}))
    assert [(one.status, one.hosts, one.reason.split(":")[0]) for one in found] == [
        (Status.FAILURE, ("node2",), "refused"), (Status.FAILURE, ("node3",), "timed out"),
    ]  # fmt: skip


@pytest.mark.parametrize(
    ("outcome", "said", "words"),
    [
        ("unreachable", "No route to host", "No route to host: node1 to node2 on port 20000. The address cannot be"),
        ("stalled", None, "it connects, but no data come back: node1 to node2 on port 20000"),
        ("other host", "the host that answers is node7",
         "the host that answers is node7. Two hosts have the address 10.0.0.12"),
        ("failed", "Too many open files", "node1 to node2 on port 20000: Too many open files"),
    ],
)  # fmt: skip
def test_other_ways_to_fail(outcome: Outcome, said: str | None, words: str) -> None:
    (found,) = links.connections(tried({(1, 2, 20000): outcome}, said))
    assert found.status is Status.FAILURE
    assert words in found.reason


# ---- round trips


def test_round_trips_are_told_with_the_longest() -> None:
    attempts = [attempt(s, t, round_trip_s=0.0009 if (s, t) == (2, 3) else 0.0002) for s, t in PAIRS]
    (found,) = links.round_trips(examination(attempts=tuple(attempts)))
    assert (found.status, found.reason) == (
        Status.OK, "0.20 ms there and back, longest 0.90 ms (node2 to node3)",
    )  # fmt: skip


def test_hosts_that_are_far_apart() -> None:
    attempts = [attempt(s, t, round_trip_s=0.042 if 3 in (s, t) else 0.0002) for s, t in PAIRS]
    (found,) = links.round_trips(examination(attempts=tuple(attempts)))
    assert found.status is Status.WARNING
    assert found.reason.startswith("42.0 ms there and back between node1 and node3")


def test_the_way_to_itself_is_no_round_trip() -> None:
    assert links.round_trips(examination(attempts=(attempt(1, 1),))) == []


# ---- rates


def rated(rates: Mapping[tuple[int, int], float], usual: float = 940.0) -> Examination:
    return examination(transfers=tuple(transfer(s, t, rates.get((s, t), usual)) for s, t in PAIRS))


def test_even_rates() -> None:
    (found,) = links.rates(rated({(3, 1): 900.0}))
    assert (found.status, found.reason) == (Status.OK, "900 Mbit/s to 940 Mbit/s (slowest node3 to node1)")


def test_a_slow_host_is_named_once() -> None:
    slow = {pair: 94.0 for pair in PAIRS if 2 in pair}
    (found,) = links.rates(rated(slow))
    assert (found.status, found.hosts) == (Status.WARNING, ("node2",))
    assert found.reason == (
        "94 Mbit/s at best, to and from every other host; the fastest pair has 940 Mbit/s, and all wait for it"
    )


def test_a_pair_that_is_slow_one_way() -> None:
    (found,) = links.rates(rated({(1, 3): 80.0}))
    assert (found.status, found.hosts) == (Status.WARNING, ("node1", "node3"))
    assert found.reason == (
        "80 Mbit/s from node1 to node3, but 940 Mbit/s back; the fastest pair has 940 Mbit/s"
    )  # fmt: skip


def test_rates_beyond_what_is_measured_well_are_not_compared() -> None:
    (found,) = links.rates(rated({(1, 3): 9_000.0}, usual=24_000.0))
    assert (found.status, found.reason) == (Status.OK, "9.0 Gbit/s to 24.0 Gbit/s (slowest node1 to node3)")


def test_a_network_that_is_slow_everywhere() -> None:
    (found,) = links.rates(rated({}, usual=11.0))
    assert found.status is Status.WARNING
    assert found.reason == "11 Mbit/s at best: training will mostly wait for the network"


def test_data_that_do_not_arrive_are_a_failure() -> None:
    told = examination(transfers=(transfer(1, 2, None, "it connects, but data do not arrive"),))
    (found,) = links.rates(told)
    assert (found.status, found.hosts) == (Status.FAILURE, ("node2",))
    assert found.reason == "no data from node1: it connects, but data do not arrive"
