"""The hosts of a run, from `--hosts` or a host file.

    parse_hosts("node1,user@node2:4,node[3-4]")    what `--hosts` holds
    read_hostfile(path)                            a host a line: `host`, `host:4` or `host slots=4`, comments
    resolve(hosts)                                 refuses names that mean nothing, finds this machine among them

A host's name is whatever the user's own ssh takes: a name, an address, or an alias of `~/.ssh/config`.
"""

from __future__ import annotations

import ipaddress
import itertools
import re
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from fleetune.cluster.network import addresses_of, own_addresses
from fleetune.cluster.rank import is_loopback
from fleetune.cluster.remote import SshSettings, ssh_settings
from fleetune.errors import ConfigError

MAX_HOSTS = 4096
"""A range may not name more: it would be a slip of the keyboard."""


@dataclass(frozen=True, kw_only=True)
class Host:
    """One host of a run."""

    name: str
    """As the user's ssh takes it: a name, an alias or an address, without user and brackets."""
    user: str | None = None
    slots: int | None = None
    """Ranks that the user wants on it; None for what its host plan says."""
    is_here: bool = False
    """Whether it is this very machine: no ssh is needed."""

    @property
    def target(self) -> str:
        """What ssh is given."""
        return self.name if self.user is None else f"{self.user}@{self.name}"


def parse_hosts(words: str | Sequence[str]) -> tuple[Host, ...]:
    """Hosts from the value of `--hosts`.

    Args:
        words: Hosts separated by commas, in one text or several.

    Raises:
        ConfigError: Lists every word that is no host, and every host that is named twice.
    """
    text = words if isinstance(words, str) else ",".join(words)
    entries = [entry.strip() for entry in re.split(r",(?![^\[]*\])", text) if entry.strip()]
    return _checked(((entry, f"--hosts {entry}") for entry in entries), "--hosts")


def read_hostfile(path: Path) -> tuple[Host, ...]:
    """Hosts from a file: one a line as `host`, `host:4` or `host slots=4`; # begins a comment.

    Raises:
        ConfigError: It cannot be read, names no host, or lists every line that is none.
    """
    try:
        lines = path.read_text(encoding="utf-8-sig").splitlines()
    except (OSError, UnicodeDecodeError) as error:
        why = getattr(error, "strerror", None) or "it is no UTF-8 text"
        raise ConfigError(f"--hostfile {path}: {why}") from error
    entries = []
    for number, line in enumerate(lines, start=1):
        if entry := line.partition("#")[0].strip():
            entries.append((entry, f"{path}, line {number}: {entry}"))
    return _checked(entries, f"--hostfile {path}")


def resolve(
    hosts: Sequence[Host],
    *,
    settings_of: Callable[[str], SshSettings] = ssh_settings,
    addresses: Iterable[str] | None = None,
) -> tuple[Host, ...]:
    """Find this machine among the hosts, put `localhost` first, and refuse names that mean nothing.

    A host that ssh reaches through another (ProxyJump, ProxyCommand) need not have a name that means something here.

    Args:
        hosts: In the user's order.
        settings_of: Name -> what the user's ssh would do with it.
        addresses: Of this machine; asked for when not given.

    Raises:
        ConfigError: Lists every name that cannot be resolved, and those that are the same host.
    """
    here = set(own_addresses() if addresses is None else addresses)
    resolved, problems, seen = [], [], dict[str, str]()
    for host in hosts:
        settings = settings_of(host.target)
        found = set(addresses_of(settings.hostname))
        if not found and not settings.has_proxy:
            via = f" ({settings.hostname} in ssh's configuration)" if settings.hostname != host.name else ""
            problems.append(f"host {host.name}{via}: the name cannot be resolved; correct it, or add it to /etc/hosts "
                            "or ~/.ssh/config")  # fmt: skip
            continue
        is_here = any(_means_here(address, host.name, settings, here) for address in found)
        for key in {"this machine"} if is_here else _places(found, settings):
            if key in seen:
                problems.append(f"hosts {seen[key]} and {host.name} are the same host ({key}): name it once")
                break
            seen[key] = host.name
        resolved.append(replace(host, is_here=is_here))
    if problems:
        raise ConfigError(problems)
    named = [host for host in resolved if is_loopback(host.name)]
    return (*named, *(host for host in resolved if host not in named))


def _means_here(address: str, name: str, settings: SshSettings, here: set[str]) -> bool:
    """Whether an address that a name stands for is this machine's.

    Behind another host, a loopback address is that one's. On a port of its own it is the near end of a tunnel, or a
    container, unless the user says localhost.
    """
    if is_loopback(address):
        return is_loopback(name) or (not settings.has_proxy and settings.port == "22")
    return address in here


def _places(addresses: set[str], settings: SshSettings) -> set[str]:
    """What no two hosts may have in common: an address and a port, as the same other host sees them."""
    via = f" via {settings.proxy}" if settings.has_proxy else ""
    return {f"{address} port {settings.port}{via}" for address in addresses or {settings.hostname}}


