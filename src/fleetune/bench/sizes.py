"""The sizes of a bench: on how many hosts, with how many processes on each."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from fleetune.cluster.hosts import Host
from fleetune.cluster.start import chosen_launcher, named_hosts, wants_hosts
from fleetune.config import RunConfig
from fleetune.errors import ConfigError


@dataclass(frozen=True, kw_only=True)
class Size:
    """One size."""

    label: str
    num_hosts: int
    changes: dict[str, Any]
    """Settings that make a run one of this size."""

    @property
    def slug(self) -> str:
        """Its label as part of a file's name."""
        return self.label.replace(" ", "-")


def make_sizes(config: RunConfig, nodes: Sequence[int] | None, processes: Sequence[int] | None) -> tuple[Size, ...]:
    """All combinations of numbers of hosts and of processes, smallest first.

    Args:
        config: The settings of all runs; names the hosts.
        nodes: How many hosts; None for all that are named, or this one.
        processes: How many processes on each; None for what the settings or the hosts' plans say.

    Raises:
        ConfigError: There are not as many hosts, or nothing says what to vary.
    """
    if nodes is None and processes is None:
        raise ConfigError("which sizes? Give --nodes 1,2,4 with --hosts, or --processes 1,2 on one machine")
    if nodes is not None and not wants_hosts(config):
        raise ConfigError("--nodes: on which hosts? Give --hosts, --hostfile or --launcher")
    hosts = _hosts(config)
    numbers = sorted(set(nodes)) if nodes is not None else [len(hosts) or config.num_hosts or 1]
    if hosts and numbers[-1] > len(hosts):
        raise ConfigError(f"--nodes {numbers[-1]}: {len(hosts)} hosts are named")
    per_host: Sequence[int | None] = sorted(set(processes)) if processes is not None else [config.processes]
    return tuple(
        Size(
            label=_label(num_hosts if nodes is not None else None, ranks if processes is not None else None),
            num_hosts=num_hosts,
            changes=_place(config, hosts, num_hosts) | {"processes": ranks},
        )
        for num_hosts in numbers
        for ranks in per_host
    )


def _hosts(config: RunConfig) -> tuple[Host, ...]:
    """Hosts that are named; none where a scheduler chooses them."""
    if not wants_hosts(config) or chosen_launcher(config) not in ("ssh", "mpirun"):
        return ()
    return named_hosts(config)


def _place(config: RunConfig, hosts: Sequence[Host], num_hosts: int) -> dict[str, Any]:
    if hosts:
        return {"hosts": tuple(host_word(host) for host in hosts[:num_hosts]), "hostfile": None, "num_hosts": None}
    return {"num_hosts": num_hosts} if wants_hosts(config) else {}


def host_word(host: Host) -> str:
    """A host as `--hosts` takes it."""
    name = f"[{host.name}]" if ":" in host.name and host.slots is not None else host.name
    user = "" if host.user is None else f"{host.user}@"
    return f"{user}{name}" if host.slots is None else f"{user}{name}:{host.slots}"


def _label(num_hosts: int | None, ranks: int | None) -> str:
    told = [] if num_hosts is None else [f"{num_hosts} host{'' if num_hosts == 1 else 's'}"]
    told += [] if ranks is None else [f"{ranks} process{'' if ranks == 1 else 'es'}"]
    return " x ".join(told)
