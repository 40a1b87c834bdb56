"""A lab of two hosts that the tests of a module share."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from lab import Lab
from lab.network import Network, remains

CORES, MBIT = 0.4, 40.0


@pytest.fixture(scope="module")
def kept(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder under /tmp that hosts see."""
    folder = tmp_path_factory.mktemp("kept")
    if not folder.is_relative_to("/tmp"):
        pytest.skip(f"temporary folders are in {folder}, not under /tmp")
    (folder / "note").write_text("from the machine")
    return folder


@pytest.fixture(scope="module")
def lab(kept: Path) -> Iterator[Lab]:
    if reason := Lab.unavailable(with_ssh=True):
        pytest.skip(reason)
    with Lab.up(2, mbit=MBIT, with_ssh=True, keep=[kept]) as lab:
        yield lab


def left_of(number: int) -> list[object]:
    """What there is of a lab: namespaces, links, routes, control groups, state folder, processes."""
    name, prefix = f"fleetune-lab-{number}", f"/var/tmp/fleetune-lab-{number}/"
    groups = [path for path in Path("/sys/fs/cgroup").glob(f"**/{name}")]
    folders = [path for path in Path("/var/tmp").glob(name)]
    processes = [path.parent for path in Path("/proc").glob("[0-9]*/cmdline") if prefix in _text(path)]
    return [*remains(Network(number=number)), *groups, *folders, *processes]


def _text(path: Path) -> str:
    try:
        return path.read_text(errors="replace")
    except OSError:  # it ended
        return ""
