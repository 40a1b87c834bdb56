"""Files are whole or not there, and a disk that does not take them is named."""

from __future__ import annotations

import errno
import json
import os
from pathlib import Path

import pytest

from fleetune.errors import OutputError
from fleetune.files import disk_errors, remove, sync, write_json, write_whole


def listing(folder: Path) -> list[str]:
    return sorted(p.name for p in folder.iterdir())


def test_write_whole_makes_folders_and_leaves_only_the_file(tmp_path: Path) -> None:
    path = tmp_path / "a" / "b" / "note.txt"
    write_whole(path, lambda unfinished: unfinished.write_text("content") and None)
    assert path.read_text() == "content"
    assert listing(path.parent) == ["note.txt"]


def test_a_reader_sees_the_old_content_until_the_new_is_whole(tmp_path: Path) -> None:
    path = tmp_path / "note.txt"
    path.write_text("old")
    seen = []

    def write(unfinished: Path) -> None:
        unfinished.write_text("ne")
        seen.append(path.read_text())
        unfinished.write_text("new")

    write_whole(path, write)
    assert seen == ["old"]
    assert path.read_text() == "new"


@pytest.mark.parametrize("error", [RuntimeError("a mistake"), KeyboardInterrupt()])
def test_an_interrupted_write_changes_nothing_and_keeps_its_error(tmp_path: Path, error: BaseException) -> None:
    path = tmp_path / "note.txt"
    path.write_text("old")

    def write(unfinished: Path) -> None:
        unfinished.write_text("ha")
        raise error

    with pytest.raises(type(error)):
        write_whole(path, write)
    assert path.read_text() == "old"
    assert listing(tmp_path) == ["note.txt"]


@pytest.mark.parametrize(
    "error",
    [
        OSError(errno.ENOSPC, "No space left on device"),
        OSError(errno.EDQUOT, "Disk quota exceeded"),
        RuntimeError("I/O error: No space left on device (os error 28)"),  # as safetensors says it
    ],
)
def test_a_full_disk_is_called_full(tmp_path: Path, error: Exception) -> None:
    def write(unfinished: Path) -> None:
        unfinished.write_text("half")
        raise error

    with pytest.raises(OutputError, match=r"note\.txt cannot be written: the disk is full \([\d,]+ MB free\)"):
        write_whole(tmp_path / "note.txt", write)
    assert listing(tmp_path) == []


def test_another_disk_error_is_quoted(tmp_path: Path) -> None:
    with pytest.raises(OutputError, match=r"out/x cannot be written: .*Input/output error"), disk_errors(Path("out/x")):
        raise OSError(errno.EIO, "Input/output error")


def test_a_file_where_the_folder_should_be(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(OutputError, match=r"file/sub/note\.json cannot be written"):
        write_json(tmp_path / "file" / "sub" / "note.json", {})


def test_json_is_readable_text_and_ends_in_a_newline(tmp_path: Path) -> None:
    content = {"name": "Käthe 😀", "values": [1, 2.5, None]}
    write_json(tmp_path / "note.json", content)
    text = (tmp_path / "note.json").read_text(encoding="utf-8")
    assert "Käthe 😀" in text
    assert text.endswith("}\n")
    assert json.loads(text) == content


def test_what_json_cannot_hold_leaves_the_old_file(tmp_path: Path) -> None:
    write_json(tmp_path / "note.json", {"old": 1})
    with pytest.raises(TypeError):
        write_json(tmp_path / "note.json", {"new": object()})
    assert json.loads((tmp_path / "note.json").read_text()) == {"old": 1}
    assert listing(tmp_path) == ["note.json"]


def test_remove_takes_files_folders_links_and_nothing(tmp_path: Path) -> None:
    (tmp_path / "folder" / "sub").mkdir(parents=True)
    (tmp_path / "folder" / "sub" / "file").write_text("")
    (tmp_path / "kept").mkdir()
    (tmp_path / "link").symlink_to(tmp_path / "kept")
    for name in ("folder", "link", "absent"):
        remove(tmp_path / name)
    remove(tmp_path / "kept" / "absent" / "deeper")
    assert listing(tmp_path) == ["kept"]


def test_sync_takes_files_and_folders_and_leaves_no_descriptor_open(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("x")
    before = len(os.listdir("/proc/self/fd"))
    sync(tmp_path / "file")
    sync(tmp_path)
    assert len(os.listdir("/proc/self/fd")) == before
