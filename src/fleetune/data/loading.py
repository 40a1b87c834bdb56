"""Data for all ranks of a run: one rank prepares it, the others open what it made."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from fleetune.comm.ranks import Ranks
from fleetune.config import RunConfig
from fleetune.data.dataset import TaskData, prepare_data
from fleetune.data.tasks import Task
from fleetune.report.terminal import Terminal


def load_data(
    config: RunConfig,
    tokenizer: Any,
    ranks: Ranks,
    terminal: Terminal,
    *,
    splits: Sequence[str],
    task: Task | None = None,
) -> TaskData:
    """The task's splits as token tables: the first rank makes them or finds them in the cache, all open them.

    Args:
        config: Says where the data are and how they are read.
        tokenizer: The model's.
        ranks: Who waits for whom.
        terminal: Where progress is shown.
        splits: Names or roles of the splits that are needed.
        task: A task whose labels are known already; None: found from the settings and the training split.
    """

    def make() -> str:
        with terminal.bar("tokenising", None, "rows") as bar:
            data = prepare_data(
                config, tokenizer, task=task, splits=splits, progress=lambda done, total: bar.move_to(done)
            )
        return data.to_json()

    return TaskData.from_json(ranks.on_first(make))
