"""Experiment trackers: where scalars go besides the record."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any, Protocol


class Tracker(Protocol):
    """Receives the same lines as the log."""

    def log(self, step: int, entry: Mapping[str, Any]) -> None:
        """Take the numbers of a log line."""

    def close(self) -> None:
        """Write what is still held back."""


class NoTracker:
    """Keeps nothing."""

    def log(self, step: int, entry: Mapping[str, Any]) -> None:
        pass

    def close(self) -> None:
        pass


class TensorBoardTracker:
    """Event files, with the tags that transformers' own callback uses: train/loss, eval/accuracy ...

    Args:
        folder: Where the event files go.
        resumed_at: First step that is still to come; later points of an earlier attempt are hidden.
    """

    def __init__(self, folder: Path, resumed_at: int | None) -> None:
        from torch.utils.tensorboard import SummaryWriter

        self._writer = SummaryWriter(str(folder), purge_step=None if resumed_at is None else resumed_at + 1)

    def log(self, step: int, entry: Mapping[str, Any]) -> None:
        for name, value in entry.items():
            if name not in ("step", "epoch") and isinstance(value, (int, float)):
                tag = f"eval/{name.removeprefix('eval_')}" if name.startswith("eval_") else f"train/{name}"
                self._writer.add_scalar(tag, value, step)
        self._writer.flush()

    def close(self) -> None:
        self._writer.close()


def open_tracker(name: str, folder: Path, *, is_first: bool, resumed_at: int | None) -> Tracker:
    """The tracker of `--report_to`; only the first rank keeps one."""
    if name == "none" or not is_first:
        return NoTracker()
    return TensorBoardTracker(folder, resumed_at)
