"""Where ranks meet: the first one listens on one address of its host, the others find it.

    meeting_point(info, ...)     where that is, as this host sees it
    open_store(info, point, ...) the key-value store of all ranks: served by the first, reached by the others
    choose_interface(...)        the network interface that this rank's connections to others go through

torch's own rendezvous would listen on all interfaces, and say little of what went wrong.
"""

from __future__ import annotations

import contextlib
import errno
import ipaddress
import socket
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from datetime import timedelta

import psutil
from torch.distributed import DistError, PrefixStore, Store, TCPStore  # type: ignore[attr-defined]

from fleetune.cluster.network import Interface, address_towards, inside, interface_of, interfaces
from fleetune.cluster.rank import RankInfo, is_loopback
from fleetune.errors import LaunchError

GLOO_INTERFACE = "GLOO_SOCKET_IFNAME"
_ANY = "0.0.0.0"
_ATTEMPT_S, _PAUSE_S = 5.0, 0.1
"""What one attempt to connect may take, and the time to the next."""
_BACKLOG = 4096


@dataclass(frozen=True, kw_only=True)
class MeetingPoint:
    """Where the first rank listens, as one host sees it."""

    addresses: tuple[str, ...]
    """To bind to (the first of them) or to try, in this order."""
    notice: str | None = None
    """Why it is another address than the launcher's: in one line for the first rank to say, for others beside a failure
    to reach it."""

    @property
    def is_everywhere(self) -> bool:
        """Whether the first rank listens on all addresses of its host."""
        return self.addresses[0] == _ANY


def meeting_point(
    info: RankInfo, network: str | None, environ: Mapping[str, str], among: Sequence[Interface] | None = None
) -> MeetingPoint:
    """The addresses behind the launcher's MASTER_ADDR, with a look at whether they can be what was meant.

    Many distributions map a host's own name to 127.0.1.1. On the first rank's host that name then means the host
    alone, while the others know its real address: the first rank must listen there, and the other ranks of its host
    must look for it there.

    Args:
        info: This rank.
        network: `--network`.
        environ: May hold the user's GLOO_SOCKET_IFNAME.
        among: Interfaces of this host; asked for when not given.

    Raises:
        LaunchError: The name cannot be resolved, or this host has no address in the network.
    """
    if among is None:
        among = interfaces()
    found = _resolve(info)
    own = [address for address in found if _is_own(address, among)]
    if info.local_world_size == info.world_size:
        return MeetingPoint(addresses=tuple(own or found))
    outward = [address for address in own if not is_loopback(address)]
    if info.rank == 0:
        return MeetingPoint(addresses=(outward[0],)) if outward else _instead(info, found, network, environ, among)
    if outward or not own:
        return MeetingPoint(addresses=tuple(outward or found))
    return _instead(info, found, network, environ, among)


def _resolve(info: RankInfo) -> list[str]:
    try:
        entries = socket.getaddrinfo(info.main_address, info.main_port, type=socket.SOCK_STREAM)
    except (OSError, UnicodeError) as error:
        raise LaunchError(
            f"MASTER_ADDR={info.main_address}: {socket.gethostname()} (rank {info.rank}) cannot resolve this name "
            f"({getattr(error, 'strerror', None) or error}): give the address of rank 0's host, or add the name to "
            "/etc/hosts"
        ) from error
    return list(dict.fromkeys(str(entry[4][0]) for entry in entries))


def _is_own(address: str, among: Sequence[Interface]) -> bool:
    # ::1 is no address of a host whose IPv6 is off, whatever its /etc/hosts says.
    return address.startswith("127.") or interface_of(address.partition("%")[0], among) is not None


