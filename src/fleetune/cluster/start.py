"""Whether this process is a rank, or the one that starts the ranks."""

from __future__ import annotations

import os
import sys
from collections.abc import Sequence

from fleetune.cluster.launchers.local import plan_local, run_local
from fleetune.cluster.rank import RankInfo, rank_variable, read_rank
from fleetune.errors import ConfigError
from fleetune.hardware.host_plan import HostPlan
from fleetune.hardware.pinning import plan_this_host


def start_ranks(arguments: Sequence[str], *, processes: int | None, threads: int | None) -> int | None:
    """Start the ranks of a run on this machine and wait for them, where that is asked for.

    Args:
        arguments: Of `python -m fleetune`, the same for every rank.
        processes: Ranks that the settings ask for; None for what the host plan or an outer launcher says.
        threads: Threads of each rank; None for what the host plan says.

    Returns:
        Exit status of the ranks; None when this process itself is a rank, or the only one needed.

    Raises:
        ConfigError: An outer launcher started another number of ranks than the settings ask for.
    """
    plan = plan_ranks(read_rank(os.environ), processes=processes, threads=threads)
    if read_rank(os.environ) is not None or len(plan.parts) == 1:
        return None
    command = [sys.executable, "-m", "fleetune", *arguments]
    num_threads = plan.parts[0].threads
    return run_local(plan_local(command, processes=len(plan.parts), threads=num_threads, environ=os.environ))


def plan_ranks(info: RankInfo | None, *, processes: int | None, threads: int | None) -> HostPlan:
    """The plan of this host, for the ranks that an outer launcher started where it did.

    Args:
        info: Which rank this process is, if it is one.
        processes: Ranks that the settings ask for.
        threads: Threads of each that the settings ask for.

    Raises:
        ConfigError: An outer launcher started another number of ranks than the settings ask for.
    """
    if info is None:
        return plan_this_host(os.environ, processes=processes, threads=threads)
    check_processes(processes, info)
    return plan_this_host(
        os.environ,
        processes=info.local_world_size,
        threads=threads,
        local_rank=info.local_rank,
        rank_variable=rank_variable(os.environ),
    )


def check_processes(processes: int | None, info: RankInfo) -> None:
    """Refuse settings that ask for another number of ranks than an outer launcher started.

    Raises:
        ConfigError: They do.
    """
    if processes is not None and processes != info.world_size:
        raise ConfigError(f"--processes {processes}: {info.launcher} started {info.world_size} ranks; leave it out")
