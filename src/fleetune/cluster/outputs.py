"""What ranks on other hosts print, brought to the host that started them, each rank's by itself.

mpirun and srun mix the lines of all ranks, and cut them anywhere. So every rank connects its standard output and
standard error to the head before it becomes the user's command (`connect`), and the head (`RankOutputs`) shows those
of rank 0, and keeps all of them in `logs/<host>.<rank>.log`. What stays open tells which ranks live.
"""

from __future__ import annotations

import contextlib
import json
import os
import re
import secrets
import selectors
import socket
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import BinaryIO

from fleetune.cluster.network import free_port
from fleetune.errors import LaunchError

OUTPUT_VARIABLE = "FLEETUNE_OUTPUT"
"""Tells a rank where its output goes, as JSON: address, port, and a word that shows that it belongs to the run."""
LOG_FOLDER = "logs"
"""Name of the folder that what ranks say is kept in."""

_STREAMS = ("stdout", "stderr")
_STATUS = "status"
_CONNECT_TIMEOUT_S = 20
_TAIL_BYTES = 8192
_HELLO_BYTES = 4096


def log_file(folder: Path, host: str, rank: int) -> Path:
    """Where what a rank says is kept; a name of a host may be an address."""
    return folder / f"{re.sub(r'[^A-Za-z0-9._-]', '_', host)}.{rank}.log"


def connect(environ: Mapping[str, str], *, rank: int, host: str) -> socket.socket | None:
    """Let this process's standard output and error go to the head, where it listens for them.

    Args:
        environ: Holds `OUTPUT_VARIABLE`, or does not: then nothing happens.
        rank: Number of this rank.
        host: Name of this host.

    Returns:
        Where the head wants to be told this rank's exit status, if it does: a number as text.

    Raises:
        LaunchError: The head cannot be reached.
    """
    if OUTPUT_VARIABLE not in environ:
        return None
    told = json.loads(environ[OUTPUT_VARIABLE])
    about = {"word": told["word"], "rank": rank, "host": host, "pid": os.getpid()}
    place = (str(told["address"]), int(told["port"]))
    for descriptor, stream in enumerate(_STREAMS, start=1):
        with _opened(place, {**about, "stream": stream}) as connection:
            os.dup2(connection.fileno(), descriptor)
    return _opened(place, {**about, "stream": _STATUS}) if told["wants_status"] else None


def _opened(place: tuple[str, int], hello: Mapping[str, object]) -> socket.socket:
    try:
        connection = socket.create_connection(place, timeout=_CONNECT_TIMEOUT_S)
        connection.sendall(json.dumps(hello).encode() + b"\n")
    except OSError as error:
        raise LaunchError(
            f"{hello['host']} cannot reach the head at {place[0]}, TCP port {place[1]}: {error.strerror or error}; "
            "hosts must be able to connect to each other: open the ports (--port_range names them) in the firewall"
        ) from error
    connection.settimeout(None)
    return connection


@dataclass
class RankOutput:
    """What is known of one rank."""

    rank: int
    host: str
    """As the user names it."""
    hostname: str
    """As it names itself."""
    pid: int
    log: Path
    file: BinaryIO = field(repr=False)
    open_streams: int = 0
    tail: bytes = b""
    """The end of what it has printed."""

    def keep(self, text: bytes, stream: str) -> None:
        """Write it to the log; the first rank's goes to the terminal, too."""
        self.file.write(text)
        self.tail = (self.tail + text)[-_TAIL_BYTES:]
        if self.rank == 0:
            with contextlib.suppress(OSError, ValueError):  # the terminal may have been closed
                shown = sys.stdout if stream == "stdout" else sys.stderr
                shown.buffer.write(text)
                shown.flush()

    def last_lines(self, count: int) -> list[str]:
        """The last lines it has printed."""
        return self.tail.decode(errors="replace").splitlines()[-count:]


