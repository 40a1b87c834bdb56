"""Which ranks are on one host: they add gradients up in memory that they share, and one of them crosses the network."""

from __future__ import annotations

import json
import math
import mmap
import os
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch.distributed import Store  # type: ignore[attr-defined]

from fleetune.errors import PeerError
from fleetune.kernels.library import load_kernels, raw_ops

_GLANCE_S = 0.2
"""How often a rank that waits looks whether the one it waits for is still there."""


@dataclass(frozen=True, kw_only=True)
class Team:
    """The ranks of one host, and its place among the hosts."""

    hosts: tuple[tuple[int, ...], ...]
    """The ranks of every host, ascending; a host is named by its first rank."""
    rank: int
    pids: tuple[int, ...]
    """The processes of this host's ranks."""

    @property
    def host(self) -> int:
        """Index of this host."""
        return next(i for i, ranks in enumerate(self.hosts) if self.rank in ranks)

    @property
    def members(self) -> tuple[int, ...]:
        """The ranks of this host."""
        return self.hosts[self.host]

    @property
    def index(self) -> int:
        """Which of this host's ranks this one is."""
        return self.members.index(self.rank)

    @property
    def size(self) -> int:
        """Count of this host's ranks."""
        return len(self.members)

    @property
    def num_shares(self) -> int:
        """What a bucket must be divisible by: into a share for every host, and each into parts for its ranks."""
        return len(self.hosts) * math.lcm(*(len(ranks) for ranks in self.hosts))

    @property
    def leads(self) -> bool:
        """Whether this rank speaks with the other hosts."""
        return self.index == 0

    @property
    def leaders(self) -> list[int]:
        """The rank of every host that speaks with the others."""
        return [ranks[0] for ranks in self.hosts]


def meet(store: Store, rank: int, world_size: int) -> Team:
    """Find out which ranks can share memory with this one: those that see the same processes and may open their files.

    A rank that cannot is a host of its own, and so is every rank where the kernels are not compiled: waiting for each
    other in memory needs them.

    Args:
        store: Of all ranks.
        rank: This one.
        world_size: Count of ranks.
    """
    place = place_of_process() if load_kernels().compiled else f"rank {rank}"
    told = _tell(store, "place", rank, world_size, [place, os.getpid()])
    first = next(r for r in range(world_size) if told[r][0] == place)
    own = place if _can_open_files_of(told[first][1]) else f"rank {rank}"
    places = [place for (place,) in _tell(store, "host", rank, world_size, [own])]
    hosts = tuple(tuple(r for r in range(world_size) if places[r] == place) for place in dict.fromkeys(places))
    mine = next(ranks for ranks in hosts if rank in ranks)
    return Team(hosts=hosts, rank=rank, pids=tuple(told[r][1] for r in mine))


def _tell(store: Store, what: str, rank: int, world_size: int, values: list[Any]) -> list[list[Any]]:
    """Tell all ranks something, and hear it from all."""
    store.set(f"{what}/{rank}", json.dumps(values))
    return [json.loads(store.get(f"{what}/{r}")) for r in range(world_size)]


def place_of_process() -> str:
    """What processes have in common that can open each other's memory: the kernel and the namespace of processes."""
    boot = Path("/proc/sys/kernel/random/boot_id").read_text().strip()
    return f"{boot} {Path('/proc/self/ns/pid').stat().st_ino}"


def _can_open_files_of(pid: int) -> bool:
    try:
        return len(os.listdir(f"/proc/{pid}/fd")) > 0
    except OSError:
        return False


class SharedMemory:
    """Float32 numbers and counters that all ranks of a host see; the counters begin at zero.

    The memory has no name that could be left behind: it is gone when the last rank is. Pages take room when they are
    first written.

    Args:
        team: The ranks of this host.
        store: Of all ranks.
        count: Numbers.
        num_counters: Counters of each rank.
        timeout_s: How long a rank waits for another.
    """

    def __init__(self, team: Team, store: Store, count: int, num_counters: int, timeout_s: float) -> None:
        self._team, self._num_counters, self._timeout_s = team, num_counters, timeout_s
        counter_bytes = -(-4 * num_counters * team.size // 4096) * 4096
        size = counter_bytes + 4 * count
        key = f"memory/{team.host}"
        if team.leads:
            file = os.memfd_create("fleetune")
            os.ftruncate(file, size)
            store.set(key, f"/proc/{os.getpid()}/fd/{file}")
        else:
            file = os.open(store.get(key).decode(), os.O_RDWR)
        memory = mmap.mmap(file, size)
        if not team.leads:
            os.close(file)
        self._counters = torch.frombuffer(memory, dtype=torch.int32, count=num_counters * team.size)
        self.numbers = torch.frombuffer(memory, dtype=torch.float32, offset=counter_bytes, count=count)

    def count_up(self, counter: int, value: int) -> None:
        """Set a counter of this rank, which never falls, and wake who waits for it."""
        raw_ops().count_up_(self._counters, self._team.index * self._num_counters + counter, value)

    def wait(self, counter: int, value: int, *, leader_only: bool = False) -> None:
        """Wait until a counter of all ranks of the host, or of its leader, is at least `value`.

        Raises:
            PeerError: A rank that is waited for is gone, or does not answer.
        """
        end = time.monotonic() + self._timeout_s
        for index in range(1 if leader_only else self._team.size):
            place = index * self._num_counters + counter
            while not raw_ops().wait_for_count(self._counters, place, value, _GLANCE_S):
                rank = self._team.members[index]
                if not _is_alive(self._team.pids[index]):
                    raise PeerError(f"rank {rank} of this host is gone")
                if time.monotonic() > end:
                    raise PeerError(f"rank {rank} of this host did not answer for {self._timeout_s:g} s")


def _is_alive(pid: int) -> bool:
    """Whether a process runs; one that has ended and was not collected yet does not."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] not in ("Z", "X")
    except OSError:
        return False
