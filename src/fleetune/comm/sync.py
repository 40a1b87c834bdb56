"""Gradient sync: gradients are added up over ranks while backward runs, and arrive while the next forward does.

Every rank packs gradients into buckets as backward finishes them; a thread beside it sends them (`exchange`), all in
one order (`buckets.wire_order`). Nothing waits for the end of backward: the update of a stage of the model is due when
the next forward comes to it, and waits for that stage's gradients alone. Only the norm, which scales every update,
needs all sums; it does not need what is gathered.

The gradient of the table of words is zero outside the rows that the global batch touches. Which these are follows from
the data and the step: every rank knows them without asking, and only they travel.
"""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future
from dataclasses import dataclass
from queue import SimpleQueue
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed import Store  # type: ignore[attr-defined]

from fleetune.comm.buckets import Size, cut, wire_order
from fleetune.comm.exchange import Bucket, Counter, Finish
from fleetune.comm.hosts import SharedMemory, Team

_IN_FLIGHT = 4
"""Exchanges that are started before the first of them is finished: the wire is never idle between two."""

Gradients = Iterator[tuple[nn.Parameter, Tensor]]


@dataclass(frozen=True, kw_only=True)
class SyncOptions:
    """How gradients travel."""

    dtype: torch.dtype = torch.float32
    """What crosses the network: float32, or bfloat16 with error feedback. The table's rows are always float32."""
    bucket_bytes: int = 4 << 20
    """Gradients of a bucket, as float32."""
    early: int = 0
    """Buckets that are gathered during backward, see `wire_order`."""


@dataclass(frozen=True, kw_only=True)
class Piece:
    """A parameter's place in its bucket."""

    parameter: nn.Parameter
    bucket: int
    begin: int


@dataclass(frozen=True, kw_only=True)
class Table:
    """A parameter whose gradient is zero outside some rows, and which these are."""

    parameter: nn.Parameter
    rows_of: Callable[[int], Tensor]
    """Step -> the rows that the global batch touches, int64, ascending, each once; the same on every rank."""
    most_rows: int
    """How many these are at most."""


