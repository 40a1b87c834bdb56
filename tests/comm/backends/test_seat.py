"""The address that peers reach a rank on."""

from __future__ import annotations

from typing import Any

import pytest
from torch.distributed import HashStore, PrefixStore, TCPStore  # type: ignore[attr-defined]

from fleetune.cluster.network import Interface
from fleetune.comm.backends.seat import interface_name, own_address
from fleetune.errors import BackendError

AMONG = (
    Interface(name="lo", address="127.0.0.1"), Interface(name="eth0", address="fe80::1"),
    Interface(name="eth0", address="10.0.0.5"), Interface(name="ib0", address="10.1.0.5"),
)  # fmt: skip


def address(store: Any = None, *, towards: dict[str, str] | None = None, **environ: str) -> str:
    return own_address(store, environ, AMONG, (towards or {}).get)


def test_the_interface_that_gloo_is_told_is_ours() -> None:
    assert address(GLOO_SOCKET_IFNAME="ib0", MASTER_ADDR="10.0.0.1") == "10.1.0.5"
    assert address(GLOO_SOCKET_IFNAME="eth0,ib0") == "10.0.0.5", "IPv4 first"
    with pytest.raises(BackendError, match=r"GLOO_SOCKET_IFNAME=eth7: .* has no such network interface") as caught:
        address(GLOO_SOCKET_IFNAME="eth7")
    assert "it has eth0, ib0, lo" in str(caught.value)


def test_else_it_is_the_one_that_leads_to_the_master() -> None:
    assert address(towards={"10.1.0.1": "10.1.0.5"}, MASTER_ADDR="10.1.0.1") == "10.1.0.5"


def test_a_master_on_loopback_is_meant_where_there_is_one_host() -> None:
    routes = {"node1": "127.0.0.1", "192.0.2.1": "10.0.0.5"}
    one = {"MASTER_ADDR": "node1", "LOCAL_WORLD_SIZE": "4", "WORLD_SIZE": "4"}
    assert address(towards=routes, **one) == "127.0.0.1"
    assert address(towards=routes, **{**one, "WORLD_SIZE": "8"}) == "10.0.0.5"


def test_a_store_knows_where_it_is_served() -> None:
    store = TCPStore("127.0.0.1", 0, 1, is_master=True)
    assert address(PrefixStore("a", store), towards={"127.0.0.1": "127.0.0.1"}) == "127.0.0.1"


def test_without_a_hint_it_is_loopback() -> None:
    assert address(HashStore()) == "127.0.0.1"


def test_interfaces_have_names() -> None:
    assert [interface_name(a, AMONG) for a in ("10.0.0.5", "127.0.1.1", "10.9.9.9")] == ["eth0", "lo", None]
