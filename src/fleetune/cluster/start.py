"""Whether this process is a rank, or the one that starts the ranks."""

from __future__ import annotations

import os
import sys
from collections.abc import Sequence

from fleetune.cluster.launchers.local import plan_local, run_local
from fleetune.cluster.rank import RankInfo, read_rank
from fleetune.errors import ConfigError
from fleetune.hardware.host import choose_threads, usable_cores


def start_ranks(arguments: Sequence[str], *, processes: int | None, threads: int | None) -> int | None:
    """Start the ranks of a run on this machine and wait for them, where that is asked for.

    Args:
        arguments: Of `python -m fleetune`, the same for every rank.
        processes: Ranks that the settings ask for; None for one, or for what an outer launcher started.
        threads: Threads of each rank; None for an equal share of the cores.

    Returns:
        Exit status of the ranks; None when this process itself is a rank, or the only one needed.

    Raises:
        ConfigError: An outer launcher started another number of ranks than the settings ask for.
    """
    info = read_rank(os.environ)
    if info is not None:
        check_processes(processes, info)
        return None
    if processes is None or processes == 1:
        return None
    chosen, notice = choose_threads(os.environ, usable_cores(), processes, threads)
    if notice:
        print(notice, flush=True)
    command = [sys.executable, "-m", "fleetune", *arguments]
    return run_local(plan_local(command, processes=processes, threads=chosen, environ=os.environ))


def check_processes(processes: int | None, info: RankInfo) -> None:
    """Refuse settings that ask for another number of ranks than an outer launcher started.

    Raises:
        ConfigError: They do.
    """
    if processes is not None and processes != info.world_size:
        raise ConfigError(f"--processes {processes}: {info.launcher} started {info.world_size} ranks; leave it out")
