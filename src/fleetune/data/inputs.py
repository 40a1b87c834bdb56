"""Tokenise a file that predictions are wanted for."""

from __future__ import annotations

from dataclasses import dataclass, replace
from pathlib import Path

from fleetune.data.columns import apply_header, match_layout, possible_texts, present_id
from fleetune.data.examples import OnBadRow, Reading
from fleetune.data.notices import reading_notices
from fleetune.data.problems import PROBLEMS
from fleetune.data.sources import Source, missing_column, open_source
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
from fleetune.data.wording import counted
from fleetune.errors import ConfigError, DataError


@dataclass(frozen=True, kw_only=True)
class PreparedInputs:
    """A tokenised file, and what is to be told about it."""

    table: TokenTable
    notices: tuple[str, ...]
    """What was chosen on the way, one line each; bad rows are listed in the table."""


@dataclass(frozen=True, kw_only=True)
class _Choice:
    columns: Columns
    notice: str | None


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
    doc_stride: int = 128,
    overwrite_cache: bool = False,
    progress: Progress | None = None,
) -> PreparedInputs:
    """Tokenise a file of one's own for prediction. Labels, if it has any, are not looked at.

    Args:
        path: The file; `rows` of the table are its row numbers.
        task: The task the model was trained on.
        tokenizer: The tokenizer of the model.
        cache_dir: Where the tokens are kept.
        max_seq_length: Tokens an example may have.
        text_column_names: Its text columns, as many as the task reads. None: those of the task if the file has
            them, else its only columns that can be texts, which is told in the notices.
        encoding: A Python codec name; None: UTF-8, or what a byte-order mark says.
        on_bad_row: "error", or "skip" to leave bad rows out.
        max_samples: Only the first rows; None: all.
        doc_stride: Tokens that windows of a context have in common.
        overwrite_cache: Tokenise anew.
        progress: Called while tokenising.

    Raises:
        ConfigError: More or fewer text columns are named than the task reads.
        DataError: The file, a column or a row cannot be used, or the text columns are not plain to see.
        OutputError: The cache cannot be written.
    """
    source = open_source(path, encoding)
    choice = _choose(source, task, text_column_names)
    problem = PROBLEMS[task.problem]
    encoder = problem.encoder(task, doc_stride)
    limit = usable_length(tokenizer, max_seq_length, pair=task.is_pair)
    encoder.adapt(tokenizer, limit)
    request = TableRequest(
        source=apply_header(source, choice.columns),
        split="predict",
        reading=Reading(
            columns=choice.columns,
            labels=None,
            label_optional=True,
            on_bad_row=on_bad_row,
            max_rows=max_samples,
            texts=problem.texts(task, "test"),
        ),
        tokenizer=tokenizer,
        tokenizer_identity=tokenizer_identity(tokenizer),
        max_length=limit,
        encoding=encoding,
        encoder=encoder,
    )
    cached = load_or_build(request, cache_dir, overwrite=overwrite_cache, progress=progress)
    told = filter(None, (choice.notice, cached.notice))
    return PreparedInputs(table=cached.table, notices=(*told, *reading_notices(cached.table)))


def _choose(source: Source, task: Task, asked: tuple[str, ...] | None) -> _Choice:
    num_texts = len(task.text_columns)
    if asked is not None:
        if len(asked) != num_texts:
            named = counted(len(asked), "column")
            raise ConfigError(f"text_column_names names {named}, the model reads {num_texts}")
        # Not even a file's only column stands in for one that was named, in this command or in the run's.
        if missing := [name for name in asked if name not in source.columns]:
            raise _unclear(source, missing_column(source.columns, *missing))
        return _Choice(columns=Columns(texts=asked, label=None, id=present_id(source, task.layouts[0])), notice=None)
    unlabelled = [replace(layout, label=None) for layout in task.layouts]
    try:
        columns = match_layout(source, unlabelled, label_optional=True)
    except DataError as error:
        texts = _stand_ins(source, task)
        if texts is None:
            raise _unclear(source, error.reason) from None
        notice = f"{error.reason}: text from {' and '.join(map(repr, texts))}"
        return _Choice(columns=Columns(texts=texts, label=None), notice=f"{source.name}: {notice}")
    return _Choice(columns=columns, notice=_headerless_notice(source, columns))


def _unclear(source: Source, reason: str) -> DataError:
    return DataError(f"{reason}: name the text with --text_column_names", file=source.name)


def _stand_ins(source: Source, task: Task) -> tuple[str, ...] | None:
    """The file's only columns that can be texts, if they are as many as the task reads; None otherwise."""
    found = possible_texts(source, {layout.label for layout in task.layouts})
    if len(found) != len(task.text_columns):
        return None
    # A column of the task that is there keeps its place; the others come in the order of the file.
    others = iter([name for name in found if name not in task.text_columns])
    return tuple(name if name in found else next(others) for name in task.text_columns)


def _headerless_notice(source: Source, columns: Columns) -> str | None:
    if columns.header is None:
        return None
    cells = " and ".join(str(columns.header.index(name) + 1) for name in columns.texts)
    return f"{source.name}: read as a file without a header line, text from cell {cells} of {len(columns.header)}"
