"""Which address ranks meet at, for hosts as they are found: names that mean loopback, several networks, IPv6."""

from __future__ import annotations

import socket
import subprocess
import sys

import pytest

from fleetune.cluster.network import Interface
from fleetune.cluster.rank import RankInfo
from fleetune.comm.meeting import choose_interface, holder_of, listen, meeting_point
from fleetune.errors import LaunchError

LOOPBACK = Interface(name="lo", address="127.0.0.1")
ETH = Interface(name="eth0", address="10.1.0.5")
IB = Interface(name="ib0", address="192.168.7.5")
LINK_LOCAL = Interface(name="eth0", address="fe80::1")


def info(address: str, *, rank: int = 0, local_world_size: int = 1, world_size: int = 2) -> RankInfo:
    return RankInfo(
        rank=rank, world_size=world_size, local_rank=0, local_world_size=local_world_size, launcher="env",
        main_address=address, main_port=29500,
    )  # fmt: skip


def test_an_address_of_the_host_is_what_rank_0_binds_to() -> None:
    point = meeting_point(info("10.1.0.5"), None, {}, [LOOPBACK, ETH, IB])
    assert (point.addresses, point.notice) == (("10.1.0.5",), None)


def test_all_ranks_here_meet_on_loopback() -> None:
    point = meeting_point(info("127.0.0.1", local_world_size=2), None, {}, [LOOPBACK, ETH])
    assert (point.addresses, point.notice) == (("127.0.0.1",), None)


def test_another_hosts_address_is_tried_as_it_is() -> None:
    assert meeting_point(info("10.1.0.9", rank=1), None, {}, [LOOPBACK, ETH]).addresses == ("10.1.0.9",)


def test_loopback_with_ranks_on_several_hosts_is_replaced_by_the_only_other_address() -> None:
    """What `127.0.1.1 myhost` in /etc/hosts leads to; rank 1 of the same host looks there, too."""
    point = meeting_point(info("127.0.1.1"), None, {}, [LOOPBACK, ETH, LINK_LOCAL])
    assert point.addresses == ("10.1.0.5",)
    assert point.notice == (
        "MASTER_ADDR=127.0.1.1 means this host alone, and ranks are on several hosts: rank 0 listens on 10.1.0.5"
    )
    other = meeting_point(info("127.0.1.1", rank=1, local_world_size=2, world_size=4), None, {}, [LOOPBACK, ETH])
    assert other.addresses == ("10.1.0.5",)
    assert "rank 0 was looked for on this host" in str(other.notice)


def test_ipv6_that_is_off_is_not_listened_on(monkeypatch: pytest.MonkeyPatch) -> None:
    """`::1 localhost` in /etc/hosts, and no such address."""
    places = [(socket.AF_INET6, 1, 6, "", ("::1", 29500, 0, 0)), (socket.AF_INET, 1, 6, "", ("127.0.0.1", 29500))]
    monkeypatch.setattr(socket, "getaddrinfo", lambda *_, **__: places)
    assert meeting_point(info("localhost", local_world_size=2), None, {}, [LOOPBACK, ETH]).addresses == ("127.0.0.1",)


@pytest.mark.parametrize(
    ("network", "environ"), [("192.168.0.0/16", {}), (None, {"GLOO_SOCKET_IFNAME": "ib0"})], ids=["network", "gloo"]
)
def test_of_several_addresses_the_user_says_which(network: str | None, environ: dict[str, str]) -> None:
    assert meeting_point(info("localhost"), network, environ, [LOOPBACK, ETH, IB]).addresses == ("192.168.7.5",)


def test_of_several_addresses_none_is_guessed() -> None:
    point = meeting_point(info("localhost"), None, {}, [LOOPBACK, ETH, IB])
    assert point.is_everywhere
    assert point.notice is not None
    assert "listens on all addresses (10.1.0.5, 192.168.7.5); --network tells which is meant" in point.notice


def test_an_address_that_is_not_the_hosts_own_is_replaced_and_told() -> None:
    """A public address that a router translates."""
    point = meeting_point(info("203.0.113.7"), None, {}, [LOOPBACK, ETH])
    assert point.addresses == ("10.1.0.5",)
    assert "203.0.113.7, which is no address of this host" in str(point.notice)


def test_a_host_with_loopback_alone_is_refused() -> None:
    with pytest.raises(LaunchError, match="has no other address: give one that the other hosts can reach"):
        meeting_point(info("localhost"), None, {}, [LOOPBACK])


def test_a_network_that_the_host_is_not_in_is_refused() -> None:
    with pytest.raises(LaunchError, match=r"--network 10.9.0.0/16: \S+ has no address in it; it has 127.0.0.1 \(lo\)"):
        meeting_point(info("localhost"), "10.9.0.0/16", {}, [LOOPBACK, ETH])


def test_a_name_that_cannot_be_resolved_is_refused() -> None:
    with pytest.raises(LaunchError, match=r"MASTER_ADDR=no-such-host.invalid: \S+ \(rank 1\) cannot resolve this name"):
        meeting_point(info("no-such-host.invalid", rank=1), None, {}, [LOOPBACK, ETH])


def test_the_interface_is_that_of_the_route_within_the_network() -> None:
    among = [LOOPBACK, ETH, IB]
    assert choose_interface("10.1.0.9", None, among, lambda _: "10.1.0.5") == "eth0"
    assert choose_interface("10.1.0.9", "192.168.0.0/16", among, lambda _: "10.1.0.5") == "ib0"
    assert choose_interface("10.1.0.9", None, among, lambda _: None) is None
    with pytest.raises(LaunchError, match=r"--network 172\.16\.0\.0/12"):
        choose_interface("10.1.0.9", "172.16.0.0/12", among, lambda _: "10.1.0.5")


@pytest.mark.parametrize("address", ["127.0.0.1", "::1"])
def test_listening_is_on_one_address(address: str) -> None:
    try:
        listening = listen(address, 0)
    except LaunchError:
        pytest.skip(f"this machine has no {address}")
    with listening:
        assert listening.getsockname()[0] == address


def test_a_taken_port_names_its_holder() -> None:
    script = (
        "import socket, time; s = socket.create_server(('127.0.0.1', 0)); print(s.getsockname()[1], flush=True); "
        "time.sleep(60)"
    )
    holder = subprocess.Popen([sys.executable, "-c", script], stdout=subprocess.PIPE, text=True)
    try:
        assert holder.stdout is not None
        port = int(holder.stdout.readline())
        with pytest.raises(
            LaunchError, match=rf"127.0.0.1:{port} of {socket.gethostname()}: the port is taken"
        ) as told:
            listen("127.0.0.1", port)
        assert f"process {holder.pid} ({sys.executable} -c" in str(told.value)
    finally:
        holder.kill()
        holder.communicate()
    assert "cannot be seen" in holder_of(port), "nobody has it any more"
