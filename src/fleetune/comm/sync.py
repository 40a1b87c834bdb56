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
from collections.abc import Iterator, Sequence
from concurrent.futures import Future
from dataclasses import dataclass
from datetime import timedelta
from queue import SimpleQueue
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed import Store  # type: ignore[attr-defined]

from fleetune.comm.buckets import Size, cut, wire_order
from fleetune.comm.exchange import Bucket, Counter, Finish
from fleetune.comm.hosts import SharedMemory, Team
from fleetune.comm.link import bucket_bytes, measure_link
from fleetune.timing.clocks import RankClocks

_IN_FLIGHT = 4
"""Exchanges that are started before the first of them is finished: the wire is never idle between two."""
_CLOSING_S = 2.0
_IN_MEMORY_BYTES = 4 << 20
"""A bucket where no link is crossed."""

Gradients = Iterator[tuple[nn.Parameter, Tensor]]


@dataclass(frozen=True, kw_only=True)
class SyncOptions:
    """How gradients travel."""

    dtype: torch.dtype = torch.float32
    """What crosses the network: float32, or bfloat16 with error feedback. The table's rows are always float32."""
    bucket_bytes: int | None = None
    """Gradients of a bucket, as float32; None for what suits the link."""
    timeout_s: float = 1800.0
    """How long an exchange may take."""


@dataclass(frozen=True, kw_only=True)
class Piece:
    """A parameter's place in its bucket."""

    parameter: nn.Parameter
    bucket: int
    begin: int


