"""The flags of a launcher as a table, and the words of a command read by it.

A row says what a flag means in facts that all launchers share (`FACTS`), or why it is left away, or refuses it.
What no row knows is refused by name: a flag that is silently dropped would train something else.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field

from fleetune.config.values import nearest

FACTS = {
    "ranks": "ranks of all hosts together",
    "ranks_per_host": "ranks of one host",
    "num_hosts": "hosts that take part",
    "host_rank": "number of the host on which the command is typed",
    "hosts": "hosts, separated by commas",
    "hostfile": "file with a host a line",
    "threads": "threads of a rank",
    "network": "network that the hosts talk through",
    "interface": "name of the interface that leads to the other hosts",
    "port": "TCP port where the first rank listens",
    "mixed_precision": "what numbers are computed in: no, bf16",
    "config_file": "file of accelerate's with more facts",
    "module": "the script is the name of a module",
    "no_python": "the script is a program of its own",
}
"""Name of a fact -> what it tells."""


@dataclass(frozen=True, kw_only=True)
class Meaning:
    """What the words of a launcher, or a file of its settings, tell."""

    facts: Mapping[str, str] = field(default_factory=dict)
    """Fact -> its value, as it was written."""
    variables: Mapping[str, str] = field(default_factory=dict)
    """Variables that ranks get."""
    handed_on: tuple[str, ...] = ()
    """Names of variables that ranks get with the value that they have here."""
    notices: tuple[str, ...] = ()
    """One line for each thing that is left away or done otherwise."""
    problems: tuple[str, ...] = ()
    """One sentence for each thing that cannot be done."""

    def __add__(self, other: Meaning) -> Meaning:
        """Both; where they tell of the same fact or variable, the other one counts."""
        return Meaning(
            facts={**self.facts, **other.facts},
            variables={**self.variables, **other.variables},
            handed_on=tuple(dict.fromkeys((*self.handed_on, *other.handed_on))),
            notices=tuple(dict.fromkeys((*self.notices, *other.notices))),
            problems=tuple(dict.fromkeys((*self.problems, *other.problems))),
        )


Reading = Callable[[str, tuple[str, ...]], Meaning]
"""(the flag as it was written, its values) -> what they tell."""


@dataclass(frozen=True, kw_only=True)
class Flag:
    """One row of a launcher's table."""

    names: tuple[str, ...]
    """Without dashes in front; dashes within as underscores."""
    reads: Reading
    num_values: int = 1
    """Words behind the flag that belong to it."""
    joins: bool = False
    """Whether NAME=VALUE may stand for its two values."""


# ---- what rows say


def fact(names: str, name: str, *, value: str | None = None) -> Flag:
    """A flag that tells a fact.

    Args:
        names: Of the flag, separated by blanks.
        name: Of the fact.
        value: Of the fact, for a flag without one.
    """
    assert name in FACTS, name
    return Flag(
        names=tuple(names.split()),
        reads=lambda flag, values: Meaning(facts={name: values[0] if value is None else value}),
        num_values=0 if value is not None else 1,
    )


def without(names: str, says: str = "", *, num_values: int = 0) -> Flag:
    """A flag that is left away; `says` tells what happens instead, nothing where that is nothing else."""
    return Flag(
        names=tuple(names.split()),
        reads=lambda flag, values: Meaning(notices=(f"{flag}: {says}",) if says else ()),
        num_values=num_values,
    )


def refused(names: str, says: str, *, num_values: int = 0) -> Flag:
    """A flag that asks for what is not there; `says` tells what to do."""
    return Flag(
        names=tuple(names.split()),
        reads=lambda flag, values: Meaning(problems=(f"{' '.join((flag, *values))}: {says}",)),
        num_values=num_values,
    )


def only(names: str, accepted: Iterable[str], says: str) -> Flag:
    """A flag of which some values ask for what happens anyway; all others are refused."""
    accepted = tuple(accepted)
    return Flag(
        names=tuple(names.split()),
        reads=lambda flag, values: (
            Meaning() if values[0].lower() in accepted else Meaning(problems=(f"{flag} {values[0]}: {says}",))
        ),
    )


# ---- reading


def read_flags(words: Sequence[str], table: Sequence[Flag], launcher: str) -> tuple[Meaning, tuple[str, ...]]:
    """The flags that stand in front of a program.

    Args:
        words: Behind the launcher's name.
        table: The launcher's flags.
        launcher: Its name, for messages.

    Returns:
        What the flags tell, and the program with its own words. A flag that is not known, or lacks its value, is a
        problem; behind it nothing can be told apart, so the program is empty then.
    """
    by_name = {name: flag for flag in table for name in flag.names}
    found, rest = Meaning(), list(words)
    while rest and rest[0].startswith("-") and rest[0] not in ("-", "--"):
        word, equals, glued = rest.pop(0).partition("=")
        name = _plain(word)
        if (flag := by_name.get(name)) is None:
            known = nearest(name, list(by_name))
            return found + Meaning(problems=(f"{word}: no flag of {launcher} that is known here{known}",)), ()
        values, problem = _values(word, flag, [glued] if equals else [], rest)
        found += Meaning(problems=(problem,)) if problem else flag.reads(word, values)
    return found, tuple(rest[1:] if rest[:1] == ["--"] else rest)


def _plain(word: str) -> str:
    """A flag without the dashes in front, and with `_` for those within: launchers take both."""
    return word.lstrip("-").replace("-", "_")


def _values(word: str, flag: Flag, values: list[str], rest: list[str]) -> tuple[tuple[str, ...], str]:
    """The values of a flag, taken from the words behind it, or what is wrong."""
    if not values and flag.joins and rest and "=" in rest[0]:
        return tuple(rest.pop(0).split("=", 1)), ""
    while len(values) < flag.num_values:
        if not rest:
            return (), f"{word}: a value is expected behind it"
        values.append(rest.pop(0))
    if len(values) > flag.num_values:
        return (), f"{word}={values[0]}: this flag takes no value"
    return tuple(values), ""
