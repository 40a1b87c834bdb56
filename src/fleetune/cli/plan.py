"""`fleetune plan`: what a run would make of its hosts, and why."""

from __future__ import annotations

import os
from collections.abc import Sequence

from fleetune.cli.arguments import add_dry_run, make_parser, parse, tell_notices
from fleetune.cluster.rank import read_rank
from fleetune.cluster.start import plan_hosts, plan_ranks, wants_hosts
from fleetune.config import RunConfig
from fleetune.hardware.host_plan import HostPlan, plan_lines

DESCRIPTION = """Show how many ranks each host would have, with which threads, cores and memory, which global batch and
learning rate follow, and why. Takes the settings of `fleetune train` and starts no rank; data and model are not
read."""


def run(words: Sequence[str]) -> int:
    """Print the plan of this host, or of all that are named; under an outer launcher, once on each host."""
    parsed = parse(add_dry_run(make_parser("plan", DESCRIPTION)), words, ("dry_run",))  # which a plan is anyway
    tell_notices(parsed)
    config, info = parsed.config, read_rank(os.environ)
    if info is None and wants_hosts(config):
        tell(plan_hosts(config), config)
    elif info is None or info.local_rank == 0:
        plan = plan_ranks(info, processes=config.processes, threads=config.threads)
        tell({plan.hostname: plan}, config, None if info is None else info.world_size)
    return 0


def tell(plans: dict[str, HostPlan], config: RunConfig, world_size: int | None = None) -> None:
    """Print the plans of hosts.

    Args:
        plans: Name of a host -> its plan.
        config: The settings.
        world_size: Ranks of all hosts, where these are only some.
    """
    from fleetune.train.plan import known_before

    processes = sum(len(plan.parts) for plan in plans.values()) if world_size is None else world_size
    print("\n".join(plan_lines(plans, known_before(config, processes))))
