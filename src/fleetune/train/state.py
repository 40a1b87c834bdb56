"""What changes while a run goes on, besides weights and optimizer: the step, the best evaluation, the history."""

from __future__ import annotations

from dataclasses import asdict, dataclass, field
from typing import Any


@dataclass(kw_only=True)
class TrainState:
    """Progress of a run. Everything else follows from the settings and the step."""

    step: int = 0
    """Updates done."""
    best_metric: float | None = None
    best_step: int | None = None
    """Step of the evaluation with the best metric."""
    num_stale: int = 0
    """Evaluations in a row that were no better than the best before them, by more than a threshold."""
    recent_losses: list[float] = field(default_factory=list)
    """Mean loss of each update since the last log line."""
    log_history: list[dict[str, Any]] = field(default_factory=list)
    """Log lines as transformers writes them: loss, learning_rate, grad_norm, epoch, step, and eval_* metrics."""

    def to_dict(self) -> dict[str, Any]:
        return asdict(self)

    def has_evaluated(self) -> bool:
        """Whether the weights of this step have been evaluated."""
        return any(entry["step"] == self.step and "eval_loss" in entry for entry in reversed(self.log_history))

    def take_mean_loss(self) -> float:
        """Mean loss of the updates since the last log line, which begins a new one."""
        mean = sum(self.recent_losses) / len(self.recent_losses)
        self.recent_losses = []
        return mean

    def note_evaluation(self, value: float | None, greater_is_better: bool, threshold: float) -> None:
        """Count evaluations without an improvement, as transformers' `EarlyStoppingCallback` does.

        To be called before the best metric is set.

        Args:
            value: The metric; an undefined one is no improvement.
            greater_is_better: Whether more of it is better.
            threshold: By how much more it must be so.
        """
        best = self.best_metric
        improves = value is not None and (
            best is None or (self.is_new_best(value, greater_is_better) and abs(value - best) > threshold)
        )
        self.num_stale = 0 if improves else self.num_stale + 1

    def is_new_best(self, value: float | None, greater_is_better: bool) -> bool:
        """Whether a metric beats the best so far; an undefined one never does."""
        if value is None:
            return False
        return self.best_metric is None or (value > self.best_metric if greater_is_better else value < self.best_metric)
