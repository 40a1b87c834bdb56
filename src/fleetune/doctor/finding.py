"""What a check has found out, about which hosts, and how to mend it."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from enum import StrEnum


class Status(StrEnum):
    """How bad it is."""

    OK = "ok"
    WARNING = "warning"
    """A run works, but slower or less surely than it could."""
    FAILURE = "failure"
    """A run would not start, or end badly."""


@dataclass(frozen=True, kw_only=True)
class Verdict:
    """What a check says of one host."""

    status: Status
    reason: str
    """What was found, with values."""
    fix: str | None = None
    """The command that mends it, with a few words where one command is not enough."""


@dataclass(frozen=True, kw_only=True)
class Finding:
    """A verdict, and what it is about."""

    check: str
    """Name of the check."""
    hosts: tuple[str, ...]
    status: Status
    reason: str
    fix: str | None = None


def ok(reason: str) -> Verdict:
    return Verdict(status=Status.OK, reason=reason)


def warning(reason: str, fix: str | None = None) -> Verdict:
    return Verdict(status=Status.WARNING, reason=reason, fix=fix)


def failure(reason: str, fix: str | None = None) -> Verdict:
    return Verdict(status=Status.FAILURE, reason=reason, fix=fix)


def about(verdict: Verdict, check: str, *hosts: str) -> Finding:
    """A verdict as the finding of a check on some hosts."""
    return Finding(check=check, hosts=hosts, status=verdict.status, reason=verdict.reason, fix=verdict.fix)


def merged(findings: Iterable[Finding]) -> tuple[Finding, ...]:
    """One finding in place of several that differ in their hosts only, where the first of them stood."""
    hosts: dict[tuple[str, Status, str, str | None], dict[str, None]] = {}
    for one in findings:
        hosts.setdefault((one.check, one.status, one.reason, one.fix), {}).update(dict.fromkeys(one.hosts))
    return tuple(
        Finding(check=check, hosts=tuple(names), status=status, reason=reason, fix=fix)
        for (check, status, reason, fix), names in hosts.items()
    )
