"""Checkpoints that are whole or not there: written under a temporary name, synced, then renamed.

    checkpoint-<step>/
        model.safetensors, config.json, tokenizer   what `save_pretrained` writes: loads as a model
        optimizer.safetensors                       AdamW's moments, by parameter name
        trainer_state.json                          history, as transformers writes it
        run_state.json                              step, seed, plan: where to go on
        manifest.json                               written last: size and SHA-256 of every file

Nothing is pickled. There is no random-generator state to save: order of data and dropout are functions of
(seed, step, rank), see `docs/numerics.md`.
"""

from __future__ import annotations

import hashlib
import json
import re
import shutil
from collections.abc import Callable
from pathlib import Path

from fleetune.errors import CheckpointError
from fleetune.files import disk_errors, sync

MANIFEST = "manifest.json"
_NAME = re.compile(r"checkpoint-(\d+)")


def checkpoint_folder(output_dir: Path, step: int) -> Path:
    """Where the checkpoint of a step lies."""
    return output_dir / f"checkpoint-{step}"


def step_of(folder: Path) -> int:
    """The step that a checkpoint's name tells."""
    match = _NAME.fullmatch(folder.name)
    if match is None:
        raise CheckpointError(f"{folder}: a folder named checkpoint-<step> is expected")
    return int(match[1])


def named_checkpoint(path: str) -> Path:
    """The folder that `--resume_from_checkpoint` names.

    Raises:
        CheckpointError: There is none, or its name is not that of a checkpoint.
    """
    folder = Path(path).expanduser()
    if not folder.is_dir():
        raise CheckpointError(f"--resume_from_checkpoint {path}: there is no such folder")
    step_of(folder)
    return folder


def list_checkpoints(output_dir: Path) -> list[Path]:
    """All checkpoint folders of a run, torn ones too, the newest first."""
    folders = [p for p in output_dir.glob("checkpoint-*") if p.is_dir() and _NAME.fullmatch(p.name)]
    return sorted(folders, key=step_of, reverse=True)


def write_checkpoint(folder: Path, write: Callable[[Path], None]) -> None:
    """Write a folder so that it is either whole or absent, whatever happens meanwhile.

    Args:
        folder: The final name; a checkpoint already there is replaced.
        write: Writes the files into the folder that it is given.

    Raises:
        OutputError: The disk is full or cannot be written; nothing is left of the attempt.
    """
    unfinished = folder.with_name(f".{folder.name}.writing")
    with disk_errors(folder, unfinished):
        clear_leftovers(folder.parent)
        unfinished.mkdir(parents=True)
        write(unfinished)
        _write_manifest(unfinished)
        _swap_in(unfinished, folder)


def clear_leftovers(output_dir: Path) -> None:
    """Remove what a killed run left half written."""
    for pattern in (".checkpoint-*.writing", ".checkpoint-*.replaced"):
        for path in output_dir.glob(pattern):
            shutil.rmtree(path, ignore_errors=True)


def _write_manifest(folder: Path) -> None:
    files = {p.name: {"bytes": p.stat().st_size, "sha256": _sha256(p)} for p in sorted(folder.iterdir()) if p.is_file()}
    for name in files:
        sync(folder / name)
    (folder / MANIFEST).write_text(json.dumps({"format": 1, "files": files}, indent=1))
    sync(folder / MANIFEST)
    sync(folder)


def _swap_in(unfinished: Path, folder: Path) -> None:
    replaced = folder.with_name(f".{folder.name}.replaced")
    shutil.rmtree(replaced, ignore_errors=True)
    if folder.exists():
        folder.rename(replaced)
    unfinished.rename(folder)
    sync(folder.parent)
    shutil.rmtree(replaced, ignore_errors=True)


def verify_checkpoint(folder: Path) -> None:
    """Compare every file of a checkpoint with its manifest.

    Raises:
        CheckpointError: Names what is missing or differs.
    """
    try:
        files = _read_manifest(folder)
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
        raise CheckpointError(f"{folder}: torn, its {MANIFEST} cannot be read ({error})") from error
    for name, (size, sha256) in files.items():
        path = folder / name
        if not path.is_file():
            raise CheckpointError(f"{folder}: torn, {name} is missing")
        if path.stat().st_size != size:
            raise CheckpointError(f"{folder}: torn, {name} has {path.stat().st_size:,} bytes of {size:,}")
        if _sha256(path) != sha256:
            raise CheckpointError(f"{folder}: torn, the content of {name} is not what was written")


def _read_manifest(folder: Path) -> dict[str, tuple[int, str]]:
    files = json.loads((folder / MANIFEST).read_text(encoding="utf-8"))["files"]
    return {name: (int(entry["bytes"]), str(entry["sha256"])) for name, entry in files.items()}


def newest_intact(output_dir: Path, say: Callable[[str], None]) -> Path | None:
    """The newest checkpoint that is whole, telling of each torn one that is passed over; None without any."""
    for folder in list_checkpoints(output_dir):
        try:
            verify_checkpoint(folder)
        except CheckpointError as error:
            say(f"{error}; trying an older one")
        else:
            return folder
    return None


def prune_checkpoints(output_dir: Path, keep: int | None, best: Path | None) -> None:
    """Remove the oldest checkpoints beyond `keep`, never the best nor the newest one."""
    if keep is None:
        return
    newest_first = list_checkpoints(output_dir)
    spared = {*newest_first[:1], *(f for f in newest_first if f == best)}  # the best may never have been saved
    removable = [f for f in newest_first if f not in spared]
    for folder in removable[max(0, keep - len(spared)) :]:
        shutil.rmtree(folder)


def _sha256(path: Path) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()
