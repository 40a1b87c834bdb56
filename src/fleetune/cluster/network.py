"""Which of a host's addresses and interfaces lead to another host. Works without asking any name server.

Names are a bad guide: many distributions map a host's own name to 127.0.1.1, and a host may have several networks. The
kernel knows: it says which of its addresses it would use towards an address.
"""

from __future__ import annotations

import contextlib
import errno
import ipaddress
import random
import re
import socket
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass

import psutil

from fleetune.errors import ConfigError, LaunchError

DEFAULT_PORTS = range(20000, 30000)
"""Below the ephemeral range (32768 and up on Linux), so that no outgoing connection takes one."""


@dataclass(frozen=True, kw_only=True)
class Interface:
    """A network interface with one of its addresses."""

    name: str
    address: str


def interfaces() -> tuple[Interface, ...]:
    """All IP addresses of this host, with their interfaces."""
    return tuple(
        Interface(name=name, address=entry.address.partition("%")[0])  # IPv6 link-local ones name the interface again
        for name, entries in psutil.net_if_addrs().items()
        for entry in entries
        if entry.family in (socket.AF_INET, socket.AF_INET6)
    )


def own_addresses() -> tuple[str, ...]:
    """All addresses of this host."""
    return tuple(interface.address for interface in interfaces())


def interface_of(address: str, among: Iterable[Interface]) -> str | None:
    """Name of the interface that has an address."""
    return next((interface.name for interface in among if interface.address == address), None)


def addresses_of(name: str) -> list[str]:
    """The addresses of a name; none where it has none."""
    with contextlib.suppress(OSError, UnicodeError):
        found = socket.getaddrinfo(name, None, type=socket.SOCK_STREAM)
        return list(dict.fromkeys(str(entry[4][0]).partition("%")[0] for entry in found))
    return []


def address_towards(target: str) -> str | None:
    """The address that this host would use towards another; None without a route. Sends nothing."""
    with contextlib.suppress(OSError):
        for family, kind, protocol, _, place in socket.getaddrinfo(target, 9, type=socket.SOCK_DGRAM):
            with contextlib.suppress(OSError), socket.socket(family, kind, protocol) as probe:
                probe.connect(place)
                return str(probe.getsockname()[0])
    return None


def parse_network(text: str) -> ipaddress.IPv4Network | ipaddress.IPv6Network:
    """The network of `--network`.

    Raises:
        ConfigError: It is none.
    """
    try:
        return ipaddress.ip_network(text, strict=False)
    except ValueError as error:
        raise ConfigError(f"--network {text}: {error}; a network as 10.0.0.0/8 is expected") from None


def inside(network: str, among: Iterable[Interface]) -> tuple[Interface, ...]:
    """Those interfaces whose address is in a network."""
    wanted = parse_network(network)
    return tuple(interface for interface in among if ipaddress.ip_address(interface.address) in wanted)


def parse_ports(text: str) -> range:
    """The ports of `--port_range`: `29500-29510`, or one port.

    Raises:
        ConfigError: They are none.
    """
    match = re.fullmatch(r"(\d+)(?:-(\d+))?", text.strip(), re.ASCII)
    first, last = (int(match[1]), int(match[2] or match[1])) if match else (0, 0)
    if not 1 <= first <= last <= 65535:
        raise ConfigError(f"--port_range {text}: two TCP ports as 29500-29510 are expected")
    return range(first, last + 1)


def free_port(address: str = "", ports: Sequence[int] = DEFAULT_PORTS) -> int:
    """A TCP port that nobody listens on.

    Args:
        address: Where it must be free; empty for all addresses.
        ports: Those that may be chosen; tried in a random order.

    Raises:
        LaunchError: None of them is free.
    """
    where = f"on {address}" if address else "on this machine"
    for port in random.sample(ports, len(ports)):
        try:
            with _listening(address, port):
                return port
        except OSError as error:
            if error.errno not in (errno.EADDRINUSE, errno.EACCES):  # no port would do
                raise LaunchError(f"no TCP port can be opened {where}: {error.strerror or error}") from error
    hint = "; those below 1024 are root's" if ports[0] < 1024 else ""
    raise LaunchError(f"no TCP port from {ports[0]} to {ports[-1]} is free {where}{hint}; give another --port_range")


@contextlib.contextmanager
def _listening(address: str, port: int) -> Iterator[None]:
    family = socket.AF_INET6 if ":" in address else socket.AF_INET
    with socket.socket(family, socket.SOCK_STREAM) as probe:
        probe.bind((address, port))
        yield
