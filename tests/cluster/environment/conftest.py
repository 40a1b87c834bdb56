"""A lab of three hosts, and on the first of them a small environment with fleetune out of its checkout."""

from __future__ import annotations

import importlib.metadata
import os
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from lab import Host, Lab
from tests.conftest import REPOSITORY

PREFIX = Path("/tmp/fleetune-place/env")
"""On the hosts, whose /tmp is their own."""
SITE = PREFIX / f"lib/python{sys.version_info.major}.{sys.version_info.minor}/site-packages"
BASE = Path(os.path.realpath(f"{sys.base_prefix}/bin/python{sys.version_info.major}.{sys.version_info.minor}"))

Run = Callable[..., subprocess.CompletedProcess[str]]


@pytest.fixture(scope="package")
def lab() -> Iterator[Lab]:
    if reason := Lab.unavailable(with_ssh=True):
        pytest.skip(reason)
    if not shutil.which("tar") or not shutil.which("find"):
        pytest.skip("no tar or find")
    with Lab.up(3, with_ssh=True) as lab:
        yield lab


@pytest.fixture(scope="package")
def packages() -> Iterator[Path]:
    """What fleetune setup needs to run, and a `torch` that is missing a library on hosts with /tmp/no-libgomp."""
    folder = Path(tempfile.mkdtemp(prefix="fleetune-test-", dir="/var/tmp"))  # hosts have a /tmp of their own
    psutil = importlib.metadata.distribution("psutil")
    for file in psutil.files or []:
        if ".." not in file.parts and "__pycache__" not in file.parts:
            (folder / file).parent.mkdir(parents=True, exist_ok=True)
            shutil.copy2(str(file.locate()), folder / file)
    (folder / "torch").mkdir()
    (folder / "torch" / "__init__.py").write_text(
        "import os\n__version__ = '9.9'\nif os.path.exists('/tmp/no-libgomp'):\n"
        "    raise ImportError('libgomp.so.1: cannot open shared object file')\n"
    )
    (folder / "torch-9.9.dist-info").mkdir()
    (folder / "torch-9.9.dist-info" / "METADATA").write_text("Metadata-Version: 2.1\nName: torch\nVersion: 9.9\n")
    own = folder / "fleetune-0.1.0.dist-info"
    own.mkdir()
    (own / "METADATA").write_text("Metadata-Version: 2.1\nName: fleetune\nVersion: 0.1.0\n")
    (own / "RECORD").write_text("__editable__.fleetune-0.1.0.pth,,\n")
    (own / "direct_url.json").write_text(f'{{"dir_info": {{"editable": true}}, "url": "file://{REPOSITORY}"}}')
    (folder / "__editable__.fleetune-0.1.0.pth").write_text(f"{REPOSITORY}/src\n")
    yield folder
    shutil.rmtree(folder)


@pytest.fixture
def head(lab: Lab, packages: Path) -> Iterator[Host]:
    """The first host, with a fresh environment, and nothing on the others."""
    head = lab["node1"]
    made = head.run([str(BASE), "-m", "venv", "--without-pip", str(PREFIX)])
    assert made.returncode == 0, made.stderr
    head.run(["cp", "-a", f"{packages}/.", str(SITE)]).check_returncode()
    yield head
    for host in lab:
        host.run(["sh", "-c", f"umount {PREFIX.parent}; rm -rf {PREFIX.parent} /tmp/no-libgomp"])


@pytest.fixture
def setup(head: Host) -> Run:
    """`fleetune setup` on the first host."""

    def run(*words: str, hosts: str = "node1,node2,node3", timeout: float = 120) -> subprocess.CompletedProcess[str]:
        return head.run(
            [f"{PREFIX}/bin/python", "-m", "fleetune", "setup", "--hosts", hosts, "--no_kernels", *words],
            timeout=timeout,
        )

    return run


def tree(host: Host) -> dict[str, str]:
    """Path -> kind, size, mode and content's digest of what an environment holds, compiled files left out."""
    script = (
        f"cd {PREFIX} && find . -name __pycache__ -prune -o -type f -exec sha256sum {{}} + && "
        "find . -name __pycache__ -prune -o -printf '%y%m%l %p\\n'"
    )
    listed = host.run(["sh", "-c", script])
    assert listed.returncode == 0, listed.stderr
    lines = sorted(line.split(maxsplit=1) for line in listed.stdout.splitlines())
    return {f"{path} {'digest' if len(first) == 64 else 'kind'}": first for first, path in lines}


def names_beside(host: Host) -> list[str]:
    """What there is in the folder where the environment is put."""
    return sorted(host.run(["ls", "-A", str(PREFIX.parent)]).stdout.split())
