"""Updates: from the gradients of a backward pass to new weights, on one rank or over several."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Protocol

import torch
from torch import Tensor, nn

from fleetune.comm.sync import Gradients, GradientSync
from fleetune.kernels.library import raw_ops
from fleetune.timing.clocks import RankClocks
from fleetune.train.optim import AdamW


class GradientSource(Protocol):
    """Where an update's gradients come from."""

    @property
    def num_stages(self) -> int:
        """How many parts they come in."""

    @property
    def bytes_packed(self) -> int:
        """Of this rank's gradients that were added up over ranks, in all updates so far."""

    def begin(self, rows: Tensor | None) -> None:
        """The next backward is the last of an update, in which only these rows of the table of words change."""

    def squared_norm(self) -> float:
        """This rank's share of the squared norm, after backward."""

    def of_stage(self, stage: int) -> Gradients:
        """The gradients of a stage, summed over ranks."""

    def lines(self) -> list[str]:
        """How they travel, a line for each thing to know."""

    def close(self) -> None:
        """No more of them will be asked for."""


RowsOf = Callable[[int], Tensor]


class OwnGradients:
    """The gradients of a single rank: all there when backward is over.

    Args:
        parameters: Those that are trained.
    """

    num_stages = 1
    bytes_packed = 0

    def __init__(self, parameters: Sequence[nn.Parameter]) -> None:
        self._parameters = parameters

    def begin(self, rows: Tensor | None) -> None:
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

    def close(self) -> None:
        """There is nothing to end."""


class Updates:
    """Turns gradients into updates; a stage whose gradients are still on their way is updated when it is needed.

    Args:
        optimizer: What updates.
        gradients: Where they come from.
        rows_of: Step -> the rows of the table of words that the global batch touches; None: it is not asked for them.
        clocks: Told how long the optimizer works.
    """

    def __init__(self, optimizer: AdamW, gradients: GradientSource, rows_of: RowsOf | None = None,
                 clocks: RankClocks | None = None) -> None:  # fmt: skip
        self._clocks = clocks or RankClocks()
        self._optimizer, self._gradients, self._rows_of = optimizer, gradients, rows_of
        self._open: set[int] = set()

    def expect(self, step: int) -> None:
        """The next backward is the last of the update of a step."""
        self.settle()
        rows = None
        if self._rows_of is not None:
            with self._clocks.during("communication"):
                rows = self._rows_of(step)
        self._gradients.begin(rows)

    def lines(self) -> list[str]:
        """How gradients travel, for the plan."""
        return self._gradients.lines()

    @property
    def bytes_packed(self) -> int:
        """Of this rank's gradients that were added up over ranks, in all updates so far."""
        return self._gradients.bytes_packed

    def close(self) -> None:
        """No more updates will come."""
        self._gradients.close()

    def squared_norm(self) -> float:
        """This rank's share of the squared norm of the gradients; their sum over ranks is that of all."""
        with self._clocks.during("optimizer"):
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
            with self._clocks.during("optimizer"):
                self._optimizer.apply(self._gradients.of_stage(stage))

    def settle(self) -> None:
        """Make sure that all parameters are up to date."""
        for stage in sorted(self._open):
            self.settle_stage(stage)


