"""Times of steps: what clocks, kernels and the other ranks say, divided among the parts."""

from __future__ import annotations

import time
from pathlib import Path

import pytest

from fleetune.timing.clocks import FORWARD_BACKWARD, LOOP, RankClocks
from fleetune.timing.interface import Traffic, read_traffic
from fleetune.timing.parts import PARTS, names_of
from fleetune.timing.steps import Samples, StepTimes, divided

S = 1_000_000_000


@pytest.mark.parametrize(
    ("behind_s", "waiting_s", "communication_s"),
    [(4, 4, 1 + 6 - 4), (0, 0, 7), (-3, 0, 7), (25, 6, 1)],
    ids=["a slower rank", "this one is the slowest", "said to be slower than the slowest", "more than was waited"],
)
def test_a_step_is_divided(behind_s: int, waiting_s: int, communication_s: int) -> None:
    taken = {FORWARD_BACKWARD: 50, "blocked": 6, "communication": 1, "optimizer": 5, "data": 2, LOOP: 3}
    kernels = {"products": 30, "attention": 9, "kernels": 4}
    assert divided(taken, kernels, behind_s) == {
        **kernels, "framework": 7, "optimizer": 5, "communication": communication_s, "waiting": waiting_s, "data": 2,
        "rest": 3,
    }  # fmt: skip


def test_the_parts_of_a_step_are_all_of_it() -> None:
    taken = {FORWARD_BACKWARD: 50, "blocked": 6, "communication": 1, "optimizer": 5, "data": 2, LOOP: 3}
    parts = divided(taken, {"products": 30, "attention": 9, "kernels": 4}, 2)
    assert tuple(parts) == names_of("steps")
    assert sum(parts.values()) == sum(taken.values())


class Day:
    """A rank whose time passes when it says so."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.ns = 0
        monkeypatch.setattr(time, "perf_counter_ns", lambda: self.ns)
        self.clocks = RankClocks()
        self.in_kernels = {"products": 0, "attention": 0, "kernels": 0}
        self.times = StepTimes(self.clocks, lambda: dict(self.in_kernels))

    def spend(self, part: str, seconds: int) -> None:
        with self.clocks.during(part):
            self.ns += seconds * S

    def compute(self, products: int, attention: int, kernels: int, between: int) -> None:
        with self.clocks.during(FORWARD_BACKWARD):
            self.ns += (products + attention + kernels + between) * S
            for name, seconds in (("products", products), ("attention", attention), ("kernels", kernels)):
                self.in_kernels[name] += seconds * S

    def step(self, slowest_s: float) -> float:
        self.times.begin()
        self.spend("data", 1)
        self.compute(10, 4, 3, 2)
        with self.clocks.blocked():
            self.ns += 6 * S
        own_s = self.times.own_s()
        self.spend("optimizer", 5)
        self.times.end(slowest_s)
        return own_s


def test_two_steps_with_an_evaluation_between_them(monkeypatch: pytest.MonkeyPatch) -> None:
    day = Day(monkeypatch)
    day.compute(100, 100, 100, 100)  # before the loop, as when the model was tried
    with day.clocks.during(LOOP):
        day.times.open()
        assert day.step(slowest_s=22) == 20
        day.spend(LOOP, 7)  # the log
        day.spend("evaluation", 1000)
        day.in_kernels["products"] += 900 * S
        assert day.step(slowest_s=27) == 27
        day.spend("optimizer", 2)
        day.times.close()
    one = {"products": 10, "attention": 4, "kernels": 3, "framework": 2, "optimizer": 5, "communication": 4,
           "waiting": 2, "data": 1, "rest": 0}  # fmt: skip
    both = {"products": 20, "attention": 8, "kernels": 6, "framework": 4, "optimizer": 12, "communication": 10,
            "waiting": 2, "data": 2, "rest": 7}  # fmt: skip
    assert day.times.num_steps == 2
    assert day.times.first_ns == {name: seconds * S for name, seconds in one.items()}
    assert day.times.total_ns == {name: seconds * S for name, seconds in both.items()}
    assert day.times.samples.seconds == [31.0, 38.0]


def test_many_samples_take_little_room() -> None:
    samples = Samples()
    for step in range(10_000):
        samples.add(float(step))
    assert samples.steps_each == 4
    assert len(samples.seconds) == 2500
    assert samples.seconds[:2] == [1.5, 5.5]
    samples.add(10_001.0)
    assert samples.seconds[-1] == 10_001.0


def test_names_of_parts_are_unique() -> None:
    for parts in PARTS.values():
        names = [part.name for part in parts]
        assert len(set(names)) == len(names)
        assert all(part.meaning and part.label for part in parts)


def test_traffic_is_what_the_kernel_counts(tmp_path: Path) -> None:
    counters = tmp_path / "eth7" / "statistics"
    counters.mkdir(parents=True)
    (counters / "tx_bytes").write_text("1200\n")
    (counters / "rx_bytes").write_text("340\n")
    before = read_traffic("eth7", tmp_path)
    assert before == Traffic(name="eth7", sent_bytes=1200, received_bytes=340)
    (counters / "tx_bytes").write_text("2000\n")
    after = read_traffic("eth7", tmp_path)
    assert after is not None
    assert after.since(before) == Traffic(name="eth7", sent_bytes=800, received_bytes=0)
    assert read_traffic("eth8", tmp_path) is None
    assert read_traffic(None, tmp_path) is None


def test_the_loopback_interface_has_counters() -> None:
    traffic = read_traffic("lo")
    assert traffic is None or traffic.sent_bytes >= 0
