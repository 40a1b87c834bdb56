"""`TokenTable`: one tokenised split, memory-mapped from a folder of plain arrays."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any, cast

import numpy as np
from numpy.typing import NDArray

from fleetune.data.examples import BadRow
from fleetune.data.tasks import Columns, columns_from_json
from fleetune.errors import DataError

# Raised when the layout of the folder, or what is tokenised into it, changes: older folders are then not found.
FORMAT_VERSION = 2
META_NAME = "meta.json"

TOKEN_IDS, TYPE_IDS, OFFSETS, LABELS, ROWS = "token_ids", "type_ids", "offsets", "labels", "rows"


class DamagedTableError(DataError):
    """The folder holds no complete token table."""


@dataclass(frozen=True, kw_only=True)
class ArrayRecord:
    """One array file, as the meta file describes it."""

    dtype: str
    count: int
    sha256: str


@dataclass(frozen=True, kw_only=True)
class TableMeta:
    """What `meta.json` says; written last, so that a folder with it is complete."""

    format_version: int
    split: str
    source: str
    columns: Columns
    arrays: Mapping[str, ArrayRecord]
    num_bad_rows: int
    bad_rows: tuple[BadRow, ...]
    num_unlabelled: int

    def write(self, folder: Path) -> None:
        """Write the meta file into a folder whose arrays are complete."""
        (folder / META_NAME).write_text(json.dumps(asdict(self), indent=1), encoding="utf-8")

    @classmethod
    def read(cls, folder: Path) -> TableMeta:
        """Read it back.

        Raises:
            DamagedTableError: It is missing, torn, or of another version.
        """
        try:
            fields = json.loads((folder / META_NAME).read_text(encoding="utf-8"))
            if fields["format_version"] != FORMAT_VERSION:
                raise DamagedTableError(f"has format version {fields['format_version']}", file=folder)
            fields["columns"] = columns_from_json(fields["columns"])
            fields["arrays"] = {name: ArrayRecord(**record) for name, record in fields["arrays"].items()}
            fields["bad_rows"] = tuple(BadRow(**bad) for bad in fields["bad_rows"])
            return cls(**fields)
        except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
            if isinstance(error, DamagedTableError):
                raise
            raise DamagedTableError(f"no readable {META_NAME} ({error})", file=folder) from error


@dataclass(frozen=True, kw_only=True, eq=False)
class TokenTable:
    """N tokenised examples, T tokens in all. The arrays are read-only views of files."""

    folder: Path
    """Where the arrays are."""
    split: str
    """Name of the split, such as `validation_matched`."""
    source: str
    """The file or hub data set it was made from."""
    columns: Columns
    """The columns that were read."""
    token_ids: NDArray[np.int32]
    """int32 (T,): the examples one after the other, special tokens included, no padding."""
    type_ids: NDArray[np.uint8] | None
    """uint8 (T,): 0 for the first text, 1 for the second; None if the tokenizer gives none."""
    offsets: NDArray[np.int64]
    """int64 (N+1,): example i has the tokens offsets[i] to offsets[i+1]."""
    labels: NDArray[np.int64] | NDArray[np.float32] | None
    """int64 (N,) class ids or float32 (N,) scores; None if a row of the split has no label."""
    rows: NDArray[np.int64]
    """int64 (N,): row of each example in the source; see `fleetune.data.sources.Row.number`."""
    num_bad_rows: int
    """How many rows were left out."""
    bad_rows: tuple[BadRow, ...]
    """The first of them."""
    num_unlabelled: int
    """How many examples came without a label."""

    def __len__(self) -> int:
        return len(self.rows)

    @property
    def num_tokens(self) -> int:
        """Tokens of all examples."""
        return len(self.token_ids)

    @property
    def lengths(self) -> NDArray[np.int64]:
        """int64 (N,): tokens of each example."""
        return np.diff(self.offsets)

    def head(self, num_examples: int) -> TokenTable:
        """The first examples, as views of the same arrays; all of them if there are fewer."""
        count = min(num_examples, len(self))
        num_tokens = int(self.offsets[count])
        return replace(
            self,
            token_ids=self.token_ids[:num_tokens],
            type_ids=None if self.type_ids is None else self.type_ids[:num_tokens],
            offsets=self.offsets[: count + 1],
            labels=None if self.labels is None else self.labels[:count],
            rows=self.rows[:count],
        )

    @classmethod
    def open(cls, folder: Path, *, verify: bool = False) -> TokenTable:
        """Map a table's files.

        Args:
            folder: A folder that a finished build has left.
            verify: Also compare the content of each file with its digest (reads everything once).

        Raises:
            DamagedTableError: A file is missing, or has not the size or the content that the meta file tells.
        """
        meta = TableMeta.read(folder)
        arrays = {name: _mapped(folder, name, record, verify) for name, record in meta.arrays.items()}
        missing = {TOKEN_IDS, OFFSETS, ROWS} - set(arrays)
        if missing:
            raise DamagedTableError(f"no {', '.join(sorted(missing))} in {META_NAME}", file=folder)
        return cls(
            folder=folder,
            split=meta.split,
            source=meta.source,
            columns=meta.columns,
            token_ids=arrays[TOKEN_IDS],
            type_ids=arrays.get(TYPE_IDS),
            offsets=arrays[OFFSETS],
            labels=arrays.get(LABELS),
            rows=arrays[ROWS],
            num_bad_rows=meta.num_bad_rows,
            bad_rows=meta.bad_rows,
            num_unlabelled=meta.num_unlabelled,
        )


def array_path(folder: Path, name: str) -> Path:
    """The file of an array."""
    return folder / f"{name}.bin"


def _mapped(folder: Path, name: str, record: ArrayRecord, verify: bool) -> NDArray[Any]:
    path = array_path(folder, name)
    expected = record.count * np.dtype(record.dtype).itemsize
    found = path.stat().st_size if path.is_file() else None
    if found != expected:
        size = "is missing" if found is None else f"has {found} bytes instead of {expected}"
        raise DamagedTableError(f"{path.name} {size}", file=folder)
    mapped = np.memmap(path, dtype=record.dtype, mode="r", shape=(record.count,))
    if verify and hashlib.sha256(cast("Any", mapped)).hexdigest() != record.sha256:
        raise DamagedTableError(f"{path.name} has changed since it was written", file=folder)
    return np.asarray(mapped)
