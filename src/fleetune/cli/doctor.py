"""`fleetune doctor`: everything that would go wrong on the hosts of a run, before it does."""

from __future__ import annotations

import contextlib
import json
import os
import shlex
import socket
import sys
from collections.abc import Iterator, Sequence
from typing import Any

from fleetune.cli.arguments import add_dry_run, make_parser, parse, tell_notices
from fleetune.cluster.hosts import Host, resolve
from fleetune.cluster.network import DEFAULT_PORTS, parse_network, parse_ports
from fleetune.cluster.start import named_hosts
from fleetune.config import RunConfig
from fleetune.doctor.checks.all import findings
from fleetune.doctor.examine import Examination, Say, Scope, examine, probe_command
from fleetune.doctor.facts import to_json
from fleetune.doctor.finding import Finding, Status, about, failure
from fleetune.doctor.table import show, worst_of
from fleetune.errors import ConfigError

DESCRIPTION = """Look at all hosts of a run at the same time, and say what would go wrong, and how to mend it: ssh,
versions, clocks, CPUs, memory, disks, ports, and the network between every two hosts. Without hosts, this machine
alone. Nothing is changed. Exit status: 0 when a run would work, 1 when it would fail."""

FIELDS = frozenset({"hosts", "hostfile", "network", "port_range", "timeout_s", "cache_dir"})


def run(words: Sequence[str]) -> int:
    """Examine the hosts, and show the findings."""
    parser = add_dry_run(make_parser("doctor", DESCRIPTION, FIELDS))
    parser.add_argument("--json", action="store_true", help="print facts, measurements and findings as JSON")
    parsed = parse(parser, words, ("json", "dry_run"))
    as_json = parsed.extra.get("json", False)
    if not as_json:
        tell_notices(parsed)
    scope = scope_of(parsed.config)
    if parsed.extra.get("dry_run"):
        print("\n".join(as_commands(asked_hosts(parsed.config), scope)))
        return 0
    hosts, unknown = known_hosts(asked_hosts(parsed.config))
    with _telling() as say:
        examination = examine(hosts, scope, say) if hosts else Examination(scope=scope, views=())
    found = findings(examination, unknown)
    names = [*(host.name for host in hosts), *(name for one in unknown for name in one.hosts)]
    if as_json:
        print(json.dumps(as_mapping(examination, found), indent=2))
    else:
        from rich.console import Console

        show(found, names, Console())
    return 1 if worst_of(found) is Status.FAILURE else 0


def scope_of(config: RunConfig) -> Scope:
    """What is looked at, from the settings.

    Raises:
        ConfigError: Network or ports that are none.
    """
    if config.network is not None:
        parse_network(config.network)
    return Scope(
        ports=DEFAULT_PORTS if config.port_range is None else parse_ports(config.port_range),
        has_own_ports=config.port_range is not None,
        network=config.network,
        cache_dir=str(config.cache_dir),
        timeout_s=config.timeout_s,
        environ=os.environ,
    )


# ---- hosts


def asked_hosts(config: RunConfig) -> tuple[Host, ...]:
    """The hosts that the settings name; this machine where they name none.

    Raises:
        ConfigError: They are named twice over, or some are no hosts.
    """
    if config.hosts is None and config.hostfile is None:
        return (Host(name=socket.gethostname(), is_here=True),)
    return named_hosts(config)


def known_hosts(hosts: Sequence[Host]) -> tuple[tuple[Host, ...], tuple[Finding, ...]]:
    """The hosts whose names can be resolved, and a finding for each of the others.

    Raises:
        ConfigError: Two of them are the same host.
    """
    if len(hosts) == 1 and hosts[0].is_here:
        return tuple(hosts), ()
    unknown, known = [], []
    for host in hosts:
        try:
            resolve((host,))
            known.append(host)
        except ConfigError as error:
            reason, _, fix = error.problems[0].partition("; ")
            unknown.append(about(failure(reason, fix), "name", host.name))
    return resolve(known), tuple(unknown)


# ---- output


def as_commands(hosts: Sequence[Host], scope: Scope) -> list[str]:
    """What would be run to look at each host; names are not looked up."""
    lines = [f"{host.name}: {shlex.join(probe_command(host, scope))}" for host in hosts]
    return [
        *lines,
        "each answers questions on its standard input, listens on a few ports for seconds, and ends with it",
    ]


def as_mapping(examination: Examination, found: Sequence[Finding]) -> dict[str, Any]:
    """All that was found and measured, JSON-ready."""
    hosts = {}
    for view in examination.views:
        hosts[view.name] = {
            "target": view.host.target,
            "is_here": view.host.is_here,
            "facts": None if view.facts is None else to_json(view.facts),
            "without_python": None if view.plain is None else to_json(view.plain),
            "trouble": None if view.trouble is None else to_json(view.trouble),
            "clock": None if view.clock is None else to_json(view.clock),
            "listened": None if view.place is None else to_json(view.place),
        }
    return {
        "status": worst_of(found).value,
        "findings": [to_json(one) for one in found],
        "hosts": hosts,
        "connections": [{"source": source, **to_json(one)} for source, one in examination.attempts],
        "transfers": [{"source": source, **to_json(one)} for source, one in examination.transfers],
    }


@contextlib.contextmanager
def _telling() -> Iterator[Say]:
    """What is being done, on a line of the terminal that goes away; nothing elsewhere."""
    if not sys.stderr.isatty():
        yield lambda what: None
        return
    from rich.console import Console

    with Console(stderr=True).status("starting") as status:
        yield lambda what: status.update(what)
