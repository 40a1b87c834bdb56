"""One rank of the scaling benchmark: takes turns of updates with each way of exchanging gradients, when it is told to.

Started by `benchmarks.scaling` on every host of the lab. Turns are files in a folder that all hosts see: `turn-N.json`
says what to do, `turn-N-rank-R.json` what came of it.
"""

from __future__ import annotations

import argparse
import json
import time
from abc import ABC, abstractmethod
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from torch.nn.parallel import DistributedDataParallel

from fleetune.cluster.rank import RankInfo
from fleetune.comm.ranks import Ranks, joined_ranks
from fleetune.config import RunConfig
from fleetune.data.batches import pack
from fleetune.files import write_json
from fleetune.hardware.threads import set_threads
from fleetune.model.losses import LOSSES
from fleetune.report.record import RunRecord
from fleetune.report.terminal import PlainTerminal
from fleetune.train.loop import accumulate_gradients
from fleetune.train.program import prepare
from fleetune.train.run import TrainingRun
from fleetune.train.updates import OwnGradients, Updates

CLIPPING = 1.0
POLL_S = 0.02


class Exchange(ABC):
    """A way of exchanging gradients, with a model of its own."""

    def __init__(self, run: TrainingRun) -> None:
        self.run = run

    @abstractmethod
    def update(self) -> float:
        """One update; this rank's share of the loss."""


class OwnSync(Exchange):
    """fleetune's: the training loop's own steps."""

    def update(self) -> float:
        run = self.run
        loss, _ = accumulate_gradients(run)
        told = torch.tensor([run.updates.squared_norm(), loss], dtype=torch.float64)
        squared_norm, global_loss = run.ranks.start_sum(told)().tolist()
        run.updates.begin(run.plan.schedule.at(run.state.step), squared_norm, CLIPPING)
        run.state.step += 1
        return float(global_loss)


class NoSync(OwnSync):
    """Each rank for itself: what an update costs without others."""

    def __init__(self, run: TrainingRun) -> None:
        super().__init__(run)
        parameters = [p for p in run.classifier.module.parameters() if p.requires_grad]
        run.updates = Updates(run.optimizer, OwnGradients(parameters))
        run.classifier.module.before_stage(lambda stage: None)
        self._world = run.ranks

    def update(self) -> float:
        run = self.run
        loss, _ = accumulate_gradients(run)
        run.updates.begin(run.plan.schedule.at(run.state.step), run.updates.squared_norm(), CLIPPING)
        run.state.step += 1
        return loss


class PlainDDP(Exchange):
    """DistributedDataParallel as it comes, around the same kernels, with the same optimizer."""

    def __init__(self, run: TrainingRun) -> None:
        super().__init__(run)
        module = run.classifier.module
        module.word_embeddings.sparse = False
        module.before_stage(lambda stage: None)
        self._updates = Updates(run.optimizer, OwnGradients([p for p in module.parameters() if p.requires_grad]))
        self._engine = DistributedDataParallel(module, forward_sync_buffers=False, gradient_as_bucket_view=True)

    def update(self) -> float:
        run = self.run
        step, rank = run.state.step, run.ranks.rank
        (examples,) = run.batches.micro_batches(step, rank)
        batch = pack(run.train_table, examples)
        run.classifier.module.begin_micro_batch(run.config.seed, step, micro_batch=0, rank=rank)
        assert batch.labels is not None
        loss = LOSSES[run.task.problem](self._engine(batch), batch.labels)
        (loss * (run.ranks.world_size / len(run.batches.examples_of(step)))).backward()
        self._updates.begin(run.plan.schedule.at(step), self._updates.squared_norm(), CLIPPING)
        run.state.step += 1
        return float(run.ranks.start_sum(loss.detach().double().reshape(1))().item())


EXCHANGES: dict[str, tuple[type[Exchange], str]] = {
    "alone": (NoSync, "float32"),
    "ddp": (PlainDDP, "float32"),
    "exact": (OwnSync, "float32"),
    "bfloat16": (OwnSync, "bfloat16"),
}
"""Name -> how gradients are exchanged, and in which type they travel."""


def main(words: Sequence[str] | None = None) -> None:
    """Join the others, put a run together for each exchange, and take turns until told to end."""
    options = parse_options(words)
    info = RankInfo(
        rank=options.rank, world_size=options.world_size, local_rank=0, local_world_size=1,
        main_address=options.master, main_port=options.port, launcher="env",
    )  # fmt: skip
    with joined_ranks(info, RunConfig(ddp_timeout=600, timeout_s=600), print) as ranks:
        threads = set_threads(options.threads, local_world_size=1, speaks=False)
        arms = {name: make(name, RunConfig(**json.loads(options.config)), ranks, threads, options.folder)
                for name in options.exchanges}  # fmt: skip
        number = 0
        while (turn := await_turn(options.folder, number))["exchange"] is not None:
            told = take(arms[turn["exchange"]], turn["steps"], ranks)
            write_json(options.folder / f"turn-{number}-rank-{ranks.rank}.json", told)
            number += 1


def parse_options(words: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.scaling_rank")
    parser.add_argument("--rank", type=int, required=True)
    parser.add_argument("--world_size", type=int, required=True)
    parser.add_argument("--master", required=True)
    parser.add_argument("--port", type=int, required=True)
    parser.add_argument("--threads", type=int, required=True)
    parser.add_argument("--folder", type=Path, required=True)
    parser.add_argument("--config", required=True)
    parser.add_argument("--exchanges", nargs="+", required=True)
    return parser.parse_args(words)


def make(name: str, config: RunConfig, ranks: Ranks, threads: int, folder: Path) -> Exchange:
    """A run of its own for an exchange."""
    kind, grad_dtype = EXCHANGES[name]
    config = config.replace(grad_dtype=grad_dtype, output_dir=folder / f"{name}-{ranks.rank}")
    record = RunRecord(config=config.to_dict())
    return kind(prepare(config, ranks, threads, record, PlainTerminal()))


def await_turn(folder: Path, number: int) -> dict[str, Any]:
    path = folder / f"turn-{number}.json"
    while not path.exists():
        time.sleep(POLL_S)
    turn: dict[str, Any] = json.loads(path.read_text())
    return turn


def take(arm: Exchange, steps: int, ranks: Ranks) -> dict[str, Any]:
    """Some updates, the time of each, and the losses."""
    ranks.start_sum(torch.zeros(1))()  # all begin together
    laps, losses, last = [], [], time.perf_counter()
    cpu_before_s = time.process_time()
    for _ in range(steps):
        losses.append(arm.update())
        now = time.perf_counter()
        laps.append(now - last)
        last = now
    arm.run.updates.settle()
    return {
        "seconds": laps,
        "settle_s": time.perf_counter() - last,
        "losses": losses,
        "cpu_s": (time.process_time() - cpu_before_s) / steps,
    }


if __name__ == "__main__":
    main()
