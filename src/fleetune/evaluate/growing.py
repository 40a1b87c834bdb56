"""A file of predictions that grows under a temporary name, so that a run that was ended goes on where it was.

Beside `p.jsonl.partial` a small file says how many rows of the input are in it, and how many bytes they are: what a
killed run wrote behind them is cut off. It is given the name `p.jsonl` when it is complete.
"""

from __future__ import annotations

import fcntl
import json
import os
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from fleetune.errors import OutputError
from fleetune.files import disk_errors, sync, write_json

FORMAT = 1


@dataclass(frozen=True, kw_only=True)
class Progress:
    """How far a file of predictions has come."""

    made_by: Mapping[str, Any]
    """All that decides what is in it, JSON-ready."""
    num_rows: int = 0
    """Rows of the input that are done, bad ones counted."""
    last_row: int = 0
    """Number of the last of them in the input."""
    num_predictions: int = 0
    num_bytes: int = 0
    """Size of the file with these rows."""
    num_bad_rows: int = 0
    """Rows that were left out."""
    bad_rows: tuple[str, ...] = ()
    """The first of them."""
    format: int = field(default=FORMAT)


def partial_of(output: Path) -> Path:
    """The name under which a file of predictions grows."""
    return output.with_name(f"{output.name}.partial")


def progress_file_of(output: Path) -> Path:
    """Where its progress is kept."""
    return output.with_name(f"{output.name}.partial.json")


def read_progress(output: Path) -> Progress | None:
    """How far an earlier run came; None if there was none, or it left nothing that can be gone on with."""
    try:
        told = json.loads(progress_file_of(output).read_text(encoding="utf-8"))
        progress = Progress(**{**told, "bad_rows": tuple(told["bad_rows"])})
        size = partial_of(output).stat().st_size
    except (OSError, ValueError, TypeError, KeyError):
        return None
    return progress if progress.format == FORMAT and progress.num_bytes <= size else None


def differences(before: Mapping[str, Any], now: Mapping[str, Any]) -> list[str]:
    """What would make other predictions than the earlier run's, in words."""
    names = dict.fromkeys([*now, *before])
    return [f"{name} was {before.get(name)!r}, is {now.get(name)!r}" for name in names
            if before.get(name) != now.get(name)]  # fmt: skip


class GrowingFile:
    """A file of predictions that this process writes.

    Args:
        output: Its name when it is complete.
        progress: What `read_progress` gave, or that of an empty file: what is behind it is cut off.

    Raises:
        OutputError: The disk cannot be written, or another process writes the same file.
    """

    def __init__(self, output: Path, progress: Progress) -> None:
        self.output, self.progress = output, progress
        self._partial = partial_of(output)
        with disk_errors(output):
            output.parent.mkdir(parents=True, exist_ok=True)
            self._descriptor = os.open(self._partial, os.O_RDWR | os.O_CREAT, 0o666)
            _lock(self._descriptor, output)
            os.ftruncate(self._descriptor, progress.num_bytes)
            os.lseek(self._descriptor, progress.num_bytes, os.SEEK_SET)

    def append(self, data: bytes, progress: Progress) -> None:
        """Write whole rows, and then what they bring the file to.

        Raises:
            OutputError: The disk is full or cannot be written.
        """
        with disk_errors(self.output):
            rest = memoryview(data)
            while rest:
                rest = rest[os.write(self._descriptor, rest) :]
            os.fsync(self._descriptor)
        write_json(progress_file_of(self.output), asdict(progress))
        self.progress = progress

    def complete(self) -> None:
        """Give the file its name."""
        with disk_errors(self.output):
            os.replace(self._partial, self.output)
            progress_file_of(self.output).unlink(missing_ok=True)
            sync(self.output.parent)

    def close(self) -> None:
        """Let others write."""
        os.close(self._descriptor)


def _lock(descriptor: int, output: Path) -> None:
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        os.close(descriptor)
        raise OutputError(f"--output {output}: another process is writing it") from None
