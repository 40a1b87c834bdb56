"""The order of classes: the task's, or that of a checkpoint that knows the labels by name."""

from __future__ import annotations

import pytest

from fleetune.model.labels import align_labels

TASK = ("entailment", "neutral", "contradiction")


def test_same_names_in_the_same_order_change_nothing() -> None:
    order = align_labels(TASK, dict(enumerate(TASK)))
    assert order.names == TASK
    assert order.to_model.tolist() == [0, 1, 2]
    assert order.keeps_head


def test_another_order_is_the_checkpoints() -> None:
    order = align_labels(TASK, {0: "contradiction", 1: "entailment", 2: "neutral"})
    assert order.names == ("contradiction", "entailment", "neutral")
    assert order.to_model.tolist() == [1, 2, 0]  # entailment is the model's 1, neutral its 2, contradiction its 0
    assert order.keeps_head
    # names and numbers say the same
    assert [order.names[i] for i in order.to_model] == list(TASK)
    assert [order.id_of(name) for name in TASK] == order.to_model.tolist()


def test_case_does_not_matter_and_the_tasks_spelling_stays() -> None:
    order = align_labels(TASK, {0: "CONTRADICTION", 1: "Entailment", 2: "neutral"})
    assert order.names == ("contradiction", "entailment", "neutral")
    assert order.to_model.tolist() == [1, 2, 0]
    assert order.keeps_head


def test_ids_decide_not_the_order_in_which_they_are_listed() -> None:
    order = align_labels(("no", "yes"), {1: "no", 0: "yes"})
    assert order.names == ("yes", "no")
    assert order.to_model.tolist() == [1, 0]


@pytest.mark.parametrize("word", ["LABEL_{}", "label_{}"])
def test_generic_names_keep_the_tasks_order_and_the_head(word: str) -> None:
    order = align_labels(TASK, {i: word.format(i) for i in range(3)})
    assert order.names == TASK
    assert order.to_model.tolist() == [0, 1, 2]
    assert order.keeps_head


@pytest.mark.parametrize(
    "id2label",
    [
        {0: "positive", 1: "neutral", 2: "negative"},  # other names, one in common
        {0: "entailment", 1: "neutral"},  # fewer
        {0: "entailment", 1: "neutral", 2: "contradiction", 3: "other"},  # more
        {0: "LABEL_0", 1: "LABEL_1"},  # generic, fewer
        {0: "LABEL_0", 1: "LABEL_1", 2: "other"},  # generic in part
        {0: "entailment", 1: "entailment", 2: "contradiction"},  # one twice
        {},
    ],
)
def test_a_head_for_other_classes_is_not_kept(id2label: dict[int, str]) -> None:
    order = align_labels(TASK, id2label)
    assert order.names == TASK
    assert order.to_model.tolist() == [0, 1, 2]
    assert not order.keeps_head


def test_labels_that_differ_in_case_only_stay_apart() -> None:
    order = align_labels(("a", "A"), {0: "A", 1: "a"})
    assert order.names == ("A", "a")
    assert order.to_model.tolist() == [1, 0]
    assert order.keeps_head
    assert not align_labels(("a", "A"), {0: "a", 1: "b"}).keeps_head
    assert not align_labels(("a", "b"), {0: "a", 1: "A"}).keeps_head


def test_id_of_a_label() -> None:
    order = align_labels(("no", "yes"), {0: "yes", 1: "no"})
    assert order.id_of("yes") == 0
    assert order.id_of(None) is None
