"""What runs on each host of a run: starts this host's ranks, hands on what they say, and ends them.

`python -m fleetune.cluster.launchers.agent`, started by `fleetune.cluster.launchers.head`. The two talk in JSON,
a message a line: the head's on standard input, the agent's on standard output, each after `MARK`, since a login shell
may print there, too. When the head is gone (end of input, or silence for longer than the time limit) the ranks are
ended.

    head                                   agent
    survey: what is wanted          ->     survey: this host, its ranks, its address towards the others
    listen, on the first host       ->     listening: at which port the ranks will meet
    reach, on the others            ->     reached: by which interface
    start: ranks with variables     ->     out: a line of a rank; failure: of the first; ended
    stop, end, ping                 ->     alive, every few seconds
"""

from __future__ import annotations

import contextlib
import json
import os
import queue
import select
import signal
import socket
import sys
import threading
import time
from collections.abc import Mapping, Sequence
from typing import Any

from fleetune.cluster.launchers.local import Watch
from fleetune.cluster.launchers.processes import RankExit, RankProcesses
from fleetune.cluster.launchers.signals import SignalInbox
from fleetune.cluster.network import (
    DEFAULT_PORTS,
    address_towards,
    free_port,
    inside,
    interface_of,
    interfaces,
    parse_ports,
)
from fleetune.cluster.rank import is_loopback
from fleetune.errors import FleetuneError, LaunchError
from fleetune.hardware.pinning import plan_this_host
from fleetune.hardware.versions import read_versions

MARK = "\x1efleetune "
"""Before each message of an agent."""
BEAT_S = 2.0
"""Seconds between two signs of life, of either side."""
LOST_GRACE_S = 5.0
"""What ranks get to save in when the head is gone."""

Message = dict[str, Any]


def main() -> int:
    """Serve the head until its run has ended.

    Returns:
        0; the ranks' own status is in the last message.
    """
    out = os.dup(sys.stdout.fileno())
    os.dup2(sys.stderr.fileno(), sys.stdout.fileno())  # what else is printed here is no message
    agent = Agent(sys.stdin.fileno(), out)
    agent.serve()
    sys.stdout.flush()
    os._exit(0)  # a thread may hang in a write to a head that is gone