def _instead(info: RankInfo, found: Sequence[str], network: str | None, environ: Mapping[str, str],
             among: Sequence[Interface]) -> MeetingPoint:  # fmt: skip
    """What to take on the first rank's host where the launcher's address is not one that other hosts can reach there.

    Only what cannot be wrong is chosen: with several candidates all of them are listened on, since the others may have
    been told any.
    """
    candidates = _outward(network, environ, among)
    meant = "this host alone" if any(map(is_loopback, found)) else f"{found[0]}, which is no address of this host"
    why = f"MASTER_ADDR={info.main_address} means {meant}, and ranks are on several hosts: "
    if not candidates:
        raise LaunchError(f"{why}{socket.gethostname()} has no other address: give one that the other hosts can reach")
    if info.rank > 0:
        looked = f"{why}rank 0 was looked for on this host ({socket.gethostname()})"
        return MeetingPoint(addresses=tuple(candidates if network is None else candidates[:1]), notice=looked)
    if len(candidates) == 1 or network is not None:
        return MeetingPoint(addresses=(candidates[0],), notice=f"{why}rank 0 listens on {candidates[0]}")
    listed = ", ".join(candidates)
    return MeetingPoint(
        addresses=(_ANY,), notice=f"{why}rank 0 listens on all addresses ({listed}); --network tells which is meant"
    )


def _outward(network: str | None, environ: Mapping[str, str], among: Sequence[Interface]) -> list[str]:
    """Addresses of this host that other hosts may know it by: those of the network, or of gloo's interface, or all."""
    if network is not None:
        return [interface.address for interface in _inside(network, among)]
    told = [name for name in environ.get(GLOO_INTERFACE, "").split(",") if name]
    all_of_them = [interface for interface in among if _is_outward(interface.address)]
    return [i.address for i in all_of_them if i.name in told] or [i.address for i in all_of_them]


def _is_outward(address: str) -> bool:
    parsed = ipaddress.ip_address(address)
    return not (parsed.is_loopback or parsed.is_link_local)


def _inside(network: str, among: Sequence[Interface]) -> tuple[Interface, ...]:
    """The interfaces in a network.

    Raises:
        LaunchError: There are none.
    """
    found = inside(network, among)
    if not found:
        listed = ", ".join(f"{interface.address} ({interface.name})" for interface in among)
        raise LaunchError(f"--network {network}: {socket.gethostname()} has no address in it; it has {listed}")
    return found


# ---- the store


def open_store(
    info: RankInfo, point: MeetingPoint, *, timeout_s: float, exchange_timeout_s: float, environ: Mapping[str, str]
) -> Store:
    """The key-value store that all ranks share.

    The first rank serves it, unless torchrun's agent does. A rank that torchrun has started again finds the keys
    of the attempt before in the agent's store, and so sees none of them.

    Args:
        info: This rank.
        point: Where the first rank listens.
        timeout_s: How long to try to reach it.
        exchange_timeout_s: How long a key is waited for.
        environ: Holds torchrun's variables, if it started this rank.

    Raises:
        LaunchError: The port is taken, or rank 0 cannot be reached.
    """
    timeout = timedelta(seconds=exchange_timeout_s)
    if info.rank == 0 and not agent_serves(environ):
        address = point.addresses[0]
        listening = listen(address, info.main_port)
        within = "127.0.0.1" if address == _ANY else address
        store = TCPStore(
            within, info.main_port, is_master=True, wait_for_workers=False, timeout=timeout,
            master_listen_fd=listening.detach(),
        )  # fmt: skip
    else:
        store = _reach(info, point, time.monotonic() + timeout_s, timeout_s)
        store.set_timeout(timeout)
    return PrefixStore(f"attempt/{environ.get('TORCHELASTIC_RESTART_COUNT', '0')}", store)


def agent_serves(environ: Mapping[str, str]) -> bool:
    """Whether torchrun's agent serves a store at the meeting point, for its ranks to use."""
    return environ.get("TORCHELASTIC_USE_AGENT_STORE") == str(True)


def listen(address: str, port: int) -> socket.socket:
    """A socket that listens on one address of this host.

    Raises:
        LaunchError: It cannot; names who has the port where that can be seen.
    """
    family, _, _, _, place = socket.getaddrinfo(address, port, type=socket.SOCK_STREAM)[0]
    listening = socket.socket(family, socket.SOCK_STREAM)
    listening.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    try:
        listening.bind(place)
        listening.listen(_BACKLOG)
    except OSError as error:
        listening.close()
        where = f"rank 0 cannot listen on {_joined(address, port)} of {socket.gethostname()}: "
        if error.errno != errno.EADDRINUSE:
            raise LaunchError(f"{where}{error.strerror}") from error
        raise LaunchError(
            f"{where}the port is taken by {holder_of(port)}: end that process, or give another MASTER_PORT "
            "(with fleetune's own launchers: --port_range)"
        ) from error
    return listening