class GradientSync:
    """The gradients of a model, over the ranks of a run.

    Args:
        parameters: In the order in which backward finishes them.
        stages: Of each: which part of the forward uses it first, counted from 0.
        table: The one among them whose gradient is sparse by rows, if there is one.
        team: The ranks of this host.
        store: Of all ranks.
        options: How they travel.
    """

    def __init__(self, parameters: Sequence[nn.Parameter], stages: Sequence[int], table: Table | None, team: Team,
                 store: Store, options: SyncOptions) -> None:  # fmt: skip
        self.num_stages = max(stages) + 1
        self._table, self._rows = table, torch.empty(0, dtype=torch.int64)
        self._failure: BaseException | None = None
        is_table = [table is not None and p is table.parameter for p in parameters]
        sizes = [
            Size(stage=stage, count=table.most_rows * p.shape[1] if table and alone else p.numel(), alone=alone)
            for p, stage, alone in zip(parameters, stages, is_table, strict=True)
        ]
        cuts = cut(sizes, options.bucket_bytes // 4)
        self._stages = [sizes[bucket[0]].stage for bucket in cuts]
        self._order = wire_order(self._stages, options.early)
        self._buckets = _make_buckets([sum(sizes[i].count for i in b) for b in cuts],
                                      [any(is_table[i] for i in b) for b in cuts], team, store, options)  # fmt: skip
        self._pieces = [_lay_out(bucket, [parameters[i] for i in indices]) for bucket, indices in enumerate(cuts)]
        self._places: dict[nn.Parameter, Tensor] = {}
        self._missing = [0] * len(cuts)
        self._armed = False
        for pieces in self._pieces:
            for piece in pieces:
                piece.parameter.register_post_accumulate_grad_hook(self._on_gradient)
        self._bucket_of = {piece.parameter: piece.bucket for pieces in self._pieces for piece in pieces}
        self._updates: SimpleQueue[bool] = SimpleQueue()
        self._thread = threading.Thread(target=self._communicate, name="gradients", daemon=True)
        self._thread.start()

    # ---- what the loop calls, in this order

    def begin(self, step: int) -> None:
        """The next backward is the last of an update: its gradients, and what earlier ones left, are to be sent.

        Raises:
            PeerError, RuntimeError: Another rank is gone.
        """
        if self._failure is not None:
            raise self._failure
        if self._table is not None:
            self._rows = self._table.rows_of(step)
        for number, (bucket, pieces) in enumerate(zip(self._buckets, self._pieces, strict=True)):
            space = bucket.begin(sum(self._count(piece.parameter) for piece in pieces))
            for piece in pieces:
                self._places[piece.parameter] = space[piece.begin : piece.begin + self._count(piece.parameter)]
            self._missing[number] = len(pieces)
        self._armed = True
        self._updates.put(True)

    def squared_norm(self) -> float:
        """This rank's share of the squared norm of the sum; waits until all sums are made.

        Raises:
            PeerError, RuntimeError: Another rank is gone.
        """
        self._armed = False
        for number, pieces in enumerate(self._pieces):
            if self._missing[number]:  # no gradient in the last backward, though perhaps in an earlier one
                for piece in pieces:
                    if piece.parameter in self._places:
                        self._pack(piece.parameter)
        return sum(bucket.reduced.result() for bucket in self._buckets)

    def of_stage(self, stage: int) -> Gradients:
        """The gradients of one stage, summed over ranks; waits for them.

        Yields:
            A parameter and its gradient; that of the table is sparse by rows.
        """
        for number, bucket in enumerate(self._buckets):
            if self._stages[number] == stage:
                bucket.gathered.result()
                for piece in self._pieces[number]:
                    yield piece.parameter, self._gradient(bucket.total, piece)

    def close(self) -> None:
        """End the thread; everything begun is finished."""
        self._updates.put(False)

    # ---- packing

    def _count(self, parameter: nn.Parameter) -> int:
        return len(self._rows) * parameter.shape[1] if self._is_table(parameter) else parameter.numel()

    def _is_table(self, parameter: nn.Parameter) -> bool:
        return self._table is not None and parameter is self._table.parameter

    def _on_gradient(self, parameter: nn.Parameter) -> None:
        if self._armed:
            self._pack(parameter)

    def _pack(self, parameter: nn.Parameter) -> None:
        place = self._places.pop(parameter)
        grad = parameter.grad
        if grad is None:
            place.zero_()
        elif self._is_table(parameter):
            grad = grad.coalesce()
            places = torch.searchsorted(self._rows, grad.indices()[0]).clamp_(max=len(self._rows) - 1)
            assert torch.equal(self._rows[places], grad.indices()[0]), "a row that the global batch does not touch"
            place.view(-1, parameter.shape[1]).zero_()[places] = grad.values()
        else:
            place.view(parameter.shape).copy_(grad)
        parameter.grad = None
        number = self._bucket_of[parameter]
        self._missing[number] -= 1
        if self._missing[number] == 0:
            self._buckets[number].pack_done()

    def _gradient(self, total: Tensor, piece: Piece) -> Tensor:
        parameter = piece.parameter
        values = total[piece.begin : piece.begin + self._count(parameter)]
        if not self._is_table(parameter):
            return values.view(parameter.shape)
        return torch.sparse_coo_tensor(self._rows.unsqueeze(0), values.view(-1, parameter.shape[1]), parameter.shape,
                                       is_coalesced=True, check_invariants=False)  # fmt: skip

    # ---- the thread

    def _communicate(self) -> None:
        while self._updates.get():
            try:
                self._send_all()
            except BaseException as error:
                self._failure = error
                for bucket in self._buckets:
                    for future in (bucket.reduced, bucket.gathered):
                        _fail(future, error)
                return

    def _send_all(self) -> None:
        """All exchanges of one update, in the agreed order."""
        for phase, number in self._order:
            self._buckets[number].expect(phase)
        started: deque[Finish] = deque()
        for phase, number in self._order:
            bucket = self._buckets[number]
            while phase == "gather" and not bucket.reduced.done():
                started.popleft()()
            started.append(bucket.start_reduce() if phase == "reduce" else bucket.start_gather())
            if len(started) > _IN_FLIGHT:
                started.popleft()()
        for finish in started:
            finish()


def _fail(future: Future[Any], error: BaseException) -> None:
    if not future.done():
        future.set_exception(error)


def _make_buckets(rooms: Sequence[int], tables: Sequence[bool], team: Team, store: Store,
                  options: SyncOptions) -> list[Bucket]:  # fmt: skip
    group = dist.new_group(team.leaders, backend="gloo") if len(team.hosts) > 1 else None
    if not team.leads:
        group = None
    offsets, end = [], 0
    for room in rooms:
        offsets.append(end)
        end += Bucket.numbers_needed(room, team)
    memory = SharedMemory(team, store, end, len(Counter) * len(rooms)) if team.size > 1 else None
    return [
        Bucket(number, room, team, torch.float32 if tables[number] else options.dtype, group, memory, offset)
        for number, (room, offset) in enumerate(zip(rooms, offsets, strict=True))
    ]


def _lay_out(bucket: int, parameters: Sequence[nn.Parameter]) -> list[Piece]:
    pieces, begin = [], 0
    for parameter in parameters:
        pieces.append(Piece(parameter=parameter, bucket=bucket, begin=begin))
        begin += parameter.numel()
    return pieces
