"""Clocks: parts add up to the whole, and a part inside another is taken off it."""

from __future__ import annotations

import contextlib
import time

import psutil
import pytest

from fleetune.timing.clock import Clock, WorkClock, process_begun_ns
from fleetune.timing.clocks import BLOCKED, OTHER, RankClocks


class Hand:
    """The hand of a clock that tests move."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.ns, self.looks = 0, 0
        monkeypatch.setattr(time, "perf_counter_ns", self._look)

    def _look(self) -> int:
        self.looks += 1
        return self.ns


@pytest.fixture
def hand(monkeypatch: pytest.MonkeyPatch) -> Hand:
    return Hand(monkeypatch)


def test_a_part_inside_another_is_taken_off_it(hand: Hand) -> None:
    clock = Clock("outer")
    hand.ns = 5
    with clock.during("middle"):
        hand.ns = 12
        with clock.during("inner"):
            hand.ns = 15
        hand.ns = 35
    hand.ns = 40
    assert clock.read() == {"outer": 5 + 5, "middle": 7 + 20, "inner": 3}


def test_the_parts_are_the_time_since_the_beginning(hand: Hand) -> None:
    hand.ns = 100
    clock = Clock("start", begun_ns=30)
    clock.switch("other")
    hand.ns = 117
    assert clock.read() == {"start": 70, "other": 17}
    hand.ns = 118
    assert sum(clock.read().values()) == 118 - 30


def test_a_part_that_fails_is_left(hand: Hand) -> None:
    clock = Clock("outer")
    with contextlib.suppress(RuntimeError), clock.during("inner"):
        hand.ns = 4
        raise RuntimeError
    hand.ns = 9
    assert clock.read() == {"outer": 5, "inner": 4}


def test_spans_are_kept_while_they_are_wanted(hand: Hand) -> None:
    clock = Clock("outer")
    with clock.during("before"):
        hand.ns = 1
    clock.read()
    clock.spans = []
    hand.ns = 3
    with clock.during("inner"):
        hand.ns = 7
    assert clock.spans == [("outer", 1, 3), ("inner", 3, 7)]


def test_a_change_of_part_looks_at_the_clock_once(hand: Hand) -> None:
    clock = Clock("outer")
    before = hand.looks
    with clock.during("inner"):
        pass
    assert hand.looks - before == 2


def test_work_is_read_while_it_goes_on(hand: Hand) -> None:
    clock = WorkClock()
    hand.ns = 10
    assert clock.read_ns() == 0
    with clock.working("reduce 3"):
        hand.ns = 14
        assert clock.read_ns() == 4
    hand.ns = 100
    clock.spans = []
    with clock.working("gather 3"):
        hand.ns = 101
    hand.ns = 200
    assert (clock.read_ns(), clock.spans) == (5, [("gather 3", 100, 101)])


def test_hidden_is_what_is_exchanged_while_the_rank_computes(hand: Hand) -> None:
    clocks = RankClocks()
    clocks.exchange.begin("reduce 0")  # from 0 to 30, of which the rank waits from 20 to 27
    hand.ns = 20
    with clocks.blocked():
        hand.ns = 27
    hand.ns = 30
    clocks.exchange.end()
    hand.ns = 50
    assert clocks.hidden_ns == 23
    assert clocks.main.read() == {OTHER: 43, BLOCKED: 7}


def test_waiting_in_which_nothing_is_exchanged_hides_nothing(hand: Hand) -> None:
    clocks = RankClocks()
    with clocks.blocked():
        hand.ns = 8
        clocks.exchange.begin("reduce 0")
        hand.ns = 10
        clocks.exchange.end()
        hand.ns = 15
    assert clocks.hidden_ns == 0
    assert clocks.main.read()[BLOCKED] == 15


def test_the_beginning_of_this_process_is_what_psutil_says() -> None:
    age_s = time.time() - psutil.Process().create_time()
    assert (time.perf_counter_ns() - process_begun_ns()) / 1e9 == pytest.approx(age_s, abs=1.0)
