"""The programs of `fleetune evaluate` and `fleetune predict`: a finished run, new data, one or several ranks."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Any

from fleetune.cluster.rank import RankInfo
from fleetune.comm.ranks import Ranks, joined_ranks
from fleetune.config import RunConfig
from fleetune.data.batches import CostModel
from fleetune.data.dataset import prepare_inputs
from fleetune.data.loading import load_data, table_here
from fleetune.data.questions import ANSWER_COLUMN, ID_COLUMN, QUESTION_COLUMNS
from fleetune.data.tasks import Problem, Task, custom_task, find_task, task_from_json, with_columns
from fleetune.data.tokens import TokenTable
from fleetune.errors import ConfigError
from fleetune.evaluate.outputs import Outputs, outputs_of
from fleetune.evaluate.predict import FloatArray, Predictor
from fleetune.evaluate.score import evaluate_splits, metric_text, write_predictions
from fleetune.files import write_json, write_whole
from fleetune.hardware.pinning import Place
from fleetune.hardware.threads import set_threads
from fleetune.kernels.contest import kernels_in_use
from fleetune.model.heads import problem_of_head
from fleetune.model.here import with_model_here
from fleetune.model.load import (
    Classifier,
    check_tokenizer_fits,
    load_classifier,
    load_model_config,
    load_tokenizer,
    with_model_labels,
)
from fleetune.model.precision import agreed_precision
from fleetune.report.record import read_record
from fleetune.report.terminal import Terminal, open_terminal


@dataclasses.dataclass(frozen=True, kw_only=True)
class FinishedModel:
    """A classifier that is only asked, with its task and tokenizer."""

    config: RunConfig
    task: Task
    tokenizer: Any
    classifier: Classifier
    ranks: Ranks
    terminal: Terminal

    @property
    def outputs(self) -> Outputs:
        return outputs_of(self.task, self.classifier, self.config)

    @property
    def predictor(self) -> Predictor:
        return Predictor(
            model=self.classifier.module,
            num_labels=self.classifier.num_labels,
            per_token=self.classifier.head.reads_all_tokens,
            ranks=self.ranks,
            batch_size=self.config.per_device_eval_batch_size,
            costs=CostModel(hidden_size=self.classifier.hidden_size),
        )


def evaluate_rank(
    config: RunConfig, info: RankInfo | None, output: Path | None, place: Place | None = None
) -> dict[str, Any]:
    """Metrics of a model on the validation splits of the settings, the same on every rank.

    Args:
        config: The settings; `model` is the folder of the finished run.
        info: Who this rank is.
        output: File for the metrics as JSON; None writes none.
        place: The part of the host that this rank has taken, if it has.
    """
    terminal = open_terminal(info is None or info.rank == 0)
    with joined_ranks(info, config, terminal.say, threads=None if place is None else place.part.threads) as ranks:
        model = open_model(config, ranks, terminal, place)
        data = load_data(model.config, model.tokenizer, ranks, model.terminal, splits=["validation"], task=model.task)
        for notice in data.notices:
            model.terminal.say(notice)
        tables = {name: with_model_labels(table, model.classifier) for name, table in data.splits.items()}
        with model.terminal.bar("evaluating", sum(len(t) for t in tables.values()), "examples") as bar:
            results = evaluate_splits(model.predictor, tables, model.outputs, bar.move_to)
        model.terminal.say(metric_text(results))
        if output is not None:
            ranks.on_first(lambda: write_json(output, results))
    return results


def predict_rank(
    config: RunConfig, info: RankInfo | None, source: Path, output: Path, place: Place | None = None
) -> None:
    """Predict every row of a file, in the file's order.

    Args:
        config: The settings; `model` is the folder of the finished run.
        info: Who this rank is.
        source: File of texts; labels in it are not looked at.
        output: File for the predictions, one JSON object a line.
        place: The part of the host that this rank has taken, if it has.
    """
    terminal = open_terminal(info is None or info.rank == 0)
    with joined_ranks(info, config, terminal.say, threads=None if place is None else place.part.threads) as ranks:
        model = open_model(config, ranks, terminal, place)
        folder = ranks.on_first(lambda: str(tokenise(model, source).folder))
        table = TokenTable.open(table_here(folder, "the tokens", ranks, config.cache_dir, terminal.say))
        with model.terminal.bar("predicting", len(table), "examples") as bar:
            logits = model.predictor.logits(table, bar.move_to)
        table = dataclasses.replace(table, labels=None)
        ranks.on_first(lambda: save_predictions(output, logits, table, model))
        count = table.num_examples
        counted = "1 prediction" if count == 1 else f"{count:,} predictions"
        model.terminal.say(f"{counted} in {output}" + left_out(table))


def left_out(table: TokenTable) -> str:
    """How many rows were skipped, and the first of them."""
    if not table.num_bad_rows:
        return ""
    first = ", ".join(f"row {bad.row} ({bad.reason})" for bad in table.bad_rows[:3])
    return f"; {table.num_bad_rows:,} bad row{'s' if table.num_bad_rows > 1 else ''} left out: {first}"


def save_predictions(output: Path, logits: FloatArray | None, table: TokenTable, model: FinishedModel) -> None:
    """Write the predictions file in one step."""
    assert logits is not None
    write_whole(output, lambda path: write_predictions(path, logits, table, model.outputs))


def tokenise(model: FinishedModel, source: Path) -> TokenTable:
    """The file's tokens, from the cache where it has them."""
    config = model.config
    with model.terminal.bar("tokenising", None, "rows") as bar:
        inputs = prepare_inputs(
            source,
            task=model.task,
            tokenizer=model.tokenizer,
            cache_dir=config.cache_dir,
            max_seq_length=config.max_seq_length,
            text_column_names=config.text_column_names,
            encoding=config.encoding,
            on_bad_row=config.on_bad_row,
            max_samples=config.max_predict_samples,
            doc_stride=config.doc_stride,
            overwrite_cache=config.overwrite_cache,
            progress=lambda done, total: bar.move_to(done),
        )
    for notice in inputs.notices:
        model.terminal.say(notice)
    return inputs.table


