"""`RunRecord`: what a run was asked, what it did, how long each part took and what came out, as one JSON file."""

from __future__ import annotations

import dataclasses
import json
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

from fleetune.files import write_json

RECORD_FILE = "record.json"
FORMAT = 1

Status = Literal["running", "interrupted", "failed", "finished"]


@dataclass(kw_only=True)
class RunRecord:
    """Grows while the run goes on; written at its start, at each stop and at its end."""

    status: Status = "running"
    config: dict[str, Any]
    """All settings, resolved."""
    plan: dict[str, Any] = field(default_factory=dict)
    """Batch sizes, steps and learning rate that followed from them."""
    task: dict[str, Any] = field(default_factory=dict)
    """Columns, labels and metrics of the task."""
    versions: dict[str, str] = field(default_factory=dict)
    host: dict[str, Any] = field(default_factory=dict)
    """Of the first rank."""
    roster: list[dict[str, Any]] = field(default_factory=list)
    """Host, process, versions, CPU, threads and kernels of every rank."""
    started: str = field(default_factory=lambda: time.strftime("%Y-%m-%dT%H:%M:%S%z"))
    resumed_at_step: int | None = None
    step: int = 0
    """Updates done."""
    seconds: dict[str, float] = field(default_factory=dict)
    """Wall time of each phase."""
    time: dict[str, Any] = field(default_factory=dict)
    """Where the time went, by part, of every rank and as their mean: see `report/times.py` and docs/time.md."""
    throughput: dict[str, float] = field(default_factory=dict)
    """samples_per_s and tokens_per_s of training, and how many tokens padding would have added."""
    metrics: dict[str, float | None] = field(default_factory=dict)
    notices: list[str] = field(default_factory=list)
    bad_rows: dict[str, Any] = field(default_factory=dict)
    """Rows left out, by split: how many, and the first of them with the reason."""
    format: int = FORMAT

    @contextmanager
    def phase(self, name: str) -> Iterator[None]:
        """Add the wall time of a `with` block to a phase."""
        start = time.perf_counter()
        try:
            yield
        finally:
            self.seconds[name] = self.seconds.get(name, 0.0) + time.perf_counter() - start

    def write(self, folder: Path) -> None:
        """Write the record to a run's folder, replacing an older one in one step."""
        write_json(folder / RECORD_FILE, dataclasses.asdict(self))


def read_record(folder: Path) -> RunRecord | None:
    """The record of a run's folder; None when there is none that can be read."""
    try:
        content = json.loads((folder / RECORD_FILE).read_text(encoding="utf-8"))
        known = {f.name for f in dataclasses.fields(RunRecord)}
        return RunRecord(**{k: v for k, v in content.items() if k in known})
    except (OSError, ValueError, TypeError, AttributeError):
        return None
