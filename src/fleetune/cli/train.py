"""`fleetune train`."""

from __future__ import annotations

import os
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

from fleetune.cli.arguments import add_dry_run, make_parser, parse, tell_notices
from fleetune.cli.pasted import add_config_file, as_typed, config_file_of, split_command
from fleetune.cluster.commands.command import for_train, read_command, with_precision
from fleetune.cluster.outputs import LOG_FOLDER
from fleetune.cluster.rank import read_rank, speaks_for_all
from fleetune.cluster.start import plan_ranks, silence_connections, start_ranks, starts_elsewhere
from fleetune.config import RunConfig
from fleetune.hardware.pinning import take_place
from fleetune.timing.clock import Clock, process_begun_ns
from fleetune.timing.clocks import RankClocks

DESCRIPTION = """Fine-tune an encoder for classification or regression of texts, for tags of words, or for answers to
questions. The names of the settings are those of transformers' run_glue.py, run_classification.py, run_ner.py,
run_qa.py and TrainingArguments. A whole command of a guide may stand behind them, as mpirun ... run_qa.py ...: it is
understood, and said to be what it becomes."""


def run(words: Sequence[str]) -> int:
    """Train, on this process or on ranks started for it."""
    parser = add_config_file(add_dry_run(make_parser("train", DESCRIPTION)))
    own, pasted = split_command(words)
    command = read_command(pasted, os.environ, config_file=config_file_of(own))
    command, theirs = for_train(command) if pasted else (with_precision(command), [])
    parsed = parse(parser, [*theirs, *own], ("dry_run", "config_file"), base=lambda extra, given: command.settings)
    tell_notices(replace(parsed, notices=(*command.notices, *parsed.notices)))
    os.environ.update(command.variables)
    is_dry = parsed.extra.get("dry_run", False)
    if is_dry and pasted:
        print(f"# {as_typed('train', parsed.config)}")
    return train(parsed.config, dry_run=is_dry)


def train(config: RunConfig, *, dry_run: bool = False) -> int:
    """Train as the settings say.

    Args:
        config: The settings.
        dry_run: Print what would be started, and touch nothing.

    Returns:
        The exit status.
    """
    from fleetune.train.checks import check_before_start

    check_before_start(config, has_files=speaks_for_all(os.environ) and not starts_elsewhere(config))
    log_dir = (config.output_dir or Path()) / LOG_FOLDER
    status = start_ranks(["train"], config, log_dir=log_dir, dry_run=dry_run)
    return be_rank(config) if status is None else status


def be_rank(config: RunConfig) -> int:
    """This process as one rank of the run."""
    clocks = RankClocks(Clock("imports", process_begun_ns()))
    info = read_rank(os.environ)
    plan = plan_ranks(info, processes=config.processes, threads=config.threads)
    silence_connections()
    place = take_place(plan, 0 if info is None else info.local_rank)  # before torch is loaded
    from fleetune.train.interrupt import Stopped
    from fleetune.train.program import run_rank

    try:
        run_rank(config, info, place, clocks)
    except Stopped as stop:
        return 128 + stop.signal_number
    return 0
