"""What is written to control groups, in the words of both versions: of machines that this one is not."""

from __future__ import annotations

from pathlib import Path

import pytest

from lab import LabError, cgroups
from lab.cgroups import V1, V2, Hierarchies, HostGroup, find_hierarchies


def hierarchy(root: Path, name: str, *, controllers: str = "") -> Path:
    folder = root / name
    folder.mkdir()
    (folder / "cgroup.controllers").write_text(controllers)
    return folder


@pytest.fixture
def mounts(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """What stands for /proc/mounts."""
    monkeypatch.setattr(cgroups, "MOUNTS", tmp_path / "mounts")
    return tmp_path / "mounts"


def test_finds_version_1_beside_version_2(tmp_path: Path, mounts: Path) -> None:
    cpu, freezer, unified = (hierarchy(tmp_path, name) for name in ("cpu", "freezer", "unified"))
    mounts.write_text(
        f"cgroup {cpu} cgroup rw,relatime,cpu,cpuacct 0 0\n"
        f"cgroup {freezer} cgroup rw,freezer 0 0\n"
        f"cgroup2 {unified} cgroup2 rw,relatime 0 0\n"
    )
    assert find_hierarchies() == Hierarchies(words=V1, cpu=cpu, freezer=freezer)


@pytest.mark.parametrize("controllers", ["cpuset cpu memory", "cpuset memory"])
def test_finds_version_2(tmp_path: Path, mounts: Path, controllers: str) -> None:
    root = hierarchy(tmp_path, "cgroup", controllers=controllers)
    mounts.write_text(f"cgroup2 {root} cgroup2 rw,nosuid 0 0\n")
    cpu = root if " cpu " in controllers else None
    assert find_hierarchies() == Hierarchies(words=V2, cpu=cpu, freezer=root)


def test_version_2_in_its_own_words(tmp_path: Path) -> None:
    group = HostGroup(hierarchies=Hierarchies(words=V2, cpu=tmp_path, freezer=tmp_path), name="lab/node1")
    group.make()
    node = tmp_path / "lab" / "node1"
    assert group.folders() == [node]
    assert (tmp_path / "cgroup.subtree_control").read_text() == "+cpu"
    assert (tmp_path / "lab" / "cgroup.subtree_control").read_text() == "+cpu"
    assert (tmp_path / "lab" / "cpu.weight").read_text() == "6400"
    group.set_quota(0.4)
    assert (node / "cpu.max").read_text() == "4000 10000"
    group.set_quota(None)
    assert (node / "cpu.max").read_text() == "max 10000"
    (node / "cgroup.events").write_text("populated 1\nfrozen 1\n")
    group.freeze()
    assert (node / "cgroup.freeze").read_text() == "1"
    group.thaw()
    assert (node / "cgroup.freeze").read_text() == "0"


def test_version_1_in_its_own_words(tmp_path: Path) -> None:
    cpu, freezer = hierarchy(tmp_path, "cpu"), hierarchy(tmp_path, "freezer")
    group = HostGroup(hierarchies=Hierarchies(words=V1, cpu=cpu, freezer=freezer), name="lab/node1")
    group.make()
    group.set_quota(0.4)
    group.freeze()
    files = {p.name: p.read_text() for p in (*(cpu / "lab").glob("**/*.*"), *(freezer / "lab").glob("**/*.*"))}
    assert files == {
        "cpu.shares": "65536", "cpu.cfs_period_us": "10000", "cpu.cfs_quota_us": "4000", "freezer.state": "FROZEN"
    }  # fmt: skip


def test_without_controllers_only_what_needs_them_is_refused() -> None:
    group = HostGroup(hierarchies=Hierarchies(words=V1, cpu=None, freezer=None), name="lab/node1")
    group.make()
    group.set_quota(None)
    with pytest.raises(LabError, match=r"no quota of 0.4 cores"):
        group.set_quota(0.4)
    with pytest.raises(LabError, match="cannot be frozen"):
        group.freeze()
