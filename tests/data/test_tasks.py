from __future__ import annotations

import json
from dataclasses import asdict

import pytest

from fleetune.data.tasks import TASKS, Task, custom_task, find_task, task_from_json, with_columns
from fleetune.errors import ConfigError

# Written down from the GLUE paper (Wang et al. 2019, table 1) and the hub's data set card.
LABELS = {
    "cola": ("unacceptable", "acceptable"),
    "sst2": ("negative", "positive"),
    "mrpc": ("not_equivalent", "equivalent"),
    "qqp": ("not_duplicate", "duplicate"),
    "stsb": None,
    "mnli": ("entailment", "neutral", "contradiction"),
    "qnli": ("entailment", "not_entailment"),
    "rte": ("entailment", "not_entailment"),
    "wnli": ("not_entailment", "entailment"),
}
# Of the hub's data set cards: SQuAD has no classes, the order of CoNLL's tags is the card's.
OTHER_LABELS = {
    "squad": None,
    "squad_v2": None,
    "conll2003": ("O", "B-PER", "I-PER", "B-ORG", "I-ORG", "B-LOC", "I-LOC", "B-MISC", "I-MISC"),
}
METRICS = {
    "cola": {"matthews_correlation"},
    "mrpc": {"accuracy", "f1"},
    "qqp": {"accuracy", "f1"},
    "stsb": {"pearson", "spearmanr"},
}


def test_the_table_has_the_nine_tasks_of_glue_and_others_with_their_labels_in_order() -> None:
    assert {name: task.labels for name, task in TASKS.items()} == LABELS | OTHER_LABELS


@pytest.mark.parametrize("name", LABELS)
def test_metrics_are_those_of_glue(name: str) -> None:
    assert set(TASKS[name].metrics) == METRICS.get(name, {"accuracy"})
    assert TASKS[name].best_metric in TASKS[name].metrics


def test_f1_is_of_the_class_that_glue_counts_as_positive() -> None:
    assert (TASKS["mrpc"].positive_label, TASKS["qqp"].positive_label) == ("equivalent", "duplicate")


@pytest.mark.parametrize(
    ("name", "found"),
    [
        ("SST-2", "sst2"),
        ("sts-b", "stsb"),
        ("MRPC", "mrpc"),
        ("sts_b", "stsb"),
        ("CoLA", "cola"),
        ("SQuAD", "squad"),
        ("squad-v2", "squad_v2"),
        ("CoNLL 2003", "conll2003"),
    ],
)
def test_names_are_found_however_they_are_spelt(name: str, found: str) -> None:
    assert find_task(name).name == found


def test_an_unknown_name_is_refused_and_the_nearest_named() -> None:
    with pytest.raises(ConfigError, match="task 'mprc' is unknown: did you mean 'mrpc'"):
        find_task("mprc")


def test_mnli_has_two_validation_and_two_test_splits() -> None:
    assert [split.name for split in find_task("mnli").splits] == [
        "train",
        "validation_matched",
        "validation_mismatched",
        "test_matched",
        "test_mismatched",
    ]


@pytest.mark.parametrize(
    ("problem", "metrics"),
    [
        ("classification", ("accuracy", "f1_macro")),
        ("regression", ("pearson", "spearmanr", "mse")),
        ("multi_label_classification", ("f1_micro", "f1_macro", "accuracy")),
        ("question_answering", ("exact_match", "f1")),
    ],
)
def test_metrics_of_a_task_of_ones_own(problem: str, metrics: tuple[str, ...]) -> None:
    task = custom_task(problem, text_columns=("text",), label_column="label")  # type: ignore[arg-type]
    assert task.metrics == metrics


def test_tags_are_scored_by_spans_where_they_mark_some() -> None:
    tags = {"text_columns": ("tokens",), "label_column": "tags"}
    spans = custom_task("token_classification", labels=("B-A", "I-A", "O"), **tags)  # type: ignore[arg-type]
    assert (spans.metrics, spans.best_metric) == (("precision", "recall", "f1", "accuracy"), "f1")
    parts_of_speech = custom_task("token_classification", labels=("ADJ", "NOUN", "O"), **tags)  # type: ignore[arg-type]
    assert (parts_of_speech.metrics, parts_of_speech.best_metric) == (("accuracy",), "accuracy")


@pytest.mark.parametrize(
    "task", [*TASKS.values(), custom_task("regression", text_columns=("a", "b"), label_column="y")]
)
def test_a_task_survives_json(task: Task) -> None:
    assert task_from_json(json.loads(json.dumps(asdict(task)))) == task


def test_named_columns_take_the_place_of_the_tasks_own() -> None:
    task = with_columns(find_task("cola"), ("utterance",), None)
    assert [(layout.texts, layout.label) for layout in task.layouts] == [(("utterance",), "label")]
