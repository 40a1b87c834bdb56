"""What is known of this environment, on real virtual environments."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from fleetune.cluster.environment import here
from fleetune.cluster.environment.here import read_environment
from fleetune.errors import ConfigError
from tests.cluster.environment.conftest import BASE
from tests.conftest import REPOSITORY

SITE = f"lib/python{sys.version_info.major}.{sys.version_info.minor}/site-packages"


def read_in(prefix: Path) -> dict[str, object]:
    """`read_environment` by an environment's own Python, with this checkout and psutil of ours."""
    script = (
        "import json\nfrom fleetune.cluster.environment.here import read_environment as read\n"
        "print(json.dumps(read().__dict__, default=str))"
    )
    ran = subprocess.run(
        [prefix / "bin/python", "-c", script], capture_output=True, text=True, env={"PYTHONPATH": f"{REPOSITORY}/src"}
    )
    assert ran.returncode == 0, ran.stderr
    read: dict[str, object] = json.loads(ran.stdout)
    return read


def make(prefix: Path, *options: str) -> Path:
    subprocess.run([BASE, "-m", "venv", "--without-pip", *options, prefix], check=True)
    return prefix


def test_a_virtual_environment(tmp_path: Path) -> None:
    read = read_in(make(tmp_path / "env"))
    assert (read["prefix"], read["kind"], read["site_packages"]) == (str(tmp_path / "env"), "venv", SITE)
    assert os.path.realpath(str(read["base"])) == str(BASE)
    assert read["machine"] == os.uname().machine
    assert read["modules"] == ["fleetune"]
    assert str(read["versions"]).split() == [".".join(map(str, sys.version_info[:3])), "0.1.0"]
    assert read["package"] == f"{REPOSITORY}/src/fleetune"
    assert read["warnings"] == []


def test_one_of_copies_needs_its_home(tmp_path: Path) -> None:
    prefix = make(tmp_path / "env", "--copies")
    assert not (prefix / "bin/python").is_symlink()
    base = str(read_in(prefix)["base"])
    assert os.path.realpath(base) == str(BASE)
    assert not base.startswith(str(tmp_path))


def test_what_would_not_come_along_is_said(tmp_path: Path) -> None:
    prefix = make(tmp_path / "env", "--system-site-packages")
    mine = prefix / SITE / "mine-1.dist-info"
    mine.mkdir()
    (mine / "METADATA").write_text("Metadata-Version: 2.1\nName: mine\nVersion: 1\n")
    (mine / "direct_url.json").write_text('{"url": "file:///home/me/mine", "dir_info": {"editable": true}}')
    warnings = read_in(prefix)["warnings"]
    assert isinstance(warnings, list)
    assert [warning.split(",")[0] for warning in warnings] == [
        "packages of the system's Python", "mine is installed from file:///home/me/mine with -e"
    ]  # fmt: skip


def test_a_python_of_the_system_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="neither a virtual nor a conda environment, and cannot be sent"):
        read_environment(tmp_path)


@pytest.mark.parametrize(
    ("told", "version"), [("glibc 2.36", (2, 36)), ("glibc 2.9", (2, 9)), (None, ()), ("", ())]
)  # fmt: skip
def test_versions_of_glibc(told: str | None, version: tuple[int, ...]) -> None:
    assert here._glibc(told) == version
