"""`fleetune plan`: what a run would make of this host, and why."""

from __future__ import annotations

import os
from collections.abc import Sequence

from fleetune.cli.arguments import make_parser, parse, tell_notices
from fleetune.cluster.rank import read_rank
from fleetune.cluster.start import plan_ranks

DESCRIPTION = """Show how many ranks this host would have, with which threads, cores and memory, and why. Takes the
settings of `fleetune train` and starts nothing; data and model are not read."""


def run(words: Sequence[str]) -> int:
    """Print the plan of this host; under an outer launcher, once on each host."""
    parsed = parse(make_parser("plan", DESCRIPTION), words)
    tell_notices(parsed)
    info = read_rank(os.environ)
    plan = plan_ranks(info, processes=parsed.config.processes, threads=parsed.config.threads)
    if info is None or info.local_rank == 0:
        print("\n".join(plan.lines()))
    return 0
