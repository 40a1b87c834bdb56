"""Learning rate as a pure function of the step, so that a resumed run needs no schedule state.

Shapes and names are those of `transformers.get_scheduler`.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass


def _linear(progress: float) -> float:
    return 1.0 - progress


def _cosine(progress: float) -> float:
    return 0.5 * (1.0 + math.cos(math.pi * progress))


def _constant(progress: float) -> float:
    return 1.0


_DECAYS: dict[str, Callable[[float], float]] = {
    "linear": _linear,
    "cosine": _cosine,
    "constant": _constant,
    "constant_with_warmup": _constant,
}
"""Name -> share of the peak rate after a share `progress` of the steps that follow the warm-up."""

_POLYNOMIAL_END = 1e-7


@dataclass(frozen=True, kw_only=True)
class Schedule:
    """The learning rate over a run."""

    name: str
    peak: float
    """Highest learning rate, reached at the end of the warm-up."""
    warmup_steps: int
    total_steps: int

    def at(self, step: int) -> float:
        """Learning rate of an update, counted from 0."""
        if step < self.warmup_steps and self.name != "constant":
            return self.peak * step / max(1, self.warmup_steps)
        if self.name == "inverse_sqrt":
            timescale = self.warmup_steps or 10_000
            return self.peak / math.sqrt((step + timescale - self.warmup_steps) / timescale)
        progress = min(1.0, (step - self.warmup_steps) / max(1, self.total_steps - self.warmup_steps))
        if self.name == "polynomial":
            return (self.peak - _POLYNOMIAL_END) * (1.0 - progress) + _POLYNOMIAL_END
        return self.peak * _DECAYS[self.name](progress)
