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
from dataclasses import replace
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed import PrefixStore, Store  # type: ignore[attr-defined]

from fleetune.cluster.network import DEFAULT_PORTS, free_port, interface_of, interfaces, parse_ports
from fleetune.cluster.rank import RankInfo, as_environment
from fleetune.comm.comparison import check_alone, differences_in_words
from fleetune.comm.hosts import meet
from fleetune.comm.meeting import (
    GLOO_INTERFACE,
    MeetingPoint,
    agent_serves,
    choose_interface,
    meeting_point,
    open_store,
)
from fleetune.comm.roll import call_roll, let_hear, wait_for
from fleetune.comm.roster import Roster, own_facts
from fleetune.comm.sync import GradientSync, SyncOptions, Table
from fleetune.config import RunConfig
from fleetune.errors import FleetuneError, LaunchError, PeerError
from fleetune.kernels.library import failure_to_load, load_kernels
from fleetune.timing.clocks import RankClocks

_PATIENCE = timedelta(
    days=7
)  # for work that only the first rank does, such as tokenising; its death is noticed at once


class Ranks:
    """This rank and its peers.

    Args:
        info: Who this rank is; None for a single process.
        store: The key-value store that all ranks share; None for a single process.
        roster: All ranks; None for a single process that nobody asked about.
    """

    def __init__(self, info: RankInfo | None, store: Store | None, roster: Roster | None = None) -> None:
        self.rank = 0 if info is None else info.rank
        self.world_size = 1 if info is None else info.world_size
        self.local_world_size = 1 if info is None else info.local_world_size
        self.has_own_launcher = info is not None and info.is_ours
        self.roster = Roster(members=()) if roster is None else roster
        self._store = store
        self._num_turns = self._num_syncs = self._num_agreements = 0

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

    @property
    def has_several_hosts(self) -> bool:
        """Whether ranks are on more than one host."""
        return len(self.roster.hosts) > 1

    def tell_all(self, value: Any) -> list[Any]:
        """The JSON-ready values of all ranks, on all ranks."""
        if self._store is None:
            return [value]
        self._num_agreements += 1
        key = f"told/{self._num_agreements}"
        self._store.set(f"{key}/{self.rank}", json.dumps(value))
        if self.is_first:
            keys = [f"{key}/{rank}" for rank in range(self.world_size)]
            self._store.wait(keys, _PATIENCE)
            texts = [text.decode() for text in self._store.multi_get(keys)]
            self._store.set(key, f"[{','.join(texts)}]")
        self._store.wait([key], _PATIENCE)
        told: list[Any] = json.loads(self._store.get(key))
        return told

    def raise_any(self, failure: FleetuneError | None) -> None:
        """Let the lowest rank that has failed raise that, and the others end without a word.

        Args:
            failure: What this rank failed with, if it did.

        Raises:
            PeerError: Another rank failed, and says why itself.
        """
        try:
            told = self.tell_all(None if failure is None else str(failure))
        except RuntimeError:  # the store is gone
            if failure is not None:
                raise failure from None
            raise
        failed = [rank for rank, text in enumerate(told) if text is not None]
        if not failed:
            return
        self._hear_out()
        if failure is not None and failed[0] == self.rank:
            raise failure
        raise PeerError(f"rank {failed[0]}: {told[failed[0]]}")

    def _hear_out(self) -> None:
        """Do not let the first rank, which may hold the store, leave before all have read why the run ends."""
        if self._store is not None:
            let_hear(self._store, f"heard/{self._num_agreements}", self.world_size, is_first=self.is_first)

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
             options: SyncOptions, clocks: RankClocks) -> GradientSync:  # fmt: skip
        """What adds gradients up over these ranks; see `GradientSync`."""
        assert self._store is not None
        self._num_syncs += 1
        store = PrefixStore(f"sync/{self._num_syncs}", self._store)
        team = meet(store, self.rank, self.world_size)
        return GradientSync(parameters, stages, table, team, store, options, clocks)

    def broadcast(self, tensors: Iterable[Tensor]) -> None:
        """Overwrite the tensors of every rank with those of the first."""
        if self._store is not None:
            for tensor in tensors:
                dist.broadcast(tensor, src=0)


@contextmanager
def joined_ranks(
    info: RankInfo | None, config: RunConfig, say: Callable[[str], None], *, threads: int | None = None,
    clocks: RankClocks | None = None,
) -> Iterator[Ranks]:  # fmt: skip
    """Meet the other ranks, load the kernels, and join the process group for the time of a `with` block.

    Args:
        info: Who this rank is; None when no launcher started it.
        config: The settings: what was asked for, how long to wait, and what must be equal on all ranks.
        say: Told, on the first rank, how hosts differ, and what is to be said of the kernels.
        threads: Of this rank, where that is known already.
        clocks: Told how long it takes to meet, and to load the kernels.

    Raises:
        LaunchError: The ranks cannot meet, or are not those that were asked for.
        ConfigError: They have other settings.
        KernelError: The kernels were asked for, and cannot be had.
        PeerError: Another rank failed.
    """
    clocks = clocks or RankClocks()
    if info is None or info.world_size == 1:
        roster = check_alone(own_facts(info, config, address=None, threads=threads), config)
        with clocks.during("compiling"):
            failure = failure_to_load(say)
        if failure is not None:
            raise failure
        yield Ranks(None, None, roster.with_kernels([load_kernels().name]))
        return
    has_group = dist.is_initialized()
    if has_group:
        info = _beside_the_group(info, config)
    else:
        os.environ.update(as_environment(info))
    with _ended_by_ctrl_c():
        with clocks.during("meeting"):
            store, ranks = _meet_others(info, config, say, threads, clocks)
        timeout = timedelta(seconds=config.ddp_timeout)
        if not has_group:
            with clocks.during("meeting"):
                dist.init_process_group("gloo", store=PrefixStore("gloo", store), rank=info.rank,
                                        world_size=info.world_size, timeout=timeout)  # fmt: skip
        try:
            yield ranks
            dist.barrier()  # the first rank holds the store: it must not leave while others still read
        finally:
            if not has_group:
                dist.destroy_process_group()


