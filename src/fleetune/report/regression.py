"""Whether runs are worse than those of a baseline, by more than the noise that was measured in both.

The rule: of rows of the same size and trainer, each number's means are compared. It is a regression when the new mean
is worse by more than what two means of unchanged runs differ by in 1 of 100 cases: Welch's one-sided test
(`spread.py`). A side that was measured once is given the other's noise; where both were, nothing is judged.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Literal

from fleetune.errors import ConfigError
from fleetune.report.columns import Cell, clock, rounded
from fleetune.report.rows import Row, Table
from fleetune.report.spread import Spread, noise_of_difference

Verdict = Literal["regression", "better", "within noise", "not judged"]


@dataclass(frozen=True, kw_only=True)
class Quantity:
    """A number that is compared."""

    name: str
    of: Callable[[Row], Spread | None]
    more_is_better: bool
    text: Callable[[float], str] = rounded


@dataclass(frozen=True, kw_only=True)
class Comparison:
    """One number of one row against the baseline's."""

    label: str
    quantity: Quantity
    before: Spread
    now: Spread
    noise: float | None
    """Difference that unchanged runs exceed in 1 of 100 cases; None where none was measured."""

    @property
    def worse_by(self) -> float:
        """How much worse the mean is; negative where it is better."""
        difference = self.now.mean - self.before.mean
        return -difference if self.quantity.more_is_better else difference

    @property
    def verdict(self) -> Verdict:
        if self.noise is None:
            return "not judged"
        if self.worse_by > self.noise:
            return "regression"
        return "better" if -self.worse_by > self.noise else "within noise"


def compare(now: Table, baseline: Table) -> list[Comparison]:
    """All numbers of the rows that both have.

    Raises:
        ConfigError: They have no row in common, or nothing was measured often enough to be judged.
    """
    found = []
    for row in now.rows:
        for earlier in (other for other in baseline.rows if is_same_size(row, other)):
            found += _compare(row, earlier, quantities_of(now, baseline))
    if not found:
        raise ConfigError("--baseline: its runs have no size and trainer in common with these, nothing can be compared")
    if all(comparison.verdict == "not judged" for comparison in found):
        raise ConfigError(
            "--baseline: every size was run once, there and here, so how much runs differ by themselves is not known: "
            "repeat one of them (`fleetune bench scaling --repeat 3`, or several RUN of the same settings)"
        )
    return found


def is_same_size(one: Row, other: Row) -> bool:
    """Whether two rows are of as many hosts and ranks, by the same trainer; and, in benches, of the same label."""
    same = (one.trainer, one.hosts, one.first("ranks")) == (other.trainer, other.hosts, other.first("ranks"))
    return same and one.first("ranks") is not None and (None in (one.bench, other.bench) or one.size == other.size)


def quantities_of(now: Table, baseline: Table) -> list[Quantity]:
    """What is compared."""
    quantities = [
        Quantity(name="samples/s", of=lambda row: row.spread("samples_per_s"), more_is_better=True),
        Quantity(name="start-up", of=lambda row: row.spread("startup_s"), more_is_better=False, text=clock),
        Quantity(name="bytes/step, rank", of=lambda row: row.spread("step_bytes"), more_is_better=False),
    ]
    name = now.metric
    if name is not None and name == baseline.metric:
        more = not name.endswith(("loss", "mse"))
        quantities.append(Quantity(name=name, of=lambda row: row.metric(name), more_is_better=more))
    return quantities


def _compare(row: Row, earlier: Row, quantities: Sequence[Quantity]) -> list[Comparison]:
    found = []
    for quantity in quantities:
        now, before = quantity.of(row), quantity.of(earlier)
        if now is not None and before is not None:
            noise = noise_of_difference(before, now)
            found.append(Comparison(label=row.label, quantity=quantity, before=before, now=now, noise=noise))
    return found


HEADER = ("size", "number", "baseline", "now", "worse by", "noise", "verdict")


def comparison_cells(comparisons: Sequence[Comparison]) -> list[list[Cell]]:
    """The comparisons as rows of a table with `HEADER`."""
    return [
        [
            Cell(text=one.label),
            Cell(text=one.quantity.name),
            Cell(text=one.quantity.text(one.before.mean), value=one.before.mean, deviation=one.before.deviation),
            Cell(text=one.quantity.text(one.now.mean), value=one.now.mean, deviation=one.now.deviation),
            Cell(text=_signed(one.worse_by, one.quantity.text), value=one.worse_by),
            Cell(text="unknown" if one.noise is None else one.quantity.text(one.noise), value=one.noise),
            Cell(text=one.verdict),
        ]
        for one in comparisons
    ]


def _signed(value: float, text: Callable[[float], str]) -> str:
    return f"{'-' if value < 0 else '+'}{text(abs(value))}"


def has_regression(comparisons: Sequence[Comparison]) -> bool:
    return any(comparison.verdict == "regression" for comparison in comparisons)


RULE = (
    "A regression is worse by more than the noise: what means of unchanged runs differ by in 1 of 100 cases (Welch's "
    "test, one-sided)."
)


def verdict_of(comparisons: Sequence[Comparison]) -> str:
    """What the comparisons come to."""
    return "Worse than the baseline" if has_regression(comparisons) else "Not worse than the baseline"
