"""Predictions of a file of any size, chunk by chunk: the first rank reads and writes, all ranks compute."""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import hashlib
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import nn

from fleetune.comm.ranks import Ranks
from fleetune.data.inputs import Chunk, Inputs, open_inputs
from fleetune.data.notices import reading_notices
from fleetune.data.tasks import Columns
from fleetune.data.tokens import TokenTable, tokenizer_identity
from fleetune.evaluate.finished import FinishedModel
from fleetune.evaluate.growing import GrowingFile, Progress, differences, partial_of, read_progress
from fleetune.evaluate.predict import FloatArray
from fleetune.evaluate.score import prediction_lines
from fleetune.report.terminal import Bar

BAD_ROWS_SHOWN = 3
DECIDING = (
    "max_seq_length", "text_column_names", "encoding", "max_predict_samples", "doc_stride", "n_best_size",
    "max_answer_length", "null_score_diff_threshold", "per_device_eval_batch_size",
)  # fmt: skip
"""Settings that decide what predictions are, to the last digit."""


def predict_file(model: FinishedModel, source: Path, output: Path) -> None:
    """Predict every row of a file, in the file's order, in memory that does not depend on its size. All ranks call it.

    An output that an earlier run of the same kind left unfinished is gone on with. A chunk is the same whichever row
    the run begins with, and so are its batches: what is written is the same, too.

    Args:
        model: A model that is asked.
        source: File of texts, on the first rank's host; labels in it are not looked at.
        output: File for the predictions, one JSON object a line.

    Raises:
        DataError: The file or a row cannot be used.
        OutputError: The output cannot be written.
        PeerError: Another rank failed.
    """
    ranks, desk = model.ranks, _Desk(model, source, output)
    with contextlib.ExitStack() as stack:
        stack.callback(desk.close)
        begun = ranks.on_first(desk.begin)
        bar: Bar = stack.enter_context(
            model.terminal.bar("predicting", begun["total"], "rows", start=begun["num_rows"])
        )
        while (told := ranks.on_first(desk.read)) is not None:
            logits = None
            if told["num_sequences"]:
                logits = model.predictor.logits(_on_all_ranks(ranks, told, desk.table))
            bar.move_to(ranks.on_first(functools.partial(desk.write, logits)))
        ranks.on_first(desk.complete)
    model.terminal.say(desk.summary() if ranks.is_first else "")


class _Desk:
    """Where the first rank reads and writes; nothing is on the others'.

    Args:
        model: That is asked.
        source: See `predict_file`.
        output: See `predict_file`.
    """

    def __init__(self, model: FinishedModel, source: Path, output: Path) -> None:
        self._model, self._source, self._output = model, source, output
        self._say = model.terminal.say
        self._chunks: Iterator[Chunk] = iter(())
        self._chunk: Chunk | None = None
        self._file: GrowingFile | None = None
        self._told: set[str] = set()

    @property
    def table(self) -> TokenTable | None:
        """The chunk that was read last."""
        return None if self._chunk is None else self._chunk.table

    def begin(self) -> dict[str, int]:
        """Check the input, and open the output where an earlier run left it."""
        inputs = inputs_of(self._model, self._source)
        for notice in inputs.notices:
            self._say(notice)
        total = inputs.check()
        progress = self._earlier(made_by_of(self._model, inputs))
        self._file = GrowingFile(self._output, progress)
        self._chunks = inputs.chunks(progress.num_rows)
        return {"total": total, "num_rows": progress.num_rows}

    def _earlier(self, made_by: dict[str, Any]) -> Progress:
        """What an earlier run wrote, if it was of the same kind; else nothing."""
        fresh, earlier = Progress(made_by=made_by), read_progress(self._output)
        if earlier is None:
            return fresh
        partial, reasons = partial_of(self._output), differences(earlier.made_by, made_by)
        if earlier.num_bad_rows and self._model.config.on_bad_row == "error":
            reasons.append("bad rows were left out")
        if reasons:
            self._say(f"{partial} is of another run and is begun anew: {'; '.join(reasons)}")
            return fresh
        self._say(
            f"going on behind row {earlier.last_row:,}: {earlier.num_predictions:,} predictions are in {partial} "
            "(remove it to begin anew)"
        )
        return earlier

    def read(self) -> dict[str, Any] | None:
        """The next chunk; gives what other ranks must know of it. None: there is none."""
        self._chunk = next(self._chunks, None)
        if self._chunk is None:
            return None
        table = self._chunk.table
        if table is None:
            return {"num_sequences": 0}
        return {"num_sequences": len(table), "num_tokens": table.num_tokens, "has_types": table.type_ids is not None}

    def write(self, logits: FloatArray | None) -> int:
        """Write the predictions of the chunk; gives how many rows are done."""
        assert self._chunk is not None
        assert self._file is not None
        chunk, before, data, num_predictions = self._chunk, self._file.progress, b"", 0
        if chunk.table is not None:
            assert logits is not None
            data = "".join(prediction_lines(logits, chunk.table, self._model.outputs)).encode()
            num_predictions = chunk.table.num_examples
            self._tell(chunk.table)
        shown = [f"row {bad.row} ({bad.reason})" for bad in chunk.bad_rows]
        progress = dataclasses.replace(
            before, num_rows=before.num_rows + chunk.num_rows, last_row=chunk.last_row,
            num_predictions=before.num_predictions + num_predictions, num_bytes=before.num_bytes + len(data),
            num_bad_rows=before.num_bad_rows + len(chunk.bad_rows),
            bad_rows=(*before.bad_rows, *shown)[:BAD_ROWS_SHOWN],
        )  # fmt: skip
        self._file.append(data, progress)
        return progress.num_rows

    def _tell(self, table: TokenTable) -> None:
        """What is used otherwise than it stands in the file, and windows: of each kind the first time."""
        kinds = {*table.counts, *(["windows"] if table.example_of is not None else [])}
        if kinds - self._told:
            self._told |= kinds
            for notice in reading_notices(table):
                self._say(f"up to row {int(table.rows[-1]):,}: {notice}")

    def complete(self) -> None:
        """Give the output its name."""
        assert self._file is not None
        self._file.complete()

    def close(self) -> None:
        """Let others write the output."""
        if self._file is not None:
            self._file.close()

    def summary(self) -> str:
        """What a finished run says."""
        assert self._file is not None
        progress = self._file.progress
        count, bad = progress.num_predictions, progress.num_bad_rows
        counted = "1 prediction" if count == 1 else f"{count:,} predictions"
        left_out = f"; {bad:,} bad row{'s' if bad > 1 else ''} left out: {', '.join(progress.bad_rows)}" if bad else ""
        return f"{counted} in {self._output}{left_out}"


