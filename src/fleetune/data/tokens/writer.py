"""Write a token table to disk, block by block."""

from __future__ import annotations

import contextlib
import hashlib
import json
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from types import TracebackType

import numpy as np
from numpy.typing import NDArray

from fleetune.data.examples import BadRowLog
from fleetune.data.labels import LabelReader
from fleetune.data.tasks import Columns
from fleetune.data.tokens.table import (
    EXAMPLE_OF,
    FORMAT_VERSION,
    LABELS,
    NOTE_OFFSETS,
    NOTES,
    OFFSETS,
    PLACES,
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
        self._width: int | None = None

    def append(self, values: NDArray[np.generic]) -> None:
        """Append values, which the dtype must hold exactly."""
        data = np.ascontiguousarray(values, dtype=self._dtype).tobytes()
        self._file.write(data)
        self._digest.update(data)
        self._count += len(values)
        self._width = values.shape[1] if values.ndim == 2 else None

    def close(self) -> ArrayRecord:
        """Close the file; says what is in it."""
        self._file.close()
        return ArrayRecord(
            dtype=self._dtype.name, count=self._count, sha256=self._digest.hexdigest(), width=self._width
        )


class TableWriter:
    """Writes the arrays of a table block by block; use it in a `with`.

    Args:
        folder: An empty folder.
        labels: Makes an array of labels; None: the examples have none.
    """

    def __init__(self, folder: Path, labels: LabelReader | None) -> None:
        self.num_examples = 0
        self._num_tokens = self._num_note_bytes = self._num_unlabelled = 0
        self._remarks = BadRowLog()
        self._counts: Counter[str] = Counter()
        self._labels_of_tokens = False
        self._folder = folder
        self._labels = labels
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
            if OFFSETS not in self._files:
                self._write(OFFSETS, np.zeros(1, np.int64))
            self._write(TOKEN_IDS, block.token_ids)
            self._write(OFFSETS, self._num_tokens + np.cumsum(block.lengths))
            self._write(ROWS, block.rows)
            self._write_optional(block)
            if self._labels is not None:
                self._write_labels(block, self._labels)
        self.num_examples += len(block.labels)
        self._num_tokens += int(block.lengths.sum())
        self._num_unlabelled += block.labels.count(None)
        self._counts.update(block.counts)
        for remark in block.remarks:
            self._remarks.add(remark)

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
                labels_of_tokens=self._labels_of_tokens,
                num_remarks=self._remarks.total,
                remarks=self._remarks.listed,
                counts=dict(self._counts),
            ).write(self._folder)

    def _write_optional(self, block: TokenBlock) -> None:
        if block.type_ids is not None:
            self._write(TYPE_IDS, block.type_ids)
        if block.places is not None:
            self._write(PLACES, block.places)
        if block.example_of is not None:
            self._write(EXAMPLE_OF, self.num_examples + block.example_of)
        if block.notes is not None:
            self._write_notes([json.dumps(note, ensure_ascii=False).encode() for note in block.notes])

    def _write_notes(self, notes: list[bytes]) -> None:
        if NOTE_OFFSETS not in self._files:
            self._write(NOTE_OFFSETS, np.zeros(1, np.int64))
        ends = self._num_note_bytes + np.cumsum([len(note) for note in notes], dtype=np.int64)
        self._write(NOTES, np.frombuffer(b"".join(notes), np.uint8))
        self._write(NOTE_OFFSETS, ends)
        self._num_note_bytes += sum(map(len, notes))

    def _write_labels(self, block: TokenBlock, labels: LabelReader) -> None:
        """A block with an unlabelled example makes the split unlabelled: what is written for it does not matter."""
        if block.targets is not None:
            self._labels_of_tokens = block.targets.ndim == 1
            self._write(LABELS, block.targets)
        elif block.places is None:
            self._write(LABELS, labels.array(block.labels))

    def _write(self, name: str, values: NDArray[np.generic]) -> None:
        if name not in self._files:
            self._files[name] = ArrayFile(self._folder, name, values.dtype.type)
        self._files[name].append(values)

    def _close(self) -> dict[str, ArrayRecord]:
        return {name: file.close() for name, file in self._files.items()}
