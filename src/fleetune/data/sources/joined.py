"""Several columns read as one."""

from __future__ import annotations

import hashlib
from collections.abc import Iterator, Sequence

from fleetune.data.sources.rows import Row, Source


class JoinedColumns(Source):
    """A source in which several columns can also be read as one: its cells are dicts of cells by column.

    Args:
        source: Has the columns.
        name: Of the column that stands for them.
        parts: The columns.
    """

    def __init__(self, source: Source, name: str, parts: Sequence[str]) -> None:
        self.name = source.name
        self.columns = (*source.columns, name)
        self._source, self._joined, self._parts = source, name, tuple(parts)

    def rows(self, columns: Sequence[str]) -> Iterator[Row]:
        """See `Source.rows`."""
        plain = [name for name in columns if name != self._joined]
        wanted = list(dict.fromkeys([*plain, *self._parts]))
        for row in self._source.rows(wanted):
            if row.problem is not None:
                yield row
                continue
            cells = dict(zip(wanted, row.cells, strict=True))
            joined = {name: cells[name] for name in self._parts}
            yield Row(row.number, tuple(joined if name == self._joined else cells[name] for name in columns))

    def digest(self) -> str:
        """See `Source.digest`."""
        return hashlib.sha256(repr((self._source.digest(), self._parts)).encode()).hexdigest()

    def total_rows(self) -> int | None:
        """See `Source.total_rows`."""
        return self._source.total_rows()
