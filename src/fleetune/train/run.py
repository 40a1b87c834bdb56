"""`TrainingRun`: the parts of one rank's run, put together once and handed to the loop."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from fleetune.comm.ranks import Ranks
from fleetune.comm.sync import SyncOptions, Table
from fleetune.config import RunConfig
from fleetune.data.batches import CostModel, GlobalBatches, pack, touched_rows
from fleetune.data.tasks import Task
from fleetune.data.tokens import TokenTable
from fleetune.evaluate.predict import FloatArray
from fleetune.model.flat import FlatClassifier
from fleetune.model.load import Classifier
from fleetune.model.objective import Objective
from fleetune.model.padded import PaddedClassifier
from fleetune.report.record import RunRecord
from fleetune.report.terminal import Terminal
from fleetune.timing.clocks import RankClocks
from fleetune.timing.steps import StepTimes
from fleetune.trackers.tracker import Trackers
from fleetune.train.optim import AdamW
from fleetune.train.plan import TrainPlan
from fleetune.train.state import TrainState
from fleetune.train.updates import LocalUpdates, OwnGradients, RowsOf, Updates

AnyUpdates = Updates | LocalUpdates


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
    objective: Objective
    optimizer: AdamW
    updates: AnyUpdates
    batches: GlobalBatches
    state: TrainState
    record: RunRecord
    terminal: Terminal
    clocks: RankClocks
    times: StepTimes
    tracker: Trackers = Trackers({})
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


def freeze_unused(module: FlatClassifier | PaddedClassifier, table: TokenTable) -> list[nn.Parameter]:
    """Freeze what the loss does not reach: one backward pass over an empty batch tells.

    Returns:
        The other parameters, in the order in which backward finishes them.
    """
    finished: list[nn.Parameter] = []
    hooks = [p.register_post_accumulate_grad_hook(finished.append) for p in module.parameters() if p.requires_grad]
    words = module.word_embeddings
    words.sparse = holders_of(words.weight, module) == 1  # one that is tied to a head has a gradient in every row
    module.train()
    module(pack(table, np.empty(0, np.int64))).sum().backward()
    for hook in hooks:
        hook.remove()
    words.sparse = words.weight.grad is not None and words.weight.grad.is_sparse
    for parameter in module.parameters():
        parameter.requires_grad_(parameter.grad is not None)
        parameter.grad = None
    return finished


def holders_of(parameter: Tensor, module: nn.Module) -> int:
    """How many modules have a parameter as their own."""
    return sum(any(p is parameter for p in m._parameters.values()) for m in module.modules())


def make_updates(classifier: Classifier, table: TokenTable, batches: GlobalBatches, optimizer: AdamW, ranks: Ranks,
                 parameters: list[nn.Parameter], config: RunConfig, plan: TrainPlan,
                 clocks: RankClocks) -> AnyUpdates:  # fmt: skip
    """What turns gradients into updates: of this rank, or of all."""
    module = classifier.module
    trained = [p for p in module.parameters() if p.requires_grad]
    if ranks.world_size == 1:
        return Updates(optimizer, OwnGradients(trained), clocks=clocks)
    words = table_of(module, table, batches, config)
    rows_of = None if words is None else rows_of_steps(module, table, batches)
    stage_of = {p: number for number, stage in enumerate(module.stages) for p in stage}
    ranks.broadcast_if_different(p.data for p in module.parameters())
    sync = ranks.sync(parameters, [stage_of[p] for p in parameters], words, sync_options(config), clocks)
    together = Updates(optimizer, sync, rows_of, clocks)
    module.before_stage(together.settle_stage)
    if config.local_steps == 1:
        return together
    return LocalUpdates(
        together, optimizer, sync, trained, None if words is None else words.parameter, rows_of,
        world_size=ranks.world_size, every=config.local_steps, first_step=plan.warmup_steps,
        clocks=clocks,
    )  # fmt: skip


def rows_of_steps(module: FlatClassifier | PaddedClassifier, table: TokenTable, batches: GlobalBatches) -> RowsOf:
    """Step -> the rows of the table of words that the global batch touches."""
    num_rows = module.word_embeddings.num_embeddings
    return lambda step: touched_rows(table, batches.examples_of(step), module.fills_with, num_rows)


def table_of(module: FlatClassifier | PaddedClassifier, table: TokenTable, batches: GlobalBatches,
             config: RunConfig) -> Table | None:  # fmt: skip
    """The table of words, if its gradient is sparse by rows."""
    words = module.word_embeddings
    if not words.sparse:
        return None
    most = batches.global_batch_size * int(table.lengths.max()) + 1
    if config.local_steps > 1:  # those of many batches
        most = words.num_embeddings
    return Table(parameter=words.weight, most_rows=min(words.num_embeddings, most))  # type: ignore[arg-type]


def sync_options(config: RunConfig) -> SyncOptions:
    """How gradients travel."""
    dtype = torch.bfloat16 if config.grad_dtype == "bfloat16" else torch.float32
    return SyncOptions(dtype=dtype, timeout_s=config.ddp_timeout)
