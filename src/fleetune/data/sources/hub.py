"""Data sets of the Hugging Face hub, through the optional `datasets` package."""

from __future__ import annotations

import hashlib
import importlib
from collections.abc import Iterator, Mapping, Sequence
from itertools import count
from typing import Any

from fleetune.data.sources.rows import Cell, Row, Source
from fleetune.errors import ConfigError, DataError

BATCH_ROWS = 4096


class HubSplit(Source):
    """One split of a hub data set. Class ids are given as class names, where the data set knows them.

    Args:
        dataset: A `datasets.Dataset`.
        name: What error messages call it.
    """

    def __init__(self, dataset: Any, name: str) -> None:
        self.name = name
        self.columns = tuple(dataset.column_names)
        self._dataset = dataset
        if len(dataset) == 0:
            raise DataError("the split has no rows", file=name)

    def rows(self, columns: Sequence[str]) -> Iterator[Row]:
        """Stream every record, numbered from 1; see `Source.rows`."""
        class_names = [_class_names(self._dataset.features[name]) for name in columns]
        numbers = count(1)
        for table in self._tables(columns):
            cells_of = [
                _named(table.column(name).to_pylist(), names) for name, names in zip(columns, class_names, strict=True)
            ]
            for cells in zip(*cells_of, strict=True):
                yield Row(next(numbers), cells)

    def digest(self) -> str:
        """SHA-256 over the records, the class names and the column types."""
        import pyarrow

        state = hashlib.sha256(repr(sorted(self._dataset.features.items())).encode())
        for table in self._tables(self.columns):
            sink = pyarrow.BufferOutputStream()
            with pyarrow.ipc.new_stream(sink, table.schema) as writer:
                writer.write_table(table)
            state.update(sink.getvalue())
        return state.hexdigest()

    def total_rows(self) -> int | None:
        """Number of records."""
        return len(self._dataset)

    def _tables(self, columns: Sequence[str]) -> Iterator[Any]:
        chosen = self._dataset.select_columns(list(dict.fromkeys(columns)))
        return iter(chosen.with_format("arrow").iter(batch_size=BATCH_ROWS))


def open_hub(name: str, config: str | None = None) -> dict[str, Source]:
    """Every split of a hub data set, by the hub's split names, from the hub or its local cache.

    Args:
        name: Name on the hub such as "nyu-mll/glue", or a local folder that `datasets` can load.
        config: Configuration of the data set, such as "mrpc".

    Raises:
        ConfigError: The `datasets` package is not installed.
        DataError: The data set cannot be loaded.
    """
    label = f"{name}/{config}" if config else name
    try:
        datasets = importlib.import_module("datasets")
    except ImportError:
        raise ConfigError(
            f"data set {label!r} is on the hub, and reading it needs the `datasets` package: "
            "pip install 'fleetune[hub]', or give files with --data_dir or --train_file"
        ) from None
    # Whatever goes wrong inside (no network, no such name) is one thing to the user.
    try:
        loaded: Mapping[str, Any] = datasets.load_dataset(name, config)
    except Exception as error:
        raise DataError(f"cannot be loaded from the hub: {error}", file=label) from error
    return {split: HubSplit(dataset, f"{label}:{split}") for split, dataset in loaded.items()}


def _class_names(feature: Any) -> Sequence[str] | None:
    """The class names of a column of class ids, or of lists of them."""
    return getattr(feature, "names", None) or getattr(getattr(feature, "feature", None), "names", None)


def _named(ids: list[Cell], names: Sequence[str] | None) -> list[Cell]:
    """Class ids, or lists of them, as class names; what is no id of a class (the -1 of test splits, a null) stays."""
    if names is None:
        return ids
    lists = [_named(cell, names) if isinstance(cell, list) else cell for cell in ids]
    return [names[cell] if isinstance(cell, int) and 0 <= cell < len(names) else cell for cell in lists]
