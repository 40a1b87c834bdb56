"""The findings for people: a table in a terminal, a line each elsewhere."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence

from rich import box
from rich.console import Console
from rich.table import Table
from rich.text import Text

from fleetune.doctor.finding import Finding, Status

_MARKS = {Status.OK: "✓", Status.WARNING: "!", Status.FAILURE: "✗"}
_COLOURS = {Status.OK: "green", Status.WARNING: "yellow", Status.FAILURE: "bold red"}
_MOST_NAMED = 4


def show(findings: Sequence[Finding], hosts: Sequence[str], console: Console) -> None:
    """Print the findings, and what they come to.

    Args:
        findings: Failures last.
        hosts: Names of all hosts.
        console: A table if it is a terminal, else plain lines.
    """
    if not console.is_terminal:
        for line in plain_lines(findings, hosts):
            console.print(line, markup=False, highlight=False, soft_wrap=True)
        return
    console.print(as_table(findings, hosts))
    console.print()
    last = worst_of(findings)
    console.print(Text(summary(findings, hosts), style=_COLOURS[last]))


def plain_lines(findings: Sequence[Finding], hosts: Sequence[str]) -> list[str]:
    """Status, check, hosts and reason in columns, the fix below its reason; nothing is wrapped."""
    rows = [(one.status.value, one.check, _hosts(one, hosts), one.reason) for one in findings]
    widths = [max(map(len, column), default=0) for column in list(zip(*rows, strict=True))[:3]]
    lines = []
    for one, row in zip(findings, rows, strict=True):
        lines.append("  ".join([*(cell.ljust(width) for cell, width in zip(row, widths, strict=False)), row[3]]))
        if one.fix is not None:
            lines.append(f"{'':{sum(widths) + 6}}fix: {one.fix}")
    return [*lines, "", summary(findings, hosts)]


def as_table(findings: Sequence[Finding], hosts: Sequence[str]) -> Table:
    """A table as wide as the terminal, with a rule where warnings and failures begin."""
    table = Table(box=box.SIMPLE_HEAD, show_edge=False, padding=(0, 1, 0, 0), header_style="bold")
    table.add_column("  check", no_wrap=True)
    if len(hosts) > 1:
        table.add_column("hosts", max_width=16, overflow="fold")
    table.add_column("finding", overflow="fold")
    for one, following in zip(findings, [*findings[1:], None], strict=True):
        colour = _COLOURS[one.status]
        told = Text(one.reason)
        if one.fix is not None:
            told.append(f"\n→ {one.fix}", style="cyan")
        names = [_hosts(one, hosts)] if len(hosts) > 1 else []
        table.add_row(
            Text.assemble((f"{_MARKS[one.status]} ", colour), (one.check, "" if one.status is Status.OK else colour)),
            *names,
            told,
            end_section=following is not None and following.status is not one.status,
        )
    return table


def summary(findings: Sequence[Finding], hosts: Sequence[str]) -> str:
    """How many findings of which kind, and what that means."""
    counts = Counter(one.status for one in findings)
    failures, warnings = counts[Status.FAILURE], counts[Status.WARNING]
    place = f"{len(hosts)} hosts" if len(hosts) > 1 else hosts[0]
    told = f"{place}: {_count(failures, 'failure')}, {_count(warnings, 'warning')}, {counts[Status.OK]} ok"
    meanings = {
        Status.OK: "ready to train",
        Status.WARNING: "ready to train; the warnings say what could be better",
        Status.FAILURE: "a run would fail: mend the failures first",
    }
    return f"{told}: {meanings[worst_of(findings)]}"


def worst_of(findings: Sequence[Finding]) -> Status:
    """The worst status among some findings; ok of none."""
    order = list(Status)
    return max((one.status for one in findings), key=order.index, default=Status.OK)


def _count(number: int, word: str) -> str:
    return f"{number or 'no'} {word}{'' if number == 1 else 's'}"


def _hosts(finding: Finding, hosts: Sequence[str]) -> str:
    if len(finding.hosts) == len(hosts) > 1:
        return f"all {len(hosts)}"
    named = ", ".join(finding.hosts[:_MOST_NAMED])
    more = len(finding.hosts) - _MOST_NAMED
    return f"{named} and {more} more" if more > 0 else named
