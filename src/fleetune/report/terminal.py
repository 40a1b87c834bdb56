"""What a person sees while a run goes on: a bar in a terminal, plain lines elsewhere, nothing on other ranks."""

from __future__ import annotations

import contextlib
import os
import sys
import time
from abc import ABC, abstractmethod
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager
from typing import Protocol


class Bar(Protocol):
    """Progress of one job."""

    def move_to(self, done: int, note: str = "") -> None:
        """Show that `done` units are done, with a short note such as the loss."""


class Terminal(ABC):
    """Where lines and progress go."""

    @abstractmethod
    def say(self, line: str) -> None:
        """Print a line."""

    @abstractmethod
    def bar(self, title: str, total: int | None, unit: str, start: int = 0) -> AbstractContextManager[Bar]:
        """Context manager: show progress of `total` units, of which `start` are already done."""


def open_terminal(is_first: bool) -> Terminal:
    """The terminal of a rank: only the first one speaks."""
    if not is_first:
        return SilentTerminal()
    # Open MPI gives the first rank a terminal of its own, whatever the user's output goes to.
    in_terminal = sys.stdout.isatty() and "OMPI_COMM_WORLD_RANK" not in os.environ
    return RichTerminal() if in_terminal else PlainTerminal()


class SilentTerminal(Terminal):
    """Says nothing."""

    def say(self, line: str) -> None:
        pass

    @contextmanager
    def bar(self, title: str, total: int | None, unit: str, start: int = 0) -> Iterator[Bar]:
        yield _SilentBar()


class _SilentBar:
    def move_to(self, done: int, note: str = "") -> None:
        pass


class PlainTerminal(Terminal):
    """Lines for a log file: progress is told at most every few seconds."""

    def __init__(self, interval_s: float = 5.0) -> None:
        self._interval_s = interval_s

    def say(self, line: str) -> None:
        with contextlib.suppress(OSError):  # the terminal or the reader is gone: the run goes on, or saves
            print(line, flush=True)

    @contextmanager
    def bar(self, title: str, total: int | None, unit: str, start: int = 0) -> Iterator[Bar]:
        yield _PlainBar(self, Pace(title, total, unit, start), self._interval_s)


class Pace:
    """How fast a job goes, and how long it still takes, in words."""

    def __init__(self, title: str, total: int | None, unit: str, start: int) -> None:
        self.title, self.total, self.unit, self.start = title, total, unit, start
        self._began = time.monotonic()

    def line(self, done: int, note: str) -> str:
        """One line such as `training 40/690 steps, loss 0.61, 0:42 left`."""
        elapsed = time.monotonic() - self._began
        parts = [f"{self.title} {done:,}" + (f"/{self.total:,}" if self.total else "") + f" {self.unit}"]
        parts += [note] if note else []
        if self.total and done > self.start and done < self.total:
            parts.append(f"{clock(elapsed / (done - self.start) * (self.total - done))} left")
        return ", ".join(parts)


def clock(seconds: float) -> str:
    """A duration as m:ss, or h:mm:ss."""
    minutes, rest = divmod(round(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours}:{minutes:02}:{rest:02}" if hours else f"{minutes}:{rest:02}"


class _PlainBar:
    def __init__(self, terminal: PlainTerminal, pace: Pace, interval_s: float) -> None:
        self._terminal, self._pace, self._interval_s = terminal, pace, interval_s
        self._told = time.monotonic()

    def move_to(self, done: int, note: str = "") -> None:
        if time.monotonic() - self._told >= self._interval_s:
            self._told = time.monotonic()
            self._terminal.say(self._pace.line(done, note))


class RichTerminal(Terminal):
    """A live bar at the bottom of the screen, lines above it."""

    def __init__(self) -> None:
        from rich.console import Console

        self._console = Console(highlight=False)

    def say(self, line: str) -> None:
        with contextlib.suppress(OSError):  # the terminal is gone: the run goes on, or saves
            self._console.print(line, markup=False, soft_wrap=True)

    @contextmanager
    def bar(self, title: str, total: int | None, unit: str, start: int = 0) -> Iterator[Bar]:
        from rich.progress import BarColumn, Progress, TextColumn, TimeRemainingColumn

        done = TextColumn("{task.completed:,}" + (f"/{total:,}" if total else "") + f" {unit}")
        columns = [TextColumn("{task.description}"), done, TextColumn("{task.fields[note]}")]
        if total is not None:
            left = (TimeRemainingColumn(compact=True), TextColumn("left"))
            columns = [columns[0], BarColumn(bar_width=24), *columns[1:], *left]  # type: ignore[list-item]
        with Progress(*columns, console=self._console, transient=True) as progress:
            yield _RichBar(progress, progress.add_task(title, total=total, completed=start, note=""))


class _RichBar:
    def __init__(self, progress: object, task: object) -> None:
        self._progress, self._task = progress, task

    def move_to(self, done: int, note: str = "") -> None:
        self._progress.update(self._task, completed=done, note=note)  # type: ignore[attr-defined]