class Agent:
    """One host's side.

    Args:
        source: File descriptor of the head's messages.
        sink: File descriptor of the messages to it.
    """

    def __init__(self, source: int, sink: int) -> None:
        self._source, self._sink, self._lock = source, sink, threading.Lock()
        self._received: queue.SimpleQueue[Message | None] = queue.SimpleQueue()
        self._inbox: SignalInbox | None = None
        self._silence_limit_s = 60.0
        self._asked: Message = {}
        self._listener: socket.socket | None = None

    def serve(self) -> None:
        """Do what the head says, message by message; returns when the ranks have ended, or the head is gone."""
        threading.Thread(target=self._listen, name="head", daemon=True).start()
        threading.Thread(target=self._beat, name="beat", daemon=True).start()
        steps = {"survey": self._survey, "listen": self._listen_once, "reach": self._reach}
        while (message := self._received.get()) is not None:
            if message["do"] == "start":
                self._run_ranks(message)
                return
            if message["do"] in ("stop", "end"):
                return
            try:
                self._tell(steps[message["do"]](message))
            except FleetuneError as error:
                self._tell({"refused": str(error)})

    # ---- before the start

    def _survey(self, asked: Message) -> Message:
        """Who this host is, and how many ranks it would have."""
        self._silence_limit_s, self._asked = asked["timeout_s"], asked
        os.environ.update(asked["environ"])
        if has_folder := os.path.isdir(asked["cwd"]):  # a host without it works in the user's home
            os.chdir(asked["cwd"])
        plan = plan_this_host(os.environ, processes=asked["processes"], threads=asked["threads"])
        found = {
            "hostname": socket.gethostname(),
            "versions": read_versions(),
            "has_folder": has_folder,
            "plan": plan.to_dict(),
        }
        if asked["towards"] is not None:
            found["address"] = meeting_address(asked["towards"], asked["network"], os.environ)
        return {"survey": found}

    def _listen_once(self, asked: Message) -> Message:
        """A port that is free, and a listener there until the ranks start, for the other hosts to try."""
        ports = DEFAULT_PORTS if asked["port_range"] is None else parse_ports(asked["port_range"])
        port = free_port(asked["address"], ports)
        self._listener = socket.create_server((asked["address"], port), family=_family(asked["address"]), backlog=1024)
        return {"listening": {"port": port, "interface": interface_of(asked["address"], interfaces())}}

    def _reach(self, asked: Message) -> Message:
        """Try to connect to the place where the ranks will meet; and the interface that leads there."""
        place, limit_s = (asked["address"], asked["port"]), min(10.0, self._silence_limit_s)
        try:
            with socket.create_connection(place, timeout=limit_s) as connection:
                own = connection.getsockname()[0]
        except TimeoutError:
            raise LaunchError(
                f"no answer from {place[0]} port {place[1]} within {limit_s:g} s: a firewall may drop it; open all TCP "
                "ports between the hosts, or name another network with --network"
            ) from None
        except OSError as error:
            raise LaunchError(f"cannot connect to {place[0]} port {place[1]}: {error.strerror or error}") from None
        among = interfaces() if self._asked["network"] is None else inside(self._asked["network"], interfaces())
        if (interface := interface_of(own, among)) is None:
            network = self._asked["network"]
            raise LaunchError(f"the way to {place[0]} begins at {own}, which is not in --network {network}")
        return {"reached": interface}

    # ---- ranks

    def _run_ranks(self, message: Message) -> None:
        if self._listener is not None:
            self._listener.close()  # rank 0 listens there now
        environs = [os.environ | variables for variables in message["ranks"]]
        with SignalInbox() as self._inbox, RankProcesses(self._hand_on) as ranks:
            while not self._received.empty():  # what came just before there was an inbox
                self._take(self._received.get() or {"do": "end"})
            try:
                ranks.start(message["command"], environs)
            except LaunchError as error:
                self._tell({"refused": str(error)})
                return
            watch = Watch(ranks, self._inbox, tell=lambda line: None, on_failure=self._tell_failure, ends_alone=False)
            watch.until_all_ended()
        if watch.first_failure is not None:
            self._tell_failure(watch.first_failure)
        self._tell({"ended": watch.status})

    def _hand_on(self, rank: int, stream: str, line: bytes) -> None:
        self._tell({"out": [rank, stream, line.decode(errors="replace")]})

    def _tell_failure(self, end: RankExit) -> None:
        self._tell({"failure": {"rank": end.rank, "status": end.status, "words": end.in_words()}})

    # ---- the head

    def _tell(self, message: Message) -> None:
        data = f"{MARK}{json.dumps(message)}\n".encode()
        with self._lock, contextlib.suppress(OSError):  # a head that is gone is noticed by its silence
            while data:
                data = data[os.write(self._sink, data) :]

    def _beat(self) -> None:
        while True:
            time.sleep(BEAT_S)
            self._tell({"alive": True})

    def _listen(self) -> None:
        begun, heard = b"", time.monotonic()
        while time.monotonic() - heard < self._silence_limit_s:
            if not select.select([self._source], [], [], 1.0)[0]:
                continue
            if not (chunk := os.read(self._source, 65536)):
                break
            heard = time.monotonic()
            *lines, begun = (begun + chunk).split(b"\n")
            for line in lines:
                self._take(json.loads(line))
        self._on_lost()

    def _take(self, message: Message) -> None:
        if self._inbox is None:
            if message["do"] != "ping":
                self._received.put(message)
        elif message["do"] in ("stop", "end"):
            self._inbox.post(signal.SIGTERM)
            if message["do"] == "end":
                self._inbox.post(signal.SIGTERM)

    def _on_lost(self) -> None:
        """The head is gone: ranks may save, and are then ended."""
        self._received.put(None)
        if self._inbox is not None:
            self._inbox.post(signal.SIGTERM)
            time.sleep(LOST_GRACE_S)
            self._inbox.post(signal.SIGTERM)


def meeting_address(towards: Sequence[str], network: str | None, environ: Mapping[str, str]) -> str:
    """The address of this host at which the other hosts find it.

    Args:
        towards: Names or addresses of the other hosts; none, and it is a loopback address.
        network: Where the address must be, if anywhere.
        environ: Usually `os.environ`: ssh tells there at which address it was reached.

    Raises:
        LaunchError: There is no such address.
    """
    if not towards:
        return "127.0.0.1"
    if network is not None:
        if found := inside(network, interfaces()):
            return found[0].address
        has = ", ".join(entry.address for entry in interfaces())
        raise LaunchError(f"no address in --network {network}; this host has {has}")
    for target in towards:
        own = address_towards(target)
        if own is not None and not is_loopback(own):
            return own
    reached_at = environ.get("SSH_CONNECTION", "").split()
    if len(reached_at) == 4 and not is_loopback(reached_at[2]):
        return reached_at[2]
    raise LaunchError(f"no address at which {', '.join(towards)} would find this host; name one with --network")


def _family(address: str) -> socket.AddressFamily:
    return socket.AF_INET6 if ":" in address else socket.AF_INET


def agent_command() -> list[str]:
    """How an agent is started, on a host whose Python is at the same path as this one."""
    return [sys.executable, "-m", "fleetune.cluster.launchers.agent"]


if __name__ == "__main__":
    main()
