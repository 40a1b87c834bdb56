"""One rank of the tests of gradient sync, and what its gradients must add up to.

The model is a table of words, whose rows a batch touches in part, and layers in three stages; its "loss" is made so
that a gradient is a known function of rank, update and micro-batch.
"""

from __future__ import annotations

import json
import os
import sys
import time
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

ROWS, WIDTH = 100, 8
DENSE = {"first.weight": 24 * 8, "first.bias": 24, "second.weight": 5 * 24, "sometimes": 7}
SHAPES = {"first.weight": (24, 8), "first.bias": (24,), "second.weight": (5, 24), "sometimes": (7,)}
STAGES = {"table": 0, "first.weight": 1, "first.bias": 1, "second.weight": 2, "sometimes": 2}
ORDER = ("sometimes", "second.weight", "first.bias", "first.weight", "table")
"""In which backward finishes them."""

Array = NDArray[np.float32]


def own_gradient(name: str, rank: int, update: int, micro_batch: int) -> Array:
    """What a rank's micro-batch adds to a parameter's gradient."""
    draw = np.random.default_rng([len(name), rank, update, micro_batch])
    if name == "sometimes" and micro_batch > 0:
        return np.zeros(SHAPES[name], np.float32)
    return draw.standard_normal(SHAPES[name]).astype(np.float32)


def own_rows(rank: int, update: int, micro_batch: int) -> tuple[NDArray[np.int64], Array]:
    """The rows of the table that a rank's micro-batch touches, and their gradients."""
    draw = np.random.default_rng([99, rank, update, micro_batch])
    rows = np.sort(draw.choice(ROWS, 6 + rank, replace=False))
    return rows, draw.standard_normal((len(rows), WIDTH)).astype(np.float32)


def expected_gradients(world_size: int, update: int, micro_batches: int) -> tuple[dict[str, Any], list[int]]:
    """The sums over ranks and micro-batches, in float64, and the rows of the table that any of them touched."""
    parts = [(rank, micro_batch) for rank in range(world_size) for micro_batch in range(micro_batches)]
    sums = {n: sum(own_gradient(n, r, update, m).astype(np.float64) for r, m in parts) for n in DENSE}
    table = np.zeros((ROWS, WIDTH))
    for rank, micro_batch in parts:
        rows, values = own_rows(rank, update, micro_batch)
        table[rows] += values
    touched = sorted({int(row) for rank, m in parts for row in own_rows(rank, update, m)[0]})
    return {**sums, "table": table}, touched


def main(told: dict[str, Any]) -> None:
    """Be a rank: some updates, and a file of what came out."""
    import torch
    import torch.distributed as dist
    from safetensors.torch import save_file

    from fleetune.comm.hosts import Team
    from fleetune.comm.sync import GradientSync, SyncOptions, Table
    from fleetune.timing.clocks import RankClocks

    hosts, rank, folder = told["hosts"], told["rank"], Path(told["folder"])
    world_size = sum(map(len, hosts))
    micro_batches = told.get("micro_batches", 1)
    store = dist.TCPStore("127.0.0.1", told["port"], world_size, is_master=rank == 0)
    dist.init_process_group("gloo", store=dist.PrefixStore("group", store), rank=rank, world_size=world_size)
    sent = count_sent_bytes(dist)
    store.set(f"pid/{rank}", str(os.getpid()))
    pids = {r: int(store.get(f"pid/{r}")) for r in range(world_size)}
    mine = next(ranks for ranks in hosts if rank in ranks)
    team = Team(hosts=tuple(map(tuple, hosts)), rank=rank, pids=tuple(pids[r] for r in mine))

    def at(update: int) -> int:
        return 0 if told.get("repeats") else update

    shapes = {**SHAPES, "table": (ROWS, WIDTH)}
    parameters = {name: torch.nn.Parameter(torch.zeros(shapes[name])) for name in ORDER}
    table = Table(
        parameter=parameters["table"],
        most_rows=ROWS,
    )
    options = SyncOptions(
        dtype=getattr(torch, told.get("dtype", "float32")), bucket_bytes=told.get("bucket_bytes"),
    )  # fmt: skip
    clocks = RankClocks()
    sync = GradientSync(
        list(parameters.values()), [STAGES[name] for name in ORDER], table, team,
        dist.PrefixStore("sync", store), options, clocks,
    )  # fmt: skip
    sent.clear()
    found: dict[str, torch.Tensor] = {}
    for update in range(told["updates"]):
        for micro_batch in range(micro_batches):
            if micro_batch == micro_batches - 1:
                sync.begin(torch.tensor(expected_gradients(world_size, at(update), micro_batches)[1]))
            backward(parameters, rank, at(update), micro_batch)
        squares = torch.tensor([sync.squared_norm()], dtype=torch.float64)
        dist.all_reduce(squares)
        for stage in range(sync.num_stages):
            for parameter, gradient in sync.of_stage(stage):
                name = next(n for n, p in parameters.items() if p is parameter)
                if name == "table":
                    found[f"{update}/rows"] = gradient.indices()[0].clone()
                found[f"{update}/{name}"] = gradient.to_dense().clone()
        found[f"{update}/squared_norm"] = squares
        if "pause_s" in told:
            (folder / f"began-{rank}").touch()
            found.clear()
            time.sleep(told["pause_s"])
    (folder / f"sent-{rank}.json").write_text(json.dumps(sent))
    counted = {"sent_bytes": clocks.sent_bytes, "worked_ns": clocks.exchange.read_ns(), "hidden_ns": clocks.hidden_ns}
    (folder / f"clocks-{rank}.json").write_text(json.dumps(counted))
    save_file(found, folder / f"rank-{rank}.safetensors")
    sync.close()
    dist.barrier()
    dist.destroy_process_group()


def backward(parameters: dict[str, Any], rank: int, update: int, micro_batch: int) -> None:
    """A backward pass that leaves the gradients of a micro-batch."""
    import torch

    loss = torch.zeros(())
    for name in reversed(ORDER):
        if name == "table":
            rows, values = own_rows(rank, update, micro_batch)
            taken = torch.nn.functional.embedding(torch.from_numpy(rows), parameters[name], sparse=True)
            loss = loss + (taken * torch.from_numpy(values)).sum()
        elif name != "sometimes" or micro_batch == 0:
            gradient = torch.from_numpy(own_gradient(name, rank, update, micro_batch))
            loss = loss + (parameters[name] * gradient).sum()
    loss.backward()


def count_sent_bytes(dist: Any) -> dict[str, int]:
    """Count the bytes handed to `dist.isend`, by bucket."""
    sent: dict[str, int] = {}
    isend = dist.isend

    def counting(tensor: Any, *args: Any, **kwargs: Any) -> Any:
        bucket = str(kwargs.get("tag", 0) // 2)
        sent[bucket] = sent.get(bucket, 0) + tensor.numel() * tensor.element_size()
        return isend(tensor, *args, **kwargs)

    dist.isend = counting
    return sent


if __name__ == "__main__":
    main(json.loads(sys.argv[1]))
