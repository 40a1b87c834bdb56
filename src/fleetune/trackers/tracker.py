"""`Tracker`: one experiment tracker; `Trackers`: those of a run, of which none can end it."""

from __future__ import annotations

import textwrap
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

Say = Callable[[str], None]

_LONGEST_REASON = 300


@dataclass(frozen=True, kw_only=True)
class TrackedRun:
    """What trackers are told of a run when it starts."""

    name: str
    folder: Path
    """Of its output."""
    config: Mapping[str, Any]
    """All settings."""
    resumed_at_step: int | None = None
    """The last step that an earlier attempt had saved."""


class Tracker(Protocol):
    """Receives the same lines as the log."""

    def log(self, step: int, numbers: Mapping[str, float]) -> None:
        """Take the numbers of a log line: `loss`, `learning_rate`, `eval_accuracy` ..."""

    def close(self, record: Mapping[str, Any]) -> None:
        """Take the record of the run, which has ended, and write what is still held back."""


class Trackers:
    """The trackers of a run. One that fails is said so, once, and left alone from then on.

    Args:
        opened: Name -> tracker.
        say: Told what fails.
    """

    def __init__(self, opened: Mapping[str, Tracker], say: Say = print) -> None:
        self._opened, self._say = dict(opened), say

    def log(self, step: int, entry: Mapping[str, Any]) -> None:
        """Tell all of them the numbers of a log line."""
        numbers = {k: float(v) for k, v in entry.items() if isinstance(v, (int, float)) and k not in ("step", "epoch")}
        self._each(lambda tracker: tracker.log(step, numbers))

    def close(self, record: Mapping[str, Any]) -> None:
        """Tell all of them that the run has ended."""
        self._each(lambda tracker: tracker.close(record))
        self._opened.clear()

    def _each(self, tell: Callable[[Tracker], None]) -> None:
        for name, tracker in list(self._opened.items()):
            try:
                tell(tracker)
            except Exception as error:  # whatever a tracker's package raises: the run is worth more
                del self._opened[name]
                self._say(failure_in_words(name, error))


def failure_in_words(name: str, error: Exception) -> str:
    """One line for a tracker that does not work."""
    reason = textwrap.shorten(str(error), _LONGEST_REASON, placeholder=" ...") or "no reason given"
    return f"--report_to {name}: {type(error).__name__}: {reason}; the run goes on without it"


def tag(name: str) -> str:
    """A number's name as transformers' own callbacks write it: train/loss, eval/accuracy."""
    return f"eval/{name.removeprefix('eval_')}" if name.startswith("eval_") else f"train/{name}"
