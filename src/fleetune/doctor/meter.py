"""Whether hosts reach each other over TCP, and how fast: who answers, and who asks.

A `Responder` listens on a few ports of one address while the doctor looks. A connection begins with the doctor's
secret, which only it and its probes know, and with what is wanted; the answer begins with the responder's name, since
the address may have led to another machine.
"""

from __future__ import annotations

import contextlib
import errno
import json
import select
import socket
import struct
import threading
import time
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import Literal

ECHO, TAKE = b"E", b"T"
"""Wishes of a connection: every byte sent back; or all taken, and told how fast they came."""

SECRET_LENGTH = 32
_ROUNDS = 10
_CHUNK = bytes(1 << 16)
_WARM_UP = 1 / 4
"""Share of a transfer that is not measured: TCP starts slowly, and limits of rate let a burst pass."""
_MOST_PORTS = 3
_AT_ONCE = 64
_SLOW_SHARE = 1 / 2
"""Of the fastest pair's rate: less is worth a word."""
_PLENTY_MBIT = 8000.0
"""Above it, the measuring program is what limits one stream."""
_UNREACHABLE = (errno.EHOSTUNREACH, errno.ENETUNREACH, errno.ENETDOWN, errno.EHOSTDOWN)

Outcome = Literal["reached", "timeout", "refused", "unreachable", "stalled", "other host", "failed"]


@dataclass(frozen=True, kw_only=True)
class Peer:
    """A host as others are to reach it."""

    name: str
    address: str
    ports: tuple[int, ...]


@dataclass(frozen=True, kw_only=True)
class Attempt:
    """How one connection to one port went."""

    target: str
    """Name of the host that was to be reached."""
    address: str
    port: int
    outcome: Outcome
    said: str | None = None
    """What the system or the other side said."""
    round_trip_s: float | None = None
    """The shortest of a few, there and back."""


@dataclass(frozen=True, kw_only=True)
class Transfer:
    """How fast bytes went from one host to another, in one stream."""

    target: str
    mbit_per_s: float | None
    said: str | None = None
    """Why there is no rate."""


def is_slow(mbit_per_s: float, best: float) -> bool:
    """Whether a rate is worth a word beside that of the fastest pair."""
    return mbit_per_s < _SLOW_SHARE * best and mbit_per_s < _PLENTY_MBIT


# ---- answering


class Responder:
    """Listens on an address, until it is closed.

    Args:
        address: Of this host; nothing else is listened on.
        ports: A few free ones of these are taken, spread over the range, and one that the system chooses: gloo's
            connections between ranks are on such ports.
        secret: What a connection begins with.
        name: Of this host.
    """

    def __init__(self, address: str, ports: Sequence[int], *, secret: str, name: str) -> None:
        self._secret, self._name = secret.encode(), name
        self._sockets = list(_listen_on_some(address, ports))
        self._sockets.append(_listening(address, 0))
        self.ports = tuple(int(listener.getsockname()[1]) for listener in self._sockets)
        for listener in self._sockets:
            threading.Thread(target=self._accept, args=(listener,), daemon=True).start()

    def close(self) -> None:
        for listener in self._sockets:
            listener.close()

    def _accept(self, listener: socket.socket) -> None:
        while True:
            try:
                connection, _ = listener.accept()
            except OSError:  # closed
                return
            threading.Thread(target=self._answer, args=(connection,), daemon=True).start()

    def _answer(self, connection: socket.socket) -> None:
        with contextlib.suppress(OSError), connection:
            connection.settimeout(30)
            greeting = _receive(connection, SECRET_LENGTH + 1)
            if greeting[:-1] != self._secret:
                return
            connection.sendall(f"{self._name}\n".encode())
            if greeting[-1:] == ECHO:
                while data := connection.recv(64):
                    connection.sendall(data)
            else:
                _take(connection)


