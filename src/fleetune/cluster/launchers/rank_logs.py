"""What ranks of several hosts say: all of it in files, rank 0's on the terminal."""

from __future__ import annotations

import collections
import contextlib
import os
import sys
from pathlib import Path
from typing import IO

from fleetune.cluster.outputs import log_file

_TAIL = 12


class RankLogs:
    """`<host>.<rank>.log` of each rank in a folder.

    Args:
        folder: Of the files.
    """

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self._files: dict[str, IO[str]] = {}
        self._last: dict[int, collections.deque[str]] = {}

    def begin(self, host: str, rank: int) -> None:
        """Make a rank's file, which may stay empty."""
        with contextlib.suppress(OSError):
            self._open(host, rank)

    def take(self, host: str, rank: int, stream: str, line: str) -> None:
        """Write a rank's line to its file, and rank 0's to the terminal too."""
        if rank == 0:
            show(line, sys.stdout if stream == "out" else sys.stderr)
        if stream == "err":
            self._last.setdefault(rank, collections.deque(maxlen=_TAIL)).append(line)
        with contextlib.suppress(OSError):  # a full disk here is no reason to end the run: rank 0 will say so
            print(line, file=self._open(host, rank), flush=True)

    def path(self, host: str, rank: int) -> Path:
        """The file of a rank."""
        return log_file(self.folder, host, rank)

    def last_words(self, rank: int) -> list[str]:
        """The last lines of a rank's standard error that were not on the terminal."""
        return [] if rank == 0 else list(self._last.get(rank, ()))

    def close(self) -> None:
        for file in self._files.values():
            with contextlib.suppress(OSError):
                file.close()

    def _open(self, host: str, rank: int) -> IO[str]:
        path = self.path(host, rank)
        if path.name not in self._files:
            self.folder.mkdir(parents=True, exist_ok=True)
            self._files[path.name] = path.open("w", encoding="utf-8")
        return self._files[path.name]


def show(line: str, stream: IO[str]) -> None:
    """Print a line, unless its reader has gone, as in `fleetune ... | head`: the run goes on, its files have all."""
    try:
        print(line, file=stream, flush=True)
    except BrokenPipeError:
        os.dup2(os.open(os.devnull, os.O_WRONLY), stream.fileno())  # or Python complains of what is left to write
    except (OSError, ValueError):  # the terminal was closed
        pass
