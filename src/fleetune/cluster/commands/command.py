"""A command of another launcher, read from its front: variables, launchers, python, the script.

mpirun -f hosts -n 4 -ppn 2 -genv OMP_NUM_THREADS=23 python3 run_qa.py --no_cuda ...
torchrun --nproc_per_node 2 run_glue.py ...
mpirun -f hosts -n 16 -ppn 4 accelerate launch nlp_example.py
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from fleetune.cluster.commands.accelerate import ACCELERATE, read_accelerate_file, with_file
from fleetune.cluster.commands.flags import Flag, Meaning, read_flags
from fleetune.cluster.commands.horovod import HOROVOD
from fleetune.cluster.commands.ipexrun import IPEXRUN
from fleetune.cluster.commands.mpi import MPI
from fleetune.cluster.commands.ranks import PLACEMENT, rank_settings
from fleetune.cluster.commands.retired import read_environment, read_variables
from fleetune.cluster.commands.script import rewrite_flags, training_arguments, training_words
from fleetune.cluster.commands.text import is_text, read_text
from fleetune.cluster.commands.torchrun import TORCHRUN
from fleetune.errors import ConfigError


@dataclass(frozen=True, kw_only=True)
class Command:
    """What a command means here."""

    settings: Mapping[str, Any] = field(default_factory=dict)
    """Of `RunConfig`: hosts, ranks, threads, network."""
    variables: Mapping[str, str] = field(default_factory=dict)
    """That ranks get."""
    script: tuple[str, ...] = ()
    """The script and its own words; `-m module ...` for a module."""
    notices: tuple[str, ...] = ()
    """One line for each thing that is left away or done otherwise."""
    mixed_precision: str | None = None
    """What accelerate was told to compute in, no or bf16."""


@dataclass(frozen=True, kw_only=True)
class Launcher:
    """What starts ranks, elsewhere."""

    name: str
    begins: tuple[str, ...]
    """Patterns of the words that its command begins with, one pattern a word."""
    table: tuple[Flag, ...]
    unless_told: Mapping[str, str] = field(default_factory=dict)
    """Facts that it takes for granted."""
    completes: Callable[[Meaning, Mapping[str, str]], Meaning] = lambda found, environ: found
    """(what its flags tell, the environment) -> the same with what it reads elsewhere."""


_PYTHON = r"python[\d.]*"


def _module(name: str, module: str, table: tuple[Flag, ...], **more: Any) -> Launcher:
    return Launcher(name=name, begins=(_PYTHON, "-m", re.escape(module)), table=table, **more)


def _ipex_ranks(found: Meaning, environ: Mapping[str, str]) -> Meaning:
    """Without hosts it starts one process, with all physical cores."""
    return found if "num_hosts" in found.facts else Meaning(facts={"ranks_per_host": "1"}) + found


_ONE = {"ranks_per_host": "1"}
_ACCELERATE: dict[str, Any] = {"table": ACCELERATE, "unless_told": _ONE, "completes": with_file}
_INTEL = ("intel_extension_for_pytorch.cpu.launch", "intel_pytorch_extension.launch")

LAUNCHERS: tuple[Launcher, ...] = (
    Launcher(name="mpirun", begins=(r"(mpirun|mpiexec|prterun|orterun)(\.\w+)?",), table=MPI),
    Launcher(name="torchrun", begins=("torchrun",), table=TORCHRUN, unless_told=_ONE),
    _module("torchrun", "torch.distributed.run", TORCHRUN, unless_told=_ONE),
    _module("torch.distributed.launch", "torch.distributed.launch", TORCHRUN, unless_told=_ONE),
    Launcher(name="accelerate launch", begins=("accelerate", "launch"), **_ACCELERATE),
    Launcher(name="accelerate-launch", begins=("accelerate-launch",), **_ACCELERATE),
    Launcher(name="accelerate launch", begins=(_PYTHON, "-m", r"accelerate\.commands\.launch"), **_ACCELERATE),
    Launcher(name="ipexrun", begins=("ipexrun",), table=IPEXRUN, completes=_ipex_ranks),
    *(_module("Intel's launch", module, IPEXRUN, completes=_ipex_ranks) for module in _INTEL),
    Launcher(name="horovodrun", begins=("horovodrun",), table=HOROVOD, unless_told=_ONE),
)

_ASSIGNMENT = re.compile(r"([A-Za-z_]\w*)=(.*)", re.DOTALL)


def begins_command(words: Sequence[str]) -> bool:
    """Whether these words begin with a launcher, python, or variables in front of one."""
    if not words:
        return False
    is_known = _launcher(words) is not None or _is_python(words[0]) or words[0] == "env"
    return is_known or _ASSIGNMENT.fullmatch(words[0]) is not None or is_text(words)


def read_command(words: Sequence[str], environ: Mapping[str, str], *, config_file: Path | None = None) -> Command:
    """Understand a command.

    Args:
        words: As a guide has them, from the launcher, variables or the script on.
        environ: The user's environment: guides export variables before the command.
        config_file: A file of accelerate's that counts below the command.

    Raises:
        ConfigError: Lists flags that are not known, and what cannot be done here.
    """
    found = Meaning() if config_file is None else read_accelerate_file(config_file)
    if is_text(words):
        words, notices = read_text(words[0], environ)
        found += Meaning(notices=notices)
    told, rest, launched = _unwrapped(list(words), environ)
    found = (_without_placement(found) if launched else found) + told
    if ":" in rest and launched:
        found += Meaning(problems=("`:` begins a second program: one command is expected",))
    if found.problems:
        raise ConfigError(found.problems)
    if launched:
        found += Meaning(notices=read_environment(environ).notices)
    found = read_variables({name: environ[name] for name in found.handed_on if environ.get(name)}) + found
    told_of = {"GLOO_SOCKET_IFNAME": found.facts["interface"]} if "interface" in found.facts else {}
    return Command(
        settings=rank_settings(found.facts),
        variables={**found.variables, **told_of},
        script=_script(rest, found.facts),
        notices=found.notices,
        mixed_precision=found.facts.get("mixed_precision"),
    )


def for_launch(command: Command) -> Command:
    """The command with its script's flags as today's transformers takes them.

    Raises:
        ConfigError: The script waits for Horovod's own launcher.
    """
    script = command.script
    if not script or not script[0].endswith(".py") or not Path(script[0]).is_file():
        return command
    text = Path(script[0]).read_text(encoding="utf-8", errors="replace")
    if re.search(r"^\s*(import|from) horovod\b", text, re.MULTILINE):
        raise ConfigError(f"{script[0]} talks through Horovod, which only horovodrun can start: use torch.distributed, "
                          "or `fleetune train` where that does its work")  # fmt: skip
    words, notices = rewrite_flags(script[1:], text, training_arguments())
    return replace(command, script=(script[0], *words), notices=(*command.notices, *notices))


def for_train(command: Command) -> tuple[Command, list[str]]:
    """The command with the settings that its script has without being told, and the flags that it is told.

    Raises:
        ConfigError: `fleetune train` does not do that script's work.
    """
    settings, words, notices = training_words(command.script)
    told = with_precision(command)
    return replace(told, settings={**settings, **told.settings}, notices=(*told.notices, *notices)), words


def with_precision(command: Command) -> Command:
    """The command with accelerate's mixed precision as a setting of ours."""
    if command.mixed_precision is None:
        return command
    return replace(command, settings={**command.settings, "bf16": str(command.mixed_precision == "bf16").lower()})


