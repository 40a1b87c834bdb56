"""Tokenise a file that predictions are wanted for."""

from __future__ import annotations

import contextlib
from dataclasses import replace
from pathlib import Path

from fleetune.data.columns import apply_header, choose_columns, match_layout
from fleetune.data.examples import OnBadRow, Reading
from fleetune.data.sources import Source, open_source
from fleetune.data.tasks import Columns, Task
from fleetune.data.tokens import (
    Progress,
    TableRequest,
    Tokenizer,
    TokenTable,
    load_or_build,
    tokenizer_identity,
    usable_length,
)
from fleetune.errors import ConfigError, DataError


def prepare_inputs(
    path: Path,
    *,
    task: Task,
    tokenizer: Tokenizer,
    cache_dir: Path,
    max_seq_length: int,
    text_column_names: tuple[str, ...] | None = None,
    encoding: str | None = None,
    on_bad_row: OnBadRow = "error",
    max_samples: int | None = None,
    overwrite_cache: bool = False,
    progress: Progress | None = None,
) -> TokenTable:
    """Tokenise a file of one's own for prediction. Labels, if it has any, are not looked at.

    Args:
        path: The file; `rows` of the result are its row numbers.
        task: The task the model was trained on.
        tokenizer: The tokenizer of the model.
        cache_dir: Where the tokens are kept.
        max_seq_length: Tokens an example may have.
        text_column_names: Its text columns, as many as the task reads. None: those of the task if the file has
            them, else the usual names, else by position; `columns` of the result says which.
        encoding: A Python codec name; None: UTF-8, or what a byte-order mark says.
        on_bad_row: "error", or "skip" to leave bad rows out.
        max_samples: Only the first rows; None: all.
        overwrite_cache: Tokenise anew.
        progress: Called while tokenising.

    Raises:
        ConfigError: More or fewer text columns are named than the task reads.
        DataError: The file, a column or a row cannot be used.
        OutputError: The cache cannot be written.
    """
    source = open_source(path, encoding)
    columns = _columns(source, task, text_column_names)
    request = TableRequest(
        source=apply_header(source, columns),
        split="predict",
        reading=Reading(columns=columns, labels=None, label_optional=True, on_bad_row=on_bad_row, max_rows=max_samples),
        tokenizer=tokenizer,
        tokenizer_identity=tokenizer_identity(tokenizer),
        max_length=usable_length(tokenizer, max_seq_length, pair=task.is_pair),
        encoding=encoding,
    )
    return load_or_build(request, cache_dir, overwrite=overwrite_cache, progress=progress).table


def _columns(source: Source, task: Task, texts: tuple[str, ...] | None) -> Columns:
    num_texts = len(task.text_columns)
    if texts is not None and len(texts) != num_texts:
        raise ConfigError(f"text_column_names names {len(texts)} columns, the model reads {num_texts}")
    if texts is None:
        unlabelled = [replace(layout, label=None) for layout in task.layouts]
        with contextlib.suppress(DataError):
            return match_layout(source, unlabelled, label_optional=True)
    return choose_columns(source, texts=texts, label=task.label_column, num_texts=num_texts, with_label=False).columns
