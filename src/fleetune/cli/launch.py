"""`fleetune launch`: any training script as ranks, here or on several hosts."""

from __future__ import annotations

import argparse
import os
from collections.abc import Sequence
from pathlib import Path

from fleetune.cli.arguments import CLUSTER, add_dry_run, make_parser, parse, tell_notices
from fleetune.cluster.job import script_job
from fleetune.cluster.outputs import LOG_FOLDER
from fleetune.cluster.start import job_settings, start_script
from fleetune.errors import ConfigError

DESCRIPTION = """Run a script as ranks, with the environment, cores and meeting point that `fleetune train` gives
its own: for scripts that use torch.distributed (env://), transformers.Trainer, accelerate or Lightning, as they are.
Everything after the script is the script's own."""


def run(words: Sequence[str]) -> int:
    """Start the script's ranks and wait for them."""
    parser = add_dry_run(make_parser("launch", DESCRIPTION, CLUSTER | {"processes", "threads"}))
    parser.add_argument(
        "--log_dir", "--log-dir", metavar="FOLDER", help=f"for what ranks of several hosts say (default: {LOG_FOLDER})"
    )
    parser.add_argument("script", nargs=argparse.REMAINDER, metavar="SCRIPT ...", help="script.py, `-m module`, or any "
                        "program, and its arguments")  # fmt: skip
    parsed = parse(parser, _with_module(words), ("dry_run", "log_dir", "script"))
    script = [word for i, word in enumerate(parsed.extra["script"]) if i or word != "--"]
    if not script:
        raise ConfigError("no script: fleetune launch [--setting value ...] SCRIPT [argument ...]")
    _check(script)
    tell_notices(parsed)
    config = parsed.config
    job = script_job(script, os.environ, **job_settings(config))
    log_dir = Path(parsed.extra.get("log_dir", LOG_FOLDER))
    return start_script(job, config, log_dir=log_dir, dry_run=parsed.extra.get("dry_run", False))


def _with_module(words: Sequence[str]) -> list[str]:
    """`-m module` begins the script, but looks like one of the command's own flags."""
    words = list(words)
    if "-m" in words and "--" not in words:
        words.insert(words.index("-m"), "--")
    return words


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
