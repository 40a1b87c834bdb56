"""Where the ranks of several hosts meet: the first host's address and a port, and the network that all are in.

    meet(job, hosts) -> Meeting

Asked on the host that starts the ranks, for launchers that bring them up all at once (mpirun).
"""

from __future__ import annotations

import ipaddress
import socket
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import psutil

from fleetune.cluster.hosts import Host
from fleetune.cluster.job import Job
from fleetune.cluster.network import (
    DEFAULT_PORTS,
    address_towards,
    addresses_of,
    free_port,
    inside,
    interface_of,
    interfaces,
    parse_network,
    parse_ports,
)
from fleetune.cluster.rank import is_loopback
from fleetune.cluster.remote import ssh_settings
from fleetune.errors import ConfigError


@dataclass(frozen=True, kw_only=True)
class Meeting:
    """Where the ranks meet, and how the hosts talk."""

    main_address: str
    main_port: int
    own_address: str
    """Of this host, towards the others: mpirun's daemons and the ranks' output come here."""
    interface: str | None
    """The interface that has it."""
    network: str | None
    """The network that all hosts are in; None where that cannot be told, and nothing is restricted."""


def meet(job: Job, hosts: Sequence[Host]) -> Meeting:
    """Find out where the ranks can meet: at the first host's address that the others use.

    Raises:
        ConfigError: No address of a host is known.
    """
    found = {host.name: _addresses(host) for host in hosts}
    others = [address for host in hosts if not host.is_here for address in found[host.name]]
    own = own_address(others, job.network)
    main = own if hosts[0].is_here else _address_within(hosts[0], found[hosts[0].name], job.network)
    _, ports = split_ports(job.port_range)
    among = interfaces()
    return Meeting(
        main_address=main,
        main_port=free_port(own if hosts[0].is_here else "", ports),
        own_address=own,
        interface=interface_of(own, among),
        network=job.network or common_network(own, others),
    )


def split_ports(port_range: str | None) -> tuple[str | None, range]:
    """The ports for mpirun itself, and those for the ranks: it would take the first rank's before that has started."""
    if port_range is None:
        return None, DEFAULT_PORTS
    ports = parse_ports(port_range)
    middle = ports[len(ports) // 2]
    return (f"{ports[0]}-{middle - 1}", range(middle, ports[-1] + 1)) if len(ports) > 1 else (port_range, ports)


def common_network(own: str, others: Iterable[str]) -> str | None:
    """The network of an address of this host, where all the others are in it."""
    for entries in psutil.net_if_addrs().values():
        for entry in entries:
            if entry.address == own and entry.netmask and entry.family == socket.AF_INET:
                network = ipaddress.ip_network(f"{own}/{entry.netmask}", strict=False)
                is_common = all(ipaddress.ip_address(address) in network for address in others)
                return str(network) if is_common and not is_loopback(own) else None
    return None


def _addresses(host: Host) -> list[str]:
    return [a for a in addresses_of(ssh_settings(host.target).hostname) if host.is_here or not is_loopback(a)]


def own_address(others: Sequence[str], network: str | None) -> str:
    """Of this host: in the network, or on the route to the first other host; with no other, loopback."""
    if network is not None:
        if within := inside(network, interfaces()):
            return within[0].address
        raise ConfigError(f"--network {network}: no address of this host ({socket.gethostname()}) is in it")
    return next((own for address in others if (own := address_towards(address))), "127.0.0.1")


def _address_within(host: Host, found: Sequence[str], network: str | None) -> str:
    wanted = None if network is None else parse_network(network)
    for address in found:
        if wanted is None or ipaddress.ip_address(address) in wanted:
            return address
    within = "" if network is None else f" in --network {network}"
    raise ConfigError(f"host {host.name}: no address of it{within} is known here; name it by that address in --hosts")