@dataclass(frozen=True, kw_only=True)
class Table:
    """A parameter whose gradient is zero outside some rows."""

    parameter: nn.Parameter
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
        clocks: Told how long the rank packs and waits, and its thread works.
    """

    def __init__(self, parameters: Sequence[nn.Parameter], stages: Sequence[int], table: Table | None, team: Team,
                 store: Store, options: SyncOptions, clocks: RankClocks | None = None) -> None:  # fmt: skip
        self._clocks = clocks or RankClocks()
        self.num_stages = max(stages) + 1
        self._table, self._rows = table, torch.empty(0, dtype=torch.int64)
        self._team, self._options = team, options
        group = _join_leaders(team, options)
        self._link = measure_link(team, group, store) if len(team.hosts) > 1 else None
        self._bucket_bytes = options.bucket_bytes or (bucket_bytes(self._link) if self._link else _IN_MEMORY_BYTES)
        cuts = cut([self._size(p, stage) for p, stage in zip(parameters, stages, strict=True)], self._bucket_bytes // 4)
        self._pieces = [_lay_out(bucket, [parameters[i] for i in indices]) for bucket, indices in enumerate(cuts)]
        self._buckets = self._make_buckets(group, store)
        self._bucket_of = {piece.parameter: piece.bucket for pieces in self._pieces for piece in pieces}
        self._stages = [stages[indices[0]] for indices in cuts]
        self._order = wire_order(self._stages)
        self._places: dict[nn.Parameter, Tensor] = {}
        self._missing = [0] * len(cuts)
        self._is_last = False
        self.bytes_packed = 0
        """Of this rank's gradients in all updates so far, as float32: what is added up over ranks."""
        for parameter in self._bucket_of:
            parameter.register_post_accumulate_grad_hook(self._on_gradient)
        self._failure: BaseException | None = None
        self._updates: SimpleQueue[bool] = SimpleQueue()
        self._thread = threading.Thread(target=self._communicate, name="gradients", daemon=True)
        self._thread.start()

    def _size(self, parameter: nn.Parameter, stage: int) -> Size:
        if self._table is not None and parameter is self._table.parameter:
            return Size(stage=stage, count=self._table.most_rows * parameter.shape[1], alone=True)
        return Size(stage=stage, count=parameter.numel())

    def _make_buckets(self, group: dist.ProcessGroup | None, store: Store) -> list[Bucket]:
        rooms = [sum(self._size(piece.parameter, 0).count for piece in pieces) for pieces in self._pieces]
        needed = [Bucket.numbers_needed(room, self._team) for room in rooms]
        memory = None
        if self._team.size > 1:
            memory = SharedMemory(self._team, store, sum(needed), len(Counter) * len(rooms), self._options.timeout_s)
        return [
            Bucket(number, room, self._team, self._dtype_of(number), group, memory, sum(needed[:number]),
                   self._clocks)
            for number, room in enumerate(rooms)
        ]  # fmt: skip

    def _dtype_of(self, bucket: int) -> torch.dtype:
        """In which type a bucket crosses the network: the rows of a table, other ones each time, lose nothing."""
        return torch.float32 if self._is_table(self._pieces[bucket][0].parameter) else self._options.dtype

    # ---- what the loop calls, in this order

    def begin(self, rows: Tensor | None) -> None:
        """The next backward is the last of an update: its gradients, and what earlier ones left, are to be sent.

        Args:
            rows: Of the table, outside which its gradient is zero on all ranks: int64, ascending, each once; the same
                on every rank.

        Raises:
            PeerError, RuntimeError: Another rank is gone.
        """
        if self._failure is not None:
            raise self._failure
        with self._clocks.during("communication"):
            self._begin(rows)

    def _begin(self, rows: Tensor | None) -> None:
        if rows is not None:
            self._rows = rows
        for number, (bucket, pieces) in enumerate(zip(self._buckets, self._pieces, strict=True)):
            count = sum(self._count(piece.parameter) for piece in pieces)
            self.bytes_packed += 4 * count
            space = bucket.begin(count)
            for piece in pieces:
                self._places[piece.parameter] = space[piece.begin : piece.begin + self._count(piece.parameter)]
            self._missing[number] = len(pieces)
        self._is_last = True
        self._updates.put(True)

    def squared_norm(self) -> float:
        """This rank's share of the squared norm of the sum; waits until all sums are made.

        Raises:
            PeerError, RuntimeError: Another rank is gone.
        """
        self._is_last = False
        for number, pieces in enumerate(self._pieces):
            if self._missing[number]:  # no gradient in the last backward, though perhaps in an earlier one
                for piece in pieces:
                    if piece.parameter in self._places:
                        self._pack(piece.parameter)
        with self._clocks.blocked():
            return sum(bucket.reduced.result() for bucket in self._buckets)

    def of_stage(self, stage: int) -> Gradients:
        """The gradients of one stage, summed over ranks; waits for them.

        Yields:
            A parameter and its gradient; that of the table is sparse by rows.
        """
        for number, bucket in enumerate(self._buckets):
            if self._stages[number] == stage:
                with self._clocks.blocked():
                    bucket.gathered.result()
                for piece in self._pieces[number]:
                    yield piece.parameter, self._gradient(bucket.total, piece)

    def close(self) -> None:
        """End the thread, once it has finished what was begun; not waited for long: another rank may be gone."""
        self._updates.put(False)
        self._thread.join(_CLOSING_S)

    def lines(self) -> list[str]:
        """How gradients travel, for the plan."""
        hosts, ranks = len(self._team.hosts), self._team.size
        if self._link is None:
            return [f"gradients      added up in memory that the {ranks} ranks of this host share"]
        numbers = sum(p.numel() for p in self._bucket_of if not self._is_table(p))
        sent = 2 * (hosts - 1) / hosts * numbers * (2 if self._options.dtype == torch.bfloat16 else 4)
        rows = " and the rows of the words that a batch touches" if self._table is not None else ""
        inside = f"; in the memory of a host, {ranks} ranks here" if ranks > 1 else ""
        return [
            f"gradients      {sent / 1e6:,.1f} MB{rows} from every host in an update, "
            f"{str(self._options.dtype).removeprefix('torch.')}{inside}",
            f"link           {self._link / 1e6:,.1f} MB/s each way, measured: {len(self._buckets)} buckets of "
            f"{self._bucket_bytes / 1e6:.1f} MB at most",
        ]

    # ---- packing

    def _count(self, parameter: nn.Parameter) -> int:
        return len(self._rows) * parameter.shape[1] if self._is_table(parameter) else parameter.numel()

    def _is_table(self, parameter: nn.Parameter) -> bool:
        return self._table is not None and parameter is self._table.parameter

    def _on_gradient(self, parameter: nn.Parameter) -> None:
        if self._is_last:
            self._pack(parameter)

    def _pack(self, parameter: nn.Parameter) -> None:
        with self._clocks.during("communication"):
            self._pack_into_place(parameter)

    def _pack_into_place(self, parameter: nn.Parameter) -> None:
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


def _join_leaders(team: Team, options: SyncOptions) -> dist.ProcessGroup | None:
    """The group of the hosts' first ranks, which all ranks help to make; None if this is none of them."""
    if len(team.hosts) == 1:
        return None
    group = dist.new_group(team.leaders, timeout=timedelta(seconds=options.timeout_s), backend="gloo")
    return group if team.leads else None


def _lay_out(bucket: int, parameters: Sequence[nn.Parameter]) -> list[Piece]:
    pieces, begin = [], 0
    for parameter in parameters:
        pieces.append(Piece(parameter=parameter, bucket=bucket, begin=begin))
        begin += parameter.numel()
    return pieces
