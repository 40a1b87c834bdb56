"""Tasks: what the texts, the label and the score of a data set are called.

The nine GLUE tasks are rows of `TASKS`; a task on files of one's own is made with `custom_task`. Another
kind of task (questions answered by a span, say) adds a value to `Problem`, a row here and a label reader in
`fleetune.data.labels`; nothing else in this room asks which task it serves.
"""

from __future__ import annotations

import difflib
import re
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any, Literal

from fleetune.errors import ConfigError

Problem = Literal["classification", "regression"]
Role = Literal["train", "validation", "test"]

GLUE_HUB_NAME = "nyu-mll/glue"
CUSTOM = "custom"


@dataclass(frozen=True, kw_only=True)
class Columns:
    """Where the texts and the label of an example stand in a file."""

    texts: tuple[str, ...]
    """Names of one or two text columns, in the order the tokenizer gets them."""
    label: str | None
    """Name of the label column; test files may lack it. None: the label is not read."""
    header: tuple[str, ...] | None = None
    """Names for the columns of a file that has no header line; None: the first line is the header."""


@dataclass(frozen=True, kw_only=True)
class Split:
    """One part of a data set."""

    name: str
    """Name on the hub and in results, such as `validation_matched`."""
    role: Role
    """What the split is for; test splits may be unlabelled."""
    stems: tuple[str, ...]
    """File names without suffix under which the split is found in a folder."""


PLAIN_SPLITS = (
    Split(name="train", role="train", stems=("train",)),
    Split(name="validation", role="validation", stems=("dev", "validation")),
    Split(name="test", role="test", stems=("test",)),
)

MNLI_SPLITS = (
    Split(name="train", role="train", stems=("train",)),
    Split(name="validation_matched", role="validation", stems=("dev_matched", "validation_matched")),
    Split(name="validation_mismatched", role="validation", stems=("dev_mismatched", "validation_mismatched")),
    Split(name="test_matched", role="test", stems=("test_matched",)),
    Split(name="test_mismatched", role="test", stems=("test_mismatched",)),
)


@dataclass(frozen=True, kw_only=True)
class Task:
    """What is learned, from which columns, and how it is scored."""

    name: str
    """Lower-case name: a key of `TASKS`, or "custom"."""
    problem: Problem
    """Kind of label: a class, or a number."""
    layouts: tuple[Columns, ...]
    """Column layouts the files of this task come in, preferred first; the first is the hub's."""
    labels: tuple[str, ...] | None
    """Class names, class id = position; None for regression."""
    metrics: tuple[str, ...]
    """Names of the metrics that are reported."""
    best_metric: str
    """The metric by which the best checkpoint is chosen."""
    positive_label: str | None = None
    """The class that binary F1 is computed for."""
    score_range: tuple[float, float] | None = None
    """Smallest and largest score a regression label may have; None: any finite number."""
    label_ids_allowed: bool = False
    """Whether a file may give the class id in place of the class name."""
    splits: tuple[Split, ...] = PLAIN_SPLITS
    folder: str | None = None
    """Name of the task's folder in a GLUE download."""
    hub_name: str | None = None
    """Data set on the hub."""
    hub_config: str | None = None
    """Configuration of that data set."""

    @property
    def text_columns(self) -> tuple[str, ...]:
        """Names of the text columns on the hub."""
        return self.layouts[0].texts

    @property
    def label_column(self) -> str | None:
        """Name of the label column on the hub."""
        return self.layouts[0].label

    @property
    def is_pair(self) -> bool:
        """Whether an example has two texts."""
        return len(self.text_columns) == 2


def _glue(
    name: str,
    folder: str,
    texts: tuple[str, ...],
    labels: tuple[str, ...] | None,
    *,
    metrics: tuple[str, ...] = ("accuracy",),
    best_metric: str = "accuracy",
    positive_label: str | None = None,
    score_range: tuple[float, float] | None = None,
    tsv: Columns | None = None,
    splits: tuple[Split, ...] = PLAIN_SPLITS,
) -> Task:
    """One row of the GLUE table; `tsv` is given where the TSV files differ from the hub's columns."""
    hub = Columns(texts=texts, label="label")
    return Task(
        name=name,
        problem="regression" if labels is None else "classification",
        layouts=(hub,) if tsv is None else (hub, tsv),
        labels=labels,
        metrics=metrics,
        best_metric=best_metric,
        positive_label=positive_label,
        score_range=score_range,
        label_ids_allowed=labels is not None,
        splits=splits,
        folder=folder,
        hub_name=GLUE_HUB_NAME,
        hub_config=name,
    )


SENTENCE = ("sentence",)
SENTENCES = ("sentence1", "sentence2")
QUESTIONS = ("question1", "question2")
ENTAILMENT = ("entailment", "not_entailment")
ACCURACY_AND_F1 = ("accuracy", "f1")