class RankOutputs:
    """The head's end of it: a context manager, and a step of whoever waits for the ranks.

    Args:
        address: Of this host, towards the others.
        ports: Those that it may listen on.
        logs: Folder of the logs.
        names: Rank -> name of its host, where the user's name for it is known; else the host tells its own.
        wants_status: Whether ranks tell their exit status here, since their launcher keeps it to itself.
    """

    def __init__(
        self, address: str, ports: Sequence[int], logs: Path, names: Mapping[int, str], *, wants_status: bool = False
    ) -> None:
        self.ranks: dict[int, RankOutput] = {}
        self.statuses: dict[int, int] = {}
        """Exit status of ranks that have told it, in the order of time."""
        self.ended: list[int] = []
        """Ranks whose output has been closed, in the order of time."""
        self._address, self._ports, self._logs, self._names = address, ports, logs, names
        self._wants_status = wants_status
        self._word = secrets.token_hex(16)
        self._selector = selectors.DefaultSelector()

    def __enter__(self) -> RankOutputs:
        self._logs.mkdir(parents=True, exist_ok=True)
        family = socket.AF_INET6 if ":" in self._address else socket.AF_INET
        self._listener = socket.socket(family, socket.SOCK_STREAM)
        self._listener.bind((self._address, free_port(self._address, self._ports)))
        self._listener.listen(1024)
        self._listener.setblocking(False)
        self._selector.register(self._listener, selectors.EVENT_READ, None)
        return self

    def __exit__(self, *_: object) -> None:
        for key in list(self._selector.get_map().values()):
            assert isinstance(key.fileobj, socket.socket)
            key.fileobj.close()
        self._selector.close()
        for output in self.ranks.values():
            output.file.close()

    def variable(self) -> dict[str, str]:
        """What ranks have to find in their environment."""
        port = self._listener.getsockname()[1]
        told = {"address": self._address, "port": port, "word": self._word, "wants_status": self._wants_status}
        return {OUTPUT_VARIABLE: json.dumps(told)}

    def pump(self, timeout_s: float) -> bool:
        """Take what has come within the time; returns whether anything has."""
        events = self._selector.select(timeout_s)
        for key, _ in events:
            assert isinstance(key.fileobj, socket.socket)
            if key.data is None:
                self._accept()
            else:
                self._read(key.fileobj, key.data)
        return bool(events)

    def drain(self) -> None:
        """Take what has come already, when the ranks have ended."""
        while self.pump(0.2):
            pass

    def _accept(self) -> None:
        with contextlib.suppress(OSError):
            connection, _ = self._listener.accept()
            connection.setblocking(False)
            self._selector.register(connection, selectors.EVENT_READ, _Stream())

    def _read(self, connection: socket.socket, stream: _Stream) -> None:
        try:
            data = connection.recv(65536)
        except BlockingIOError:
            return
        except OSError:  # the host was lost
            data = b""
        try:
            text = data if stream.output is not None else self._greet(stream, data)
        except (ValueError, KeyError, TypeError):  # a stranger
            return self._close(connection, stream)
        if stream.name == _STATUS and stream.output is not None and text:
            self.statuses[stream.output.rank] = int(text)
        elif stream.output is not None:
            stream.output.keep(text, stream.name)
        return None if data else self._close(connection, stream)

    def _greet(self, stream: _Stream, data: bytes) -> bytes:
        """Take the first line, which tells who is speaking; returns what follows it."""
        stream.hello += data
        line, newline, rest = stream.hello.partition(b"\n")
        if not newline and len(stream.hello) < _HELLO_BYTES:
            return b""
        hello = json.loads(line)
        if not secrets.compare_digest(str(hello["word"]), self._word):
            raise ValueError("another run's rank")
        stream.output = self._rank(int(hello["rank"]), str(hello["host"]), int(hello["pid"]))
        stream.output.open_streams += 1
        stream.name = str(hello["stream"])
        return rest

    def _rank(self, rank: int, host: str, pid: int) -> RankOutput:
        if rank not in self.ranks:
            name = self._names.get(rank, host)
            log = log_file(self._logs, name, rank)
            self.ranks[rank] = RankOutput(
                rank=rank, host=name, hostname=host, pid=pid, log=log, file=log.open("wb", buffering=0)
            )
        return self.ranks[rank]

    def _close(self, connection: socket.socket, stream: _Stream) -> None:
        self._selector.unregister(connection)
        connection.close()
        if stream.output is not None:
            stream.output.open_streams -= 1
            if stream.output.open_streams == 0:
                self.ended.append(stream.output.rank)


@dataclass
class _Stream:
    """One connection: unknown until its first line has come."""

    name: str = ""
    output: RankOutput | None = None
    hello: bytes = b""
