"""Where ranks of several hosts meet."""

from __future__ import annotations

import socket
from pathlib import Path
from types import SimpleNamespace

import psutil
import pytest

from fleetune.cluster import meeting
from fleetune.cluster.hosts import Host
from fleetune.cluster.job import Job
from fleetune.cluster.meeting import common_network, meet, own_address, split_ports
from fleetune.errors import ConfigError

JOB = Job(command=("true",), environ={}, cwd=Path("/"))


@pytest.fixture
def _own_interface(monkeypatch: pytest.MonkeyPatch) -> None:
    """This host is 10.0.3.1 in a network of 10.0.0.0/16."""
    eth0 = SimpleNamespace(family=socket.AF_INET, address="10.0.3.1", netmask="255.255.0.0")
    monkeypatch.setattr(psutil, "net_if_addrs", lambda: {"eth0": [eth0]})


@pytest.mark.usefixtures("_own_interface")
def test_the_network_that_all_hosts_are_in() -> None:
    assert common_network("10.0.3.1", ["10.0.3.2", "10.0.200.9"]) == "10.0.0.0/16"
    assert common_network("10.0.3.1", ["10.0.3.2", "10.1.0.9"]) is None
    assert common_network("192.168.0.1", []) is None


@pytest.mark.usefixtures("_own_interface")
def test_a_network_without_this_host_is_refused() -> None:
    assert own_address(["8.8.8.8"], "10.0.3.0/24") == "10.0.3.1"
    with pytest.raises(ConfigError, match=r"--network 192.168.0.0/16: no address of this host"):
        own_address(["8.8.8.8"], "192.168.0.0/16")


def test_this_host_alone_meets_at_loopback() -> None:
    found = meet(JOB, [Host(name="localhost", is_here=True)])
    assert (found.main_address, found.own_address, found.network) == ("127.0.0.1", "127.0.0.1", None)
    assert found.main_port in range(20000, 30000)


@pytest.mark.usefixtures("_own_interface")
def test_the_first_host_may_be_another_one(monkeypatch: pytest.MonkeyPatch) -> None:
    """The address that is in the network, of those that it has."""
    known = {"node1": ["127.0.1.1", "172.16.0.5", "10.0.3.2"]}
    monkeypatch.setattr(meeting, "addresses_of", known.__getitem__)
    job = Job(command=("true",), environ={}, cwd=Path("/"), network="10.0.0.0/8", port_range="29500-29509")
    found = meet(job, [Host(name="node1")])
    assert (found.main_address, found.own_address, found.interface) == ("10.0.3.2", "10.0.3.1", "eth0")
    assert found.main_port in range(29505, 29510)
    known["node1"] = ["172.16.0.5"]
    with pytest.raises(ConfigError, match=r"host node1: no address of it in --network 10.0.0.0/8 is known here"):
        meet(job, [Host(name="node1")])


def test_mpirun_and_the_ranks_share_the_ports() -> None:
    assert split_ports(None) == (None, range(20000, 30000))
    assert split_ports("29500-29509") == ("29500-29504", range(29505, 29510))
    assert split_ports("29500-29502") == ("29500-29500", range(29501, 29503))
    assert split_ports("29500") == ("29500", range(29500, 29501))
