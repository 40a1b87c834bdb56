"""The ranks of a run as one object: who this rank is, and the few things that ranks say to each other.

With a world of one, every method does its work locally and no process group exists.
"""

from __future__ import annotations

import functools
import json
import os
import signal
import threading
import zlib
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed import PrefixStore, Store  # type: ignore[attr-defined]
from torch.distributed.rendezvous import rendezvous

from fleetune.cluster.rank import RankInfo, as_environment
from fleetune.comm.hosts import meet
from fleetune.comm.sync import GradientSync, SyncOptions, Table
from fleetune.errors import FleetuneError, PeerError

_PATIENCE = timedelta(
    days=7
)  # for work that only the first rank does, such as tokenising; its death is noticed at once


class Ranks:
    """This rank and its peers.

    Args:
        info: Who this rank is; None for a single process.
        store: The key-value store that all ranks share; None for a single process.
    """

    def __init__(self, info: RankInfo | None, store: Store | None) -> None:
        self.rank = 0 if info is None else info.rank
        self.world_size = 1 if info is None else info.world_size
        self.local_world_size = 1 if info is None else info.local_world_size
        self.has_own_launcher = info is not None and info.is_ours
        self._store = store
        self._num_turns = self._num_syncs = 0

    @property
    def is_first(self) -> bool:
        """Whether this is rank 0, the one that speaks and writes."""
        return self.rank == 0

    def on_first(self, work: Callable[[], Any]) -> Any:
        """Let the first rank work while the others wait, and give its JSON-ready result to all.

        Raises:
            PeerError: On the other ranks, when the work failed on the first, which raises the failure itself.
        """
        if self._store is None:
            return work()
        self._num_turns += 1
        key = f"turn/{self._num_turns}"
        if self.is_first:
            return self._work_and_tell(key, work)
        self._store.wait([key], _PATIENCE)
        told = json.loads(self._store.get(key))
        if "failed" in told:
            raise PeerError(told["failed"])
        return told["result"]

    def _work_and_tell(self, key: str, work: Callable[[], Any]) -> Any:
        assert self._store is not None
        try:
            result = work()
        except BaseException as error:
            self._store.set(key, json.dumps({"failed": f"rank 0: {error!r}"}))
            raise
        self._store.set(key, json.dumps({"result": result}))
        return result

    def raise_once(self, failure: Exception | None) -> None:
        """Raise what this rank failed with before the ranks met, if it did; where the first failed, it speaks for all.

        Raises:
            PeerError: On the other ranks, when the first one failed.
        """

        def raise_own() -> None:
            if failure is not None:
                raise failure

        self.on_first(raise_own)
        raise_own()

    def start_sum(self, values: Tensor) -> Callable[[], Tensor]:
        """Start to add up a small tensor over ranks, in place; the returned function waits for the result."""
        if self._store is None:
            return lambda: values
        work = dist.all_reduce(values, async_op=True)

        def wait() -> Tensor:
            work.wait()
            return values

        return wait

    def gather(self, value: Tensor) -> list[Tensor] | None:
        """The tensors of all ranks, which may differ in their first dimension, on the first rank; None elsewhere."""
        if self._store is None:
            return [value]
        sizes = torch.zeros(self.world_size, dtype=torch.int64)
        sizes[self.rank] = value.shape[0]
        dist.all_reduce(sizes)
        padded = value.new_zeros((int(sizes.max()), *value.shape[1:]))
        padded[: value.shape[0]] = value
        received = [torch.empty_like(padded) for _ in range(self.world_size)] if self.is_first else None
        dist.gather(padded, received, dst=0)
        return None if received is None else [x[: int(n)] for x, n in zip(received, sizes, strict=True)]

    def broadcast_if_different(self, tensors: Iterable[Tensor]) -> None:
        """Overwrite the tensors of every rank with those of the first, if any rank has others."""
        if self._store is None:
            return
        mine = list(tensors)
        digest = functools.reduce(lambda value, x: zlib.crc32(x.contiguous().numpy().data, value), mine, 0)
        digests = torch.zeros(self.world_size, dtype=torch.int64)
        digests[self.rank] = digest
        dist.all_reduce(digests)
        if len(set(digests.tolist())) > 1:
            self.broadcast(mine)

    def sync(self, parameters: Sequence[nn.Parameter], stages: Sequence[int], table: Table | None,
             options: SyncOptions) -> GradientSync:  # fmt: skip
        """What adds gradients up over these ranks; see `GradientSync`."""
        assert self._store is not None
        self._num_syncs += 1
        store = PrefixStore(f"sync/{self._num_syncs}", self._store)
        team = meet(store, self.rank, self.world_size)
        return GradientSync(parameters, stages, table, team, store, options)

    def broadcast(self, tensors: Iterable[Tensor]) -> None:
        """Overwrite the tensors of every rank with those of the first."""
        if self._store is not None:
            for tensor in tensors:
                dist.broadcast(tensor, src=0)


@contextmanager
def joined_ranks(info: RankInfo | None, timeout_s: float, failure: Exception | None = None) -> Iterator[Ranks]:
    """Join the process group of the run for the time of a `with` block; a world of one needs none.

    Args:
        info: Who this rank is; None when no launcher started it.
        timeout_s: How long a rank waits for another in one exchange, seconds.
        failure: What this rank failed with before, which is raised as soon as its peers can know.

    Raises:
        PeerError: The first rank failed before.
    """
    if info is None or info.world_size == 1:
        ranks = Ranks(None, None)
        ranks.raise_once(failure)
        yield ranks
        return
    os.environ.update(as_environment(info))
    if info.local_world_size == info.world_size:  # all on this host: a host name that resolves oddly does no harm
        os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")
    timeout = timedelta(seconds=timeout_s)
    with _ended_by_ctrl_c():
        store, rank, world_size = next(iter(rendezvous("env://", timeout=timeout)))
        group_store = PrefixStore("gloo", store)
        dist.init_process_group("gloo", store=group_store, rank=rank, world_size=world_size, timeout=timeout)
        try:
            ranks = Ranks(info, PrefixStore("fleetune", store))
            ranks.raise_once(failure)
            yield ranks
            dist.barrier()  # the first rank holds the store: it must not leave while others still read
        finally:
            dist.destroy_process_group()


@contextmanager
def _ended_by_ctrl_c() -> Iterator[None]:
    """Let the kernel end the process on Ctrl-C: a rank that waits for another inside torch runs no Python handler."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    before = signal.signal(signal.SIGINT, signal.SIG_DFL)
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, before)


def is_peer_loss(error: BaseException) -> bool:
    """Whether an error only says that another rank is gone: that rank has the reason."""
    lost = isinstance(error, (dist.DistNetworkError, dist.DistStoreError))
    words = ("Connection closed by peer", "Connection reset by peer", "Broken pipe", "Socket closed")
    return not isinstance(error, FleetuneError) and (
        lost or (isinstance(error, RuntimeError) and any(word in str(error) for word in words))
    )
