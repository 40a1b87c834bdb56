"""A finished run's model, or any folder's, as it is asked: with its task, tokenizer and outputs."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Any

from fleetune.comm.ranks import Ranks
from fleetune.config import RunConfig
from fleetune.data.batches import CostModel
from fleetune.data.questions import ANSWER_COLUMN, ID_COLUMN, QUESTION_COLUMNS
from fleetune.data.tasks import Problem, Task, custom_task, find_task, task_from_json, with_columns
from fleetune.errors import ConfigError
from fleetune.evaluate.outputs import Outputs, outputs_of
from fleetune.evaluate.predict import Predictor
from fleetune.hardware.pinning import Place
from fleetune.hardware.threads import set_threads
from fleetune.kernels.contest import kernels_in_use
from fleetune.model.heads import problem_of_head
from fleetune.model.here import with_model_here
from fleetune.model.load import Classifier, check_tokenizer_fits, load_classifier, load_model_config, load_tokenizer
from fleetune.model.precision import agreed_precision
from fleetune.report.record import read_record
from fleetune.report.terminal import Terminal


@dataclasses.dataclass(frozen=True, kw_only=True)
class FinishedModel:
    """A classifier that is only asked, with its task and tokenizer."""

    config: RunConfig
    task: Task
    tokenizer: Any
    classifier: Classifier
    ranks: Ranks
    terminal: Terminal
    dtype: str
    """What it computes in."""

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
        config=config, task=task, tokenizer=tokenizer, classifier=classifier, ranks=ranks, terminal=terminal,
        dtype=precision.dtype,
    )  # fmt: skip


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