# Layouts of the TSV files: https://gluebenchmark.com/tasks. Train and dev of CoLA have no header line.
# The label order is the hub's (and, where a TSV gives numbers, GLUE's): WNLI's is the reverse of RTE's.
COLA_TSV = Columns(texts=SENTENCE, label="label", header=("source", "label", "author_mark", "sentence"))
MRPC_TSV = Columns(texts=("#1 String", "#2 String"), label="Quality")
QQP_TSV = Columns(texts=QUESTIONS, label="is_duplicate")
STSB_TSV = Columns(texts=SENTENCES, label="score")
MNLI_TSV = Columns(texts=SENTENCES, label="gold_label")

TASKS: dict[str, Task] = {
    task.name: task
    for task in (
        _glue(
            "cola",
            "CoLA",
            SENTENCE,
            ("unacceptable", "acceptable"),
            metrics=("matthews_correlation",),
            best_metric="matthews_correlation",
            tsv=COLA_TSV,
        ),
        _glue("sst2", "SST-2", SENTENCE, ("negative", "positive")),
        _glue(
            "mrpc",
            "MRPC",
            SENTENCES,
            ("not_equivalent", "equivalent"),
            metrics=ACCURACY_AND_F1,
            best_metric="f1",
            positive_label="equivalent",
            tsv=MRPC_TSV,
        ),
        _glue(
            "qqp",
            "QQP",
            QUESTIONS,
            ("not_duplicate", "duplicate"),
            metrics=ACCURACY_AND_F1,
            best_metric="f1",
            positive_label="duplicate",
            tsv=QQP_TSV,
        ),
        _glue(
            "stsb",
            "STS-B",
            SENTENCES,
            None,
            metrics=("pearson", "spearmanr"),
            best_metric="pearson",
            score_range=(0.0, 5.0),
            tsv=STSB_TSV,
        ),
        _glue(
            "mnli",
            "MNLI",
            ("premise", "hypothesis"),
            ("entailment", "neutral", "contradiction"),
            tsv=MNLI_TSV,
            splits=MNLI_SPLITS,
        ),
        _glue("qnli", "QNLI", ("question", "sentence"), ENTAILMENT),
        _glue("rte", "RTE", SENTENCES, ENTAILMENT),
        _glue("wnli", "WNLI", SENTENCES, ("not_entailment", "entailment")),
    )
}


def find_task(name: str) -> Task:
    """The GLUE task of this name, however it is spelt ("SST-2", "sts_b", "MRPC").

    Raises:
        ConfigError: No task has this name; the nearest is named.
    """
    key = re.sub(r"[^a-z0-9]", "", name.lower())
    if key in TASKS:
        return TASKS[key]
    near = difflib.get_close_matches(key, TASKS, n=1, cutoff=0.5)
    hint = f"did you mean {near[0]!r}? " if near else ""
    raise ConfigError(f"task {name!r} is unknown: {hint}the tasks are {', '.join(TASKS)}")


def custom_task(
    problem: Problem,
    *,
    text_columns: tuple[str, ...],
    label_column: str | None,
    labels: tuple[str, ...] | None = None,
) -> Task:
    """A task on files of one's own.

    Args:
        problem: "classification" or "regression".
        text_columns: One or two column names.
        label_column: Name of the label column; None for unlabelled files.
        labels: Class names in class id order; None for regression, and while they are not yet known.
    """
    # F1 of one class would need to know which class is the positive one: the mean over classes does not.
    classification = problem == "classification"
    return Task(
        name=CUSTOM,
        problem=problem,
        layouts=(Columns(texts=text_columns, label=label_column),),
        labels=labels,
        metrics=("accuracy", "f1_macro") if classification else ("pearson", "spearmanr", "mse"),
        best_metric="accuracy" if classification else "pearson",
    )


def with_columns(task: Task, texts: tuple[str, ...] | None, label: str | None) -> Task:
    """The task with its texts or label read from other columns than its own; None leaves them.

    Columns can only be named where a header names them, so layouts for files without one are dropped.
    """
    if texts is None and label is None:
        return task
    layouts = tuple(
        replace(layout, texts=texts or layout.texts, label=label or layout.label)
        for layout in task.layouts
        if layout.header is None
    )
    return replace(task, layouts=layouts)


def task_from_json(fields: Mapping[str, Any]) -> Task:
    """A `Task` from what `dataclasses.asdict` and JSON made of it."""
    tuples = {
        name: None if fields[name] is None else tuple(fields[name]) for name in ("labels", "metrics", "score_range")
    }
    splits = tuple(Split(**{**split, "stems": tuple(split["stems"])}) for split in fields["splits"])
    layouts = tuple(columns_from_json(layout) for layout in fields["layouts"])
    return Task(**{**fields, **tuples, "splits": splits, "layouts": layouts})


def columns_from_json(fields: Mapping[str, Any]) -> Columns:
    """`Columns` from what `dataclasses.asdict` and JSON made of it."""
    header = fields["header"]
    return Columns(
        texts=tuple(fields["texts"]), label=fields["label"], header=None if header is None else tuple(header)
    )
