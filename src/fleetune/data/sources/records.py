"""JSON, JSON Lines and Parquet files as streams of rows."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from itertools import count, islice
from pathlib import Path

from fleetune.data.sources.encoding import read_lines, read_text
from fleetune.data.sources.rows import (
    MISSING,
    READ_BYTES,
    Row,
    Source,
    count_lines,
    file_digest,
    refuse_duplicate_columns,
)
from fleetune.data.sources.squad import SquadFile
from fleetune.errors import DataError

# JSON Lines has no header: a key counts as a column if one of the first records has it.
RECORDS_THAT_NAME_COLUMNS = 100
BATCH_ROWS = 4096


class JsonLinesFile(Source):
    """One JSON object a line.

    Args:
        path: A regular file.
        encoding: A Python codec name; None: UTF-8, or what the byte-order mark says.

    Raises:
        DataError: The file is empty, or none of its first lines is a JSON object.
    """

    def __init__(self, path: Path, encoding: str | None = None) -> None:
        self.name = str(path)
        self._path, self._encoding = path, encoding
        first = list(islice(self._records(), RECORDS_THAT_NAME_COLUMNS))
        if not first:
            raise DataError("the file is empty", file=path)
        self.columns = _keys(record for _, record in first if isinstance(record, dict))
        if not self.columns:
            number, problem = first[0]
            raise DataError(str(problem) if problem else "no columns", file=path, row=number)

    def rows(self, columns: Sequence[str]) -> Iterator[Row]:
        """Stream every row, numbered by line; see `Source.rows`."""
        for number, record in self._records():
            if isinstance(record, str):
                yield Row(number, (), record)
            else:
                yield Row(number, tuple(record.get(name, MISSING) for name in columns))

    def digest(self) -> str:
        """See `Source.digest`."""
        return file_digest(self._path)

    def total_rows(self) -> int | None:
        """Number of lines: a close estimate (a last line without an end is not counted)."""
        return count_lines(self._path)

    def _records(self) -> Iterator[tuple[int, Mapping[str, object] | str]]:
        """Line numbers with the object, or with what is wrong with the line; empty lines are passed over."""
        for number, line in enumerate(read_lines(self._path, self._encoding), start=1):
            if line.strip():
                yield number, _object_or_problem(line)


class JsonFile(Source):
    """A JSON array of objects, or an object whose "data" is one. Held in memory, as JSON cannot be streamed.

    Args:
        path: A regular file.
        encoding: A Python codec name; None: UTF-8, or what the byte-order mark says.

    Raises:
        DataError: The file is not valid JSON, or not of that shape, or holds no objects.
    """

    def __init__(self, path: Path, encoding: str | None = None) -> None:
        self.name = str(path)
        self._path = path
        self._records = _json_array(path, encoding)
        self.columns = _keys(record for record in self._records if isinstance(record, dict))
        if not self.columns:
            raise DataError("the JSON array holds no objects with keys", file=path)

    def rows(self, columns: Sequence[str]) -> Iterator[Row]:
        """Stream every record, numbered from 1; see `Source.rows`."""
        for number, record in enumerate(self._records, start=1):
            if isinstance(record, dict):
                yield Row(number, tuple(record.get(name, MISSING) for name in columns))
            else:
                yield Row(number, (), f"a JSON object was expected, found {_kind(record)}")

    def digest(self) -> str:
        """See `Source.digest`."""
        return file_digest(self._path)

    def total_rows(self) -> int | None:
        """Length of the array."""
        return len(self._records)


class ParquetFile(Source):
    """A Parquet file, read in batches and only in the columns asked for.

    Args:
        path: A regular file.

    Raises:
        DataError: The file is not Parquet, holds no rows, or names a column twice.
    """

    def __init__(self, path: Path) -> None:
        # Imported here: it takes longer than the rest of this room together, and most files are text.
        import pyarrow
        import pyarrow.parquet

        self.name = str(path)
        self._path = path
        self._reader, self._arrow_error = pyarrow.parquet.ParquetFile, pyarrow.ArrowException
        try:
            with self._reader(path) as file:
                self.columns = tuple(file.schema_arrow.names)
                self._num_rows: int = file.metadata.num_rows
        except (self._arrow_error, OSError) as error:
            raise DataError(f"not a readable Parquet file: {error}", file=path) from error
        refuse_duplicate_columns(self.columns, self.name)
        if self._num_rows == 0:
            raise DataError("the file has columns and no rows", file=path)

    def rows(self, columns: Sequence[str]) -> Iterator[Row]:
        """Stream every record, numbered from 1; see `Source.rows`."""
        numbers = count(1)
        try:
            # Pages of a column as they are needed, not all of a row group, which may be the whole file.
            with self._reader(self._path, buffer_size=READ_BYTES, pre_buffer=False) as file:
                for batch in file.iter_batches(batch_size=BATCH_ROWS, columns=list(dict.fromkeys(columns))):
                    cells_of = [batch.column(name).to_pylist() for name in columns]
                    for cells in zip(*cells_of, strict=True):
                        yield Row(next(numbers), cells)
        except (self._arrow_error, OSError) as error:
            raise DataError(f"damaged: {error}", file=self._path, row=next(numbers)) from error

    def digest(self) -> str:
        """See `Source.digest`."""
        return file_digest(self._path)

    def total_rows(self) -> int | None:
        """Number of records, from the file's footer."""
        return self._num_rows


