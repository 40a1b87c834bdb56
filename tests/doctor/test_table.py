"""The report, word for word."""

from __future__ import annotations

import io
from pathlib import Path
from typing import Any

from rich.console import Console

from fleetune.doctor.checks.all import findings
from fleetune.doctor.finding import Finding, Status, merged
from fleetune.doctor.table import plain_lines, show, summary
from tests.doctor.made_up import attempt, changed, examination, transfer, trouble, view

GOLDEN = Path(__file__).with_name("golden_report.txt")
NAMES = ["node1", "node2", "node3"]
FOUND = (
    Finding(check="python", hosts=("node1", "node2", "node3"), status=Status.OK, reason="all there"),
    Finding(check="hostname", hosts=("node2",), status=Status.WARNING, reason="127.0.1.1", fix="edit /etc/hosts"),
    Finding(check="ssh", hosts=("node2", "node3"), status=Status.FAILURE, reason="refused", fix="start sshd"),
)


def printed(**terminal: Any) -> list[str]:
    """What a person sees: in a terminal, or in a pipe."""
    file = io.StringIO()
    show(FOUND, NAMES, Console(file=file, color_system=None, **terminal))
    return [line.rstrip() for line in file.getvalue().splitlines()]


def test_lines_in_a_pipe() -> None:
    assert printed(force_terminal=False) == [
        "ok       python    all 3         all there",
        "warning  hostname  node2         127.0.1.1",
        "                                 fix: edit /etc/hosts",
        "failure  ssh       node2, node3  refused",
        "                                 fix: start sshd",
        "",
        "3 hosts: 1 failure, 1 warning, 1 ok: a run would fail: mend the failures first",
    ]


def test_a_table_in_a_terminal() -> None:
    assert printed(force_terminal=True, width=60) == [
        "  check     hosts         finding",
        "────────────────────────────────────────────",
        "✓ python    all 3         all there",
        "",
        "! hostname  node2         127.0.1.1",
        "                          → edit /etc/hosts",
        "",
        "✗ ssh       node2, node3  refused",
        "                          → start sshd",
        "",
        "3 hosts: 1 failure, 1 warning, 1 ok: a run would fail: mend",
        "the failures first",
    ]


def test_no_line_is_wider_than_the_terminal() -> None:
    long = Finding(check="connections", hosts=tuple(NAMES), status=Status.FAILURE, reason="word " * 60, fix="x" * 200)
    file = io.StringIO()
    show([long], NAMES, Console(file=file, force_terminal=True, color_system=None, width=80))
    assert max(map(len, file.getvalue().splitlines())) <= 80


def test_many_hosts_are_counted() -> None:
    names = [f"node{i}" for i in range(1, 10)]
    one = Finding(check="ssh", hosts=tuple(names[:6]), status=Status.OK, reason="well")
    assert plain_lines([one], names)[0] == "ok  ssh  node1, node2, node3, node4 and 2 more  well"


def test_summaries() -> None:
    assert summary(FOUND[:1], NAMES) == "3 hosts: no failures, no warnings, 1 ok: ready to train"
    assert summary(FOUND[:2], ["vm"]) == (
        "vm: no failures, 1 warning, 1 ok: ready to train; the warnings say what could be better"
    )


def test_equal_findings_become_one() -> None:
    one, other = (Finding(check="ssh", hosts=(name,), status=Status.OK, reason="well") for name in ("a", "b"))
    assert merged([one, FOUND[0], other]) == (
        Finding(check="ssh", hosts=("a", "b"), status=Status.OK, reason="well"), FOUND[0],
    )  # fmt: skip


def test_a_whole_report() -> None:
    """Three hosts: one as it should be, one with a firewall and 127.0.1.1, one without fleetune."""
    ill = view(2, changed("cpus", load=70.0))
    seen = examination(
        view(1), ill, view(3, None, trouble=trouble("no fleetune")), to_itself="",
        attempts=(attempt(1, 1), attempt(1, 2, "timeout"), attempt(2, 1), attempt(2, 2)),
        transfers=(transfer(2, 1, 940.0),),
    )  # fmt: skip
    assert plain_lines(findings(seen), NAMES) == GOLDEN.read_text().splitlines()
