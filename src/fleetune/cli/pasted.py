"""What `launch` and `train` share to take commands of other launchers: a flag, where they begin, what they became."""

from __future__ import annotations

import argparse
import dataclasses
import shlex
from collections.abc import Sequence
from pathlib import Path

from fleetune.cluster.commands.command import begins_command
from fleetune.config import RunConfig
from fleetune.config.names import RETIRED, canonical
from fleetune.config.values import field_types, is_boolean


def add_config_file(parser: argparse.ArgumentParser) -> argparse.ArgumentParser:
    """Give a command the flag by which accelerate is told of its settings."""
    parser.add_argument(
        "--config_file", "--config-file", metavar="FILE",
        help="settings as `accelerate config` writes them: hosts, ranks, precision",
    )  # fmt: skip
    return parser


def config_file_of(words: Sequence[str]) -> Path | None:
    """The value of that flag, before all others are read."""
    parser = add_config_file(argparse.ArgumentParser(add_help=False, allow_abbrev=False, exit_on_error=False))
    file = parser.parse_known_args(list(words))[0].config_file
    return None if file is None else Path(file)


def split_command(words: Sequence[str]) -> tuple[list[str], list[str]]:
    """A command's own words, and behind them those of another launcher or of a script; those may be none."""
    words = list(words)
    for place, word in enumerate(words):
        is_value = place > 0 and _takes_value(words[place - 1])
        if not is_value and not word.startswith("-") and (word.endswith(".py") or begins_command(words[place:])):
            return words[:place], words[place:]
    return words, []


def _takes_value(word: str) -> bool:
    """Whether a word is a flag of ours whose value stands behind it."""
    if not word.startswith("--") or "=" in word or word == "--":
        return False
    name = canonical(word)
    if name in RETIRED:
        return RETIRED[name].takes_value
    return name not in _SWITCHES and not is_boolean(field_types(RunConfig).get(name, str))


_SWITCHES = ("dry_run", "print_config")


def as_typed(command: str, config: RunConfig, *rest: str) -> str:
    """Settings as one would type them, those that are as ever left out.

    Args:
        command: Of fleetune.
        config: The settings.
        rest: Words behind them.
    """
    words, unset = ["fleetune", command], RunConfig()
    for field in dataclasses.fields(config):
        value = getattr(config, field.name)
        if value is not None and value != getattr(unset, field.name):
            words += [f"--{field.name}", ",".join(value) if isinstance(value, tuple) else str(value)]
    return shlex.join([*words, *rest])
