"""Addresses, routes, networks and ports, on this machine and in a lab."""

from __future__ import annotations

import json
import socket
import sys
from pathlib import Path

import pytest

from fleetune.cluster.network import (
    Interface,
    address_towards,
    free_port,
    inside,
    interface_of,
    interfaces,
    own_addresses,
    parse_network,
    parse_ports,
)
from fleetune.errors import ConfigError, LaunchError
from lab import Lab
from tests.conftest import REPOSITORY

TWO = (
    Interface(name="lo", address="127.0.0.1"),
    Interface(name="eth0", address="10.0.0.7"),
    Interface(name="eth1", address="192.168.5.7"),
    Interface(name="eth1", address="fd00::7"),
)


def test_loopback_is_an_own_address_of_an_interface() -> None:
    assert "127.0.0.1" in own_addresses()
    assert interface_of("127.0.0.1", interfaces()) == "lo"
    assert interface_of("192.0.2.1", interfaces()) is None
    assert not any("%" in address for address in own_addresses())


def test_the_route_decides() -> None:
    assert address_towards("127.0.0.1") == "127.0.0.1"
    assert address_towards("no-such-host.invalid") is None
    assert address_towards("") is None or address_towards("") in own_addresses()


@pytest.mark.parametrize(
    ("network", "expected"),
    [
        ("10.0.0.0/8", ["10.0.0.7"]),
        ("10.9.9.9/8", ["10.0.0.7"]),
        ("10.0.0.7", ["10.0.0.7"]),
        ("0.0.0.0/0", ["127.0.0.1", "10.0.0.7", "192.168.5.7"]),
        ("fd00::/16", ["fd00::7"]),
        ("172.16.0.0/12", []),
    ],
)
def test_interfaces_inside_a_network(network: str, expected: list[str]) -> None:
    assert [interface.address for interface in inside(network, TWO)] == expected


@pytest.mark.parametrize("text", ["eth0", "10.0.0.0/33", "10.0.0/8", "", "10.0.0.0-10.0.0.9"])
def test_what_is_no_network(text: str) -> None:
    with pytest.raises(ConfigError, match=r"^--network .*a network as 10\.0\.0\.0/8 is expected$"):
        parse_network(text)


def test_ports() -> None:
    assert parse_ports("29500-29510") == range(29500, 29511)
    assert parse_ports(" 29500 ") == range(29500, 29501)
    for text in ("0", "29510-29500", "1-65536", "a-b", "29500-", "", "²"):
        with pytest.raises(ConfigError, match="two TCP ports as 29500-29510 are expected"):
            parse_ports(text)


@pytest.mark.parametrize("address", ["", "127.0.0.1"])
def test_a_taken_port_is_passed_over_and_named_when_it_is_the_only_one(address: str) -> None:
    with socket.socket() as listener:
        listener.bind((address or "0.0.0.0", 0))
        listener.listen()
        taken = listener.getsockname()[1]
        with pytest.raises(LaunchError, match=rf"no TCP port from {taken} to {taken} is free .*--port_range"):
            free_port(address, (taken,))


def test_an_address_of_another_host_is_not_called_taken() -> None:
    with pytest.raises(
        LaunchError, match=r"no TCP port can be opened on 192\.0\.2\.1: Cannot assign requested address"
    ):
        free_port("192.0.2.1")


ASK = """
import json, sys
from fleetune.cluster import network
print(json.dumps({
    "own": network.own_addresses(),
    "towards": [network.address_towards(name) for name in sys.argv[1:]],
    "interface": network.interface_of(network.address_towards(sys.argv[1]), network.interfaces()),
    "port": network.free_port(network.address_towards(sys.argv[1]), range(29500, 29511)),
}))
"""


def test_a_host_with_several_networks_and_a_name_that_means_loopback(tmp_path: Path) -> None:
    """As Debian has it: 127.0.1.1 is the host's own name. A second address, an unroutable one, and no route at all."""
    if reason := Lab.unavailable():
        pytest.skip(reason)
    with Lab.up(2) as lab:
        node1, node2 = lab
        node1.run(
            ["sh", "-c", "echo 127.0.1.1 node1 >/run/hosts; mount --bind /run/hosts /etc/hosts"]
        ).check_returncode()
        node1.run(["ip", "address", "add", "198.51.100.5/24", "dev", "lo"]).check_returncode()
        found = node1.run(
            [sys.executable, "-c", ASK, node2.address, "node1", "198.51.100.5", "192.0.2.9"],
            env={"PYTHONPATH": f"{REPOSITORY}/src"}, timeout=60,
        )  # fmt: skip
        assert found.returncode == 0, found.stderr
        answer = json.loads(found.stdout)
        assert set(answer["own"]) >= {"127.0.0.1", "198.51.100.5", node1.address}
        assert answer["towards"] == [node1.address, "127.0.0.1", "198.51.100.5", None]
        assert answer["interface"] == "eth0"
        assert 29500 <= answer["port"] <= 29510