def _listen_on_some(address: str, ports: Sequence[int]) -> Iterator[socket.socket]:
    """On free ports at the beginning, in the middle and at the end of a range."""
    taken = 0
    for begin, end in ((0, 1), (1, 2), (2, 3)):
        part = ports[begin * len(ports) // _MOST_PORTS : end * len(ports) // _MOST_PORTS]
        for port in part or ports[taken:]:
            with contextlib.suppress(OSError):
                yield _listening(address, port)
                taken += 1
                break


def _listening(address: str, port: int) -> socket.socket:
    listener = socket.socket(socket.AF_INET6 if ":" in address else socket.AF_INET, socket.SOCK_STREAM)
    try:
        listener.bind((address, port))
        listener.listen(64)
    except OSError:
        listener.close()
        raise
    return listener


def _take(connection: socket.socket) -> None:
    """Take what comes for the seconds that the other side names, then tell the rate, and go on taking."""
    (seconds,) = struct.unpack("d", _receive(connection, 8))
    buffer = bytearray(1 << 20)
    began = marked = time.perf_counter()
    total = total_at_mark = 0
    is_marked = False
    while (now := time.perf_counter()) < began + seconds:
        if not is_marked and now >= began + _WARM_UP * seconds:
            marked, total_at_mark, is_marked = now, total, True
        if select.select([connection], [], [], began + seconds - now)[0]:
            received = connection.recv_into(buffer)
            if not received:
                break
            total += received
    told = {"bytes": total - total_at_mark, "seconds": time.perf_counter() - marked}
    connection.sendall(json.dumps(told).encode() + b"\n")
    while connection.recv_into(buffer):  # until the other side has read the answer: it resets the connection
        pass


def _receive(connection: socket.socket, count: int) -> bytes:
    data = b""
    while len(data) < count:
        if not (more := connection.recv(count - len(data))):
            raise ConnectionResetError("the other side closed the connection")
        data += more
    return data


def _receive_line(connection: socket.socket) -> str:
    data = b""
    while not data.endswith(b"\n") and len(data) < 4096:
        data += _receive(connection, 1)
    return data.decode(errors="replace").strip()


# ---- asking


def reach(peers: Sequence[Peer], *, secret: str, timeout_s: float) -> list[Attempt]:
    """Connect to every port of every peer, many at the same time, and measure the round trips."""
    places = [(peer, port) for peer in peers for port in peer.ports]
    with ThreadPoolExecutor(max_workers=_AT_ONCE) as pool:
        return list(pool.map(lambda place: _reach_port(*place, secret=secret, timeout_s=timeout_s), places))


def _reach_port(peer: Peer, port: int, *, secret: str, timeout_s: float) -> Attempt:
    def attempt(outcome: Outcome, said: str | None = None, round_trip_s: float | None = None) -> Attempt:
        return Attempt(
            target=peer.name, address=peer.address, port=port, outcome=outcome, said=said, round_trip_s=round_trip_s
        )

    try:
        connection = socket.create_connection((peer.address, port), timeout=timeout_s)
    except OSError as error:
        return attempt(_outcome_of(error), error.strerror or str(error))
    with connection:
        try:
            connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            connection.sendall(secret.encode() + ECHO)
            name = _receive_line(connection)
            if name != peer.name:
                return attempt("other host", f"the host that answers is {name}")
            return attempt("reached", round_trip_s=min(_round_trip(connection) for _ in range(_ROUNDS)))
        except TimeoutError:
            return attempt("stalled", "the connection opens, but no data come back")
        except OSError as error:
            return attempt("failed", error.strerror or str(error))


def _outcome_of(error: OSError) -> Outcome:
    if isinstance(error, TimeoutError):
        return "timeout"
    if isinstance(error, ConnectionRefusedError):
        return "refused"
    return "unreachable" if error.errno in _UNREACHABLE else "failed"


def _round_trip(connection: socket.socket) -> float:
    began = time.perf_counter()
    connection.sendall(b"x")
    _receive(connection, 1)
    return time.perf_counter() - began


def transfer(peer: Peer, *, secret: str, seconds: float, timeout_s: float) -> Transfer:
    """Send to a peer for a while, and be told the rate at which it came in."""
    try:
        with socket.create_connection((peer.address, peer.ports[-1]), timeout=timeout_s) as connection:
            connection.sendall(secret.encode() + TAKE)
            _receive_line(connection)
            connection.sendall(struct.pack("d", seconds))
            told = _send_until_told(connection, seconds + timeout_s)
            # What is still on its way would disturb the next measurement: closing throws it away.
            connection.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
    except TimeoutError:
        return Transfer(target=peer.name, mbit_per_s=None, said="it connects, but data do not arrive")
    except (OSError, ValueError) as error:
        return Transfer(target=peer.name, mbit_per_s=None, said=getattr(error, "strerror", None) or str(error))
    rate = told["bytes"] * 8 / told["seconds"] / 1e6 if told["seconds"] > 0 else 0.0
    return Transfer(target=peer.name, mbit_per_s=rate or None, said=None if rate else "data do not arrive")


def _send_until_told(connection: socket.socket, within_s: float) -> dict[str, float]:
    connection.setblocking(False)
    deadline = time.perf_counter() + within_s
    while (left := deadline - time.perf_counter()) > 0:
        readable, writable, _ = select.select([connection], [connection], [], left)
        if readable:
            connection.settimeout(5)
            told: dict[str, float] = json.loads(_receive_line(connection))
            return told
        if writable:
            with contextlib.suppress(BlockingIOError):
                connection.send(_CHUNK)
    raise TimeoutError
