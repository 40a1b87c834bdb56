"""Who this process is to its peers: the address that they reach it on, and the name of its host."""

from __future__ import annotations

import ipaddress
import os
import socket
from collections.abc import Callable, Mapping, Sequence

from torch.distributed import Store  # type: ignore[attr-defined]

from fleetune.cluster.network import Interface, address_towards, interface_of, interfaces
from fleetune.comm.meeting import GLOO_INTERFACE
from fleetune.errors import BackendError

_LOOPBACK = "127.0.0.1"
_FAR_AWAY = "192.0.2.1"
"""An address of documentation (RFC 5737): towards it leads the default route."""

Route = Callable[[str], str | None]


def host_name(environ: Mapping[str, str] = os.environ) -> str:
    """What to call this host in messages."""
    return environ.get("SLURMD_NODENAME") or socket.gethostname()


def own_address(
    store: Store | None, environ: Mapping[str, str], among: Sequence[Interface] | None = None,
    route: Route = address_towards,
) -> str:  # fmt: skip
    """The IP address of this host on the network that all ranks share.

    That is the one of the interface that GLOO_SOCKET_IFNAME names; or else the one that leads to the master; or, where
    that is loopback although there are several hosts, as with Debian's `127.0.1.1 name`, the one that leads outside.

    Args:
        store: Of the group; one over TCP knows the master's address where MASTER_ADDR is not set.
        environ: GLOO_SOCKET_IFNAME, MASTER_ADDR, WORLD_SIZE, LOCAL_WORLD_SIZE.
        among: Interfaces of this host; asked for when not given.
        route: Which own address leads to another.

    Raises:
        BackendError: There is no such interface, or it has no address.
    """
    among = interfaces() if among is None else among
    if named := environ.get(GLOO_INTERFACE, "").split(",")[0]:
        return _address_of(named, among)
    master = environ.get("MASTER_ADDR") or _host_of(store)
    towards = route(master) if master else None
    if towards is None or (_is_loopback(towards) and _has_several_hosts(environ)):
        towards = route(_FAR_AWAY) if master or _has_several_hosts(environ) else None
    return towards or _LOOPBACK


def interface_name(address: str, among: Sequence[Interface] | None = None) -> str | None:
    """The interface that an address belongs to; None where it cannot be told."""
    name = interface_of(address, interfaces() if among is None else among)
    return "lo" if name is None and _is_loopback(address) else name


def _address_of(name: str, among: Sequence[Interface]) -> str:
    addresses = [interface.address for interface in among if interface.name == name]
    if not addresses:
        known = ", ".join(sorted({interface.name for interface in among}))
        raise BackendError(
            f"{GLOO_INTERFACE}={name}: {host_name()} has no such network interface with an address",
            remedy=f"it has {known}",
        )
    return next((address for address in addresses if ":" not in address), addresses[0])


def _host_of(store: Store | None) -> str | None:
    """The address that a store over TCP is reached on."""
    while (inner := getattr(store, "underlying_store", None)) is not None:
        store = inner
    host = getattr(store, "host", None)
    return host if isinstance(host, str) else None


def _has_several_hosts(environ: Mapping[str, str]) -> bool:
    counts = [environ.get(name, "") for name in ("LOCAL_WORLD_SIZE", "WORLD_SIZE")]
    return all(count.isdigit() for count in counts) and int(counts[0]) < int(counts[1])


def _is_loopback(address: str) -> bool:
    return ipaddress.ip_address(address).is_loopback
