"""The head that a model gets for each kind of task: one row of `HEADS` for each `Problem`."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from fleetune.data.tasks import Problem
from fleetune.data.tokens import UNLABELLED

Labels = NDArray[Any]
SEQUENCE, TOKENS, ANSWERS = "ForSequenceClassification", "ForTokenClassification", "ForQuestionAnswering"


@dataclass(frozen=True, kw_only=True)
class Head:
    """What stands on the encoder, and what its outputs and labels are."""

    kind: str
    """How the names of such models end in transformers."""
    problem_type: str | None = None
    """What a model's config says of its labels."""
    reads_all_tokens: bool = False
    """Whether logits are (T, C), one row a token, or (B, C), read from the first token of each sequence."""
    label_names: Callable[[tuple[str, ...] | None], tuple[str, ...]]
    """Names of the task's labels in the model's order, or None -> names in the model's config."""
    to_model: Callable[[Labels, NDArray[np.int64]], Labels] = lambda labels, to_model: labels
    """(labels of a split, the model's class id for each class id of the task) -> labels as the model counts."""
    logits_of: Callable[[Any], Tensor] = lambda output: output.logits
    """What the model's own forward returns -> logits, of padded batches (B, L, C) where all tokens are read."""

    @property
    def auto_class(self) -> Any:
        """The class of transformers that loads such a model."""
        import transformers

        return getattr(transformers, f"AutoModel{self.kind}")


def _known(names: tuple[str, ...] | None) -> tuple[str, ...]:
    assert names is not None
    return names


def _tags_to_model(labels: Labels, to_model: NDArray[np.int64]) -> Labels:
    is_learned = labels != UNLABELLED
    return np.where(is_learned, to_model[np.where(is_learned, labels, 0)], UNLABELLED)


def _flags_to_model(labels: Labels, to_model: NDArray[np.int64]) -> Labels:
    return labels[:, np.argsort(to_model)]


def _span_logits(output: Any) -> Tensor:
    return torch.stack([output.start_logits, output.end_logits], dim=-1)


HEADS: dict[Problem, Head] = {
    "classification": Head(
        kind=SEQUENCE,
        problem_type="single_label_classification",
        label_names=_known,
        to_model=lambda labels, to_model: to_model[labels],
    ),
    "regression": Head(kind=SEQUENCE, problem_type="regression", label_names=lambda names: ("score",)),
    "multi_label_classification": Head(
        kind=SEQUENCE, problem_type="multi_label_classification", label_names=_known, to_model=_flags_to_model
    ),
    "token_classification": Head(kind=TOKENS, reads_all_tokens=True, label_names=_known, to_model=_tags_to_model),
    "question_answering": Head(
        kind=ANSWERS,
        reads_all_tokens=True,
        label_names=lambda names: ("LABEL_0", "LABEL_1"),
        logits_of=_span_logits,
    ),
}
"""Kind of task -> head."""

_KINDS = (SEQUENCE, TOKENS, ANSWERS)


def kind_of(model_config: Any) -> str | None:
    """The kind of head that a checkpoint says it has, as `Head.kind`; None if it has another or none."""
    names = model_config.architectures or ()
    return next((kind for kind in _KINDS if any(name.endswith(kind) for name in names)), None)


def problem_of_head(model_config: Any) -> Problem:
    """The kind of task that a model's head is for, by its config alone."""
    by_kind: dict[str | None, Problem] = {TOKENS: "token_classification", ANSWERS: "question_answering"}
    if (kind := kind_of(model_config)) in by_kind:
        return by_kind[kind]
    if model_config.problem_type == "multi_label_classification":
        return "multi_label_classification"
    return "regression" if model_config.num_labels == 1 else "classification"
