"""A lab's network: a bridge on the machine, and a link from it into the network namespace of each host.

All names and addresses follow from the lab's number, so that a lab of a killed process can be taken apart by whoever
finds it.
"""

from __future__ import annotations

import ipaddress
import json
import re
from dataclasses import dataclass
from pathlib import Path

from lab.commands import LabError, call

NUMBERS = range(77, 97)
"""A lab's number is the second byte of its addresses."""
MAX_HOSTS = 200
NAMESPACES = Path("/run/netns")


@dataclass(frozen=True, kw_only=True)
class Network:
    """Names and addresses of one lab."""

    number: int
    """One of `NUMBERS`."""

    @property
    def subnet(self) -> ipaddress.IPv4Network:
        return ipaddress.IPv4Network(f"10.{self.number}.0.0/24")

    @property
    def bridge(self) -> str:
        return f"lab{self.number}"

    @property
    def machine_address(self) -> str:
        """Where hosts reach the machine that they run on."""
        return str(self.subnet[1])

    def address(self, index: int) -> str:
        """Address of the host with a number from 0."""
        return str(self.subnet[11 + index])

    def plug(self, index: int) -> str:
        """The machine's end of a host's link. The other end is the host's eth0."""
        return f"{self.bridge}p{index}"

    def namespace(self, host: str) -> str:
        return f"{self.bridge}-{host}"


def is_free(network: Network) -> bool:
    """Whether neither addresses nor names are in use on this machine."""
    routes = json.loads(call("ip", "-json", "-4", "route", "show", "table", "all"))
    taken = (ipaddress.ip_network(route["dst"], strict=False) for route in routes if route["dst"] != "default")
    return not any(network.subnet.overlaps(other) for other in taken) and not remains(network)


def build(network: Network) -> None:
    """Make the bridge, without hosts.

    First of all comes a route that refuses the lab's addresses: where the bridge is missing or down, their packets
    must not leave the machine by its default route.
    """
    call(
        *("ip", "-batch", "-"),
        lines=[
            f"route add unreachable {network.subnet} metric 9999",
            f"link add {network.bridge} type bridge forward_delay 0",
            f"addr add {network.machine_address}/{network.subnet.prefixlen} dev {network.bridge}",
            f"link set {network.bridge} up",
        ],
    )


def connect(network: Network, host: str, index: int) -> None:
    """Make a host's network namespace and plug it in. It has no default route: a host knows the lab, nothing else.

    The route names the congestion control, cubic as on most clusters, because the setting of a namespace takes only
    what the machine allows to everybody, and the machine is to stay as it is.
    """
    namespace, plug, address = network.namespace(host), network.plug(index), network.address(index)
    call("ip", "netns", "add", namespace)
    call(
        *("ip", "-batch", "-"),
        lines=[
            f"link add {plug} type veth peer name eth0 netns {namespace}",
            f"link set {plug} master {network.bridge} up",
        ],
    )
    call(
        *("ip", "-netns", namespace, "-batch", "-"),
        lines=[
            "link set lo up",
            f"addr add {address}/{network.subnet.prefixlen} dev eth0 noprefixroute",
            "link set eth0 up",
            f"route add {network.subnet} dev eth0 src {address} congctl cubic",
        ],
    )


def set_link(network: Network, host: str, index: int, mbit: float | None) -> None:
    """Limit a host's link to a rate, Mbit/s each way; `None` takes the limit off.

    Each end limits what it sends. Smaller bursts than 128 kB give a wrong rate: 95.6 % of it is goodput with this one,
    from 100 Mbit/s to 1 Gbit/s.
    """
    if mbit is not None and mbit <= 0:
        raise LabError(f"a link of {mbit} Mbit/s: expected more than 0, or None for no limit")
    shape = ("noqueue",) if mbit is None else ("tbf", "rate", f"{mbit}mbit", "burst", "128kb", "latency", "50ms")
    call("tc", "-netns", network.namespace(host), "qdisc", "replace", "dev", "eth0", "root", *shape)
    call("tc", "qdisc", "replace", "dev", network.plug(index), "root", *shape)


def set_carrier(network: Network, index: int, *, on: bool) -> None:
    """Bring a host's link up, or take it down: packets are lost in silence."""
    call("ip", "link", "set", network.plug(index), "up" if on else "down")


def counted_bytes(network: Network, index: int, direction: str) -> int:
    """What the machine's end of a link counted: "rx" is what the host sent, "tx" is what it was sent."""
    return int(Path(f"/sys/class/net/{network.plug(index)}/statistics/{direction}_bytes").read_text())


def namespaces(network: Network) -> list[str]:
    """Names of the network namespaces of a lab's hosts."""
    found = NAMESPACES.iterdir() if NAMESPACES.is_dir() else ()
    return sorted(path.name for path in found if path.name.startswith(f"{network.bridge}-"))


def _links(network: Network) -> list[str]:
    """The bridge and the links into hosts, these first."""
    names = [link["ifname"] for link in json.loads(call("ip", "-json", "link", "show"))]
    return sorted((name for name in names if re.fullmatch(rf"{network.bridge}(p\d+)?", name)), key=len, reverse=True)


def remains(network: Network) -> list[str]:
    """What there is of a lab's network: namespaces, links, and the route that refuses its addresses."""
    route = call("ip", "route", "show", "type", "unreachable", "exact", str(network.subnet)).strip()
    return [*namespaces(network), *_links(network), *([route] if route else [])]


def remove(network: Network) -> None:
    """Take away whatever is left of a lab's network."""
    for link in _links(network):  # by name: a namespace takes its link along, but later
        call("ip", "link", "delete", link)
    for namespace in namespaces(network):
        call("ip", "netns", "delete", namespace)
    if remains(network):
        call("ip", "route", "delete", "unreachable", str(network.subnet), "metric", "9999")
