"""Updates: from the gradients of a backward pass to new weights, on one rank or over several."""

from __future__ import annotations

import math
from typing import Protocol

from torch import nn

from fleetune.comm.sync import Gradients
from fleetune.kernels.library import raw_ops
from fleetune.train.optim import AdamW


class GradientSource(Protocol):
    """Where an update's gradients come from."""

    @property
    def num_stages(self) -> int:
        """How many parts they come in."""

    def begin(self, step: int) -> None:
        """The next backward is the last of the update of a step."""

    def squared_norm(self) -> float:
        """This rank's share of the squared norm, after backward."""

    def of_stage(self, stage: int) -> Gradients:
        """The gradients of a stage, summed over ranks."""

    def lines(self) -> list[str]:
        """How they travel, a line for each thing to know."""


class OwnGradients:
    """The gradients of a single rank: all there when backward is over.

    Args:
        parameters: Those that are trained.
    """

    num_stages = 1

    def __init__(self, parameters: list[nn.Parameter]) -> None:
        self._parameters = parameters

    def begin(self, step: int) -> None:
        """There is nobody to tell."""

    def squared_norm(self) -> float:
        """Of all gradients."""
        grads = []
        for parameter in self._parameters:
            if parameter.grad is not None:
                if parameter.grad.is_sparse:
                    parameter.grad = parameter.grad.coalesce()
                grads.append(parameter.grad.values() if parameter.grad.is_sparse else parameter.grad)
        return float(raw_ops().squared_norm(grads).item()) if grads else 0.0

    def of_stage(self, stage: int) -> Gradients:
        """All of them, cleared from the parameters."""
        for parameter in self._parameters:
            grad, parameter.grad = parameter.grad, None
            if grad is not None:
                yield parameter, grad

    def lines(self) -> list[str]:
        """They do not travel."""
        return []


class Updates:
    """Turns gradients into updates; a stage whose gradients are still on their way is updated when it is needed.

    Args:
        optimizer: What updates.
        gradients: Where they come from.
    """

    def __init__(self, optimizer: AdamW, gradients: GradientSource) -> None:
        self._optimizer, self._gradients = optimizer, gradients
        self._open: set[int] = set()

    def expect(self, step: int) -> None:
        """The next backward is the last of the update of a step."""
        self.settle()
        self._gradients.begin(step)

    def lines(self) -> list[str]:
        """How gradients travel, for the plan."""
        return self._gradients.lines()

    def squared_norm(self) -> float:
        """This rank's share of the squared norm of the gradients; their sum over ranks is that of all."""
        return self._gradients.squared_norm()

    def begin(self, learning_rate: float, squared_norm: float, max_grad_norm: float) -> float:
        """Begin the update.

        Returns:
            The norm before clipping.
        """
        norm = math.sqrt(squared_norm)
        self._optimizer.begin(learning_rate, norm, max_grad_norm)
        self._open = set(range(self._gradients.num_stages))
        if self._gradients.num_stages == 1:
            self.settle()
        return norm

    def settle_stage(self, stage: int) -> None:
        """Make sure that a stage's parameters are up to date; the model calls it before it uses them."""
        if stage in self._open:
            self._open.remove(stage)
            self._optimizer.apply(self._gradients.of_stage(stage))

    def settle(self) -> None:
        """Make sure that all parameters are up to date."""
        for stage in sorted(self._open):
            self.settle_stage(stage)
