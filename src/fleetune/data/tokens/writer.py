"""Write a token table to disk, block by block."""

from __future__ import annotations

import contextlib
import hashlib
from collections.abc import Iterator
from pathlib import Path
from types import TracebackType

import numpy as np
from numpy.typing import NDArray

from fleetune.data.examples import BadRowLog
from fleetune.data.tasks import Columns
from fleetune.data.tokens.table import (
    FORMAT_VERSION,
    LABELS,
    OFFSETS,
    ROWS,
    TOKEN_IDS,
    TYPE_IDS,
    ArrayRecord,
    TableMeta,
    array_path,
)
from fleetune.data.tokens.tokenizing import TokenBlock
from fleetune.errors import OutputError


@contextlib.contextmanager
def cache_errors(folder: Path) -> Iterator[None]:
    """Map what the file system says to an error that names the setting.

    Raises:
        OutputError: In place of an `OSError`.
    """
    try:
        yield
    except OSError as error:
        reason = error.strerror or str(error)
        raise OutputError(
            f"the token cache {folder} cannot be written: {reason}; --cache_dir names another place"
        ) from error


class ArrayFile:
    """An array that is appended to on disk.

    Args:
        folder: The table's folder.
        name: The array's name.
        dtype: Of its elements.
    """

    def __init__(self, folder: Path, name: str, dtype: type[np.generic]) -> None:
        self._dtype = np.dtype(dtype)
        self._file = array_path(folder, name).open("wb")
        self._digest = hashlib.sha256()
        self._count = 0

    def append(self, values: NDArray[np.generic]) -> None:
        """Append values, which the dtype must hold exactly."""
        data = np.ascontiguousarray(values, dtype=self._dtype).tobytes()
        self._file.write(data)
        self._digest.update(data)
        self._count += len(values)

    def close(self) -> ArrayRecord:
        """Close the file; says what is in it."""
        self._file.close()
        return ArrayRecord(dtype=self._dtype.name, count=self._count, sha256=self._digest.hexdigest())


class TableWriter:
    """Writes the arrays of a table block by block; use it in a `with`.

    Args:
        folder: An empty folder.
        label_dtype: Of the labels; None: the examples have none.
    """

    def __init__(self, folder: Path, label_dtype: type[np.generic] | None) -> None:
        self.num_examples = 0
        self._num_tokens = 0
        self._num_unlabelled = 0
        self._folder = folder
        self._label_dtype = label_dtype
        self._files: dict[str, ArrayFile] = {}

    def __enter__(self) -> TableWriter:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        with contextlib.suppress(OSError):
            self._close()

    def append(self, block: TokenBlock) -> None:
        """Append the examples of a block.

        Raises:
            OutputError: They cannot be written.
        """
        with cache_errors(self._folder.parent):
            if self.num_examples == 0:
                self._write(OFFSETS, np.zeros(1, np.int64))
            self._write(TOKEN_IDS, block.token_ids)
            if block.type_ids is not None:
                self._write(TYPE_IDS, block.type_ids)
            self._write(OFFSETS, self._num_tokens + np.cumsum(block.lengths))
            self._write(ROWS, block.rows)
            if self._label_dtype is not None:
                self._write(LABELS, self._label_array(block))
        self.num_examples += len(block.lengths)
        self._num_tokens += int(block.lengths.sum())
        self._num_unlabelled += block.labels.count(None)

    def finish(self, log: BadRowLog, *, split: str, source: str, columns: Columns) -> None:
        """Complete the table with its meta file. A split with an unlabelled row counts as unlabelled.

        Raises:
            OutputError: It cannot be written.
        """
        with cache_errors(self._folder.parent):
            arrays = self._close()
            if self._num_unlabelled and LABELS in arrays:
                del arrays[LABELS]
                array_path(self._folder, LABELS).unlink()
            TableMeta(
                format_version=FORMAT_VERSION,
                split=split,
                source=source,
                columns=columns,
                arrays=arrays,
                num_bad_rows=log.total,
                bad_rows=log.listed,
                num_unlabelled=self._num_unlabelled,
            ).write(self._folder)

    def _label_array(self, block: TokenBlock) -> NDArray[np.generic]:
        return np.array([0 if label is None else label for label in block.labels], dtype=self._label_dtype)

    def _write(self, name: str, values: NDArray[np.generic]) -> None:
        if name not in self._files:
            self._files[name] = ArrayFile(self._folder, name, values.dtype.type)
        self._files[name].append(values)

    def _close(self) -> dict[str, ArrayRecord]:
        return {name: file.close() for name, file in self._files.items()}
