"""Ranks on hosts, counted by hand: as mpirun would have placed them."""

from __future__ import annotations

from pathlib import Path

import pytest

from fleetune.cluster.commands.ranks import rank_settings, ranks_of_hosts
from fleetune.cluster.hosts import Host, parse_hosts
from fleetune.errors import ConfigError

BARE = (Host(name="a"), Host(name="b"), Host(name="c"))
SLOTS = (Host(name="a", slots=4), Host(name="b", slots=2), Host(name="c"))


@pytest.mark.parametrize(
    ("hosts", "total", "per_host", "num_hosts", "counts"),
    [
        (BARE, None, None, None, [None, None, None]),  # what each host's plan says
        (BARE, None, None, 2, [None, None]),
        (BARE, None, 2, None, [2, 2, 2]),
        (BARE, None, 2, 2, [2, 2]),
        (BARE, 4, 2, None, [2, 2]),  # the first two hosts
        (BARE, 5, 2, None, [2, 2, 1]),
        (BARE, 2, None, None, [1, 1]),
        (BARE, 6, None, None, [2, 2, 2]),
        (SLOTS, 5, None, None, [4, 1]),  # host after host
        (SLOTS, 7, None, None, [4, 2, 1]),  # a host without a number has one slot
        (SLOTS, None, None, None, [4, 2, None]),
    ],
)
def test_ranks_of_hosts(
    hosts: tuple[Host, ...], total: int | None, per_host: int | None, num_hosts: int | None, counts: list[int | None]
) -> None:
    assert ranks_of_hosts(hosts, total, per_host, num_hosts) == counts


@pytest.mark.parametrize(
    ("total", "per_host", "num_hosts", "says"),
    [
        (7, 2, None, "7 ranks do not fit"),
        (4, None, None, "4 ranks on 3 hosts"),
        (None, 1, 4, "4 hosts are to take part"),
    ],
)
def test_ranks_that_do_not_fit(total: int | None, per_host: int | None, num_hosts: int | None, says: str) -> None:
    with pytest.raises(ConfigError, match=says):
        ranks_of_hosts(BARE, total, per_host, num_hosts)
    with pytest.raises(ConfigError, match="the hosts have 7 slots"):
        ranks_of_hosts(SLOTS, 8, None, None)


def test_hosts_are_named_as_our_own_setting_takes_them() -> None:
    """Users, ports of IPv6, and Open MPI's way of naming a host once for each rank."""
    settings = rank_settings({"hosts": "ann@a,ann@a,b:3"})
    assert settings == {"hosts": "ann@a:2,b:3"}
    assert [(host.target, host.slots) for host in parse_hosts(settings["hosts"])] == [("ann@a", 2), ("b", 3)]
    settings = rank_settings({"hosts": "fe80::1,fe80::2", "ranks_per_host": "2"})
    assert [(host.name, host.slots) for host in parse_hosts(settings["hosts"])] == [("fe80::1", 2), ("fe80::2", 2)]


def test_hostfile_stays_a_file_where_all_of_it_is_used(tmp_path: Path) -> None:
    file = tmp_path / "hosts"
    file.write_text("a slots=2\nb slots=2\n")
    path = {"hostfile": str(file)}
    assert rank_settings(path) == path
    assert rank_settings({**path, "ranks": "4"}) == path
    assert rank_settings({**path, "ranks": "2", "ranks_per_host": "1"}) == {**path, "processes": 1}
    assert rank_settings({**path, "ranks": "3"}) == {"hosts": "a:2,b:1"}


def test_unnamed_hosts() -> None:
    """Ranks of more than one host ask for hosts, which `--hosts` in front or a scheduler may give."""
    assert rank_settings({}) == {}
    assert rank_settings({"ranks": "4", "ranks_per_host": "2", "port": "29500"}) == {
        "processes": 2, "num_hosts": 2, "port_range": "29500"
    }  # fmt: skip
    assert rank_settings({"ranks": "2", "port": "29500"}) == {"processes": 2}  # a port here is free for sure
    assert rank_settings({"hosts": "localhost:3"}) == {"processes": 3}
