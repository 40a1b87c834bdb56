"""What is to be told about a tokenised split."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from fleetune.data.examples import BadRow
from fleetune.data.tokens import CachedTable, TokenTable
from fleetune.data.wording import counted

BAD_ROWS_SHOWN = 5


def notices_of(cached: CachedTable) -> Iterator[str]:
    """One line for each thing."""
    table = cached.table
    if cached.notice:
        yield cached.notice
    if table.num_bad_rows:
        shown = _first(table.bad_rows, table.num_bad_rows)
        yield f"{table.source}: {counted(table.num_bad_rows, 'bad row')} left out: {shown}"
    if 0 < table.num_unlabelled < table.num_examples:
        have = "has" if table.num_unlabelled == 1 else "have"
        yield (
            f"{table.source}: {table.num_unlabelled} of {table.num_examples} rows {have} no label, "
            f"so the {table.split} split counts as unlabelled"
        )
    yield from reading_notices(table)


def reading_notices(table: TokenTable) -> Iterator[str]:
    """What is used otherwise than it stands in the source, and how examples were cut into windows."""
    if table.counts:
        amounts = ", ".join(f"{number} {what}" for what, number in table.counts.items())
        yield f"{table.source}: {amounts}: {_first(table.remarks, table.num_remarks)}"
    if table.example_of is not None:
        longest = int(table.lengths.max())
        yield (
            f"{table.source}: {counted(table.num_examples, 'question')} in {counted(len(table), 'window')} of up to "
            f"{longest} tokens"
        )


def _first(rows: Sequence[BadRow], total: int) -> str:
    further = total - BAD_ROWS_SHOWN
    more = f"; and {further} more" if further > 0 else ""
    return "; ".join(map(str, rows[:BAD_ROWS_SHOWN])) + more