def inputs_of(model: FinishedModel, source: Path) -> Inputs:
    """A file opened as the settings say."""
    config = model.config
    return open_inputs(
        source,
        task=model.task,
        tokenizer=model.tokenizer,
        max_seq_length=config.max_seq_length,
        text_column_names=config.text_column_names,
        encoding=config.encoding,
        on_bad_row=config.on_bad_row,
        max_samples=config.max_predict_samples,
        doc_stride=config.doc_stride,
    )


def made_by_of(model: FinishedModel, inputs: Inputs) -> dict[str, Any]:
    """All that decides what the predictions of a file are, JSON-ready, by names that people know."""
    settings = model.config.to_dict()
    return {
        "the input": inputs.source.digest(),
        "the model": weights_digest(model.classifier.hugging_face),
        "the tokenizer": tokenizer_identity(inputs.tokenizer),
        "the task": json.loads(json.dumps(dataclasses.asdict(model.task))),
        "the arithmetic": model.dtype,
        "rows of a chunk": inputs.chunk_rows,
        **{f"--{name}": settings[name] for name in DECIDING},
    }


def weights_digest(module: nn.Module) -> str:
    """SHA-256, in hex, of a model's weights and their names."""
    digest = hashlib.sha256()
    for name, value in module.state_dict().items():
        digest.update(name.encode())
        digest.update(value.detach().contiguous().reshape(-1).view(torch.uint8).numpy().data)
    return digest.hexdigest()


def _on_all_ranks(ranks: Ranks, told: dict[str, Any], table: TokenTable | None) -> TokenTable:
    """The first rank's table; on the others, as much of it as the model reads."""
    if ranks.world_size == 1:
        assert table is not None
        return table
    arrays = [np.zeros(told["num_sequences"] + 1, np.int64), np.zeros(told["num_tokens"], np.int32)]
    arrays += [np.zeros(told["num_tokens"], np.uint8)] if told["has_types"] else []
    if table is not None:
        own = [table.offsets, table.token_ids, *([] if table.type_ids is None else [table.type_ids])]
        for array, values in zip(arrays, own, strict=True):
            array[:] = values
    ranks.broadcast(map(torch.from_numpy, arrays))
    if table is not None:
        return table
    offsets, token_ids, *types = arrays
    return TokenTable(
        folder=Path(), split="predict", source="", columns=Columns(texts=(), label=None), token_ids=token_ids,
        type_ids=types[0] if types else None, offsets=offsets, labels=None, rows=np.zeros(len(offsets) - 1, np.int64),
        num_bad_rows=0, bad_rows=(), num_unlabelled=0,
    )  # fmt: skip
