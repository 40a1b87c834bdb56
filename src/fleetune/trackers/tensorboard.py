"""TensorBoard: event files under `runs/` of the output folder."""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

from fleetune.trackers.tracker import TrackedRun, tag

FOLDER = "runs"


class TensorBoardTracker:
    """Event files, with the tags that transformers' own callback uses; settings and record are texts in them.

    Args:
        run: The run; later points of an earlier attempt are hidden.
    """

    def __init__(self, run: TrackedRun) -> None:
        from torch.utils.tensorboard import SummaryWriter

        purged = None if run.resumed_at_step is None else run.resumed_at_step + 1
        self._writer = SummaryWriter(str(run.folder / FOLDER), purge_step=purged)
        self._writer.add_text("config", _as_code(run.config), purged or 0)
        self._step = purged or 0

    def log(self, step: int, numbers: Mapping[str, float]) -> None:
        """Take the numbers of a log line."""
        for name, value in numbers.items():
            self._writer.add_scalar(tag(name), value, step)
        self._writer.flush()
        self._step = step

    def close(self, record: Mapping[str, Any]) -> None:
        """Take the record, and end the file."""
        self._writer.add_text("record", _as_code(record), self._step)
        self._writer.close()


def _as_code(content: Mapping[str, Any]) -> str:
    """JSON as a block of code in Markdown, which is what TensorBoard shows texts as."""
    return "    " + json.dumps(content, indent=2, default=str).replace("\n", "\n    ")
