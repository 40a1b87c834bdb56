"""`TokenTable`: one tokenised split, memory-mapped from a folder of plain arrays."""

from __future__ import annotations

import hashlib
import json
import math
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any, cast

import numpy as np
from numpy.typing import NDArray

from fleetune.data.examples import BadRow
from fleetune.data.tasks import Columns, columns_from_json
from fleetune.errors import DataError

# Raised when the layout of the folder, or what is tokenised into it, changes: older folders are then not found.
FORMAT_VERSION = 3
META_NAME = "meta.json"

UNLABELLED = -100
"""Label where nothing is to be learned, among labels that are whole numbers; as in transformers."""

TOKEN_IDS, TYPE_IDS, OFFSETS, LABELS, ROWS = "token_ids", "type_ids", "offsets", "labels", "rows"
PLACES, EXAMPLE_OF, NOTES, NOTE_OFFSETS = "places", "example_of", "notes", "note_offsets"


class DamagedTableError(DataError):
    """The folder holds no complete token table."""


@dataclass(frozen=True, kw_only=True)
class ArrayRecord:
    """One array file, as the meta file describes it."""

    dtype: str
    count: int
    sha256: str
    width: int | None = None
    """Numbers in each of the elements counted; None: the array has one dimension."""

    @property
    def shape(self) -> tuple[int, ...]:
        return (self.count,) if self.width is None else (self.count, self.width)


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
    labels_of_tokens: bool = False
    num_remarks: int = 0
    remarks: tuple[BadRow, ...] = ()
    counts: Mapping[str, int] = field(default_factory=dict)

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
            for name in ("bad_rows", "remarks"):
                fields[name] = tuple(BadRow(**row) for row in fields[name])
            return cls(**fields)
        except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
            if isinstance(error, DamagedTableError):
                raise
            raise DamagedTableError(f"no readable {META_NAME} ({error})", file=folder) from error


