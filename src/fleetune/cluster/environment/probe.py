"""What a host has: asked in one connection, before anything is sent."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, Literal

from fleetune.cluster.environment.contents import MARKER
from fleetune.cluster.environment.here import Environment

PROBE = " ".join(
    (
        "p=$1; b=$2;",
        'echo "machine $(uname -m)"; echo "libc $(getconf GNU_LIBC_VERSION 2>/dev/null)";',
        "for t in tar find xargs head df stat; do command -v $t >/dev/null || echo missing $t; done;",
        'if [ -x "$b" ]; then echo "base $("$b" -V 2>&1)"; fi;',
        'd=$(dirname -- "$p"); until [ -d "$d" ]; do d=$(dirname -- "$d"); done;',
        '[ -w "$d" ] || echo "unwritable $d";',
        'echo "space $(df -Pk -- "$d" | tail -n 1)"; echo "inodes $(df -Pi -- "$d" | tail -n 1)";',
        'echo identity $(stat -L -c %i.%Z -- "$p/bin" "$p/$3" 2>/dev/null);',
        f'if [ -L "$p" ]; then echo found link; elif [ -f "$p/{MARKER}" ]; then echo found ours;',
        f'echo "marker $(cat -- "$p/{MARKER}")"; elif [ -e "$p" ]; then echo found other; else echo found nothing; fi',
    )
)
"""For sh. Arguments: the environment's folder, the base interpreter or nothing, site-packages below the folder."""

_PACKAGES = {"tar": "tar", "find": "findutils", "xargs": "findutils"}
_ROOM = 1.05
"""Folders and metadata of a file system take a little beside the files."""


@dataclass(frozen=True, kw_only=True)
class HostFacts:
    """What the probe told."""

    machine: str
    glibc: tuple[int, ...]
    missing: tuple[str, ...]
    """Programs."""
    base: str | None
    """What the base interpreter says of its version; None where there is none."""
    unwritable: str | None
    """The folder that the environment would be made in, where this user cannot."""
    free_bytes: int
    free_inodes: int | None
    """None where the file system makes them as needed."""
    identity: str
    """Of two folders of an environment in this place: inodes and times of change."""
    found: Literal["nothing", "ours", "other", "link"]
    marker: dict[str, Any]


def probe_command(environment: Environment) -> list[str]:
    """The command that probes a host."""
    return [
        "sh",
        "-c",
        PROBE,
        "sh",
        str(environment.prefix),
        str(environment.base or ""),
        str(environment.site_packages),
    ]


def parse_facts(text: str) -> HostFacts:
    """Read what the probe printed.

    Raises:
        ValueError: It is not what a probe prints: a login script may have spoken, or ended the shell.
    """
    told: dict[str, list[str]] = {}
    for line in text.splitlines():
        word, _, rest = line.partition(" ")
        told.setdefault(word, []).append(rest)
    if not {"machine", "space", "found"} <= set(told):
        raise ValueError(f"the probe printed {text[:200]!r}")
    return HostFacts(
        machine=told["machine"][0],
        glibc=tuple(int(part) for part in re.findall(r"\d+", told.get("libc", [""])[0])),
        missing=tuple(told.get("missing", ())),
        base=told["base"][0] if "base" in told else None,
        unwritable=told["unwritable"][0] if "unwritable" in told else None,
        free_bytes=1024 * (_available(told["space"][0]) or 0),
        free_inodes=_available(told["inodes"][0]),
        identity=told["identity"][0],
        found=told["found"][0],  # type: ignore[arg-type]  # one of its words
        marker=_marker(told.get("marker", ["{}"])[0]),
    )


def _available(line: str) -> int | None:
    """The number before the percentage in a line of `df -P`; None where the file system counts none."""
    match = re.search(r"\s(\d+)\s+(?:\d+%|-)\s", f"{line} ")
    total = re.search(r"\s(\d+)\s", f"{line} ")
    return int(match[1]) if match and not (total and total[1] == "0") else None


def _marker(text: str) -> dict[str, Any]:
    try:
        read = json.loads(text)
    except ValueError:
        return {}
    return read if isinstance(read, dict) else {}


def obstacles(facts: HostFacts, environment: Environment, *, force: bool) -> Iterator[str]:
    """Why a host cannot be set up, each with its remedy."""
    for tool in facts.missing:
        yield f"there is no program `{tool}`: install the package {_PACKAGES.get(tool, 'coreutils')}"
    if facts.machine != environment.machine:
        yield (
            f"its CPU is {facts.machine}, this environment is for {environment.machine}: "
            f"leave it out, or run fleetune from a host with {facts.machine} for hosts of that kind"
        )
    elif facts.glibc < environment.glibc:
        yield (
            f"its C library is {_dotted(facts.glibc)}, this environment was made with {_dotted(environment.glibc)}: "
            "update its system, or run setup from the host with the oldest one"
        )
    if environment.base is not None and facts.base != f"Python {environment.python}":
        has = "nothing" if facts.base is None else facts.base
        yield f"{environment.base} must be Python {environment.python} there, but is {has}: {_how_to_get(environment)}"
    if facts.unwritable is not None:
        yield (
            f"{facts.unwritable} cannot be written by this user: make {environment.prefix.parent} there and give it to "
            "that user, or use an environment in a folder of one's own"
        )
    if facts.found in ("other", "link") and not force:
        yield (
            f"{environment.prefix} is there already, and was not made by fleetune setup: "
            "move it away, or replace it with --force"
        )


def lack_of_room(facts: HostFacts, num_bytes: int, num_files: int) -> str | None:
    """Why what is sent does not fit; None where it does."""
    if facts.free_bytes < num_bytes * _ROOM:
        return f"{num_bytes * _ROOM / 1e6:,.0f} MB are needed, {facts.free_bytes / 1e6:,.0f} MB are free: free some"
    if facts.free_inodes is not None and facts.free_inodes < num_files:
        return f"{num_files:,} files are to be made, its file system takes {facts.free_inodes:,} more: remove some"
    return None


def _dotted(version: tuple[int, ...]) -> str:
    return "glibc " + ".".join(map(str, version)) if version else "not glibc"


def _how_to_get(environment: Environment) -> str:
    base, short = str(environment.base), ".".join(environment.python.split(".")[:2])
    if "/.pyenv/" in base:
        return f"`pyenv install {environment.python}` there, or copy {base.partition('/bin/')[0]}"
    if "/uv/python/" in base:
        return f"`uv python install {environment.python}` there, or copy {base.partition('/bin/')[0]}"
    if base.startswith("/usr/bin/"):
        return f"`apt-get install python{short}` or `dnf install python{short}` there, of the same release"
    return f"install it there, or copy {base.partition('/bin/')[0]}"
