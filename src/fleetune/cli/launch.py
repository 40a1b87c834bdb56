"""`fleetune launch`: any training script as ranks, here or on several hosts."""

from __future__ import annotations

import argparse
import os
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from fleetune.cli.arguments import CLUSTER, add_dry_run, make_parser, parse, tell_notices
from fleetune.cli.pasted import add_config_file, as_typed, split_command
from fleetune.cluster.commands.command import Command, begins_command, for_launch, read_command
from fleetune.cluster.job import as_words, script_job, shown_words
from fleetune.cluster.outputs import LOG_FOLDER
from fleetune.cluster.start import job_settings, start_script
from fleetune.errors import ConfigError

DESCRIPTION = """Run a script as ranks, with the environment, cores and meeting point that `fleetune train` gives
its own: for scripts that use torch.distributed (env://), transformers.Trainer, accelerate or Lightning, as they are.
Everything after the script is the script's own. In place of the script, a whole command of mpirun, torchrun,
accelerate launch or ipexrun may stand: it is understood, and said to be what it becomes."""
_EXTRA = ("dry_run", "config_file", "log_dir", "script")


def run(words: Sequence[str]) -> int:
    """Start the script's ranks and wait for them."""
    parser = add_dry_run(make_parser("launch", DESCRIPTION, CLUSTER | {"processes", "threads"}))
    parser.add_argument(
        "--log_dir", "--log-dir", metavar="FOLDER", help=f"for what ranks of several hosts say (default: {LOG_FOLDER})"
    )
    add_config_file(parser)
    parser.add_argument("script", nargs=argparse.REMAINDER, metavar="SCRIPT ...", help="script.py, `-m module`, any "
                        "program, or a command of another launcher, and its arguments")  # fmt: skip
    parsed = parse(parser, _with_module(words), _EXTRA, base=lambda own, given: _command(own).settings)
    command = for_launch(_command(parsed.extra))
    if not command.script:
        raise ConfigError("no script: fleetune launch [--setting value ...] SCRIPT [argument ...]")
    _check(command.script)
    tell_notices(replace(parsed, notices=(*parsed.notices, *command.notices)))
    config = parsed.config
    environ = {**os.environ, **command.variables}
    job = script_job(command.script, environ, **job_settings(config))
    job = replace(job, environ={**job.environ, **command.variables})
    is_dry = parsed.extra.get("dry_run", False)
    if is_dry and begins_command(parsed.extra.get("script", [])):
        typed = as_typed("launch", config, *shown_words(command.script))
        print("#", f"{as_words(command.variables, [])} {typed}".strip())
    log_dir = Path(parsed.extra.get("log_dir", LOG_FOLDER))
    return start_script(job, config, log_dir=log_dir, dry_run=is_dry)


def _command(own: Mapping[str, Any]) -> Command:
    """What the script's words say, in front of the script and in a file of accelerate's."""
    words = [word for i, word in enumerate(own.get("script", ())) if i or word != "--"]
    file = own.get("config_file")
    return read_command(words, os.environ, config_file=None if file is None else Path(file))


def _with_module(words: Sequence[str]) -> list[str]:
    """`-m module` begins the script, but looks like one of the command's own flags."""
    own, pasted = split_command(words)
    if "-m" in own and "--" not in own:
        own.insert(own.index("-m"), "--")
    return [*own, *pasted]


def _check(script: Sequence[str]) -> None:
    """Refuse a script that is not there, which every rank would otherwise say.

    Raises:
        ConfigError: It is not.
    """
    if script[0] == "-m":
        if len(script) < 2:
            raise ConfigError("-m: which module?")
    elif script[0].endswith(".py") and not Path(script[0]).is_file():
        raise ConfigError(f"{script[0]}: there is no such script")
