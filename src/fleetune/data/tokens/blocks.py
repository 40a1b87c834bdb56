"""Blocks of tokens as a table in memory, for examples that are seen once."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from fleetune.data.tasks import Columns
from fleetune.data.tokens.table import TokenTable
from fleetune.data.tokens.tokenizing import TokenBlock

REMARKS_LISTED = 5


def table_of_blocks(blocks: Sequence[TokenBlock], *, source: str, columns: Columns) -> TokenTable:
    """The unlabelled examples of some blocks as one table, which no file holds.

    Args:
        blocks: At least one, of examples that follow each other.
        source: Where they are from.
        columns: That were read.
    """
    lengths = np.concatenate([block.lengths for block in blocks])
    num_examples = [len(block.labels) for block in blocks]
    remarks = [remark for block in blocks for remark in block.remarks]
    counts: Counter[str] = Counter()
    for block in blocks:
        counts.update(block.counts)
    notes: Any = None if blocks[0].notes is None else [note for block in blocks for note in block.notes or ()]
    return TokenTable(
        folder=Path(),
        split="predict",
        source=source,
        columns=columns,
        token_ids=np.concatenate([block.token_ids for block in blocks]),
        type_ids=_joined(blocks, lambda block: block.type_ids),
        offsets=np.concatenate([[0], np.cumsum(lengths)]),
        labels=None,
        rows=np.concatenate([block.rows for block in blocks]),
        num_bad_rows=0,
        bad_rows=(),
        num_unlabelled=sum(num_examples),
        places=_joined(blocks, lambda block: block.places),
        example_of=_example_of(blocks, num_examples),
        notes=notes,
        num_remarks=len(remarks),
        remarks=tuple(remarks[:REMARKS_LISTED]),
        counts=dict(counts),
    )


def _joined(blocks: Sequence[TokenBlock], part: Callable[[TokenBlock], NDArray[Any] | None]) -> Any:
    parts = [part(block) for block in blocks]
    return None if parts[0] is None else np.concatenate([array for array in parts if array is not None])


def _example_of(blocks: Sequence[TokenBlock], num_examples: Sequence[int]) -> NDArray[np.int64] | None:
    if blocks[0].example_of is None:
        return None
    before = np.cumsum([0, *num_examples[:-1]])
    return np.concatenate([n + block.example_of for n, block in zip(before, blocks, strict=True)
                           if block.example_of is not None])  # fmt: skip
