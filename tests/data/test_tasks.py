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
METRICS = {
    "cola": {"matthews_correlation"},
    "mrpc": {"accuracy", "f1"},
    "qqp": {"accuracy", "f1"},
    "stsb": {"pearson", "spearmanr"},
}


def test_the_table_has_the_nine_tasks_with_their_labels_in_order() -> None:
    assert {name: task.labels for name, task in TASKS.items()} == LABELS


@pytest.mark.parametrize("name", LABELS)
def test_metrics_are_those_of_glue(name: str) -> None:
    assert set(TASKS[name].metrics) == METRICS.get(name, {"accuracy"})
    assert TASKS[name].best_metric in TASKS[name].metrics


def test_f1_is_of_the_class_that_glue_counts_as_positive() -> None:
    assert (TASKS["mrpc"].positive_label, TASKS["qqp"].positive_label) == ("equivalent", "duplicate")


@pytest.mark.parametrize(
    ("name", "found"), [("SST-2", "sst2"), ("sts-b", "stsb"), ("MRPC", "mrpc"), ("sts_b", "stsb"), ("CoLA", "cola")]
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
    [("classification", ("accuracy", "f1_macro")), ("regression", ("pearson", "spearmanr", "mse"))],
)
def test_metrics_of_a_task_of_ones_own(problem: str, metrics: tuple[str, ...]) -> None:
    task = custom_task(problem, text_columns=("text",), label_column="label")  # type: ignore[arg-type]
    assert task.metrics == metrics


@pytest.mark.parametrize(
    "task", [*TASKS.values(), custom_task("regression", text_columns=("a", "b"), label_column="y")]
)
def test_a_task_survives_json(task: Task) -> None:
    assert task_from_json(json.loads(json.dumps(asdict(task)))) == task


def test_named_columns_take_the_place_of_the_tasks_own() -> None:
    task = with_columns(find_task("cola"), ("utterance",), None)
    assert [(layout.texts, layout.label) for layout in task.layouts] == [(("utterance",), "label")]
