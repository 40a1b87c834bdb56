"""The file that a benchmark leaves: where it goes, and what every one of them says about the machine."""

from __future__ import annotations

import dataclasses
import importlib.metadata
import os
import shlex
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from fleetune.files import write_json
from fleetune.hardware.host import read_host
from fleetune.hardware.versions import read_versions

REPOSITORY = Path(__file__).parents[1]
RESULTS = REPOSITORY / "benchmarks" / "results"
PEERS = ("accelerate",)
"""Distributions that take part in a benchmark and that fleetune itself does not need."""


def describe(name: str, options: Mapping[str, object]) -> dict[str, Any]:
    """The head of a result: which benchmark, how to repeat it, on what machine, with which versions.

    Args:
        name: Of the benchmark's module.
        options: Its command-line options, resolved; those that are None are left out of the command.
    """
    return {
        "benchmark": name,
        "started": time.strftime("%Y-%m-%dT%H:%M:%S%z"),
        "command": command(name, options),
        "host": host_facts(),
        "versions": versions(),
    }


def versions() -> dict[str, str]:
    """Versions of Python, of fleetune and its libraries, and of its peers."""
    return read_versions() | {peer: importlib.metadata.version(peer) for peer in PEERS}


def command(name: str, options: Mapping[str, object]) -> str:
    """The command that repeats a benchmark, from the repository's folder."""
    words = ["python", "-m", f"benchmarks.{name}"]
    for option, value in options.items():
        if value is not None:
            words += [f"--{option}", *map(str, value if isinstance(value, (list, tuple)) else [value])]
    return shlex.join(words)


def host_facts() -> dict[str, Any]:
    """What the machine is, without its name, and how busy it was before the benchmark."""
    facts = dataclasses.asdict(read_host())
    del facts["hostname"]
    return facts | {"load_average_1_min": os.getloadavg()[0]}


def shown_path(path: Path) -> str:
    """A path as it may stand in a result: relative to the repository."""
    return os.path.relpath(path.absolute(), REPOSITORY)


def unused_path(folder: Path, name: str, date: str) -> Path:
    """`<name>-<date>.json`, with a number behind the date when an earlier result of that day is to be kept."""
    path, number = folder / f"{name}-{date}.json", 1
    while path.exists():
        number += 1
        path = folder / f"{name}-{date}-{number}.json"
    return path


def write_result(content: Mapping[str, Any], output: Path | None) -> Path:
    """Write a result to `output`, or where results are kept, and say where that is."""
    path = output or unused_path(RESULTS, content["benchmark"], time.strftime("%Y-%m-%d"))
    write_json(path, content)
    return path


def print_result(notes: Sequence[str], table: str, path: Path) -> None:
    """What the terminal shows at the end."""
    print("\n".join(["", *notes, "", table, "", f"written to {shown_path(path)}"]), flush=True)
