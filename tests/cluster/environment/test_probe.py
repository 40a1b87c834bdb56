"""What keeps a host from getting an environment, and what is done about it."""

from __future__ import annotations

import subprocess
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from fleetune.cluster.environment.here import Environment
from fleetune.cluster.environment.probe import HostFacts, lack_of_room, obstacles, parse_facts, probe_command

ENVIRONMENT = Environment(
    prefix=Path("/opt/env"), kind="venv", base=Path("/usr/bin/python3.11"),
    site_packages=Path("lib/python3.11/site-packages"),
    python="3.11.2", modules=("fleetune", "torch"), versions="3.11.2 0.1.0 2.13.0", machine="x86_64", glibc=(2, 36),
    package=None, head="head 1",
)  # fmt: skip
FACTS = HostFacts(
    machine="x86_64", glibc=(2, 36), missing=(), base="Python 3.11.2", unwritable=None, free_bytes=10**10,
    free_inodes=10**6, identity="", found="nothing", marker={},
)  # fmt: skip


def told(environment: Environment = ENVIRONMENT, *, force: bool = False, **changes: Any) -> list[str]:
    return list(obstacles(replace(FACTS, **changes), environment, force=force))


def test_a_host_as_it_should_be() -> None:
    assert told() == told(glibc=(2, 41)) == told(found="ours") == told(found="other", force=True) == []


ANOTHER_SYSTEM = "update its system, or run setup from the host with the oldest one"
APT = "`apt-get install python3.11` or `dnf install python3.11` there, of the same release"


@pytest.mark.parametrize(
    ("changes", "what", "remedy"),
    [
        ({"missing": ("xargs",)}, "there is no program `xargs`", "install the package findutils"),
        ({"missing": ("df",)}, "there is no program `df`", "install the package coreutils"),
        ({"machine": "aarch64", "glibc": (2, 30)}, "its CPU is aarch64, this environment is for x86_64",
         "leave it out, or run fleetune from a host with aarch64 for hosts of that kind"),
        ({"glibc": (2, 9)}, "its C library is glibc 2.9, this environment was made with glibc 2.36", ANOTHER_SYSTEM),
        ({"glibc": ()}, "its C library is not glibc, this environment was made with glibc 2.36", ANOTHER_SYSTEM),
        ({"base": None}, "/usr/bin/python3.11 must be Python 3.11.2 there, but is nothing", APT),
        ({"base": "Python 3.11.9"}, "/usr/bin/python3.11 must be Python 3.11.2 there, but is Python 3.11.9", APT),
        ({"unwritable": "/opt"}, "/opt cannot be written by this user",
         "make /opt there and give it to that user, or use an environment in a folder of one's own"),
        ({"found": "other"}, "/opt/env is there already, and was not made by fleetune setup",
         "move it away, or replace it with --force"),
    ],
)  # fmt: skip
def test_obstacles(changes: dict[str, Any], what: str, remedy: str) -> None:
    assert told(**changes) == [f"{what}: {remedy}"]


PYENV, UV = "/root/.pyenv/versions/3.11.2", "/home/me/.local/share/uv/python/cpython-3.11.2-linux"


@pytest.mark.parametrize(
    ("place", "remedy"),
    [
        (PYENV, f"`pyenv install 3.11.2` there, or copy {PYENV}"),
        (UV, f"`uv python install 3.11.2` there, or copy {UV}"),
        ("/opt/python", "install it there, or copy /opt/python"),
    ],
)
def test_where_an_interpreter_comes_from(place: str, remedy: str) -> None:
    base = Path(place, "bin/python3.11")
    (problem,) = told(replace(ENVIRONMENT, base=base), base=None)
    assert problem == f"{base} must be Python 3.11.2 there, but is nothing: {remedy}"


def test_conda_brings_its_interpreter_along() -> None:
    assert told(replace(ENVIRONMENT, kind="conda", base=None), base=None) == []


def test_room() -> None:
    assert lack_of_room(FACTS, 10**9, 1000) is None
    assert lack_of_room(FACTS, 10**10, 1000) == "10,500 MB are needed, 10,000 MB are free: free some"
    assert lack_of_room(FACTS, 1, 2 * 10**6) == (
        "2,000,000 files are to be made, its file system takes 1,000,000 more: remove some"
    )
    assert lack_of_room(replace(FACTS, free_inodes=None), 1, 2 * 10**6) is None


def test_the_probe_on_this_machine(tmp_path: Path) -> None:
    environment = replace(ENVIRONMENT, prefix=tmp_path / "no" / "where" / "env", base=Path("/bin/false"))
    ran = subprocess.run(probe_command(environment), capture_output=True, text=True, check=True)
    facts = parse_facts(ran.stdout)
    assert (facts.missing, facts.unwritable, facts.found, facts.identity, facts.base) == ((), None, "nothing", "", "")
    assert facts.free_bytes > 10**6
    environment.prefix.mkdir(parents=True)
    assert (
        parse_facts(subprocess.run(probe_command(environment), capture_output=True, text=True).stdout).found == "other"
    )


def test_answers_of_odd_hosts() -> None:
    """A mount point with spaces and numbers, btrfs without inodes, a login script that speaks, and one that ends."""
    text = (
        "Welcome to node1\nmachine aarch64\nlibc \nmissing find\n"
        "space /dev/sda1 100 40 60 40% /my disk 1 20% x\ninodes /dev/sda1 0 0 0 - /my disk\nidentity \nfound link\n"
    )
    facts = parse_facts(text)
    assert (facts.machine, facts.glibc, facts.missing, facts.base) == ("aarch64", (), ("find",), None)
    assert (facts.free_bytes, facts.free_inodes, facts.found, facts.marker) == (60 * 1024, None, "link", {})
    with pytest.raises(ValueError, match=r"the probe printed 'Account expired\\n'"):
        parse_facts("Account expired\n")
