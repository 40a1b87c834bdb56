"""A folder arrives whole or not at all; what a host has already is recognised by content. Between hosts of a lab:
`tests/train/test_hosts.py`."""

from __future__ import annotations

import hashlib
import os
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from fleetune.comm.folders import (
    BLOCK_BYTES,
    Block,
    FolderContent,
    _blocks_of,
    _receive,
    content_of,
    folder_here,
    holds,
    own_cache,
)
from fleetune.comm.ranks import Ranks


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    made = tmp_path / "original"
    made.mkdir()
    (made / "large").write_bytes(bytes(range(256)) * (BLOCK_BYTES // 256) + b"rest")
    (made / "small").write_text("small")
    (made / "empty").touch()
    (made / "of no interest").write_text("x")
    return made


NAMES = ("small", "large", "empty")


def test_content_is_by_name_and_bytes(folder: Path) -> None:
    content = content_of(folder, NAMES)
    assert [(file.name, file.size) for file in content.files] == [
        ("empty", 0), ("large", BLOCK_BYTES + 4), ("small", 5),
    ]  # fmt: skip
    assert content.files[2].sha256 == hashlib.sha256(b"small").hexdigest()
    assert content.size == BLOCK_BYTES + 9
    before = content.digest
    (folder / "small").write_text("smell")
    assert content_of(folder, NAMES).digest != before


def test_a_folder_holds_what_is_equal(folder: Path, tmp_path: Path) -> None:
    content = content_of(folder, NAMES)
    assert holds(folder, content)
    assert not holds(tmp_path / "nowhere", content)
    (folder / "small").write_text("smell")  # of the same size
    assert not holds(folder, content)


def test_a_folder_arrives(folder: Path, tmp_path: Path) -> None:
    content, target = content_of(folder, NAMES), tmp_path / "cache" / "models" / "target"
    assert _receive(_blocks_of(folder, content), content, target) is None
    assert holds(target, content)
    assert sorted(path.name for path in target.iterdir()) == sorted(NAMES)
    assert [path.name for path in target.parent.iterdir()] == ["target"], "nothing unfinished is left"


def test_another_content_of_the_same_name_makes_room(folder: Path, tmp_path: Path) -> None:
    content, target = content_of(folder, NAMES), tmp_path / "target"
    target.mkdir()
    (target / "small").write_text("older")
    assert _receive(_blocks_of(folder, content), content, target) is None
    assert holds(target, content)


def test_an_equal_folder_of_another_run_is_taken(folder: Path, tmp_path: Path) -> None:
    content, target = content_of(folder, NAMES), tmp_path / "target"
    _receive(_blocks_of(folder, content), content, target)
    inode = target.stat().st_ino
    assert _receive(_blocks_of(folder, content), content, target) is None
    assert target.stat().st_ino == inode


def damaged(blocks: Iterator[Block]) -> Iterator[Block]:
    for file, block in blocks:
        yield file, torch.zeros_like(block) if file.name == "small" else block


def test_what_was_damaged_on_the_way_is_not_kept(folder: Path, tmp_path: Path) -> None:
    content, target = content_of(folder, NAMES), tmp_path / "target"
    failure = _receive(damaged(_blocks_of(folder, content)), content, target)
    assert failure is not None
    assert "small changed on the first rank's host while it was sent" in str(failure)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["original"]


def test_after_a_failure_the_rest_is_still_received(folder: Path, tmp_path: Path) -> None:
    """Another host waits for it behind this one."""
    content = content_of(folder, NAMES)
    (tmp_path / "file").touch()
    blocks = _blocks_of(folder, content)
    failure = _receive(blocks, content, tmp_path / "file" / "target")
    assert failure is not None
    assert "Not a directory" in str(failure)
    assert list(blocks) == []


def test_the_settings_cache_is_used_where_this_host_can_have_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "own"))
    assert own_cache(tmp_path) == tmp_path
    assert own_cache(tmp_path / "new") == tmp_path / "new"
    assert own_cache(tmp_path / "no" / "such" / "home") == tmp_path / "own" / "fleetune"
    if os.geteuid() != 0:
        (tmp_path / "closed").mkdir(mode=0o500)
        assert own_cache(tmp_path / "closed" / "new") == tmp_path / "own" / "fleetune"


def test_a_single_process_reads_the_folder_where_it_is(folder: Path) -> None:
    said: list[str] = []
    ranks = Ranks(None, None)

    def keep_in(_: FolderContent) -> Path:
        raise AssertionError("nothing is kept")

    assert folder_here("the model", ranks, lambda: (folder, NAMES), keep_in, said.append) == folder
    assert said == []
