"""`Clock`: how long a thread was in each part of its work, of which one is inside another.

A change of part costs one look at the clock and one addition, so that it may stay on always.
"""

from __future__ import annotations

import os
import time
from collections import defaultdict
from pathlib import Path
from types import TracebackType

Span = tuple[str, int, int]
"""A part, when it began and when it ended: nanoseconds of `time.perf_counter_ns`."""


class Clock:
    """Time of the parts of one thread's work. A part that is inside another is taken off that one's time.

    Args:
        part: The part that it begins in.
        begun_ns: When that began, as `time.perf_counter_ns` counts; None: now.
    """

    def __init__(self, part: str, begun_ns: int | None = None) -> None:
        self.begun_ns = time.perf_counter_ns() if begun_ns is None else begun_ns
        self._part, self._since_ns = part, self.begun_ns
        self._ns: defaultdict[str, int] = defaultdict(int)
        self.spans: list[Span] | None = None
        """Every stay in a part, while it is a list."""

    def switch(self, part: str) -> str:
        """Be in another part from now on.

        Returns:
            The part before.
        """
        now, before = time.perf_counter_ns(), self._part
        self._ns[before] += now - self._since_ns
        if self.spans is not None:
            self.spans.append((before, self._since_ns, now))
        self._part, self._since_ns = part, now
        return before

    def during(self, part: str) -> Stay:
        """Be in another part inside of a `with` block."""
        return Stay(self, part)

    def read(self) -> dict[str, int]:
        """Nanoseconds of every part up to now; together they are the time since the beginning."""
        self.switch(self._part)
        return dict(self._ns)


class Stay:
    """A `with` block in a part of a clock; a class, because a generator would cost three times as much.

    Args:
        clock: The clock.
        part: The part.
    """

    __slots__ = ("_before", "_clock", "_part")

    def __init__(self, clock: Clock, part: str) -> None:
        self._clock, self._part = clock, part

    def __enter__(self) -> None:
        self._before = self._clock.switch(self._part)

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._clock.switch(self._before)


class WorkClock:
    """How long a thread has worked at all; another thread may read it at any time.

    The state is one tuple, replaced as a whole, so that a reader never sees half of a change.
    """

    def __init__(self) -> None:
        self._state: tuple[int, int | None] = 0, None
        self._label = ""
        self.spans: list[Span] | None = None
        """Every piece of work, while it is a list."""

    def working(self, label: str) -> Work:
        """A `with` block of work, under a name that traces show. Blocks are not inside of each other."""
        return Work(self, label)

    def read_ns(self) -> int:
        """Nanoseconds of work up to now."""
        worked_ns, since_ns = self._state
        return worked_ns if since_ns is None else worked_ns + time.perf_counter_ns() - since_ns

    def begin(self, label: str) -> None:
        """Work begins."""
        self._label = label
        self._state = self._state[0], time.perf_counter_ns()

    def end(self) -> None:
        """It ends."""
        (worked_ns, since_ns), now = self._state, time.perf_counter_ns()
        assert since_ns is not None
        self._state = worked_ns + now - since_ns, None
        if self.spans is not None:
            self.spans.append((self._label, since_ns, now))


class Work:
    """A `with` block of work of a `WorkClock`.

    Args:
        clock: The clock.
        label: What traces show.
    """

    __slots__ = ("_clock", "_label")

    def __init__(self, clock: WorkClock, label: str) -> None:
        self._clock, self._label = clock, label

    def __enter__(self) -> None:
        self._clock.begin(self._label)

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._clock.end()


def process_begun_ns() -> int:
    """When this process began, as `time.perf_counter_ns` counts; a hundredth of a second is as fine as Linux tells."""
    now = time.perf_counter_ns()
    try:
        # After the name, which may hold anything: field 22 of proc_pid_stat(5), in ticks since the machine started.
        fields = Path("/proc/self/stat").read_text().rpartition(")")[2].split()
        age_s = time.clock_gettime(time.CLOCK_BOOTTIME) - int(fields[19]) / os.sysconf("SC_CLK_TCK")
    except (OSError, ValueError, IndexError, AttributeError):  # not Linux
        return now
    return now - max(0, int(1e9 * age_s))
