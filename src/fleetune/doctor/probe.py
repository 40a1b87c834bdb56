"""The program that runs on every host for the doctor: reads requests, answers each; ends with its standard input.

    python -m fleetune.doctor.probe NAME

Requests and answers are a line of JSON each, and answers begin with `MARK`, since login files may print what they like.
"""

from __future__ import annotations

import contextlib
import dataclasses
import json
import os
import signal
import sys
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from fleetune.cluster.network import address_towards, inside, interface_of, interfaces
from fleetune.doctor.facts import to_json
from fleetune.doctor.machine import read_facts
from fleetune.doctor.meter import Peer, Responder, reach, transfer

MARK = "FLEETUNE-DOCTOR "
IDLE_S = 180
"""A probe that nobody has asked anything for so long ends: its connection may be lost without a word."""

Answer = dict[str, Any]


class Probe:
    """What a probe does, by the word of a request.

    Args:
        name: What the doctor calls this host.
    """

    def __init__(self, name: str) -> None:
        self._name = name
        self._responder: Responder | None = None
        self.answers: Mapping[str, Callable[..., Answer]] = {
            "facts": self.facts, "clock": self.clock, "listen": self.listen, "reach": self.reach,
            "transfer": self.transfer,
        }  # fmt: skip

    def facts(self, cache_dir: str, ports: list[int], environ: dict[str, str], patience_s: float) -> Answer:
        """The facts of this host.

        Args:
            cache_dir: As the user wrote it: ~ is the home on this host.
            ports: First and last that rank 0 may listen on.
            environ: Variables that a run would have in addition.
            patience_s: Longest wait for `import torch`.
        """
        facts = read_facts(
            cache_dir=Path(cache_dir).expanduser(), ports=_ports(ports), environ={**os.environ, **environ},
            patience_s=patience_s,
        )  # fmt: skip
        return {"facts": to_json(facts)}

    def clock(self) -> Answer:
        """What this host's clock says, in seconds since 1970."""
        return {"time": time.time()}

    def listen(self, towards: str | None, network: str | None, ports: list[int], secret: str) -> Answer:
        """Listen on the address that a run would use, and tell it.

        Args:
            towards: Address of the head; None on the head of a cluster of one.
            network: See the setting.
            ports: First and last of the range.
            secret: What connections begin with.
        """
        found = interfaces()
        if network is not None:
            fitting = inside(network, found)
            address = fitting[0].address if fitting else None
        else:
            address = address_towards(towards) if towards is not None else "127.0.0.1"
        if address is None:
            return {"address": None}
        if self._responder is not None:
            self._responder.close()
        self._responder = Responder(address, _ports(ports), secret=secret, name=self._name)
        return {
            "address": address, "interface": interface_of(address, found), "ports": self._responder.ports,
        }  # fmt: skip

    def reach(self, peers: list[dict[str, Any]], secret: str, connect_s: float) -> Answer:
        """Connect to peers."""
        attempts = reach([_peer(peer) for peer in peers], secret=secret, timeout_s=connect_s)
        return {"attempts": [dataclasses.asdict(one) for one in attempts]}

    def transfer(self, peer: dict[str, Any], secret: str, seconds: float, connect_s: float) -> Answer:
        """Send to a peer for a while."""
        return dataclasses.asdict(transfer(_peer(peer), secret=secret, seconds=seconds, timeout_s=connect_s))


def _ports(first_and_last: list[int]) -> range:
    return range(first_and_last[0], first_and_last[1] + 1)


def _peer(told: dict[str, Any]) -> Peer:
    return Peer(name=told["name"], address=told["address"], ports=tuple(told["ports"]))


def main(name: str) -> None:
    """Answer until there are no more requests."""
    probe = Probe(name)
    signal.alarm(IDLE_S)
    for line in sys.stdin:
        request = json.loads(line)
        try:
            answer = probe.answers[request.pop("do")](**request)
        except Exception as error:  # whatever it is, it is of interest to the one who asked
            answer = {"problem": f"{type(error).__name__}: {error}"}
        with contextlib.suppress(BrokenPipeError):
            print(MARK + json.dumps(answer), flush=True)
        signal.alarm(IDLE_S)


if __name__ == "__main__":
    main(sys.argv[1])
