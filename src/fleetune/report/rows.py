"""Rows of the table: the repeated runs of one size, and how many times as fast they are as the smallest."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any

from fleetune.report.measures import Measures, best_metric, measure
from fleetune.report.spread import Spread
from fleetune.report.turns import TRAINERS, Bench, Source, Turn

NOT_OF_THE_JOB = (
    "seed", "output_dir", "overwrite_output_dir", "resume_from_checkpoint", "cache_dir", "overwrite_cache", "report_to",
    "logging_steps",
)  # fmt: skip
"""Settings in which runs of one size may differ."""


@dataclass(frozen=True, kw_only=True)
class Row:
    """The runs of one size by one trainer."""

    source: str
    """Name of the bench, or of the run."""
    size: str
    trainer: str
    hosts: int
    turns: tuple[Turn, ...]
    """Those that finished."""
    measures: tuple[Measures, ...]
    """Of each of them."""
    failures: tuple[str, ...] = ()
    """Why others did not."""
    bench: Bench | None = None
    speedup: Spread | None = None
    """Samples per second as a multiple of the smallest size's by the same trainer."""
    efficiency: Spread | None = None
    """The speed-up by that of the threads in use."""
    ideal: float | None = None
    """Threads in use as a multiple of the smallest size's."""

    against: Spread | None = None
    """Samples per second as a multiple of the stock trainer's on the same size."""

    @property
    def label(self) -> str:
        """Size and, where there are others, trainer."""
        return self.size if self.trainer == "fleetune" else f"{self.size}, {self.trainer}"

    def spread(self, of: str | Callable[[Measures], float | None]) -> Spread | None:
        """Mean and deviation of a number of the runs, named or computed."""
        get = (lambda one: getattr(one, of)) if isinstance(of, str) else of
        return Spread.of(get(one) for one in self.measures)

    def first(self, name: str) -> Any:
        """A number that is the same in all runs, such as the global batch; None when none finished."""
        return getattr(self.measures[0], name) if self.measures else None

    def metric(self, name: str) -> Spread | None:
        """Of the runs' seeds."""
        return self.spread(lambda one: one.metrics.get(name))


@dataclass(frozen=True, kw_only=True)
class Table:
    """All rows of a report."""

    sources: tuple[Source, ...]
    rows: tuple[Row, ...]
    metric: str | None
    """The task's own, without a prefix; None where nothing was evaluated."""
    notes: tuple[str, ...] = field(default=())

    @property
    def benches(self) -> tuple[Bench, ...]:
        return tuple(source.bench for source in self.sources if source.bench is not None)

    @property
    def records(self) -> list[dict[str, Any]]:
        return [turn.record for row in self.rows for turn in row.turns]


def make_table(sources: Sequence[Source]) -> Table:
    """Group the runs of all sources into rows, and compare each with the smallest of its kind."""
    rows: list[Row] = []
    single = [source for source in sources if source.bench is None]
    for source in sources:
        if source.bench is not None:
            rows += with_speedups(bench_rows(source, source.bench))
    rows += with_speedups(rows_of_runs(single))
    records = [turn.record for row in rows for turn in row.turns]
    metric = best_metric(records)
    has_metric = metric is not None and any(row.metric(metric) is not None for row in rows)
    return Table(sources=tuple(sources), rows=tuple(rows), metric=metric if has_metric else None)


def bench_rows(source: Source, bench: Bench) -> list[Row]:
    """A row for each size and trainer that has run, or failed."""
    rows = []
    for size in bench.sizes:
        for trainer in bench.trainers:
            turns = [turn for turn in source.turns if (turn.size, turn.trainer) == (size, trainer)]
            if turns:
                rows.append(make_row(source.name, turns, bench))
    stock = {row.size: row for row in rows if row.trainer != TRAINERS[0]}
    return [
        dataclasses.replace(row, against=_ratio(row, stock[row.size])) if row.size in stock else row for row in rows
    ]


def rows_of_runs(sources: Iterable[Source]) -> list[Row]:
    """Runs by themselves: those of equal settings, seed aside, are repetitions of one size. Smallest first."""
    groups: dict[str, list[Turn]] = {}
    for source in sources:
        for turn in source.turns:
            groups.setdefault(_job_of(turn), []).append(turn)
    rows = []
    for turns in groups.values():
        size = ", ".join(turn.name for turn in turns)
        rows.append(make_row(size, [dataclasses.replace(turn, size=size) for turn in turns], None))
    return sorted(rows, key=lambda row: row.first("threads") or 0)


def _job_of(turn: Turn) -> str:
    settings = turn.record.get("config", {})
    chosen = {name: value for name, value in settings.items() if name not in NOT_OF_THE_JOB}
    return repr((turn.trainer, turn.hosts, turn.record.get("plan", {}).get("processes"), sorted(chosen.items())))


def make_row(source: str, turns: Sequence[Turn], bench: Bench | None) -> Row:
    """One row; what failed counts for nothing but its reason."""
    finished = tuple(turn for turn in turns if turn.status == "finished")
    failed = [turn for turn in turns if turn.status != "finished"]
    reasons = [f"{turn.name if turn.round is None else f'round {turn.round}'}: {turn.reason}" for turn in failed]
    return Row(
        source=source, size=turns[0].size, trainer=turns[0].trainer, hosts=turns[0].hosts, turns=finished,
        measures=tuple(measure(turn, bench) for turn in finished), failures=tuple(reasons), bench=bench,
    )  # fmt: skip


def with_speedups(rows: Sequence[Row]) -> list[Row]:
    """Rows with speed-up and efficiency against the first finished row of the same trainer.

    A speed-up is taken within each round of a bench, whose runs took turns, so that a machine that slows down for a
    minute slows both. Runs by themselves are compared by their means, without a spread.
    """
    base: dict[str, Row] = {}
    told = []
    for row in rows:
        if row.measures and row.spread("samples_per_s") is not None:
            told.append(_against(row, base.setdefault(row.trainer, row)))
        else:
            told.append(row)
    return told


def _against(row: Row, base: Row) -> Row:
    if row is base:
        one = Spread(mean=1.0, deviation=None, count=len(row.turns))
        return dataclasses.replace(row, speedup=one, efficiency=one, ideal=1.0)
    speedup = _ratio(row, base)
    if speedup is None:
        means = row.spread("samples_per_s"), base.spread("samples_per_s")
        assert means[0] is not None
        assert means[1] is not None
        speedup = Spread(mean=means[0].mean / means[1].mean, deviation=None, count=1)
    threads, of_base = row.first("threads"), base.first("threads")
    if not threads or not of_base:
        return dataclasses.replace(row, speedup=speedup)
    ideal = threads / of_base
    deviation = None if speedup.deviation is None else speedup.deviation / ideal
    efficiency = Spread(mean=speedup.mean / ideal, deviation=deviation, count=speedup.count)
    return dataclasses.replace(row, speedup=speedup, efficiency=efficiency, ideal=ideal)


def _ratio(row: Row, other: Row) -> Spread | None:
    """Speed of the one by that of the other, within each round that both have."""
    mine, theirs = _by_round(row), _by_round(other)
    return None if row is other else Spread.of(mine[i] / theirs[i] for i in sorted(set(mine) & set(theirs)))


def _by_round(row: Row) -> dict[int, float]:
    return {
        turn.round: one.samples_per_s
        for turn, one in zip(row.turns, row.measures, strict=True)
        if turn.round is not None and one.samples_per_s is not None
    }
