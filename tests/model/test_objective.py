"""Smoothed labels are transformers', weighted classes torch's, and a mean over the global batch whoever computes it."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from transformers.trainer_pt_utils import LabelSmoother

from fleetune.config import RunConfig
from fleetune.data.tasks import Columns, Problem, custom_task
from fleetune.data.tokens import TokenTable
from fleetune.errors import ConfigError
from fleetune.model.labels import LabelOrder, align_labels
from fleetune.model.losses import LOSSES
from fleetune.model.objective import Objective, balanced, make_objective

NAMES = ("cat", "dog", "bird")
LABELS = np.array([0, 0, 1, 2, 0, 1])


def table_of(labels: Any, offsets: Any = None) -> TokenTable:
    """A table with nothing in it but labels: of sequences of one token, or of the tokens between offsets."""
    boundaries = np.arange(len(labels) + 1) if offsets is None else np.array(offsets)
    return TokenTable(
        folder=Path(), split="train", source="", columns=Columns(texts=("text",), label="label"),
        token_ids=np.zeros(boundaries[-1], np.int32), type_ids=None, offsets=boundaries, labels=np.asarray(labels),
        rows=np.arange(len(boundaries) - 1), num_bad_rows=0, bad_rows=(), num_unlabelled=0,
        labels_of_tokens=offsets is not None,
    )  # fmt: skip


def task_of(problem: Problem) -> Any:
    return custom_task(problem, text_columns=("text",), label_column="label", labels=NAMES, id_column="id",
                       may_lack_answers=False)  # fmt: skip


def objective_of(problem: Problem = "classification", table: TokenTable | None = None, *,
                 order: LabelOrder | None = None, **settings: Any) -> Objective:  # fmt: skip
    objective, _ = make_objective(
        RunConfig(**settings), task_of(problem), order or align_labels(NAMES, {}), table or table_of(LABELS)
    )
    return objective


@pytest.mark.parametrize("shape", [(6,), (2, 3)], ids=["classes", "tags"])
def test_smoothed_labels_are_those_of_transformers(shape: tuple[int, ...]) -> None:
    torch.manual_seed(0)
    logits, labels = torch.randn(6, 3, requires_grad=True), torch.tensor([0, 2, 1, 1, 0, 2])
    if len(shape) == 2:
        labels[4] = -100
    theirs = LabelSmoother(epsilon=0.15)({"logits": logits.view(*shape, 3)}, labels.view(shape))
    found = objective_of(label_smoothing_factor=0.15).loss(logits, labels) / int((labels != -100).sum())
    torch.testing.assert_close(found, theirs)
    gradients = [torch.autograd.grad(loss, logits)[0] for loss in (found, theirs)]
    torch.testing.assert_close(*gradients)


@pytest.mark.parametrize("label_smoothing", [0.0, 0.2])
def test_weighted_classes_are_those_of_torch_however_the_batch_is_split(label_smoothing: float) -> None:
    torch.manual_seed(0)
    logits, labels = torch.randn(6, 3), torch.from_numpy(LABELS)
    weights = torch.tensor([1.0, 3.0, 0.5])
    expected = torch.nn.functional.cross_entropy(logits, labels, weight=weights, label_smoothing=label_smoothing)
    objective = objective_of(class_weights=("1", "3", "0.5"), label_smoothing_factor=label_smoothing)
    count = objective.count(table_of(LABELS), np.arange(6))
    assert count == pytest.approx(1 + 1 + 3 + 0.5 + 1 + 3)
    halves = [objective.loss(logits[half], labels[half]) for half in (slice(0, 2), slice(2, 6))]
    torch.testing.assert_close(sum(halves) / count, expected)


def test_balanced_weights_by_hand() -> None:
    # 6 labels, 3 classes, counts 3, 2, 1: 6 / (3 x 3), 6 / (3 x 2), 6 / (3 x 1)
    assert balanced(np.array([3, 2, 1])).tolist() == pytest.approx([2 / 3, 1.0, 2.0])
    assert balanced(np.array([3, 0, 3])).tolist() == pytest.approx([2 / 3, 1.0, 2 / 3])
    weights = objective_of(class_weights=("balanced",)).class_weights
    assert weights is not None
    assert weights.tolist() == pytest.approx([2 / 3, 1.0, 2.0])


def test_weights_of_tags_leave_out_words_without_one() -> None:
    # two sentences of 3 and 2 tokens; labels of tokens 1, 2 and 4
    table = table_of([-100, 0, 0, -100, 1], offsets=[0, 3, 5])
    objective = objective_of("token_classification", table, class_weights=("balanced",))
    weights = objective.class_weights
    assert weights is not None
    assert weights.tolist() == pytest.approx([3 / (3 * 2), 3 / (3 * 1), 1.0])
    assert objective.count(table, np.array([0])) == pytest.approx(2 * 0.5)
    assert objective.count(table, np.array([1])) == pytest.approx(1.0)
    assert objective.count(table, np.array([], np.int64)) == 1.0


def test_weights_are_given_in_the_order_of_the_labels_and_used_in_that_of_the_model() -> None:
    order = align_labels(NAMES, {0: "bird", 1: "cat", 2: "dog"})
    weights = objective_of(class_weights=("1", "2", "3"), order=order).class_weights
    assert weights is not None
    assert weights.tolist() == [3.0, 1.0, 2.0]


def test_the_usual_objective_is_the_plain_loss() -> None:
    objective, lines = make_objective(RunConfig(), task_of("classification"), align_labels(NAMES, {}), table_of(LABELS))
    assert (objective.loss, objective.count(table_of(LABELS), np.arange(4)), lines) == (LOSSES["classification"], 4, [])


def test_weights_are_told_with_their_labels() -> None:
    table = table_of(np.array([0, 0, 1]))
    _, lines = make_objective(
        RunConfig(class_weights=("balanced",)), task_of("classification"), align_labels(NAMES, {}), table
    )
    assert lines == ["class weights: cat 0.5, dog 1, bird 1 (no example)"]


def test_another_number_of_weights_is_refused() -> None:
    with pytest.raises(ConfigError, match="--class_weights 1,2: 2 weights for 3 labels: cat, dog, bird"):
        objective_of(class_weights=("1", "2"))


@pytest.mark.parametrize("problem", ["regression", "multi_label_classification", "question_answering"])
@pytest.mark.parametrize("settings", [{"label_smoothing_factor": 0.1}, {"class_weights": ("balanced",)}], ids=str)
def test_kinds_without_one_right_class_are_refused_by_name(problem: Problem, settings: dict[str, Any]) -> None:
    task = dataclasses.replace(task_of("classification"), problem=problem)
    with pytest.raises(ConfigError, match=f"--{next(iter(settings))} .* labels of {problem} are not classes"):
        make_objective(RunConfig(**settings), task, None, table_of(LABELS))
