"""`StepTimes`: the steps of a rank, and where the time of each went."""

from __future__ import annotations

from collections.abc import Callable, Iterable

from fleetune.timing.clocks import BLOCKED, FORWARD_BACKWARD, LOOP, RankClocks
from fleetune.timing.interface import Traffic, read_traffic
from fleetune.timing.parts import names_of
from fleetune.timing.trace import Tracer

_IN_LOOP = (FORWARD_BACKWARD, BLOCKED, "communication", "optimizer", "data", LOOP)
"""Parts of the computing thread's clock in which a step is."""
_MOST_SAMPLES = 4096

KernelNs = Callable[[], dict[str, int]]


class StepTimes:
    """Adds up what the steps took, by part. Evaluation and checkpoints between them belong to none of them.

    How long a rank waited for the slowest one follows from what all ranks tell of a step, in the sum that they make
    anyway: each says how long it took without waiting. What it waited longer is what the exchange itself costs.

    Args:
        clocks: The rank's.
        kernel_ns: Tells how long the process has been in each kind of kernel.
        interface: The one that leads to the other hosts; None: its traffic is not this rank's to tell.
    """

    def __init__(self, clocks: RankClocks, kernel_ns: KernelNs = dict, interface: str | None = None) -> None:
        self._clocks, self._kernel_ns, self._interface = clocks, kernel_ns, interface
        self.traffic: Traffic | None = None
        """Of the interface, over the loop."""
        self.tracer: Tracer | None = None
        """Told when a step begins and ends, where a trace is wanted."""
        self._traffic_before: Traffic | None = None
        self.num_steps = 0
        self.total_ns = dict.fromkeys(names_of("steps"), 0)
        self.first_ns = dict(self.total_ns)
        """Of the first step alone."""
        self.samples = Samples()
        """Wall time of every step."""
        self._last = self._in_loop()
        self._kernels_before: dict[str, int] = {}
        self._own_ns = 0
        self._hidden_before_ns, self._sent_before = clocks.hidden_ns, clocks.sent_bytes

    def open(self) -> None:
        """The loop begins: what was before belongs to no step."""
        self._last = self._in_loop()
        self._hidden_before_ns, self._sent_before = self._clocks.hidden_ns, self._clocks.sent_bytes
        self._traffic_before = read_traffic(self._interface)

    def begin(self) -> None:
        """A step begins to compute."""
        if self.tracer is not None:
            self.tracer.begin()
        self._kernels_before = self._kernel_ns()

    def own_s(self) -> float:
        """How long the step took so far, waiting left out; asked once, before ranks tell each other."""
        now = self._in_loop()
        self._own_ns = sum(now[part] - self._last[part] for part in _IN_LOOP if part != BLOCKED)
        return self._own_ns / 1e9

    def end(self, slowest_s: float) -> None:
        """A step ends; what is between two steps, but for evaluation and checkpoints, belongs to the later one.

        Args:
            slowest_s: The greatest `own_s` of all ranks, as the ranks have told each other.
        """
        taken = self._take()
        kernels = {name: ns - self._kernels_before.get(name, 0) for name, ns in self._kernel_ns().items()}
        parts = divided(taken, kernels, int(1e9 * slowest_s) - self._own_ns)
        self._add(parts)
        self.num_steps += 1
        if self.num_steps == 1:
            self.first_ns = parts
        self.samples.add(sum(parts.values()) / 1e9)
        if self.tracer is not None:
            self.tracer.end()

    def close(self) -> None:
        """The loop has ended; what came after the last step is added to it."""
        self._add(divided(self._take(), {}, 0))
        if self.tracer is not None:
            self.tracer.stop()
        now = read_traffic(self._interface)
        if now is not None and self._traffic_before is not None:
            self.traffic = now.since(self._traffic_before)

    @property
    def hidden_ns(self) -> int:
        """How long gradients were exchanged while the rank computed."""
        return self._clocks.hidden_ns - self._hidden_before_ns

    @property
    def sent_bytes(self) -> int:
        """Gradients given to the network."""
        return self._clocks.sent_bytes - self._sent_before

    def _in_loop(self) -> dict[str, int]:
        now = self._clocks.main.read()
        return {part: now.get(part, 0) for part in _IN_LOOP}

    def _take(self) -> dict[str, int]:
        now = self._in_loop()
        taken = {part: ns - self._last[part] for part, ns in now.items()}
        self._last = now
        return taken

    def _add(self, parts: dict[str, int]) -> None:
        for name, ns in parts.items():
            self.total_ns[name] += ns


def divided(taken: dict[str, int], kernels: dict[str, int], behind_ns: int) -> dict[str, int]:
    """The parts of a step, from what the clocks say.

    Args:
        taken: Nanoseconds of the computing thread, by part of its clock.
        kernels: How much of forward and backward was in each kind of kernel.
        behind_ns: How much longer the slowest rank took than this one.

    Returns:
        Nanoseconds of each part; their sum is that of `taken`.
    """
    waiting = min(max(behind_ns, 0), taken[BLOCKED])
    parts = dict.fromkeys(names_of("steps"), 0) | kernels
    parts["framework"] = taken[FORWARD_BACKWARD] - sum(kernels.values())
    parts["waiting"] = waiting
    parts["communication"] = taken["communication"] + taken[BLOCKED] - waiting
    return parts | {part: taken[part] for part in ("optimizer", "data", LOOP)}


class Samples:
    """Times of many steps in little room: of so many that they do not fit, neighbours become their mean."""

    def __init__(self) -> None:
        self.steps_each = 1
        self._means: list[float] = []
        self._open: list[float] = []

    def add(self, seconds: float) -> None:
        """Take a step's time."""
        self._open.append(seconds)
        if len(self._open) == self.steps_each:
            self._means.append(_mean(self._open))
            self._open = []
        if len(self._means) == _MOST_SAMPLES:
            self._means = [_mean(pair) for pair in zip(self._means[::2], self._means[1::2], strict=True)]
            self.steps_each *= 2

    @property
    def seconds(self) -> list[float]:
        """Means of `steps_each` steps, in order; the last may be of fewer."""
        return self._means + ([_mean(self._open)] if self._open else [])


def _mean(values: Iterable[float]) -> float:
    several = list(values)
    return sum(several) / len(several)