def open_model(config: RunConfig, ranks: Ranks, terminal: Terminal, place: Place | None = None) -> FinishedModel:
    """The model of a finished run, or of any folder or hub name that holds a classifier."""
    set_threads(config.threads, local_world_size=ranks.local_world_size, speaks=ranks.is_first, place=place)
    config = with_model_here(config, ranks, terminal.say)
    model_config, tokenizer = load_model_config(config), load_tokenizer(config)
    config = config.replace(max_seq_length=check_tokenizer_fits(tokenizer, model_config, config.max_seq_length))
    task = task_of(config, model_config)
    classifier = load_classifier(config, model_config, task, tokenizer.pad_token_id or 0)
    if classifier.has_new_head:
        raise ConfigError(f"{config.model}: the model has no trained head for these labels ({classifier.notices[0]})")
    precision = agreed_precision(config, classifier, ranks)
    for notice in precision.notices:
        terminal.say(notice)
    terminal.say(f"arithmetic: {precision.dtype}, kernels: {kernels_in_use()}")
    return FinishedModel(
        config=config, task=task, tokenizer=tokenizer, classifier=classifier, ranks=ranks, terminal=terminal
    )


_USUAL_COLUMNS: dict[Problem, tuple[tuple[str, ...], str]] = {
    "token_classification": (("tokens",), "ner_tags"),
    "question_answering": (QUESTION_COLUMNS, ANSWER_COLUMN),
}
"""Columns of words or questions, where a model has no record and none are named."""


def task_of(config: RunConfig, model_config: Any) -> Task:
    """The task of the settings, of the finished run, or one made from the model's own labels.

    Raises:
        ConfigError: Neither says which columns hold the text.
    """
    assert config.model is not None
    record = read_record(Path(config.model))
    told = None if record is None or not record.task else task_from_json(record.task)
    if config.task is not None and (told is None or told.name != find_task(config.task).name):
        return find_task(config.task)
    if told is not None:
        return with_columns(told, config.text_column_names, config.label_column_name)
    return _task_of_model(config, model_config)


def _task_of_model(config: RunConfig, model_config: Any) -> Task:
    """A task made from the head of a model and its labels."""
    problem, id2label = problem_of_head(model_config), model_config.id2label or {}
    texts, label = _USUAL_COLUMNS.get(problem, (None, "label"))
    texts = config.text_column_names or texts
    if texts is None:
        raise ConfigError(f"{config.model} has no record of a run: name the columns with --text_column_names")
    has_classes = problem not in ("regression", "question_answering")
    return custom_task(
        problem,
        text_columns=texts,
        label_column=config.label_column_name or label,
        labels=tuple(id2label[i] for i in sorted(id2label)) if has_classes else None,
        id_column=ID_COLUMN,
        may_lack_answers=config.version_2_with_negative,
    )
