"""Tasks: what the texts, the label and the score of a data set are called.

The nine GLUE tasks, SQuAD and CoNLL-2003 are rows of `TASKS`; a task on files of one's own is made with `custom_task`.
What differs between kinds of task is a row of a table by `Problem` in each room that it concerns:
`fleetune.data.problems`, `fleetune.model.heads` and `fleetune.evaluate.outputs`.
"""

from __future__ import annotations

import difflib
import re
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any, Literal

from fleetune.data.tags import mark_spans
from fleetune.errors import ConfigError

Problem = Literal[
    "classification", "regression", "multi_label_classification", "token_classification", "question_answering"
]
"""Kinds of task: one class of a text, a number, any number of classes, a tag for each word, a span of a text."""
Role = Literal["train", "validation", "test"]

GLUE_HUB_NAME = "nyu-mll/glue"
CUSTOM = "custom"


@dataclass(frozen=True, kw_only=True)
class Columns:
    """Where the texts and the label of an example stand in a file."""

    texts: tuple[str, ...]
    """Names of one or two text columns, in the order the tokenizer gets them: for a question, it and its context."""
    label: str | None
    """Name of the label column; test files may lack it. None: the label is not read."""
    id: str | None = None
    """Name of a column of identifiers that are read where the file has it."""
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
    """File names without suffix under which the split is found in a folder; `*` stands for any text."""


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
    """Kind of task."""
    layouts: tuple[Columns, ...]
    """Column layouts the files of this task come in, preferred first; the first is the hub's."""
    labels: tuple[str, ...] | None
    """Class names, class id = position; None for regression and questions."""
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
    may_lack_answers: bool = False
    """Whether a question may have no answer in its context, as in SQuAD 2.0."""
    splits: tuple[Split, ...] = PLAIN_SPLITS
    folder: str | None = None
    """Name of the task's folder in a download of several tasks."""
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

SPAN_METRICS = ("precision", "recall", "f1", "accuracy")
SQUAD_METRICS = ("exact_match", "f1")
SQUAD_V2_METRICS = (
    *("exact", "f1", "total", "HasAns_exact", "HasAns_f1", "HasAns_total", "NoAns_exact", "NoAns_f1", "NoAns_total"),
    *("best_exact", "best_exact_thresh", "best_f1", "best_f1_thresh"),
)
"""As the official scripts name them."""


def _squad(name: str, version: str, metrics: tuple[str, ...]) -> Task:
    """A version of SQuAD; files are named as its publisher names them, or by their split."""
    return Task(
        name=name,
        problem="question_answering",
        layouts=(Columns(texts=("question", "context"), label="answers", id="id"),),
        labels=None,
        metrics=metrics,
        best_metric="f1",
        may_lack_answers=version == "v2.0",
        splits=(
            Split(name="train", role="train", stems=("train", f"train-{version}", "*[-_]train")),
            Split(
                name="validation",
                role="validation",
                stems=("dev", "validation", f"dev-{version}", "*[-_]dev", "*[-_]validation"),
            ),
            Split(name="test", role="test", stems=("test", f"test-{version}", "*[-_]test")),
        ),
        hub_name=f"rajpurkar/{name}",
    )


CONLL2003 = Task(
    name="conll2003",
    problem="token_classification",
    layouts=(Columns(texts=("tokens",), label="ner_tags"),),
    labels=("O", "B-PER", "I-PER", "B-ORG", "I-ORG", "B-LOC", "I-LOC", "B-MISC", "I-MISC"),
    metrics=SPAN_METRICS,
    best_metric="f1",
    label_ids_allowed=True,
    splits=(
        Split(name="train", role="train", stems=("train",)),
        Split(name="validation", role="validation", stems=("dev", "valid", "validation", "testa")),
        Split(name="test", role="test", stems=("test", "testb")),
    ),
    hub_name="eriktks/conll2003",
)
"""Named entities in English news (Tjong Kim Sang and De Meulder 2003); the label order is the hub's."""

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
        _squad("squad", "v1.1", SQUAD_METRICS),
        _squad("squad_v2", "v2.0", SQUAD_V2_METRICS),
        CONLL2003,
    )
}


def find_task(name: str) -> Task:
    """The task of this name, however it is spelt ("SST-2", "sts_b", "MRPC", "SQuAD v2").

    Raises:
        ConfigError: No task has this name; the nearest is named.
    """
    key, names = _folded(name), {_folded(known): known for known in TASKS}
    if key in names:
        return TASKS[names[key]]
    near = difflib.get_close_matches(key, names, n=1, cutoff=0.5)
    hint = f"did you mean {names[near[0]]!r}? " if near else ""
    raise ConfigError(f"task {name!r} is unknown: {hint}the tasks are {', '.join(TASKS)}")


def _folded(name: str) -> str:
    return re.sub(r"[^a-z0-9]", "", name.lower())


def custom_task(
    problem: Problem,
    *,
    text_columns: tuple[str, ...],
    label_column: str | None,
    labels: tuple[str, ...] | None = None,
    id_column: str | None = None,
    may_lack_answers: bool = False,
) -> Task:
    """A task on files of one's own.

    Args:
        problem: Kind of task.
        text_columns: One or two column names.
        label_column: Name of the label column; None for unlabelled files.
        labels: Class names in class id order; None for regression and questions, and while they are not yet known.
        id_column: Name of the column of identifiers.
        may_lack_answers: See `Task`.
    """
    metrics, best_metric = _custom_metrics(problem, labels or (), may_lack_answers)
    return Task(
        name=CUSTOM,
        problem=problem,
        layouts=(Columns(texts=text_columns, label=label_column, id=id_column),),
        labels=labels,
        metrics=metrics,
        best_metric=best_metric,
        may_lack_answers=may_lack_answers,
    )


def _custom_metrics(problem: Problem, labels: tuple[str, ...], may_lack_answers: bool) -> tuple[tuple[str, ...], str]:
    """Names of the metrics, and the one that decides which evaluation is best."""
    # F1 of one class would need to know which class is the positive one: the mean over classes does not.
    metrics: dict[Problem, tuple[tuple[str, ...], str]] = {
        "classification": (("accuracy", "f1_macro"), "accuracy"),
        "regression": (("pearson", "spearmanr", "mse"), "pearson"),
        "multi_label_classification": (("f1_micro", "f1_macro", "accuracy"), "f1_micro"),
        "token_classification": (SPAN_METRICS, "f1") if mark_spans(labels) else (("accuracy",), "accuracy"),
        "question_answering": (SQUAD_V2_METRICS if may_lack_answers else SQUAD_METRICS, "f1"),
    }
    return metrics[problem]


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
        texts=tuple(fields["texts"]),
        label=fields["label"],
        id=fields.get("id"),
        header=None if header is None else tuple(header),
    )
