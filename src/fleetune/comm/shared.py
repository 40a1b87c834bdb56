"""First steps that every program of several ranks takes alike: threads, and data that one rank makes for all."""

from __future__ import annotations

import os
from collections.abc import Sequence
from typing import Any

import torch

from fleetune.cluster.rank import RankInfo
from fleetune.comm.ranks import Ranks
from fleetune.config import RunConfig
from fleetune.data.dataset import TaskData, prepare_data
from fleetune.data.tasks import Task
from fleetune.hardware.host import choose_threads, usable_cores
from fleetune.report.terminal import Terminal


def set_threads(config: RunConfig, info: RankInfo | None) -> int:
    """Set how many threads this rank computes with."""
    local_world_size = 1 if info is None else info.local_world_size
    threads, notice = choose_threads(os.environ, usable_cores(), local_world_size, config.threads)
    if notice and (info is None or info.rank == 0):
        print(notice, flush=True)
    torch.set_num_threads(threads)
    return threads


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