# ---- one layer after another


def _unwrapped(words: list[str], environ: Mapping[str, str]) -> tuple[Meaning, list[str], bool]:
    """What all launchers in front tell, the words behind them, and whether there was any."""
    found, launched = Meaning(), False
    while words:
        if words[0] == "-m" and _launcher(["python", *words]) is not None:
            words = ["python", *words]  # as `fleetune launch -m torch.distributed.run ...` has it
        if words[0] == "env":
            words = words[1:]
        elif match := _ASSIGNMENT.fullmatch(words[0]):
            found += read_variables({match[1]: match[2]})
            words = words[1:]
        elif (launcher := _launcher(words)) is not None:
            inner, rest = read_flags(words[len(launcher.begins) :], launcher.table, launcher.name)
            inner = launcher.completes(inner, environ)
            found = (_without_placement(inner) if launched else _complete(inner, launcher)) + found
            words, launched = list(rest), True
        else:
            break
    return found, words, launched


def _launcher(words: Sequence[str]) -> Launcher | None:
    first = [Path(words[0]).name, *words[1:]] if words else []
    for launcher in LAUNCHERS:
        begins = launcher.begins
        if len(first) >= len(begins) and all(map(re.fullmatch, begins, first)):
            return launcher
    return None


def _complete(found: Meaning, launcher: Launcher) -> Meaning:
    """With what the launcher takes for granted, where it was told neither that nor the same by another number."""
    told = {"ranks", "ranks_per_host"} & set(found.facts)
    return found if told else Meaning(facts=launcher.unless_told) + found


def _without_placement(found: Meaning) -> Meaning:
    return replace(found, facts={name: value for name, value in found.facts.items() if name not in PLACEMENT})


def _is_python(word: str) -> bool:
    return re.fullmatch(_PYTHON, word) is not None


def _script(words: Sequence[str], facts: Mapping[str, str]) -> tuple[str, ...]:
    """The script without the python in front: ranks are run by the Python that fleetune runs in."""
    words = list(words)
    if words and _is_python(words[0]):
        plain = words[1:]
        while plain[:1] == ["-u"]:  # ranks' output is never buffered
            plain = plain[1:]
        if plain and (plain[0] == "-m" or not plain[0].startswith("-")):
            words = plain
    return ("-m", *words) if "module" in facts and words else tuple(words)
