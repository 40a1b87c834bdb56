"""Flags of the commands, made from the fields of `RunConfig`."""

from __future__ import annotations

import argparse
import dataclasses
import os
from collections.abc import Callable, Collection, Mapping, Sequence
from pathlib import Path
from typing import Any, NoReturn

from fleetune.cluster.rank import read_rank
from fleetune.config import RunConfig, config_from_mapping, read_config_file, to_toml
from fleetune.config.load import FIELD_NAMES
from fleetune.config.names import ALIASES, RETIRED, canonical
from fleetune.config.run import GROUPS
from fleetune.config.values import choices, field_types, is_boolean, nearest, value_type
from fleetune.errors import ConfigError


@dataclasses.dataclass(frozen=True, kw_only=True)
class Parsed:
    """A command line, understood."""

    config: RunConfig
    notices: tuple[str, ...]
    """Lines to say: retired words and what happens instead."""
    extra: dict[str, Any]
    """Arguments of the command itself."""


class _Parser(argparse.ArgumentParser):
    def error(self, message: str) -> NoReturn:
        raise ConfigError(f"{message} (fleetune {self.prog.split()[-1]} --help lists the settings)")


def make_parser(command: str, description: str, fields: Collection[str] = FIELD_NAMES) -> argparse.ArgumentParser:
    """A parser with a flag for every field, spelled with `_` or `-`, its aliases, and the retired words.

    All values stay text: `RunConfig` converts and checks them, the same for flags, files and Python.
    """
    parser = _Parser(
        prog=f"fleetune {command}",
        description=description,
        allow_abbrev=False,
        argument_default=argparse.SUPPRESS,
        formatter_class=lambda prog: argparse.HelpFormatter(prog, max_help_position=34, width=110),
    )
    if fields:  # a command that takes no settings has nothing to read or print
        parser.add_argument(
            "--config", metavar="FILE", help="TOML, YAML or JSON file with settings; flags go before it"
        )
        parser.add_argument(
            *_spellings("print_config"), action="store_true", help="print the resolved settings and end"
        )
    types = field_types(RunConfig)
    groups = {name: parser.add_argument_group(name) for name in GROUPS}
    for field in dataclasses.fields(RunConfig):
        if field.name in fields:
            _add_flag(groups[field.metadata["group"]], field, types[field.name])
    for word, entry in RETIRED.items():
        count: dict[str, Any] = {} if entry.takes_value else {"nargs": "?", "const": "true"}
        parser.add_argument(*_spellings(word), dest=word, help=argparse.SUPPRESS, **count)
    return parser


CLUSTER = frozenset(f.name for f in dataclasses.fields(RunConfig) if f.metadata["group"] == "cluster")
"""Settings that say where ranks are started."""


def add_dry_run(parser: argparse.ArgumentParser) -> argparse.ArgumentParser:
    """Give a command that starts ranks its flag `--dry_run`."""
    parser.add_argument(
        *_spellings("dry_run"),
        action="store_true",
        help="print what would be started on which host, and touch nothing",
    )
    return parser


_METAVARS = {int: "N", float: "X", Path: "PATH", str: "NAME", tuple: "NAMES"}


def _add_flag(group: argparse._ArgumentGroup, field: dataclasses.Field[Any], kind: Any) -> None:
    aliases = [alias for alias, name in ALIASES.items() if name == field.name]
    shown_as = field.metadata["shown_as"] or _METAVARS.get(value_type(kind), "VALUE")
    options: dict[str, Any] = {"metavar": "|".join(choices(kind)) or shown_as}
    if is_boolean(kind):
        options = {"metavar": "|".join(choices(kind)) or "true|false", "nargs": "?", "const": "true"}
    if field.name == "resume_from_checkpoint":
        options |= {"nargs": "?", "const": "auto"}
    shown = f"--{field.name}"
    group.add_argument(shown, dest=field.name, help=_help(field, aliases), **options)
    for spelling in (s for word in (field.name, *aliases) for s in _spellings(word) if s != shown):
        group.add_argument(spelling, dest=f"{field.name} {spelling}", help=argparse.SUPPRESS, **options)


def _help(field: dataclasses.Field[Any], aliases: list[str]) -> str:
    default = str(field.default).lower() if isinstance(field.default, bool) else field.default
    default = ",".join(default) if isinstance(default, tuple) else default
    text = field.metadata["help"] + ("" if default is None else f" (default: {default})")
    text += f"; also --{', --'.join(aliases)}" if aliases else ""
    return str(text).replace("%", "%%")


def _spellings(word: str) -> list[str]:
    return list(dict.fromkeys((f"--{word}", f"--{word.replace('_', '-')}")))


Base = Callable[[dict[str, Any], frozenset[str]], Mapping[str, Any]]
"""(the command's own arguments, names of the settings that were given) -> settings to start from."""


def parse(
    parser: argparse.ArgumentParser,
    words: Sequence[str],
    extra: Sequence[str] = (),
    base: Base = lambda extra, given: {},
    fixed: Callable[[dict[str, Any]], Mapping[str, Any]] = lambda extra: {},
) -> Parsed:
    """Understand a command line.

    Args:
        parser: Of `make_parser`, with the command's own arguments added.
        words: The command line after the command.
        extra: Names of the command's own arguments.
        base: Settings below those of the file and the flags, as those of the run that is evaluated.
        fixed: Settings above all others, which the command's own arguments decide.

    Raises:
        ConfigError: Lists every unknown flag and every value that cannot be used.
    """
    found, unknown = parser.parse_known_args(list(words))
    values = vars(found)
    own = {name: values.pop(name) for name in extra if name in values}
    file = values.pop("config", None)
    wants_print = values.pop("print_config", False)
    layers = [read_config_file(Path(file))] if file is not None else []
    strange, problems = _unknown_settings(unknown)
    layers.append(_by_spelling(values) | strange)
    given = frozenset(canonical(name) for layer in layers for name in layer)
    try:
        config, notices = config_from_mapping(base(own, given), *layers, fixed(own))
    except ConfigError as error:
        raise ConfigError([*problems, *error.problems]) from None
    if problems:
        raise ConfigError(problems)
    if wants_print:
        print(to_toml(config), end="")
        raise SystemExit(0)
    return Parsed(config=config, notices=notices, extra=own)


def tell_notices(parsed: Parsed) -> None:
    """Print what is to be said of retired words, once: ranks started here read a file without them."""
    info = read_rank(os.environ)
    if info is None or info.rank == 0:
        for notice in parsed.notices:
            print(notice, flush=True)


def _unknown_settings(words: list[str]) -> tuple[dict[str, str], list[str]]:
    """Words that no flag took: with dashes they are no settings, or not this command's; else refused here."""
    names = list(dict.fromkeys(word.split("=", 1)[0] for word in words if word.startswith("--")))
    if words and not names:
        raise ConfigError(f"{' '.join(words)}: not understood{nearest(words[0], FIELD_NAMES)}; settings begin with --")
    elsewhere = [name for name in names if canonical(name) in FIELD_NAMES]
    problems = [f"{name} is a setting of `fleetune train`, this command does not take it" for name in elsewhere]
    return {name: "" for name in names if name not in elsewhere}, problems


def _by_spelling(values: dict[str, Any]) -> dict[str, Any]:
    """Names as they were typed, so that a message quotes them, and two spellings of one setting are noticed."""
    return {name.rsplit(" ", 1)[-1]: value for name, value in values.items()}
