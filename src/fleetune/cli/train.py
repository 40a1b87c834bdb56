"""`fleetune train`."""

from __future__ import annotations

import os
from collections.abc import Sequence

from fleetune.cli.arguments import make_parser, parse, tell_notices
from fleetune.cluster.rank import read_rank
from fleetune.cluster.start import plan_ranks, start_ranks
from fleetune.config import RunConfig, settings_file
from fleetune.hardware.pinning import take_place

DESCRIPTION = """Fine-tune an encoder for classification or regression of texts. The names of the settings are those of
transformers' run_glue.py, run_classification.py and TrainingArguments."""


def run(words: Sequence[str]) -> int:
    """Train, on this process or on ranks started for it."""
    parsed = parse(make_parser("train", DESCRIPTION), words)
    tell_notices(parsed)
    return train(parsed.config)


def train(config: RunConfig) -> int:
    """Train as the settings say.

    Returns:
        The exit status.
    """
    from fleetune.train.checks import check_before_start

    check_before_start(config)
    with settings_file(config) as path:
        status = start_ranks(["train", "--config", str(path)], processes=config.processes, threads=config.threads)
    return be_rank(config) if status is None else status


def be_rank(config: RunConfig) -> int:
    """This process as one rank of the run."""
    info = read_rank(os.environ)
    plan = plan_ranks(info, processes=config.processes, threads=config.threads)
    place = take_place(plan, 0 if info is None else info.local_rank)  # before torch is loaded
    from fleetune.train.interrupt import Stopped
    from fleetune.train.program import run_rank

    try:
        run_rank(config, info, place)
    except Stopped as stop:
        if stop.is_first:
            print(
                f"stopped at step {stop.step}, saved; to go on: the same command with --resume_from_checkpoint",
                flush=True,
            )
        return 128 + stop.signal_number
    return 0
