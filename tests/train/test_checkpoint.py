"""Checkpoints are whole or not there, and a torn one is named and passed over."""

from __future__ import annotations

import hashlib
import os
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from fleetune.errors import CheckpointError, OutputError
from fleetune.train.checkpoint import (
    checkpoint_folder,
    clear_leftovers,
    list_checkpoints,
    newest_intact,
    prune_checkpoints,
    step_of,
    verify_checkpoint,
    write_checkpoint,
)
from tests.conftest import environment, read_json

CONTENT = {"model.safetensors": b"weights " * 50, "run_state.json": b'{"step": 5}', "empty.txt": b""}


def fill(folder: Path) -> None:
    for name, content in CONTENT.items():
        (folder / name).write_bytes(content)


def make(output_dir: Path, *steps: int) -> list[Path]:
    folders = [checkpoint_folder(output_dir, step) for step in steps]
    for folder in folders:
        write_checkpoint(folder, fill)
    return folders


def names(folder: Path) -> list[str]:
    return sorted(p.name for p in folder.iterdir())


def flip(path: Path) -> None:
    content = bytearray(path.read_bytes())
    content[len(content) // 2] ^= 0x01
    path.write_bytes(content)


def test_the_manifest_holds_size_and_checksum_of_every_file(tmp_path: Path) -> None:
    (folder,) = make(tmp_path, 5)
    assert folder == tmp_path / "checkpoint-5"
    assert names(tmp_path) == ["checkpoint-5"]
    assert names(folder) == sorted([*CONTENT, "manifest.json"])
    assert read_json(folder / "manifest.json")["files"] == {
        name: {"bytes": len(content), "sha256": hashlib.sha256(content).hexdigest()}
        for name, content in sorted(CONTENT.items())
    }
    verify_checkpoint(folder)


def test_the_manifest_comes_last_and_nothing_has_the_final_name_before(tmp_path: Path) -> None:
    folder, seen = checkpoint_folder(tmp_path, 1), []

    def write(unfinished: Path) -> None:
        seen.append((unfinished.name, folder.exists(), names(unfinished)))
        fill(unfinished)

    write_checkpoint(folder, write)
    assert seen == [(".checkpoint-1.writing", False, [])]


TEARS: list[tuple[str, Callable[[Path], object], str]] = [
    ("no manifest", lambda f: (f / "manifest.json").unlink(), "its manifest.json cannot be read"),
    ("half a manifest", lambda f: os.truncate(f / "manifest.json", 60), "its manifest.json cannot be read"),
    ("empty manifest", lambda f: (f / "manifest.json").write_text(""), "its manifest.json cannot be read"),
    ("a list", lambda f: (f / "manifest.json").write_text("[]"), "its manifest.json cannot be read"),
    ("no table", lambda f: (f / "manifest.json").write_text('{"files": 3}'), "its manifest.json cannot be read"),
    (
        "a key misspelt",
        lambda f: (f / "manifest.json").write_text((f / "manifest.json").read_text().replace("bytes", "bytfs")),
        "its manifest.json cannot be read",
    ),
    ("binary", lambda f: (f / "manifest.json").write_bytes(b"\xff\xfe\x00"), "its manifest.json cannot be read"),
    ("truncated", lambda f: os.truncate(f / "model.safetensors", 399), "model.safetensors has 399 bytes of 400"),
    ("grown", lambda f: (f / "empty.txt").write_text("x"), "empty.txt has 1 bytes of 0"),
    ("flipped", lambda f: flip(f / "model.safetensors"), "the content of model.safetensors is not what was written"),
    ("missing", lambda f: (f / "run_state.json").unlink(), "run_state.json is missing"),
    (
        "a folder instead",
        lambda f: ((f / "empty.txt").unlink(), (f / "empty.txt").mkdir()),
        "empty.txt is missing",
    ),
]


@pytest.mark.parametrize(("tear", "words"), [t[1:] for t in TEARS], ids=[t[0] for t in TEARS])
def test_every_tear_is_named_and_the_one_before_is_taken(
    tmp_path: Path, tear: Callable[[Path], object], words: str
) -> None:
    older, newer = make(tmp_path, 9, 10)
    tear(newer)
    with pytest.raises(CheckpointError) as caught:
        verify_checkpoint(newer)
    assert str(caught.value).startswith(f"{newer}: torn, ")
    assert words in str(caught.value)
    said: list[str] = []
    assert newest_intact(tmp_path, said.append) == older
    assert said == [f"{caught.value}; trying an older one"]


def test_the_newest_is_by_number_not_by_name(tmp_path: Path) -> None:
    make(tmp_path, 9, 100, 20)
    (tmp_path / "checkpoint-best").mkdir()
    (tmp_path / "checkpoint-7").write_text("a file")
    (tmp_path / ".checkpoint-500.writing").mkdir()
    assert [step_of(f) for f in list_checkpoints(tmp_path)] == [100, 20, 9]
    said: list[str] = []
    assert newest_intact(tmp_path, said.append) == tmp_path / "checkpoint-100"
    assert said == []


def test_without_an_intact_one_there_is_none(tmp_path: Path) -> None:
    said: list[str] = []
    assert newest_intact(tmp_path, said.append) is None
    assert newest_intact(tmp_path / "gone", said.append) is None
    assert said == []
    for folder in make(tmp_path, 1, 2):
        flip(folder / "model.safetensors")
    assert newest_intact(tmp_path, said.append) is None
    assert [s.split(": torn")[0] for s in said] == [str(tmp_path / "checkpoint-2"), str(tmp_path / "checkpoint-1")]


@pytest.mark.parametrize("name", ["checkpoint", "checkpoint-", "checkpoint-x", "mycheckpoint-5", "checkpoint-5.old"])
def test_a_folder_of_another_name_has_no_step(name: str) -> None:
    with pytest.raises(CheckpointError, match="a folder named checkpoint-<step> is expected"):
        step_of(Path(name))


@pytest.mark.parametrize("error", [RuntimeError("a mistake"), KeyboardInterrupt(), SystemExit(1)])
def test_an_interrupted_write_leaves_no_folder(tmp_path: Path, error: BaseException) -> None:
    def write(unfinished: Path) -> None:
        fill(unfinished)
        raise error

    with pytest.raises(type(error)):
        write_checkpoint(checkpoint_folder(tmp_path, 5), write)
    assert names(tmp_path) == []


def test_an_interrupted_replacement_keeps_what_was_there(tmp_path: Path) -> None:
    (folder,) = make(tmp_path, 5)

    def write(unfinished: Path) -> None:
        (unfinished / "model.safetensors").write_bytes(b"other")
        raise RuntimeError

    with pytest.raises(RuntimeError):
        write_checkpoint(folder, write)
    verify_checkpoint(folder)
    assert (folder / "model.safetensors").read_bytes() == CONTENT["model.safetensors"]


def test_one_of_the_same_step_is_replaced(tmp_path: Path) -> None:
    (folder,) = make(tmp_path, 5)
    (folder / "stray").write_text("")
    write_checkpoint(folder, lambda unfinished: (unfinished / "new").write_text("new") and None)
    assert names(folder) == ["manifest.json", "new"]
    assert names(tmp_path) == ["checkpoint-5"]
    verify_checkpoint(folder)


def test_a_write_that_was_killed_leaves_only_a_hidden_folder_which_the_next_one_removes(tmp_path: Path) -> None:
    script = (
        "import os, signal, sys, pathlib\n"
        "from fleetune.train.checkpoint import write_checkpoint\n"
        "def write(folder):\n"
        "    (folder / 'model.safetensors').write_bytes(b'half')\n"
        "    os.kill(os.getpid(), signal.SIGKILL)\n"
        "write_checkpoint(pathlib.Path(sys.argv[1]) / 'checkpoint-7', write)\n"
    )
    make(tmp_path, 6)
    result = subprocess.run([sys.executable, "-c", script, str(tmp_path)], env=environment(), timeout=60, check=False)
    assert result.returncode == -9
    assert names(tmp_path) == [".checkpoint-7.writing", "checkpoint-6"]
    said: list[str] = []
    assert newest_intact(tmp_path, said.append) == tmp_path / "checkpoint-6"
    assert said == []
    make(tmp_path, 8)
    assert names(tmp_path) == ["checkpoint-6", "checkpoint-8"]


def test_leftovers_are_only_our_own(tmp_path: Path) -> None:
    for name in (".checkpoint-1.writing", ".checkpoint-1.replaced", ".other.writing", "checkpoint-2.writing"):
        (tmp_path / name).mkdir()
    clear_leftovers(tmp_path)
    assert names(tmp_path) == [".other.writing", "checkpoint-2.writing"]


@pytest.mark.parametrize(
    ("keep", "best", "left"),
    [
        (None, None, [1, 2, 3, 4]),
        (10, None, [1, 2, 3, 4]),
        (4, 1, [1, 2, 3, 4]),
        (3, None, [2, 3, 4]),
        (3, 1, [1, 3, 4]),
        (2, 1, [1, 4]),
        (2, 4, [3, 4]),
        (1, None, [4]),
        (1, 4, [4]),
        (1, 2, [2, 4]),  # one to go on from, and the best
        (2, 99, [3, 4]),  # the best evaluation had no checkpoint: it takes no place
    ],
)
def test_pruning_keeps_the_best_and_the_newest(
    tmp_path: Path, keep: int | None, best: int | None, left: list[int]
) -> None:
    make(tmp_path, 1, 2, 3, 4)
    (tmp_path / "checkpoint-notes").mkdir()
    prune_checkpoints(tmp_path, keep, None if best is None else checkpoint_folder(tmp_path, best))
    assert names(tmp_path) == [*(f"checkpoint-{step}" for step in left), "checkpoint-notes"]


@pytest.fixture
def small_disk(tmp_path: Path) -> Iterator[Path]:
    """A file system of 1 MB."""
    folder = tmp_path / "disk"
    folder.mkdir()
    if os.geteuid() != 0:
        pytest.skip("mounting a small file system needs root")
    mount = ["mount", "-t", "tmpfs", "-o", "size=1m", "tmpfs", str(folder)]
    result = subprocess.run(mount, capture_output=True, text=True, check=False)
    if result.returncode != 0:
        pytest.skip(f"a small file system cannot be mounted here: {result.stderr.strip()}")
    try:
        yield folder
    finally:
        subprocess.run(["umount", str(folder)], check=True)


def test_a_full_disk_is_said_and_the_checkpoint_before_stays(small_disk: Path) -> None:
    (older,) = make(small_disk, 1)
    with pytest.raises(
        OutputError, match=r"checkpoint-2 cannot be written: the disk is full \(\d+ MB free\)"
    ) as caught:
        write_checkpoint(
            checkpoint_folder(small_disk, 2), lambda f: (f / "model.safetensors").write_bytes(bytes(2 << 20)) and None
        )
    assert "--resume_from_checkpoint" in str(caught.value)
    assert names(small_disk) == ["checkpoint-1"]
    verify_checkpoint(older)
    make(small_disk, 2)  # there is room again


def test_a_full_disk_as_safetensors_reports_it(small_disk: Path) -> None:
    torch = pytest.importorskip("torch")
    from safetensors.torch import save_file

    (older,) = make(small_disk, 1)
    tensors = {"weight": torch.zeros(1 << 20)}
    with pytest.raises(OutputError, match="the disk is full"):
        write_checkpoint(checkpoint_folder(small_disk, 2), lambda f: save_file(tensors, f / "model.safetensors"))
    assert names(small_disk) == ["checkpoint-1"]
    assert newest_intact(small_disk, print) == older


def test_a_full_disk_while_one_of_the_same_step_is_replaced(small_disk: Path) -> None:
    (folder,) = make(small_disk, 1)
    with pytest.raises(OutputError, match="the disk is full"):
        write_checkpoint(folder, lambda f: (f / "model.safetensors").write_bytes(bytes(2 << 20)) and None)
    verify_checkpoint(folder)
    assert (folder / "model.safetensors").read_bytes() == CONTENT["model.safetensors"]


def test_a_read_only_disk_is_named(small_disk: Path) -> None:
    make(small_disk, 1)
    subprocess.run(["mount", "-o", "remount,ro", str(small_disk)], check=True)
    with pytest.raises(OutputError, match=r"checkpoint-2 cannot be written: .*Read-only file system"):
        make(small_disk, 2)
    verify_checkpoint(small_disk / "checkpoint-1")


def test_a_folder_that_cannot_be_written_is_named(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(OutputError, match=r"file/checkpoint-1 cannot be written: .*Not a directory"):
        make(tmp_path / "file", 1)


def test_without_permission_the_folder_is_named(tmp_path: Path) -> None:
    """As another user where the tests run as root, whom no permission stops."""
    folder = tmp_path / "locked"
    folder.mkdir(mode=0o555)
    script = (
        "import os, sys, pathlib\n"
        "from fleetune.train.checkpoint import write_checkpoint\n"
        "from fleetune.errors import OutputError\n"
        "if os.geteuid() == 0:\n"
        "    os.setuid(65534)\n"
        "try:\n"
        "    write_checkpoint(pathlib.Path('locked/checkpoint-1'), lambda folder: None)\n"
        "except OutputError as error:\n"
        "    print(error)\n"
    )
    tmp_path.chmod(0o755)  # pytest closes it to other users
    result = subprocess.run(
        [sys.executable, "-c", script], cwd=tmp_path, capture_output=True, text=True, env=environment(), timeout=60,
        check=False,
    )  # fmt: skip
    assert result.stdout.startswith("locked/checkpoint-1 cannot be written: "), result.stderr
    assert "Permission denied" in result.stdout
    assert names(folder) == []
