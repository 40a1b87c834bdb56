"""Loss of a batch as a sum over what is learned of it: the caller divides by the count of the *global* batch.

Shape suffixes: B sequences, T tokens of the batch, C labels.
"""

from __future__ import annotations

from typing import Protocol

import torch
import torch.nn.functional as F
from torch import Tensor

from fleetune.data.tasks import Problem
from fleetune.data.tokens import UNLABELLED


class Loss(Protocol):
    """(logits, labels, boundaries of the sequences (B + 1,)) -> the sum, a scalar."""

    def __call__(self, logits: Tensor, labels: Tensor, boundaries: Tensor | None = None) -> Tensor: ...


def cross_entropy_sum(logits: Tensor, labels: Tensor, boundaries: Tensor | None = None) -> Tensor:
    """Summed negative log-likelihood of the labels' classes: of sequences (B, C), or of the tokens that have a label
    (T, C)."""
    return F.cross_entropy(logits, labels, reduction="sum", ignore_index=UNLABELLED)


def squared_error_sum(logits: Tensor, labels: Tensor, boundaries: Tensor | None = None) -> Tensor:
    """Summed squared error of the predicted scores (B, 1)."""
    return F.mse_loss(logits.squeeze(-1), labels, reduction="sum")


def binary_cross_entropy_sum(logits: Tensor, labels: Tensor, boundaries: Tensor | None = None) -> Tensor:
    """Binary cross-entropy of each flag, its mean over the classes, summed over sequences (B, C)."""
    if len(logits) == 0:
        return logits.sum()
    return F.binary_cross_entropy_with_logits(logits, labels, reduction="none").mean(dim=1).sum()


def span_cross_entropy_sum(logits: Tensor, labels: Tensor, boundaries: Tensor | None = None) -> Tensor:
    """Mean of the cross-entropies of an answer's first and last token among the tokens of its sequence, summed.

    Args:
        logits: (T, 2), of a token to be the first and the last one.
        labels: (B, 2), places in the sequence; a sequence without a label does not count.
        boundaries: Of the sequences.
    """
    assert boundaries is not None
    lengths = boundaries.diff()
    num_sequences = len(lengths)
    sequence_T2 = torch.repeat_interleave(torch.arange(num_sequences), lengths).unsqueeze(1).expand(-1, 2)
    largest = logits.detach().new_full((num_sequences, 2), -torch.inf)
    largest_B2 = largest.scatter_reduce(0, sequence_T2, logits.detach(), "amax")
    shares_T2 = (logits - largest_B2.gather(0, sequence_T2)).exp()
    normaliser_B2 = logits.new_zeros(num_sequences, 2).scatter_add(0, sequence_T2, shares_T2).log() + largest_B2
    is_labelled_B1 = labels[:, :1] != UNLABELLED
    places_B2 = torch.where(is_labelled_B1, labels, 0) + boundaries[:-1].unsqueeze(1)
    losses_B2 = normaliser_B2 - logits.gather(0, places_B2)
    return (losses_B2 * is_labelled_B1).sum() / 2


LOSSES: dict[Problem, Loss] = {
    "classification": cross_entropy_sum,
    "regression": squared_error_sum,
    "multi_label_classification": binary_cross_entropy_sum,
    "token_classification": cross_entropy_sum,
    "question_answering": span_cross_entropy_sum,
}
"""Problem of the task -> loss."""
