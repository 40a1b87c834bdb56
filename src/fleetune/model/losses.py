"""Loss of a batch as a sum over its examples: the caller divides by the count of the *global* batch."""

from __future__ import annotations

from collections.abc import Callable

import torch.nn.functional as F
from torch import Tensor


def cross_entropy_sum(logits_BC: Tensor, labels_B: Tensor) -> Tensor:
    """Summed negative log-likelihood of the labels' classes, a scalar."""
    return F.cross_entropy(logits_BC, labels_B, reduction="sum")


def squared_error_sum(logits_B1: Tensor, scores_B: Tensor) -> Tensor:
    """Summed squared error of the predicted scores, a scalar."""
    return F.mse_loss(logits_B1.squeeze(-1), scores_B, reduction="sum")


LOSSES: dict[str, Callable[[Tensor, Tensor], Tensor]] = {
    "classification": cross_entropy_sum,
    "regression": squared_error_sum,
}
"""Problem of the task -> loss."""
