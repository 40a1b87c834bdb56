"""A file that predictions are wanted for, as a stream of tokens in constant memory."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import islice
from pathlib import Path

from fleetune.data.columns import apply_header, match_layout, possible_texts, present_id
from fleetune.data.examples import BadRow, Example, OnBadRow, Reading, check_rows, read_examples
from fleetune.data.problems import PROBLEMS
from fleetune.data.sources import Row, Source, missing_column, open_source
from fleetune.data.tasks import Columns, Task
from fleetune.data.tokens import Encoder, Tokenizer, TokenTable, table_of_blocks, tokenise, usable_length
from fleetune.data.wording import counted
from fleetune.errors import ConfigError, DataError

CHUNK_ROWS = 4096
BLOCKS_OF_CHUNK = 4
"""Long examples come in smaller blocks, of which a chunk has so many."""


@dataclass(frozen=True, kw_only=True)
class Chunk:
    """Some consecutive rows of a file, as tokens."""

    table: TokenTable | None
    """None: none of the rows can be used."""
    num_rows: int
    """Rows of the file, bad ones counted."""
    last_row: int
    """Number of the last of them in the file."""
    bad_rows: tuple[BadRow, ...]
    """Those that were left out."""


@dataclass(frozen=True, kw_only=True)
class Inputs:
    """An opened file."""

    source: Source
    reading: Reading
    tokenizer: Tokenizer
    encoder: Encoder
    max_length: int
    """Tokens of a sequence."""
    notices: tuple[str, ...]
    """What was chosen on the way, one line each."""

    def check(self) -> int:
        """Read all rows once, so that a bad one is told before the work, and count them, good and bad.

        Raises:
            DataError: There is a bad row, and they are not to be left out; or there is none at all.
        """
        return check_rows(self.source, self.reading)

    @property
    def chunk_rows(self) -> int:
        """Rows of a chunk."""
        return min(CHUNK_ROWS, BLOCKS_OF_CHUNK * self.encoder.most_examples)

    def chunks(self, num_done: int = 0) -> Iterator[Chunk]:
        """Stream the file in chunks, whose ends do not depend on where one begins.

        Args:
            num_done: Rows of earlier chunks, which are passed over.

        Raises:
            DataError: A row cannot be used, and is not to be left out.
        """
        rows = islice(self.source.rows(self.reading.wanted), num_done, self.reading.max_rows)
        while of_chunk := list(islice(rows, self.chunk_rows)):
            yield self._chunk(of_chunk)

    def _chunk(self, rows: Sequence[Row]) -> Chunk:
        log: list[BadRow] = []
        examples: Iterator[Example] = read_examples(self.source, self.reading, log.append, rows=rows)
        blocks = list(tokenise(examples, self.tokenizer, self.max_length, self.encoder))
        log += [bad for block in blocks for bad in block.bad_rows]
        self._refuse(log)
        blocks = [block for block in blocks if len(block.lengths)]
        table = table_of_blocks(blocks, source=self.source.name, columns=self.reading.columns) if blocks else None
        return Chunk(table=table, num_rows=len(rows), last_row=rows[-1].number, bad_rows=tuple(log))

    def _refuse(self, bad_rows: Sequence[BadRow]) -> None:
        """Of rows that no tokens could be made of: the others were refused when they were read."""
        if bad_rows and self.reading.on_bad_row == "error":
            bad = bad_rows[0]
            reason = f"{bad.reason}\n  (--on_bad_row skip leaves bad rows out and lists them)"
            raise DataError(reason, file=self.source.name, row=bad.row, column=bad.column)


def open_inputs(
    path: Path,
    *,
    task: Task,
    tokenizer: Tokenizer,
    max_seq_length: int,
    text_column_names: tuple[str, ...] | None = None,
    encoding: str | None = None,
    on_bad_row: OnBadRow = "error",
    max_samples: int | None = None,
    doc_stride: int = 128,
) -> Inputs:
    """Open a file of one's own for prediction. Labels, if it has any, are not looked at.

    Args:
        path: The file; `rows` of the tables are its row numbers.
        task: The task the model was trained on.
        tokenizer: The tokenizer of the model.
        max_seq_length: Tokens an example may have.
        text_column_names: Its text columns, as many as the task reads. None: those of the task if the file has
            them, else its only columns that can be texts, which is told in the notices.
        encoding: A Python codec name; None: UTF-8, or what a byte-order mark says.
        on_bad_row: "error", or "skip" to leave bad rows out.
        max_samples: Only the first rows; None: all.
        doc_stride: Tokens that windows of a context have in common.

    Raises:
        ConfigError: More or fewer text columns are named than the task reads.
        DataError: The file or a column cannot be used, or the text columns are not plain to see.
    """
    source = open_source(path, encoding)
    choice = _choose(source, task, text_column_names)
    problem = PROBLEMS[task.problem]
    encoder = problem.encoder(task, doc_stride)
    limit = usable_length(tokenizer, max_seq_length, pair=task.is_pair)
    encoder.adapt(tokenizer, limit)
    reading = Reading(
        columns=choice.columns,
        labels=None,
        label_optional=True,
        on_bad_row=on_bad_row,
        max_rows=max_samples,
        texts=problem.texts(task, None),
    )
    return Inputs(
        source=apply_header(source, choice.columns),
        reading=reading,
        tokenizer=tokenizer,
        encoder=encoder,
        max_length=limit,
        notices=() if choice.notice is None else (choice.notice,),
    )


@dataclass(frozen=True, kw_only=True)
class _Choice:
    columns: Columns
    notice: str | None


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
