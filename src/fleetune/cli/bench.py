"""`fleetune bench scaling`: the same job on several sizes, repeated, with a report."""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from typing import Any, get_type_hints

from fleetune.cli.arguments import make_parser, parse, tell_notices
from fleetune.config.load import FIELD_NAMES
from fleetune.config.names import ALIASES
from fleetune.config.values import BadValue, coerce, nearest
from fleetune.errors import ConfigError

DESCRIPTION = """Run one training job on several sizes, on 1, 2 and 4 hosts or as 1 and 2 processes of this machine, in
rounds that take turns, and write a report: times, speed-up, efficiency, accuracy, bytes and money, with their spread.
Takes the settings of `fleetune train`; --output_dir is the bench's folder. Can be stopped at any time: the same command
goes on."""
USAGE = """usage: fleetune bench scaling [--setting value ...]

fleetune bench scaling --help lists the settings."""

KINDS = ("scaling",)
OWN = {
    "nodes": ("N,N", "numbers of hosts, as 1,2,4: the first so many of --hosts"),
    "processes": ("N,N", "numbers of ranks of each host, as 1,2"),
    "repeat": ("N", "rounds, each with one run of every size (default: 3)"),
    "steps": ("N", "measure so many updates of every run, and extrapolate to the whole (default: 50)"),
    "discard_steps": ("N", "first updates of a run that are not counted (default: a tenth of --steps)"),
    "seeds": ("N", "with --full: train with so many seeds, from --seed on, in turn; rounds are at least as many"),
    "against": ("transformers", "also run transformers.Trainer, as run_glue.py does, on the same hosts and cores"),
    "price_per_hour": ("X", "of one host, for the money of a run"),
}
"""Argument of the command -> (what stands for its value, its help)."""
FLAGS = {
    "full": "train to the end, for time and metric, in place of --steps",
    "dry_run": "print what would be run, and touch nothing",
}


def run(words: Sequence[str]) -> int:
    """Plan, show the plan, run what is missing, report."""
    words = list(words)
    if not words or words[0] in ("-h", "--help"):
        print(USAGE)
        return 0
    if words[0] not in KINDS:
        raise ConfigError(f"fleetune bench {words[0]}: {', '.join(KINDS)} is expected{nearest(words[0], KINDS)}")
    from fleetune.bench.plan import BenchOptions, make_plan
    from fleetune.bench.scaling import run_bench

    parsed = parse(make_bench_parser(), words[1:], (*OWN, *FLAGS))
    tell_notices(parsed)
    if parsed.config.output_dir is None:
        raise ConfigError("--output_dir is missing: the folder that the bench keeps its runs and its report in")
    is_dry = parsed.extra.pop("dry_run", False)
    plan = make_plan(parsed.config, BenchOptions(**own_values(parsed.extra)))
    for line in plan.lines():
        say(line)
    if is_dry:
        return 0
    command = ["fleetune", "bench", *words]
    return run_bench(plan, command, say, anew=parsed.config.overwrite_output_dir)


def say(line: str) -> None:
    """Print a line at once."""
    print(line, flush=True)


def make_bench_parser() -> argparse.ArgumentParser:
    """All settings of `fleetune train`, and the bench's own; `--processes` takes several numbers here."""
    parser = make_parser("bench scaling", DESCRIPTION, [name for name in FIELD_NAMES if name != "processes"])
    group = parser.add_argument_group("bench")
    for name, (value, text) in OWN.items():
        others = [alias for alias, field in ALIASES.items() if field == name]
        group.add_argument(*_flags(name, others), dest=name, metavar=value, help=text)
    for name, text in FLAGS.items():
        group.add_argument(*_flags(name, []), dest=name, action="store_true", help=text)
    return parser


def _flags(name: str, others: Sequence[str]) -> list[str]:
    words = [f"--{word}" for word in (name, *others)]
    return list(dict.fromkeys([*words, *(f"--{word.lstrip('-').replace('_', '-')}" for word in words)]))


def own_values(extra: dict[str, Any]) -> dict[str, Any]:
    """The bench's own arguments, converted.

    Raises:
        ConfigError: Lists every value that cannot be used.
    """
    from fleetune.bench.plan import BenchOptions

    values, problems, kinds = {}, [], get_type_hints(BenchOptions)
    for name, text in extra.items():
        try:
            values[name] = numbers(text) if name in ("nodes", "processes") else coerce(text, kinds[name], {})
        except BadValue as error:
            problems.append(f"--{name} {text!r}: {error}")
    if problems:
        raise ConfigError(problems)
    return values


def numbers(text: str) -> tuple[int, ...]:
    """`1,2,4`.

    Raises:
        BadValue: It is something else.
    """
    words = [word.strip() for word in text.split(",")]
    if not all(word.isascii() and word.isdecimal() and int(word) >= 1 for word in words):
        raise BadValue("numbers from 1, separated by commas, are expected, as 1,2,4")
    return tuple(map(int, words))
