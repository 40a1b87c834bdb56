"""What the link between hosts carries, measured when a run starts."""

from __future__ import annotations

import time
from collections.abc import Sequence

import torch
import torch.distributed as dist
from torch.distributed import Store  # type: ignore[attr-defined]

from fleetune.comm.hosts import Team

_LEAST_S, _MOST_BYTES = 0.1, 32 << 20
"""A block that takes so long, or is so large, tells the rate."""
_BUCKET_S, _LEAST_BUCKET, _MOST_BUCKET = 0.04, 1 << 20, 16 << 20
"""Time of a bucket on the wire, and its limits in bytes: small ones leave early, many cost work of their own."""


def measure_link(team: Team, group: dist.ProcessGroup | None, store: Store) -> float:
    """Bytes a second that every host sends while it receives as many, the slowest of them; the same on all ranks.

    Blocks double until one takes a tenth of a second: the measurement is over in about a quarter of one.

    Args:
        team: The ranks of this host.
        group: The first ranks of all hosts; None on the others.
        store: Of all ranks.
    """
    if group is not None:
        rate = _rate(team.leaders, team.rank, group)
        if team.rank == 0:
            store.set("link", str(rate))
    return float(store.get("link"))


def _rate(leaders: Sequence[int], rank: int, group: dist.ProcessGroup) -> float:
    size = 1 << 16
    while True:
        slowest = torch.tensor([_exchange_s(leaders, rank, group, size)], dtype=torch.float64)
        dist.all_reduce(slowest, dist.ReduceOp.MAX, group=group)
        if slowest.item() >= _LEAST_S or size >= _MOST_BYTES:
            return size * (len(leaders) - 1) / slowest.item()
        size *= 2


def _exchange_s(leaders: Sequence[int], rank: int, group: dist.ProcessGroup, size: int) -> float:
    """Seconds until a block has gone to, and come from, every other host."""
    others = [leader for leader in leaders if leader != rank]
    sent, received = torch.zeros(size, dtype=torch.uint8), torch.empty(len(others), size, dtype=torch.uint8)
    works = [dist.irecv(received[i], other, group=group) for i, other in enumerate(others)]
    dist.barrier(group=group)
    start = time.perf_counter()
    works += [dist.isend(sent, other, group=group) for other in others]
    for work in works:
        if work is not None:
            work.wait()
    return time.perf_counter() - start


def bucket_bytes(link_bytes_per_s: float) -> int:
    """How large a bucket of gradients should be for a link."""
    return min(_MOST_BUCKET, max(_LEAST_BUCKET, int(link_bytes_per_s * _BUCKET_S)))
