"""`RankClocks`: the clocks of the two threads of a rank, of which one computes and the other exchanges gradients."""

from __future__ import annotations

from types import TracebackType

from fleetune.timing.clock import Clock, Stay, WorkClock

FORWARD_BACKWARD, BLOCKED = "forward_backward", "blocked"
"""Parts of the computing thread's clock that are divided further: by the kernels' own counters, and by what other ranks
tell of theirs."""
OTHER, LOOP = "other", "rest"
"""The parts in which everything else is: outside of the loop, and in it."""


class RankClocks:
    """What a rank's time is measured with.

    Args:
        main: Of the thread that computes; None: begins now.
    """

    def __init__(self, main: Clock | None = None) -> None:
        self.main = Clock(OTHER) if main is None else main
        self.exchange = WorkClock()
        """Of the thread that exchanges gradients."""
        self.sent_bytes = 0
        """What that thread has given to the network, of gradients; it alone changes the number."""
        self.exchanged_while_blocked_ns = 0

    def during(self, part: str) -> Stay:
        """The computing thread is in a part inside of a `with` block."""
        return self.main.during(part)

    def blocked(self) -> Blocked:
        """It waits for other ranks, or for what they send, inside of a `with` block."""
        return Blocked(self)

    @property
    def hidden_ns(self) -> int:
        """How long gradients were exchanged while the rank computed."""
        return self.exchange.read_ns() - self.exchanged_while_blocked_ns


class Blocked:
    """A `with` block in which a rank waits.

    Args:
        clocks: The rank's.
    """

    __slots__ = ("_before", "_clocks", "_exchanged_ns")

    def __init__(self, clocks: RankClocks) -> None:
        self._clocks = clocks

    def __enter__(self) -> None:
        self._before = self._clocks.main.switch(BLOCKED)
        self._exchanged_ns = self._clocks.exchange.read_ns()

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._clocks.exchanged_while_blocked_ns += self._clocks.exchange.read_ns() - self._exchanged_ns
        self._clocks.main.switch(self._before)
