"""Data for all ranks of a run: one rank prepares it, its host's open what it made, other hosts are sent it."""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from fleetune.comm.folders import FolderContent, folder_here, own_cache
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
    """The task's splits as token tables: the first rank makes them or finds them in its cache, all open them.

    Other hosts need neither the data nor the cache: what they lack, they are sent.

    Args:
        config: Says where the data are and how they are read.
        tokenizer: The model's.
        ranks: Who waits for whom.
        terminal: Where progress is shown.
        splits: Names or roles of the splits that are needed.
        task: A task whose labels are known already; None: found from the settings and the training split.

    Raises:
        ConfigError, DataError: On the first rank; see `prepare_data`.
        OutputError: This host cannot keep what it was sent.
        PeerError: Another rank failed.
    """

    def make() -> str:
        with terminal.bar("tokenising", None, "rows") as bar:
            data = prepare_data(
                config, tokenizer, task=task, splits=splits, progress=lambda done, total: bar.move_to(done)
            )
        return data.to_json()

    told = json.loads(ranks.on_first(make))
    for name, entry in told["splits"].items():
        what = f"the tokens of {name}"
        entry["folder"] = str(table_here(entry["folder"], what, ranks, config.cache_dir, terminal.say))
    return TaskData.from_json(json.dumps(told))


def table_here(
    folder: str, what: str, ranks: Ranks, cache_dir: Path, say: Callable[[str], None]
) -> Path:  # fmt: skip
    """The folder of a token table on this host, sent by the first rank's host where it is not there yet.

    Args:
        folder: On the first rank's host.
        what: For people, as "the tokens of train".
        ranks: Of the run; all of them call this.
        cache_dir: Of the settings.
        say: Told, on the first rank, what was sent.

    Raises:
        OutputError: This host cannot keep it.
        PeerError: Another rank failed.
    """

    def find() -> tuple[Path, Sequence[str]]:
        return Path(folder), [path.name for path in Path(folder).iterdir()]

    def keep_in(_: FolderContent) -> Path:
        return own_cache(cache_dir) / "tokens" / Path(folder).name

    return folder_here(what, ranks, find, keep_in, say)
