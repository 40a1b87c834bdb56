"""The tables of flags against the launchers that are installed: what these take is known here, or refused by name."""

from __future__ import annotations

import argparse
import re
import shutil
import subprocess
from collections import Counter

import pytest

from fleetune.cluster.commands.accelerate import ACCELERATE, ACCELERATE_FILE
from fleetune.cluster.commands.command import LAUNCHERS
from fleetune.cluster.commands.flags import Flag, read_flags
from fleetune.cluster.commands.mpi import MPI
from fleetune.cluster.commands.torchrun import TORCHRUN

TABLES = {launcher.name: launcher.table for launcher in LAUNCHERS} | {"accelerate's file": ACCELERATE_FILE}
ACCELERATE_ELSEWHERE = ("deepspeed", "fsdp", "megatron", "tpu", "fp8", "parallelism", "zero", "offload", "aws", "vm",
                        "env", "no_tpu", "gradient_clipping", "dynamo_use_regional", "downcast_bf16")  # fmt: skip
"""How flags begin that are of no use on CPUs: these are refused as unknown."""


def names_of(table: tuple[Flag, ...]) -> list[str]:
    return [name for flag in table for name in flag.names]


def flags_of(parser: argparse.ArgumentParser) -> dict[str, argparse.Action]:
    """Name of each flag, as the tables spell it -> what argparse knows of it."""
    found = {word: action for action in parser._actions for word in action.option_strings}
    return {w.lstrip("-").replace("-", "_"): a for w, a in found.items() if a.dest != "help"}


@pytest.mark.parametrize("name", TABLES)
def test_every_flag_has_one_row(name: str) -> None:
    assert [flag for flag, count in Counter(names_of(TABLES[name])).items() if count > 1] == []


def takes_as_many(table: tuple[Flag, ...], flags: dict[str, argparse.Action]) -> list[str]:
    """Flags that would take another number of words than their own parser takes."""
    rows = {name: flag for flag in table for name in flag.names}
    return [name for name, action in flags.items() if name in rows and rows[name].num_values != (action.nargs != 0)]


def test_torchruns_flags() -> None:
    run = pytest.importorskip("torch.distributed.run")
    flags = flags_of(run.get_args_parser())
    assert sorted(set(flags) - set(names_of(TORCHRUN))) == []
    assert takes_as_many(TORCHRUN, flags) == []


def test_accelerates_flags() -> None:
    launch = pytest.importorskip("accelerate.commands.launch")
    flags = {
        n: a for n, a in flags_of(launch.launch_command_parser()).items() if not n.startswith(ACCELERATE_ELSEWHERE)
    }
    assert sorted(set(flags) - set(names_of(ACCELERATE))) == []
    assert takes_as_many(ACCELERATE, flags) == []


def test_hydras_flags() -> None:
    """As its help lists them: `-n/-np {value}   number of processes`."""
    hydra = shutil.which("mpiexec.hydra")
    if hydra is None:
        pytest.skip("MPICH is not installed")
    text = subprocess.run([hydra, "-help"], capture_output=True, text=True, check=False, timeout=30).stdout
    words = [word for line in re.findall(r"^    (-\S+)", text, re.MULTILINE) for word in line.split("/")]
    flags = {word.lstrip("-").replace("-", "_") for word in words}
    assert len(flags) > 30
    assert sorted(flags - set(names_of(MPI))) == []


@pytest.mark.parametrize("name", TABLES)
def test_a_flag_of_nobody_is_refused(name: str) -> None:
    meaning, rest = read_flags(["--no-such-flag", "x.py"], TABLES[name], name)
    assert meaning.problems == (f"--no-such-flag: no flag of {name} that is known here",)
    assert rest == ()
