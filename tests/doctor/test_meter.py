"""Connections and rates, measured on the loopback interface."""

from __future__ import annotations

import socket
import threading

import pytest

from fleetune.doctor.meter import SECRET_LENGTH, Peer, Responder, reach, transfer

SECRET = "s" * SECRET_LENGTH
PORTS = range(21000, 21100)


@pytest.fixture
def responder():  # type: ignore[no-untyped-def]
    made = Responder("127.0.0.1", PORTS, secret=SECRET, name="node1")
    yield made
    made.close()


def peer(responder: Responder, name: str = "node1") -> Peer:
    return Peer(name=name, address="127.0.0.1", ports=responder.ports)


def test_three_ports_of_the_range_and_one_of_the_systems(responder: Responder) -> None:
    first, middle, last, chosen = responder.ports
    assert first in PORTS[:33]
    assert middle in PORTS[33:66]
    assert last in PORTS[66:]
    assert chosen not in PORTS


def test_ports_that_are_taken_are_passed_over(responder: Responder) -> None:
    other = Responder("127.0.0.1", PORTS, secret=SECRET, name="node2")
    try:
        assert len(other.ports) == 4
        assert not set(other.ports) & set(responder.ports)
    finally:
        other.close()


def test_a_range_without_a_free_port_leaves_the_systems(responder: Responder) -> None:
    other = Responder("127.0.0.1", responder.ports[:1], secret=SECRET, name="node2")
    try:
        assert len(other.ports) == 1
    finally:
        other.close()


def test_every_port_is_reached_and_the_round_trip_measured(responder: Responder) -> None:
    attempts = reach([peer(responder)], secret=SECRET, timeout_s=5)
    assert [(one.port, one.outcome) for one in attempts] == [(port, "reached") for port in responder.ports]
    assert all(one.round_trip_s is not None and 0 < one.round_trip_s < 1 for one in attempts)


def test_another_machine_answers(responder: Responder) -> None:
    attempt = reach([peer(responder, "node7")], secret=SECRET, timeout_s=5)[0]
    assert (attempt.outcome, attempt.said) == ("other host", "the host that answers is node1")


def test_nobody_listens() -> None:
    with socket.socket() as unused:
        unused.bind(("127.0.0.1", 0))  # bound, but not listening: the port stays free of others
        port = unused.getsockname()[1]
        (attempt,) = reach([Peer(name="a", address="127.0.0.1", ports=(port,))], secret=SECRET, timeout_s=5)
    assert (attempt.outcome, attempt.said) == ("refused", "Connection refused")


def test_one_who_does_not_know_the_secret_gets_nothing(responder: Responder) -> None:
    (attempt, *_) = reach([peer(responder)], secret="x" * SECRET_LENGTH, timeout_s=5)
    assert attempt.outcome == "failed"


def test_a_listener_that_says_nothing_is_told() -> None:
    with socket.socket() as mute:
        mute.bind(("127.0.0.1", 0))
        mute.listen()
        target = Peer(name="a", address="127.0.0.1", ports=(mute.getsockname()[1],))
        (attempt,) = reach([target], secret=SECRET, timeout_s=0.3)
        assert attempt.outcome == "stalled"
        slow = transfer(target, secret=SECRET, seconds=0.1, timeout_s=0.3)
        assert (slow.mbit_per_s, slow.said) == (None, "it connects, but data do not arrive")


def test_a_transfer_has_a_rate_and_leaves_no_thread_behind(responder: Responder) -> None:
    before = threading.active_count()
    made = transfer(peer(responder), secret=SECRET, seconds=0.2, timeout_s=5)
    assert made.said is None
    assert made.mbit_per_s is not None
    assert made.mbit_per_s > 1  # both ends are threads of one process, on a machine that has other work
    for thread in threading.enumerate():
        if thread.name.startswith("Thread") and "_answer" in thread.name:
            thread.join(10)
    assert threading.active_count() <= before