def open_json(path: Path, encoding: str | None = None) -> Source:
    """A `.json` file: JSON Lines, as often in this field, or one document, be it a list of records or SQuAD's."""
    if _is_json_lines(path, encoding):
        return JsonLinesFile(path, encoding)
    file = JsonFile(path, encoding)
    return SquadFile(file) if "paragraphs" in file.columns else file


def _is_json_lines(path: Path, encoding: str | None) -> bool:
    """Whether the first line with text is an object of its own and another line with text follows."""
    lines = [*islice((line for line in read_lines(path, encoding) if line.strip()), 2)]
    return len(lines) == 2 and isinstance(_object_or_problem(lines[0]), dict)


def _json_array(path: Path, encoding: str | None) -> list[object]:
    text = read_text(path, encoding)
    if not text.strip():
        raise DataError("the file is empty", file=path)
    try:
        document = json.loads(text)
    except json.JSONDecodeError as error:
        raise DataError(
            f"not valid JSON: {error.msg} at character {error.colno}", file=path, row=error.lineno
        ) from None
    except (ValueError, RecursionError) as error:
        raise DataError(_unreadable_json(error), file=path) from None
    records = document.get("data") if isinstance(document, dict) else document
    if not isinstance(records, list):
        raise DataError('expected a JSON array of objects, or {"data": [...]}', file=path)
    if not records:
        raise DataError("the JSON array is empty", file=path)
    return records


def _object_or_problem(line: str) -> dict[str, object] | str:
    try:
        record = json.loads(line)
    except json.JSONDecodeError as error:
        return f"not valid JSON: {error.msg} at character {error.colno}"
    except (ValueError, RecursionError) as error:
        return _unreadable_json(error)
    return record if isinstance(record, dict) else f"a JSON object was expected, found {_kind(record)}"


def _unreadable_json(error: ValueError | RecursionError) -> str:
    """Valid JSON that Python does not read: numbers of thousands of digits, lists nested a thousand deep."""
    return f"this JSON cannot be read: {error}"


def _kind(value: object) -> str:
    names = {list: "an array", str: "a text", bool: "a boolean", int: "a number", float: "a number"}
    return names.get(type(value), "null")


def _keys(records: Iterator[Mapping[str, object]]) -> tuple[str, ...]:
    """Every key, in the order of first appearance."""
    return tuple(dict.fromkeys(key for record in records for key in record))