def holder_of(port: int) -> str:
    """The process of this host that listens on a TCP port, in words; other users' are seen by root alone."""
    with contextlib.suppress(psutil.Error, OSError):
        for connection in psutil.net_connections(kind="tcp"):
            if connection.status == psutil.CONN_LISTEN and connection.laddr.port == port and connection.pid:
                words = " ".join(psutil.Process(connection.pid).cmdline())
                return f"process {connection.pid} ({words[:80]}{'...' if len(words) > 80 else ''})"
    return f"a process that cannot be seen from here (`sudo ss -ltnp sport = :{port}` names it)"


def _reach(info: RankInfo, point: MeetingPoint, deadline: float, timeout_s: float) -> TCPStore:
    """Connect to the store as soon as somebody listens."""
    failures: dict[str, OSError] = {}
    while True:
        for address in point.addresses:
            left = max(0.1, deadline - time.monotonic())
            try:
                socket.create_connection((address, info.main_port), timeout=min(_ATTEMPT_S, left)).close()
                return _client(info, address, timeout_s)
            except OSError as error:
                failures[address] = error
        if time.monotonic() > deadline:
            raise LaunchError(_unreached(info, point, failures, timeout_s))
        time.sleep(_PAUSE_S)


def _client(info: RankInfo, address: str, timeout_s: float) -> TCPStore:
    try:
        return TCPStore(address, info.main_port, wait_for_workers=False, timeout=timedelta(seconds=timeout_s))
    except DistError as error:
        raise LaunchError(
            f"{socket.gethostname()} (rank {info.rank}) reached {_joined(address, info.main_port)}, but what answers "
            "there is not rank 0 of a run: see on that host what listens on the port, or choose another MASTER_PORT"
        ) from error


_REFUSED = (
    "refused: the host is there, but nothing listens on the port. Rank 0 has not started or has failed (see its "
    "output), or listens elsewhere: MASTER_ADDR and MASTER_PORT must be the same on all ranks"
)
_NO_ANSWER = (
    "no answer: the host is down, the address is wrong, or a firewall drops the packets. Open the port between the "
    "hosts, or give an address of the network that they share"
)


def _unreached(info: RankInfo, point: MeetingPoint, failures: Mapping[str, OSError], timeout_s: float) -> str:
    told = "; ".join(f"{_joined(address, info.main_port)}: {_in_words(error)}" for address, error in failures.items())
    return f"{socket.gethostname()} (rank {info.rank}) could not reach rank 0 for {timeout_s:g} s. {told}" + (
        "" if point.notice is None else f"\n{point.notice}"
    )


def _in_words(error: OSError) -> str:
    if isinstance(error, ConnectionRefusedError):
        return _REFUSED
    silent = isinstance(error, TimeoutError) or error.errno in (errno.EHOSTUNREACH, errno.ENETUNREACH)
    return _NO_ANSWER if silent else str(error.strerror or error)


def _joined(address: str, port: int) -> str:
    return f"[{address}]:{port}" if ":" in address else f"{address}:{port}"


# ---- the interface of gradients


def choose_interface(
    towards: str, network: str | None, among: Sequence[Interface] | None = None,
    route: Callable[[str], str | None] = address_towards,
) -> str | None:  # fmt: skip
    """The interface that leads to another host; None where the kernel tells none.

    Args:
        towards: Address of a rank on another host.
        network: `--network`, which restricts the choice.
        among: Interfaces of this host; asked for when not given.
        route: Which own address leads to another.

    Raises:
        LaunchError: This host has no address in the network.
    """
    among = interfaces() if among is None else among
    allowed = among if network is None else _inside(network, among)
    own = route(towards)
    name = None if own is None else interface_of(own, allowed)
    if name is None and network is not None:
        return allowed[0].name
    return name
