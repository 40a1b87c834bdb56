"""`TrainingRun`: the parts of one rank's run, put together once and handed to the loop."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from fleetune.comm.ranks import Ranks
from fleetune.config import RunConfig
from fleetune.data.batches import CostModel, GlobalBatches, pack
from fleetune.data.tasks import Task
from fleetune.data.tokens import TokenTable
from fleetune.evaluate.predict import FloatArray
from fleetune.model.flat import FlatClassifier
from fleetune.model.load import Classifier
from fleetune.report.record import RunRecord
from fleetune.report.terminal import Terminal
from fleetune.train.optim import AdamW
from fleetune.train.plan import TrainPlan
from fleetune.train.state import TrainState
from fleetune.train.tracker import NoTracker, Tracker


@dataclass(frozen=True, kw_only=True)
class Evaluation:
    """What the model gave on the validation splits after a step."""

    step: int
    results: dict[str, Any]
    """Metrics, the same on every rank."""
    logits: dict[str, FloatArray]
    """By split, on the first rank."""


@dataclass(kw_only=True)
class TrainingRun:
    """Everything that the training loop works with."""

    config: RunConfig
    plan: TrainPlan
    ranks: Ranks
    task: Task
    train_table: TokenTable
    eval_tables: dict[str, TokenTable]
    """Validation splits, by name; labels are the model's class ids."""
    test_tables: dict[str, TokenTable]
    """Test splits to predict, by name."""
    tokenizer: Any
    classifier: Classifier
    engine: nn.Module
    """The classifier's module, inside DDP when there is more than one rank."""
    optimizer: AdamW
    batches: GlobalBatches
    state: TrainState
    record: RunRecord
    terminal: Terminal
    tracker: Tracker = NoTracker()
    last_evaluation: Evaluation | None = None


def make_batches(table: TokenTable, plan: TrainPlan, seed: int, hidden_size: int) -> GlobalBatches:
    """The global batches of a plan."""
    return GlobalBatches(
        lengths=table.lengths,
        seed=seed,
        global_batch_size=plan.global_batch_size,
        world_size=plan.processes,
        accumulation=plan.accumulation,
        costs=CostModel(hidden_size=hidden_size),
    )


def make_engine(module: nn.Module, table: TokenTable, ranks: Ranks) -> nn.Module:
    """Freeze what the loss does not reach, and wrap the module in DDP when there are peers.

    One backward pass over an empty batch tells which parameters are unused. A second one, through DDP, lets it settle
    its buckets before the first step, so that a resumed run adds gradients up in the same order as one that never
    stopped.
    """
    nothing = pack(table, np.empty(0, np.int64))
    if isinstance(module, FlatClassifier) and ranks.world_size == 1:
        module.word_embeddings.sparse = True  # touched rows only; between ranks the whole table goes, as DDP packs it
    module.train()
    module(nothing).sum().backward()
    for parameter in module.parameters():
        if parameter.grad is None:
            parameter.requires_grad_(False)
        parameter.grad = None
    if ranks.world_size == 1:
        return module
    engine = DistributedDataParallel(module, forward_sync_buffers=False, gradient_as_bucket_view=True)
    for _ in range(2):
        engine(nothing).sum().backward()
        engine.zero_grad(set_to_none=True)
    return engine
