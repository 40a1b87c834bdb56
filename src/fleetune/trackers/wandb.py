"""Weights & Biases: a run under `wandb/` of the output folder, sent to its server unless WANDB_MODE=offline."""

from __future__ import annotations

import os
from collections.abc import Mapping
from typing import Any

from fleetune.trackers.tracker import TrackedRun, tag

PROJECT = "fleetune"
"""Where WANDB_PROJECT names no other."""


class WandbTracker:
    """A run of W&B, with the tags and the step metric that transformers' own callback uses.

    Args:
        run: The run.
    """

    def __init__(self, run: TrackedRun) -> None:
        import wandb

        # The terminal stays ours: W&B would wrap standard output.
        self._run = wandb.init(
            project=os.environ.get("WANDB_PROJECT", PROJECT), name=os.environ.get("WANDB_NAME", run.name),
            dir=str(run.folder), config=dict(run.config), settings=wandb.Settings(console="off", quiet=True),
        )  # fmt: skip
        self._run.define_metric("train/global_step")
        self._run.define_metric("*", step_metric="train/global_step", step_sync=True)

    def log(self, step: int, numbers: Mapping[str, float]) -> None:
        """Take the numbers of a log line."""
        self._run.log({**{tag(name): value for name, value in numbers.items()}, "train/global_step": step})

    def close(self, record: Mapping[str, Any]) -> None:
        """Take the record as the run's summary, and end the run."""
        self._run.summary.update({"record": dict(record)})
        self._run.finish(exit_code=0 if record["status"] == "finished" else 1)
