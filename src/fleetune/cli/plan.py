"""`fleetune plan`: what a run would make of this host, and why."""

from __future__ import annotations

import os
from collections.abc import Sequence

from fleetune.cli.arguments import make_parser, parse, tell_notices
from fleetune.cluster.rank import RankInfo, rank_variable, read_rank
from fleetune.cluster.start import check_processes
from fleetune.config import RunConfig
from fleetune.hardware.host_plan import HostPlan
from fleetune.hardware.pinning import plan_this_host

DESCRIPTION = """Show how many ranks this host would have, with which threads, cores and memory, and why. Takes the
settings of `fleetune train` and starts nothing; data and model are not read."""


def run(words: Sequence[str]) -> int:
    """Print the plan of this host; under an outer launcher, once on each host."""
    parsed = parse(make_parser("plan", DESCRIPTION), words)
    tell_notices(parsed)
    info = read_rank(os.environ)
    plan = plan_of(parsed.config, info)
    if info is None or info.local_rank == 0:
        print("\n".join(plan.lines()))
    return 0


def plan_of(config: RunConfig, info: RankInfo | None) -> HostPlan:
    """The plan of this host under the settings, for the ranks that an outer launcher started where it did.

    Raises:
        ConfigError: An outer launcher started another number of ranks than the settings ask for.
    """
    if info is None:
        return plan_this_host(os.environ, processes=config.processes, threads=config.threads)
    check_processes(config.processes, info)
    return plan_this_host(
        os.environ,
        processes=info.local_world_size,
        threads=config.threads,
        local_rank=info.local_rank,
        rank_variable=rank_variable(os.environ),
    )
