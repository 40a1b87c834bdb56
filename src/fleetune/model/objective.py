"""What training minimises: the loss of a kind of task, with smoothed labels and weighted classes where asked for.

Evaluation reports the plain loss whatever the objective is, so that runs can be compared.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial

import numpy as np
import torch
import torch.nn.functional as F
from numpy.typing import NDArray
from torch import Tensor

from fleetune.config import RunConfig
from fleetune.config.tuning import objective_problem, parse_class_weights
from fleetune.data.tasks import Task
from fleetune.data.tokens import UNLABELLED, TokenTable
from fleetune.errors import ConfigError
from fleetune.model.labels import LabelOrder
from fleetune.model.losses import LOSSES, Loss


@dataclass(frozen=True, kw_only=True, eq=False)
class Objective:
    """A loss that is summed, and what its sum over a global batch is divided by."""

    loss: Loss
    class_weights: NDArray[np.float64] | None = None
    """(C,), by the model's class ids; None: all count alike."""

    def count(self, table: TokenTable, sequences: NDArray[np.int64]) -> float:
        """What the loss of some sequences is a mean over: labels, or the sum of their weights; at least one label."""
        if self.class_weights is None:
            return max(1, table.num_targets(sequences))
        labels = _labels_of(table, sequences)
        return float(self.class_weights[labels].sum()) or 1.0


def _labels_of(table: TokenTable, sequences: NDArray[np.int64]) -> NDArray[np.int64]:
    """The class ids of some sequences, or of their words."""
    assert table.labels is not None
    if not table.labels_of_tokens:
        labels = table.labels[sequences]
    elif len(sequences) == 0:
        labels = table.labels[:0]
    else:
        labels = np.concatenate([table.labels[table.offsets[i] : table.offsets[i + 1]] for i in sequences])
    found: NDArray[np.int64] = labels[labels != UNLABELLED].astype(np.int64)
    return found


def make_objective(
    config: RunConfig, task: Task, labels: LabelOrder | None, table: TokenTable
) -> tuple[Objective, list[str]]:
    """The objective of a run, and a line on what is not usual about it.

    Args:
        config: The settings.
        task: With its labels.
        labels: Their order in the model.
        table: What is trained on, with labels as the model counts them.

    Raises:
        ConfigError: The kind of task has no classes, or another number of them.
    """
    if problem := objective_problem(config, task.problem):
        raise ConfigError(problem)
    wish = parse_class_weights(config.class_weights)
    if wish is None and config.label_smoothing_factor == 0.0:
        return Objective(loss=LOSSES[task.problem]), []
    assert labels is not None
    weights, lines = None, []
    if wish is not None:
        counts = np.bincount(_labels_of(table, np.arange(len(table))), minlength=len(labels.names))
        weights = balanced(counts) if wish == "balanced" else _in_models_order(wish, labels, task)
        lines.append("class weights: " + ", ".join(
            f"{name} {weight:.4g}{'' if count else ' (no example)'}"
            for name, weight, count in zip(labels.names, weights, counts, strict=True)
        ))  # fmt: skip
    weights_C = None if weights is None else torch.from_numpy(weights)
    loss = partial(cross_entropy_of, weights_C=weights_C, label_smoothing=config.label_smoothing_factor)
    return Objective(loss=loss, class_weights=weights), lines


def balanced(counts_C: NDArray[np.int64]) -> NDArray[np.float64]:
    """Weights inverse to how often classes occur, as scikit-learn's `balanced`: n / (C x count); 1 where there is none.

    Args:
        counts_C: Labels of each class.
    """
    with np.errstate(divide="ignore"):
        weights = counts_C.sum() / (len(counts_C) * counts_C)
    return np.where(counts_C > 0, weights, 1.0)


def _in_models_order(weights: tuple[float, ...], labels: LabelOrder, task: Task) -> NDArray[np.float64]:
    """Weights that were given in the order of the task's labels."""
    names = task.labels or ()
    if len(weights) != len(names):
        raise ConfigError(f"--class_weights {','.join(f'{w:g}' for w in weights)}: {len(weights)} weights for "
                          f"{len(names)} labels: {', '.join(names)}")  # fmt: skip
    ordered = np.empty(len(weights))
    ordered[labels.to_model] = weights
    return ordered


def cross_entropy_of(logits: Tensor, labels: Tensor, boundaries: Tensor | None = None, *, weights_C: Tensor | None,
                     label_smoothing: float) -> Tensor:  # fmt: skip
    """Summed cross-entropy with weights of the classes and smoothed labels, as `torch.nn.functional.cross_entropy`
    has both; without weights that is what transformers' `LabelSmoother` adds up (Szegedy et al. 2016).

    Args:
        logits: Of sequences (B, C), or of tokens (T, C).
        labels: Class ids; -100: none.
        boundaries: Not read.
        weights_C: By class; None: all count alike.
        label_smoothing: Share of the label that is spread over all classes.
    """
    weight = None if weights_C is None else weights_C.to(logits.dtype)
    return F.cross_entropy(logits, labels, weight=weight, reduction="sum", ignore_index=UNLABELLED,
                           label_smoothing=label_smoothing)  # fmt: skip
