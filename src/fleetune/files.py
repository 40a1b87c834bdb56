"""Writing files so that they are whole or not there, and saying plainly when the disk does not take them."""

from __future__ import annotations

import errno
import json
import os
import shutil
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

from fleetune.errors import OutputError

_FULL = (errno.ENOSPC, errno.EDQUOT)


def write_whole(path: Path, write: Callable[[Path], None]) -> None:
    """Let `write` make a file under a temporary name, and rename it, so that no reader sees half of it.

    Raises:
        OutputError: The disk is full or cannot be written.
    """
    unfinished = path.with_name(f".{path.name}.writing")
    with disk_errors(path, unfinished):
        path.parent.mkdir(parents=True, exist_ok=True)
        write(unfinished)
        os.replace(unfinished, path)


def write_json(path: Path, content: Any) -> None:
    """Write a JSON file whole.

    Raises:
        OutputError: The disk is full or cannot be written.
    """
    text = json.dumps(content, indent=2, ensure_ascii=False) + "\n"
    write_whole(path, lambda unfinished: _write_text(unfinished, text))


def write_files(folder: Path, write: Callable[[Path], None]) -> None:
    """Let `write` fill a temporary folder, then move its files into place, so that no file is ever half written.

    Raises:
        OutputError: The disk is full or cannot be written.
    """
    unfinished = folder / ".final.writing"
    shutil.rmtree(unfinished, ignore_errors=True)
    with disk_errors(folder, unfinished):
        unfinished.mkdir(parents=True)
        write(unfinished)
        for path in sorted(unfinished.iterdir()):
            os.replace(path, folder / path.name)
        unfinished.rmdir()


def _write_text(path: Path, text: str) -> None:
    path.write_text(text, encoding="utf-8")


@contextmanager
def disk_errors(target: Path, unfinished: Path | None = None) -> Iterator[None]:
    """Turn a failure to write into one clear error, and remove the unfinished part.

    Raises:
        OutputError: Says what could not be written and how much room there is.
    """
    try:
        yield
    except Exception as error:  # safetensors reports a full disk under its own exception type
        if unfinished is not None:
            remove(unfinished)
        if not _is_disk_error(error):
            raise
        raise OutputError(_disk_message(target, error)) from error
    except BaseException:
        if unfinished is not None:
            remove(unfinished)
        raise


def _is_disk_error(error: Exception) -> bool:
    return isinstance(error, OSError) or "os error" in str(error)


def _disk_message(target: Path, error: Exception) -> str:
    is_full = getattr(error, "errno", None) in _FULL or "os error 28" in str(error)
    if not is_full:
        return f"{target} cannot be written: {error}"
    parent = next(p for p in (target, *target.parents) if p.exists())
    free = shutil.disk_usage(parent).free
    return (
        f"{target} cannot be written: the disk is full ({free / 1e6:,.0f} MB free). what was there before is "
        "intact: free some room; a training run goes on with --resume_from_checkpoint"
    )


def sync(path: Path) -> None:
    """Make what was written into a file or folder survive a power cut."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def remove(path: Path) -> None:
    """Remove a file or folder, if it is there and can be."""
    with suppress(OSError):  # it may never have been there, since its folder is at fault
        if path.is_dir() and not path.is_symlink():
            shutil.rmtree(path, ignore_errors=True)
        else:
            path.unlink()