@dataclass(frozen=True, kw_only=True, eq=False)
class TokenTable:
    """N tokenised sequences, T tokens in all. The arrays are read-only views of files.

    A sequence is an example, unless the examples were cut into windows: then `example_of` tells of which each is one.
    """

    folder: Path
    """Where the arrays are."""
    split: str
    """Name of the split, such as `validation_matched`."""
    source: str
    """The file or hub data set it was made from."""
    columns: Columns
    """The columns that were read."""
    token_ids: NDArray[np.int32]
    """int32 (T,): the sequences one after the other, special tokens included, no padding."""
    type_ids: NDArray[np.uint8] | None
    """uint8 (T,): 0 for the first text, 1 for the second; None if the tokenizer gives none."""
    offsets: NDArray[np.int64]
    """int64 (N+1,): sequence i has the tokens offsets[i] to offsets[i+1]."""
    labels: NDArray[np.int64] | NDArray[np.float32] | None
    """int64 (N,) class ids, float32 (N,) scores, float32 (N, C) flags, int64 (T,) class ids of tokens, or int64 (N, 2)
    first and last tokens of answers; -100 where nothing is to be learned. None if a row of the split has no label."""
    rows: NDArray[np.int64]
    """int64 (N,): row of each sequence in the source; see `fleetune.data.sources.Row.number`."""
    num_bad_rows: int
    """How many rows were left out."""
    bad_rows: tuple[BadRow, ...]
    """The first of them."""
    num_unlabelled: int
    """How many examples came without a label."""
    labels_of_tokens: bool = False
    """Whether `labels` has one for each token."""
    places: NDArray[np.int32] | None = None
    """int32 (T,): the word that each token begins; or (T, 2): the characters of the context that it is; -1: none."""
    example_of: NDArray[np.int64] | None = None
    """int64 (N,): the example that each sequence is a window of, ascending; None: the sequences are the examples."""
    notes: Notes | None = None
    """What is known of each example beside its tokens."""
    num_remarks: int = 0
    """How many rows are used otherwise than they stand in the source."""
    remarks: tuple[BadRow, ...] = ()
    """The first of them."""
    counts: Mapping[str, int] = field(default_factory=dict)
    """What was counted of them."""

    def __len__(self) -> int:
        return len(self.rows)

    @property
    def num_examples(self) -> int:
        """Examples, of which some may be several sequences."""
        return len(self) if self.example_of is None else int(self.example_of[-1]) + 1 if len(self) else 0

    @property
    def num_tokens(self) -> int:
        """Tokens of all sequences."""
        return len(self.token_ids)

    @property
    def lengths(self) -> NDArray[np.int64]:
        """int64 (N,): tokens of each sequence."""
        return np.diff(self.offsets)

    def num_targets(self, sequences: NDArray[np.int64]) -> int:
        """What the loss of some labelled sequences is a mean over: labelled tokens, else sequences with a label."""
        assert self.labels is not None
        if self.labels.dtype.kind == "f":
            return len(sequences)
        if self.labels_of_tokens:
            spans = [slice(self.offsets[i], self.offsets[i + 1]) for i in sequences]
            return sum(int(np.count_nonzero(self.labels[span] != UNLABELLED)) for span in spans)
        first = self.labels if self.labels.ndim == 1 else self.labels[:, 0]
        return int(np.count_nonzero(first[sequences] != UNLABELLED))

    def head(self, num_sequences: int) -> TokenTable:
        """The first sequences, as views of the same arrays; all of them if there are fewer."""
        count = min(num_sequences, len(self))
        num_tokens = int(self.offsets[count])
        return replace(
            self,
            token_ids=self.token_ids[:num_tokens],
            type_ids=None if self.type_ids is None else self.type_ids[:num_tokens],
            offsets=self.offsets[: count + 1],
            labels=None if self.labels is None else self.labels[: num_tokens if self.labels_of_tokens else count],
            rows=self.rows[:count],
            places=None if self.places is None else self.places[:num_tokens],
            example_of=None if self.example_of is None else self.example_of[:count],
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
            labels_of_tokens=meta.labels_of_tokens,
            places=arrays.get(PLACES),
            example_of=arrays.get(EXAMPLE_OF),
            notes=Notes(arrays[NOTES], arrays[NOTE_OFFSETS]) if NOTES in arrays else None,
            num_remarks=meta.num_remarks,
            remarks=meta.remarks,
            counts=meta.counts,
        )


class Notes(Sequence[dict[str, Any]]):
    """JSON objects, one after the other.

    Args:
        data: uint8, their text as UTF-8.
        offsets: int64, where each begins, and where the last ends.
    """

    def __init__(self, data: NDArray[np.uint8], offsets: NDArray[np.int64]) -> None:
        self._data, self._offsets = data, offsets

    def __len__(self) -> int:
        return len(self._offsets) - 1

    def __getitem__(self, number: Any) -> Any:
        start, end = int(self._offsets[number]), int(self._offsets[number + 1])
        return json.loads(self._data[start:end].tobytes())


def array_path(folder: Path, name: str) -> Path:
    """The file of an array."""
    return folder / f"{name}.bin"


def _mapped(folder: Path, name: str, record: ArrayRecord, verify: bool) -> NDArray[Any]:
    path = array_path(folder, name)
    expected = math.prod(record.shape) * np.dtype(record.dtype).itemsize
    found = path.stat().st_size if path.is_file() else None
    if found != expected:
        size = "is missing" if found is None else f"has {found} bytes instead of {expected}"
        raise DamagedTableError(f"{path.name} {size}", file=folder)
    mapped = np.memmap(path, dtype=record.dtype, mode="r", shape=record.shape)
    if verify and hashlib.sha256(cast("Any", mapped)).hexdigest() != record.sha256:
        raise DamagedTableError(f"{path.name} has changed since it was written", file=folder)
    return np.asarray(mapped)
