"""MLflow: a run of an experiment, in the store that MLFLOW_TRACKING_URI names, or `mlruns/` of the output folder."""

from __future__ import annotations

import os
import time
from collections.abc import Mapping
from typing import Any

from fleetune.trackers.tracker import TrackedRun

EXPERIMENT = "fleetune"
"""Where MLFLOW_EXPERIMENT_NAME names no other."""
_URI, _NAME = "MLFLOW_TRACKING_URI", "MLFLOW_EXPERIMENT_NAME"
_MOST_AT_ONCE = 100
"""Parameters that MLflow takes in one call."""
_LONGEST = 500
"""Characters of a parameter that every version and store of MLflow keeps."""
_STATUS = {"finished": "FINISHED", "interrupted": "KILLED"}


class MlflowTracker:
    """A run of MLflow, with the names of numbers that transformers' own callback uses.

    Args:
        run: The run.
    """

    def __init__(self, run: TrackedRun) -> None:
        from mlflow import MlflowClient
        from mlflow.entities import Metric, Param

        self._metric = Metric
        # Asked for in so many words, a store of files is what is wanted, which newer versions refuse otherwise.
        os.environ.setdefault("MLFLOW_ALLOW_FILE_STORE", "true")
        self._client = MlflowClient(os.environ.get(_URI) or (run.folder / "mlruns").resolve().as_uri())
        name = os.environ.get(_NAME) or EXPERIMENT
        experiment = self._client.get_experiment_by_name(name)
        number = self._client.create_experiment(name) if experiment is None else experiment.experiment_id
        self._id = self._client.create_run(number, run_name=run.name).info.run_id
        params = [Param(name, str(value)[:_LONGEST]) for name, value in run.config.items()]
        for start in range(0, len(params), _MOST_AT_ONCE):
            self._client.log_batch(self._id, params=params[start : start + _MOST_AT_ONCE])

    def log(self, step: int, numbers: Mapping[str, float]) -> None:
        """Take the numbers of a log line."""
        now_ms = int(1e3 * time.time())
        self._client.log_batch(
            self._id, metrics=[self._metric(name, value, now_ms, step) for name, value in numbers.items()]
        )

    def close(self, record: Mapping[str, Any]) -> None:
        """Take the record as an artifact, and end the run."""
        try:
            self._client.log_dict(self._id, dict(record), "record.json")
        finally:
            self._client.set_terminated(self._id, _STATUS.get(record["status"], "FAILED"))
