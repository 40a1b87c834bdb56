"""One bucket of gradients on its way: packed, added up over all ranks, gathered.

Within a host, every rank writes its gradient into memory that all of them see, and adds one part of it up. Between
hosts, the first rank of each sends every other its share of the sum (a reduce-scatter), adds up what it receives, and
sends its share to all (an all-gather): as many bytes as a ring needs. The order of the additions is that of the ranks,
so that every rank ends with the same numbers, bit for bit.

Everything is sent from point to point, to a place that is ready: a collective of gloo begins with a question, whose
answer waits behind the gradients on a busy link.
"""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import Future
from enum import IntEnum

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed import Work

from fleetune.comm.buckets import Phase, padded
from fleetune.comm.hosts import SharedMemory, Team
from fleetune.kernels.library import raw_ops
from fleetune.timing.clock import Work as TimedWork
from fleetune.timing.clocks import RankClocks

Finish = Callable[[], None]
"""Waits for an exchange that was started, and does what comes after it."""


class Counter(IntEnum):
    """What the ranks of a host tell each other about a bucket: the last update for which it is done."""

    PACKED = 0
    ADDED_UP = 1
    GATHERED = 2


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
        clocks: Told how long the rank's thread works on it, and how many bytes it sends.
    """

    def __init__(self, number: int, room: int, team: Team, dtype: torch.dtype, group: dist.ProcessGroup | None,
                 memory: SharedMemory | None, offset: int, clocks: RankClocks) -> None:  # fmt: skip
        self._number, self._team, self._group, self._memory = number, team, group, memory
        self._clocks = clocks
        self._room = padded(room, team.num_shares)
        if memory is None:
            self._slots_LN = torch.empty(1, self._room)
            self._result = self._slots_LN[0]
        else:
            space = memory.numbers[offset : offset + self.numbers_needed(room, team)].view(team.size + 1, -1)
            self._slots_LN, self._result = space[:-1], space[-1]
        self._rounding = Rounding(self._room, len(team.hosts)) if dtype == torch.bfloat16 and group else None
        self._parts = torch.empty(self._room if group else 0, dtype=dtype)
        self._receiving: dict[Phase, list[Work]] = {}
        self._update = self._count = 0

    @staticmethod
    def numbers_needed(room: int, team: Team) -> int:
        """Of the memory that a host's ranks share: one slot for each, and the sum."""
        return (team.size + 1) * padded(room, team.num_shares)

    # ---- the rank that computes

    def begin(self, count: int) -> Tensor:
        """Start an update: the place to pack `count` numbers into."""
        self._update += 1
        self._count = padded(count, self._team.num_shares)
        self.packed: Future[None] = Future()
        self.reduced: Future[float] = Future()
        self.gathered: Future[None] = Future()
        own = self._slots_LN[self._team.index if self._memory else 0]
        own[count : self._count].zero_()
        return own[:count]

    def pack_done(self) -> None:
        """All numbers of this rank are in their place."""
        self._tell(Counter.PACKED)
        self.packed.set_result(None)

    @property
    def total(self) -> Tensor:
        """The sum over all ranks, once it is gathered."""
        return self._result

    # ---- the rank's thread that communicates

    def expect(self, phase: Phase) -> None:
        """Get ready for what other hosts will send: it then waits for nothing.

        What is gathered may lie where a sum is still being sent from: a host sends a share back only after it has
        received it.
        """
        if self._group is not None:
            places = self._parts if phase == "reduce" else self._gathered_into
            self._receiving[phase] = self._each_peer(dist.irecv, places, phase)

    def start_reduce(self) -> Finish:
        """Wait for the gradients of this host's ranks, and start to add them up over hosts."""
        self.packed.result()
        self._await(Counter.PACKED)
        with self._working("reduce"):
            return self._start_reduce()

    def _start_reduce(self) -> Finish:
        squares = self._add_up_host()
        if self._group is None:
            return lambda: self.reduced.set_result(squares)
        self._await(Counter.ADDED_UP)
        sent = self._result[: self._count]
        if self._rounding is not None:
            sent = self._rounding.round_whole(sent)
        sending = self._send(sent, "reduce")

        def finish() -> None:
            self._share(self._parts).copy_(self._share(sent))
            for work in self._receiving["reduce"]:
                work.wait()
            parts = self._parts[: self._count].view(len(self._team.hosts), -1)
            squares = raw_ops().sum_parts_(parts, self._share(self._result))
            for work in sending:
                work.wait()
            self.reduced.set_result(squares)

        return self._timed(finish, "reduce")

    def start_gather(self) -> Finish:
        """Start to collect the sums of all hosts; the bucket is reduced."""
        if self._group is None:
            return self._timed(self._await_result, "gather")
        with self._working("gather"):
            return self._start_gather()

    def _start_gather(self) -> Finish:
        own = self._share(self._result)
        if self._rounding is not None:
            own = self._rounding.round_share(own)
        sending = self._send(own, "gather")

        def finish() -> None:
            for work in self._receiving["gather"]:
                work.wait()
            if self._rounding is not None:
                self._share(self._rounding.rounded).copy_(own)
                raw_ops().sum_parts_(self._rounding.rounded[: self._count].view(1, -1), self._result[: self._count])
            self._tell(Counter.GATHERED)
            for work in sending:
                work.wait()
            self.gathered.set_result(None)

        return self._timed(finish, "gather")

    def _working(self, phase: Phase) -> TimedWork:
        return self._clocks.exchange.working(f"{phase} {self._number}")

    def _timed(self, finish: Finish, phase: Phase) -> Finish:
        """The same, with its time taken."""

        def work() -> None:
            with self._working(phase):
                finish()

        return work

    def _send(self, numbers: Tensor, phase: Phase) -> list[Work]:
        """Start to send to every other host; see `_each_peer`."""
        works = self._each_peer(dist.isend, numbers, phase)
        share = self._count // len(self._team.hosts)
        self._clocks.sent_bytes += len(works) * share * numbers.element_size()
        return works

    @property
    def _gathered_into(self) -> Tensor:
        return self._result if self._rounding is None else self._rounding.rounded

    def _each_peer(self, start: Callable[..., Work | None], numbers: Tensor, phase: Phase) -> list[Work]:
        """Start to send to, or to receive from, every other host.

        Args:
            start: `dist.isend` or `dist.irecv`.
            numbers: One share, which all get; or all shares, of which each gets or gives its own.
            phase: Tells apart what is on its way at the same time.
        """
        tag = 2 * self._number + (phase == "gather")
        share = self._count // len(self._team.hosts)
        works = []
        for host, leader in enumerate(self._team.leaders):
            if host != self._team.host:
                part = numbers if len(numbers) == share else self._share(numbers, host)
                works.append(start(part, leader, group=self._group, tag=tag))
        return [work for work in works if work is not None]  # none of them is: this rank is one of the group

    def _share(self, numbers: Tensor, host: int | None = None) -> Tensor:
        """A host's share of the numbers; this one's."""
        share = self._count // len(self._team.hosts)
        host = self._team.host if host is None else host
        return numbers[host * share : (host + 1) * share]

    # ---- within the host

    def _add_up_host(self) -> float:
        """This rank's part of the sum over its host.

        Returns:
            The squares of it, if it is the sum over all ranks.
        """
        if self._memory is None:
            return 0.0
        part = self._count // self._team.size
        here = slice(self._team.index * part, (self._team.index + 1) * part)
        squares: float = raw_ops().sum_parts_(self._slots_LN[:, here], self._result[here])
        self._tell(Counter.ADDED_UP)
        return squares if len(self._team.hosts) == 1 else 0.0

    def _await_result(self) -> None:
        if len(self._team.hosts) == 1:
            self._await(Counter.ADDED_UP)
        else:
            self._await(Counter.GATHERED, leader_only=True)
        self.gathered.set_result(None)

    def _tell(self, counter: Counter) -> None:
        if self._memory is not None:
            self._memory.count_up(len(Counter) * self._number + counter, self._update)

    def _await(self, counter: Counter, *, leader_only: bool = False) -> None:
        if self._memory is not None:
            self._memory.wait(len(Counter) * self._number + counter, self._update, leader_only=leader_only)
