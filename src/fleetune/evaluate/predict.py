"""Logits for every example of a split: computed once each, by whichever rank, in the same batches for any world."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn

from fleetune.comm.ranks import Ranks
from fleetune.data.batches import CostModel, pack, sorted_batches, split_by_cost
from fleetune.data.tokens import TokenTable

FloatArray = NDArray[np.float32]


class PredictionStopped(Exception):  # noqa: N818 - an outcome, not an error
    """A rank was asked to stop while predicting; raised on all ranks."""


@dataclass(frozen=True, kw_only=True)
class Predictor:
    """What turns a split into logits."""

    model: nn.Module
    """Forward takes a `PackedBatch` and gives logits (B, C), or (T, C)."""
    num_labels: int
    per_token: bool = False
    """Whether there are logits for each token."""
    ranks: Ranks
    batch_size: int
    costs: CostModel
    should_stop: Callable[[], bool] = lambda: False

    def logits(self, table: TokenTable, progress: Callable[[int], None] = lambda done: None) -> FloatArray | None:
        """Logits of all examples, in the split's order, on the first rank, None elsewhere: float32 (N, C), or (T, C).

        Args:
            table: The split.
            progress: Told, on every rank, how many of that rank's examples are done.

        Raises:
            PredictionStopped: `should_stop` said so on some rank.
        """
        batches = list(sorted_batches(table.lengths, self.batch_size))
        costs = np.array([self.costs.of(table.lengths[b]).sum() for b in batches])
        mine = [batches[i] for i in split_by_cost(costs, self.ranks.world_size)[self.ranks.rank]]
        examples, logits, stopped = self._run(table, mine, progress)
        num_stopped = self.ranks.start_sum(torch.tensor([float(stopped)]))()
        if num_stopped.item() > 0:
            raise PredictionStopped
        return self._assemble(table, self.ranks.gather(examples), self.ranks.gather(logits))

    def _run(
        self, table: TokenTable, batches: list[Any], progress: Callable[[int], None]
    ) -> tuple[Tensor, Tensor, bool]:
        was_training = self.model.training
        self.model.eval()
        examples, logits = [torch.empty(0, dtype=torch.int64)], [torch.empty(0, self.num_labels)]
        with torch.inference_mode():
            for batch in batches:
                if self.should_stop():
                    break
                logits.append(self.model(pack(table, batch)))
                examples.append(torch.from_numpy(batch))
                progress(sum(len(e) for e in examples))
        self.model.train(was_training)
        return torch.cat(examples), torch.cat(logits), self.should_stop()

    def _assemble(
        self, table: TokenTable, examples: list[Tensor] | None, logits: list[Tensor] | None
    ) -> FloatArray | None:
        if examples is None or logits is None:
            return None
        order, values = torch.cat(examples), torch.cat(logits)
        assert torch.equal(order.sort().values, torch.arange(len(table))), "every example is predicted exactly once"
        if self.per_token:
            order = _tokens_of(order.numpy(), table)
        result = torch.empty_like(values)
        result[order] = values
        return result.numpy()


def _tokens_of(examples: NDArray[np.int64], table: TokenTable) -> Tensor:
    """The tokens of the examples, one after the other, by their places in the split."""
    places = [np.arange(table.offsets[i], table.offsets[i + 1]) for i in examples]
    return torch.from_numpy(np.concatenate([np.empty(0, np.int64), *places]))