def _beside_the_group(info: RankInfo, config: RunConfig) -> RankInfo:
    """This rank with a port of its own to meet at: that of the caller's process group, which is used, is taken.

    So is it where a script has called `init_process_group` before `finetune`, and in a worker of Ray's TorchTrainer.

    Raises:
        LaunchError: The group is of other ranks than the launcher's variables say, or no port is free.
    """
    if (dist.get_rank(), dist.get_world_size()) != (info.rank, info.world_size):
        raise LaunchError(
            f"torch.distributed is initialised as rank {dist.get_rank()} of {dist.get_world_size()}, but the "
            f"launcher's variables say rank {info.rank} of {info.world_size}: initialise it with those, or leave that "
            "to fleetune"
        )
    if agent_serves(os.environ):  # for any number of groups
        return info
    ports = DEFAULT_PORTS if config.port_range is None else parse_ports(config.port_range)
    port = torch.tensor([free_port("", ports) if info.rank == 0 else 0])
    dist.broadcast(port, src=0)
    return replace(info, main_port=int(port))


def _meet_others(
    info: RankInfo, config: RunConfig, say: Callable[[str], None], threads: int | None, clocks: RankClocks
) -> tuple[Store, Ranks]:
    """The store of all ranks, and the ranks: those that were asked for, with their kernels loaded."""
    point = meeting_point(info, config.network, os.environ)
    store = open_store(
        info, point, timeout_s=config.timeout_s, exchange_timeout_s=config.ddp_timeout, environ=os.environ
    )
    facts = own_facts(info, config, address=_own_address(info, point, config.network), threads=threads)
    if info.rank == 0 and point.notice is not None:
        say(point.notice)
    roster = call_roll(store, facts, config, config.timeout_s)
    # Only now: compiling takes its time, and ranks are waited for no longer than --timeout_s.
    with clocks.during("compiling"):
        failure = failure_to_load(say)
        _hear_of_kernels(store, roster, info.rank, failure, config.ddp_timeout)
    ranks = Ranks(info, PrefixStore("fleetune", store), roster)
    ranks.raise_any(failure)
    ranks.roster = roster.with_kernels(ranks.tell_all(load_kernels().name))
    if ranks.is_first:
        for line in differences_in_words(ranks.roster, config):
            say(line)
    _choose_interface(info, point, ranks.roster, config.network)
    return store, ranks


def _hear_of_kernels(store: Store, roster: Roster, rank: int, failure: Exception | None, patience_s: float) -> None:
    """Wait until all ranks have loaded the kernels, or failed to."""
    store.set(f"loaded/{rank}", "" if failure is None else str(failure))
    if rank == 0:
        late = wait_for(store, [f"loaded/{r}" for r in range(len(roster.members))], patience_s)
        if late:
            rank = int(late[0].rpartition("/")[2])
            raise LaunchError(
                f"{roster.host_name(rank)} (rank {rank}) did not load its kernels within {patience_s:g} s"
            )


def _own_address(info: RankInfo, point: MeetingPoint, network: str | None) -> str | None:
    """The address by which other hosts know this one; None where all ranks are here, or it cannot be told yet."""
    if info.local_world_size == info.world_size or point.is_everywhere:
        return None
    among = interfaces()
    if interface_of(point.addresses[0], among) is not None and network is None:
        return point.addresses[0]
    name = choose_interface(point.addresses[0], network, among)
    return next((interface.address for interface in among if interface.name == name), None)


def _choose_interface(info: RankInfo, point: MeetingPoint, roster: Roster, network: str | None) -> None:
    """Tell gloo which interface leads to the other hosts, where the user has not: it would go by the host's name."""
    if os.environ.get(GLOO_INTERFACE):
        return
    if len(roster.hosts) == 1 or info.local_world_size == info.world_size:
        os.environ[GLOO_INTERFACE] = "lo"
        return
    towards: str | None = point.addresses[0]
    if roster.lead_of(info.rank) == 0:  # the first rank's host: the others say where they are
        towards = next((m.address for m in roster.members if m.place != roster.members[0].place and m.address), None)
    if towards is not None and (name := choose_interface(towards, network)) is not None:
        os.environ[GLOO_INTERFACE] = name


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