# ---- one entry


_LINE = re.compile(r"(?P<rest>\S+)(?P<options>(?:\s+[A-Za-z_-]+\s*=\s*\S+)*)")
_SLOTS, _OTHER_OPTIONS = "slots", {"max_slots", "max-slots"}
"""Of a line of a host file: what counts, and what mpirun takes beside it."""
_NAME = re.compile(r"[A-Za-z0-9_](?:[A-Za-z0-9._-]*[A-Za-z0-9_])?\.?")
_RANGE = re.compile(r"\[([^\]]*)\]")


def _checked(entries: Iterable[tuple[str, str]], source: str) -> tuple[Host, ...]:
    """The hosts of all entries, each given with how to name it in a message."""
    hosts: list[Host] = []
    problems: list[str] = []
    for entry, place in entries:
        try:
            hosts += _hosts_of(entry)
        except ValueError as error:
            problems.append(f"{place}: {error}")
    names = [host.name for host in hosts]
    problems += [f"{source}: host {name} is named twice" for name, count in Counter(names).items() if count > 1]
    if not hosts and not problems:
        problems.append(f"{source}: no host is named")
    if problems:
        raise ConfigError(problems)
    return tuple(hosts)


def _hosts_of(entry: str) -> list[Host]:
    """`entry` is `[user@]name[:slots]` or `[user@]name slots=N`, with a range in the name perhaps."""
    match = _LINE.fullmatch(entry)
    if match is None:
        raise ValueError("a host is expected, as node1, node1:4 or `node1 slots=4`")
    user, at, rest = match["rest"].rpartition("@")
    if at and not re.fullmatch(r"[A-Za-z0-9_][A-Za-z0-9._+@\\-]*\$?", user):
        raise ValueError(f"{user!r} is no user name")
    name, slots = _split_slots(rest)
    told = re.findall(r"([A-Za-z_-]+)\s*=\s*(\S+)", match["options"])
    if strange := [word for word, _ in told if word != _SLOTS and word not in _OTHER_OPTIONS]:
        raise ValueError(f"{strange[0]}= is not understood: `slots=4` is expected")
    counts = ([] if slots is None else [slots]) + [value for word, value in told if word == _SLOTS]
    if len(counts) > 1:
        raise ValueError("the slots are given twice")
    slots = counts[0] if counts else None
    if slots is not None and not (slots.isascii() and slots.isdecimal() and int(slots) >= 1):
        raise ValueError(f"{slots!r} is no number of ranks: 1 or more is expected")
    return [Host(name=n, user=user or None, slots=None if slots is None else int(slots)) for n in _expanded(name)]


def _split_slots(rest: str) -> tuple[str, str | None]:
    """Name and slots of `name:4`, where the name may be an IPv6 address, bare or in brackets."""
    if match := re.fullmatch(r"\[([0-9A-Fa-f:.%\w]*:[0-9A-Fa-f:.%\w]*)\](?::(.*))?", rest):
        return _address(match[1]), match[2]
    if rest.count(":") >= 2:
        return _address(rest), None
    name, colon, slots = rest.partition(":")
    return name, slots if colon else None


def _address(text: str) -> str:
    ipaddress.IPv6Address(text.partition("%")[0])  # ValueError says what is wrong
    return text


def _expanded(name: str) -> list[str]:
    """`node[1-3,7]` as node1, node2, node3, node7; `node[08-10]` keeps its zeros. Several brackets multiply."""
    if ":" in name:
        return [name]
    literals = _RANGE.split(name)
    choices = [[text] if i % 2 == 0 else _numbers(text) for i, text in enumerate(literals)]
    names = ["".join(parts) for parts in itertools.islice(itertools.product(*choices), MAX_HOSTS + 1)]
    if len(names) > MAX_HOSTS:
        raise ValueError(f"more than {MAX_HOSTS} hosts")
    for made in names:
        if not _NAME.fullmatch(made):
            raise ValueError(f"{made!r} is no host name")
    return names


def _numbers(text: str) -> list[str]:
    numbers: list[str] = []
    for part in text.split(","):
        match = re.fullmatch(r"(\d+)(?:-(\d+))?", part.strip(), re.ASCII)
        if match is None:
            raise ValueError(f"[{text}] is no range: numbers as in [1-4] or [1,3] are expected")
        first, last = match[1], match[2] or match[1]
        if int(last) < int(first):
            raise ValueError(f"[{text}] is no range: {last} comes before {first}")
        if int(last) - int(first) > MAX_HOSTS:
            raise ValueError(f"more than {MAX_HOSTS} hosts")
        width = len(first) if first.startswith("0") else 0
        numbers += [str(number).zfill(width) for number in range(int(first), int(last) + 1)]
    return numbers
