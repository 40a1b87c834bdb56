"""One bucket of gradients on its way: packed, added up over all ranks, gathered.

Within a host, every rank writes its gradient into memory that all of them see, and adds one part of it up. Between
hosts, the first rank of each sends every other its share of the sum (an all-to-all), adds up what it receives, and
sends its share to all (an all-gather): as many bytes as a ring needs. The order of the additions is that of the ranks,
so that every rank ends with the same numbers, bit for bit.
"""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import Future

import torch
import torch.distributed as dist
from torch import Tensor

from fleetune.comm.buckets import padded
from fleetune.comm.hosts import SharedMemory, Team
from fleetune.kernels.library import raw_ops

Finish = Callable[[], None]
"""Waits for an exchange that was started, and does what comes after it."""


class Rounding:
    """bfloat16 for the wire with error feedback: what rounding loses is added before it rounds the next time.

    1-bit SGD (Seide et al. 2014) is where the feedback comes from. Both exchanges round: a host its sum, and the host
    that adds a share up the sum of that.

    Args:
        room: Numbers of a bucket.
        num_hosts: How many share it.
    """

    def __init__(self, room: int, num_hosts: int) -> None:
        self.rounded = torch.zeros(room, dtype=torch.bfloat16)
        self._share = torch.zeros(room // num_hosts, dtype=torch.bfloat16)
        self._lost, self._share_lost = torch.zeros(room), torch.zeros(room // num_hosts)

    def round_whole(self, numbers: Tensor) -> Tensor:
        """What a host sends of its own sum."""
        return self._round(numbers, self._lost, self.rounded)

    def round_share(self, numbers: Tensor) -> Tensor:
        """What a host sends of the share that it added up."""
        return self._round(numbers, self._share_lost, self._share)

    @staticmethod
    def _round(numbers: Tensor, lost: Tensor, rounded: Tensor) -> Tensor:
        count = len(numbers)
        raw_ops().round_with_feedback_(numbers, lost[:count], rounded[:count])
        return rounded[:count]


class Bucket:
    """Gradients that travel together.

    Args:
        number: Of the bucket, from 0.
        room: Numbers it holds at most.
        team: The ranks of this host.
        dtype: What crosses the network: float32 or bfloat16.
        group: The first ranks of all hosts; None on the others, and with one host.
        memory: What this host's ranks share; None if there is one rank.
        offset: Where the bucket begins in that memory.
    """

    def __init__(self, number: int, room: int, team: Team, dtype: torch.dtype, group: dist.ProcessGroup | None,
                 memory: SharedMemory | None, offset: int) -> None:  # fmt: skip
        self._number, self._team, self._group, self._memory = number, team, group, memory
        self._room = padded(room, len(team.hosts) * team.size)
        if memory is None:
            self._slots = self._result = torch.empty(self._room)
        else:
            space = memory.numbers[offset : offset + self.numbers_needed(room, team)].view(team.size + 1, -1)
            self._slots, self._result = space[:-1].view(-1), space[-1]
        wired = group is not None and dtype == torch.bfloat16
        self._rounding = Rounding(self._room, len(team.hosts)) if wired else None
        self._time = 0
        self._squares = 0.0
        self._count = 0

    @staticmethod
    def numbers_needed(room: int, team: Team) -> int:
        """Of the memory that a host's ranks share: one slot for each, and the sum."""
        return (team.size + 1) * padded(room, len(team.hosts) * team.size)

    # ---- the rank that computes

    def begin(self, count: int) -> Tensor:
        """Start an update: the place to pack `count` numbers into."""
        self._time += 1
        self._count = padded(count, len(self._team.hosts) * self._team.size)
        self.packed: Future[None] = Future()
        self.reduced: Future[float] = Future()
        self.gathered: Future[None] = Future()
        own = self._slots.view(self._team.size if self._memory else 1, -1)[self._team.index if self._memory else 0]
        own[count : self._count].zero_()
        return own[:count]

    def pack_done(self) -> None:
        """All numbers of this rank are in their place."""
        if self._memory is not None:
            self._memory.count_up(3 * self._number, self._time)
        self.packed.set_result(None)

    @property
    def total(self) -> Tensor:
        """The sum over all ranks, once it is gathered."""
        return self._result

    # ---- the rank's thread that communicates

    def start_reduce(self) -> Finish:
        """Wait for the gradients of this host's ranks, and start to add them up over hosts."""
        self.packed.result()
        squares = self._add_up_host()
        if not self._crosses:
            return lambda: self.reduced.set_result(squares)
        if self._memory is not None:
            self._memory.wait(3 * self._number + 1, self._time)
        sent = self._result[: self._count]
        if self._rounding is not None:
            sent = self._rounding.round_whole(sent)
        received = torch.empty_like(sent)
        work = dist.all_to_all_single(received, sent, group=self._group, async_op=True)

        def finish() -> None:
            work.wait()
            own = self._own(self._result)
            self.reduced.set_result(raw_ops().sum_parts_(received.view(len(self._team.hosts), -1), own))

        return finish

    def start_gather(self) -> Finish:
        """Start to collect the sums of all hosts; the bucket is reduced."""
        if not self._crosses:
            return self._await_result
        total = self._result[: self._count]
        own, received = self._own(total), total
        if self._rounding is not None:
            own, received = self._rounding.round_share(own), self._rounding.rounded[: self._count]
        work = dist.all_gather_into_tensor(received, own.clone(), group=self._group, async_op=True)

        def finish() -> None:
            work.wait()
            if self._rounding is not None:
                raw_ops().sum_parts_(received.view(1, -1), total)
            if self._memory is not None:
                self._memory.count_up(3 * self._number + 2, self._time)
            self.gathered.set_result(None)

        return finish

    @property
    def _crosses(self) -> bool:
        """Whether this rank speaks with other hosts."""
        return self._group is not None

    def _own(self, numbers: Tensor) -> Tensor:
        """This host's share of the numbers."""
        share = self._count // len(self._team.hosts)
        return numbers[self._team.host * share : (self._team.host + 1) * share]

    def _add_up_host(self) -> float:
        """This rank's part of the sum over its host; the squares of it."""
        if self._memory is None:
            return 0.0
        self._memory.wait(3 * self._number, self._time)
        part = self._count // self._team.size
        begin = self._team.index * part
        slots = self._slots.view(self._team.size, -1)[:, begin : begin + part]
        squares: float = raw_ops().sum_parts_(slots, self._result[begin : begin + part])
        self._memory.count_up(3 * self._number + 1, self._time)
        return squares if len(self._team.hosts) == 1 else 0.0

    def _await_result(self) -> None:
        assert self._memory is not None
        if len(self._team.hosts) == 1:
            self._memory.wait(3 * self._number + 1, self._time)
        else:
            self._memory.wait(3 * self._number + 2, self._time, leader_only=True)
        self.gathered.set_result(None)