class LocalUpdates:
    """Post-local SGD (Lin et al. 2020): after a beginning together, ranks update alone, and average their weights.

    Every rank keeps moments of its own, which are not averaged. A rank's gradient is that of its own part of the batch:
    an average over that part, where together it is one over the global batch.

    Args:
        together: The updates of the beginning.
        optimizer: What updates.
        sync: What adds up over ranks.
        parameters: Those that are trained.
        table: The one whose gradient is sparse by rows, if there is one.
        rows_of: Step -> the rows of it that the global batch touches.
        world_size: Count of ranks.
        every: Updates between two averages.
        first_step: The first step that ranks take alone.
        clocks: Told how long the optimizer works.
    """

    def __init__(self, together: Updates, optimizer: AdamW, sync: GradientSync, parameters: Sequence[nn.Parameter],
                 table: nn.Parameter | None, rows_of: RowsOf | None, world_size: int, every: int,
                 first_step: int, clocks: RankClocks) -> None:  # fmt: skip
        self._clocks = clocks
        self._together, self._optimizer, self._sync, self._own = together, optimizer, sync, OwnGradients(parameters)
        self._parameters, self._table, self._rows_of = parameters, table, rows_of
        self._world_size, self._every, self._first_step = world_size, every, first_step
        self._touched = None if table is None else torch.zeros(len(table), dtype=torch.bool)
        self._step, self._num_apart, self._own_squared_norm = 0, 0, 0.0

    def expect(self, step: int) -> None:
        """The next backward is the last of the update of a step."""
        self._step = step
        if not self._is_alone:
            self._together.expect(step)

    def squared_norm(self) -> float:
        """A share of the squared norm of the gradients; alone, the shares of all ranks make the mean of their own."""
        if not self._is_alone:
            return self._together.squared_norm()
        with self._clocks.during("optimizer"):
            self._own_squared_norm = self._own.squared_norm()
        return self._own_squared_norm * self._world_size

    def begin(self, learning_rate: float, squared_norm: float, max_grad_norm: float) -> float:
        """Begin the update; average the weights when that is due.

        Returns:
            The norm before clipping; alone, the mean over ranks (root of the mean square).
        """
        if not self._is_alone:
            return self._together.begin(learning_rate, squared_norm, max_grad_norm)
        self._together.settle()
        own_norm = math.sqrt(self._own_squared_norm) * self._world_size
        self._optimizer.begin(learning_rate, own_norm, max_grad_norm, factor=self._world_size)
        with self._clocks.during("optimizer"):
            self._optimizer.apply(self._own.of_stage(0))
        if self._touched is not None and self._rows_of is not None:
            self._touched[self._rows_of(self._step)] = True
        self._num_apart += 1
        if self._num_apart >= self._every:
            self.settle()
        return math.sqrt(squared_norm)

    def settle_stage(self, stage: int) -> None:
        """Make sure that a stage's parameters are up to date."""
        self._together.settle_stage(stage)

    @torch.no_grad()
    def settle(self) -> None:
        """Make sure that all parameters are up to date, and the same on all ranks, which call this together."""
        self._together.settle()
        if self._num_apart == 0:
            return
        self._num_apart = 0
        with self._clocks.during("communication"):
            self._average()

    def _average(self) -> None:
        rows = None if self._touched is None else self._touched.nonzero().squeeze(1)
        for parameter in self._parameters:
            parameter.grad = self._share(parameter, rows)
        self._sync.begin(rows)
        self._sync.squared_norm()  # packs what no backward did
        for stage in range(self._sync.num_stages):
            for parameter, mean in self._sync.of_stage(stage):
                if mean.is_sparse:
                    parameter[mean.indices()[0]] = mean.values()
                else:
                    parameter.copy_(mean)

    def lines(self) -> list[str]:
        """How gradients and weights travel, for the plan."""
        alone = f"from step {self._first_step + 1} on, ranks update alone and average their weights every {self._every}"
        return [*self._together.lines(), f"local steps    {alone} updates"]

    @property
    def bytes_packed(self) -> int:
        """Of this rank's gradients and weights that were added up over ranks, in all updates so far."""
        return self._together.bytes_packed

    def close(self) -> None:
        """No more updates will come."""
        self._together.close()

    @property
    def _is_alone(self) -> bool:
        return self._step >= self._first_step

    def _share(self, parameter: nn.Parameter, rows: Tensor | None) -> Tensor:
        """What a rank adds to the mean; of the table, the rows that any rank has touched alone."""
        if parameter is not self._table or rows is None:
            return parameter / self._world_size
        return torch.sparse_coo_tensor(rows.unsqueeze(0), parameter[rows] / self._world_size, parameter.shape,
                                       is_coalesced=True, check_invariants=False)  # fmt: skip
