"""Hosts from `--hosts` and host files, and what the user's own ssh and the name service make of them."""

from __future__ import annotations

import shutil
import socket
from collections.abc import Callable
from pathlib import Path

import pytest

from fleetune.cluster.hosts import Host, parse_hosts, read_hostfile, resolve
from fleetune.cluster.remote import SshSettings, ssh_settings
from fleetune.errors import ConfigError


def told(hosts: tuple[Host, ...]) -> list[str]:
    """`user@name slots` of each, where there are such."""
    return [f"{host.target}{'' if host.slots is None else f' {host.slots}'}" for host in hosts]


# ---- --hosts


@pytest.mark.parametrize(
    ("words", "expected"),
    [
        ("node1", ["node1"]),
        ("node1,node2 , node3,", ["node1", "node2", "node3"]),
        (("node1", "node2:2"), ["node1", "node2 2"]),
        (("node[1", "3]"), ["node1", "node3"]),  # as `RunConfig` cuts it
        ("user@node1:4", ["user@node1 4"]),
        ("name@corp.example@node1", ["name@corp.example@node1"]),
        ("CORP\\name@node1", ["CORP\\name@node1"]),
        ("node[1-3]", ["node1", "node2", "node3"]),
        ("node[08-11]:2", ["node08 2", "node09 2", "node10 2", "node11 2"]),
        ("node[0-2]", ["node0", "node1", "node2"]),
        ("node[1,3,7-8]", ["node1", "node3", "node7", "node8"]),
        ("r[1-2]n[01-02].lan", ["r1n01.lan", "r1n02.lan", "r2n01.lan", "r2n02.lan"]),
        ("me@n[1-2],other", ["me@n1", "me@n2", "other"]),
        ("10.0.0.[9-11]", ["10.0.0.9", "10.0.0.10", "10.0.0.11"]),
        ("10.0.0.1:4", ["10.0.0.1 4"]),
        ("fd00::1,[fd00::2],[fd00::3]:4", ["fd00::1", "fd00::2", "fd00::3 4"]),
        ("me@[fe80::1%eth0]:2,fe80::2%eth0", ["me@fe80::1%eth0 2", "fe80::2%eth0"]),
        ("node1.example.org.", ["node1.example.org."]),
        ("my_alias", ["my_alias"]),
    ],
)
def test_what_hosts_holds(words: str | tuple[str, ...], expected: list[str]) -> None:
    assert told(parse_hosts(words)) == expected


@pytest.mark.parametrize(
    ("words", "problem"),
    [
        ("", "--hosts: no host is named"),
        (" , ", "--hosts: no host is named"),
        ("-oProxyCommand=x", "--hosts -oProxyCommand=x: '-oProxyCommand=x' is no host name"),
        ("a b", "--hosts a b: a host is expected, as node1, node1:4 or `node1 slots=4`"),
        ("node$(id)", "--hosts node$(id): 'node$(id)' is no host name"),
        ("-l@node1", "--hosts -l@node1: '-l' is no user name"),
        ("node1:0", "--hosts node1:0: '0' is no number of ranks: 1 or more is expected"),
        ("node1:", "--hosts node1:: '' is no number of ranks: 1 or more is expected"),
        ("node1:²", "--hosts node1:²: '²' is no number of ranks: 1 or more is expected"),
        ("node1:2 slots=2", "--hosts node1:2 slots=2: the slots are given twice"),
        ("node[3-1]", "--hosts node[3-1]: [3-1] is no range: 1 comes before 3"),
        ("node[a-c]", "--hosts node[a-c]: [a-c] is no range: numbers as in [1-4] or [1,3] are expected"),
        ("node[]", "--hosts node[]: [] is no range: numbers as in [1-4] or [1,3] are expected"),
        ("node[1-3", "--hosts node[1-3: 'node[1-3' is no host name"),
        ("node[1-5000]", "--hosts node[1-5000]: more than 4096 hosts"),
        ("n[1-99]m[1-99]", "--hosts n[1-99]m[1-99]: more than 4096 hosts"),
        ("node1,node2,node1", "--hosts: host node1 is named twice"),
        ("node[1-3],me@node2", "--hosts: host node2 is named twice"),
    ],
)
def test_what_is_no_host_is_refused_by_name(words: str, problem: str) -> None:
    with pytest.raises(ConfigError) as caught:
        parse_hosts(words)
    assert caught.value.problems == (problem,)


def test_a_wrong_address_and_all_other_problems_are_told_at_once() -> None:
    with pytest.raises(ConfigError) as caught:
        parse_hosts("fd00::1::2,node1,node[2-1],node1")
    assert len(caught.value.problems) == 3
    assert caught.value.problems[0].startswith("--hosts fd00::1::2: ")
    assert caught.value.problems[2] == "--hosts: host node1 is named twice"


# ---- host files


def test_the_three_dialects(tmp_path: Path) -> None:
    """With a byte-order mark, Windows line ends, comments, empty lines, and what mpirun takes beside the slots."""
    path = tmp_path / "hosts"
    path.write_bytes(
        b"\xef\xbb\xbf# our hosts\r\nnode1\r\n\r\n  node2:4   # the big one\r\nme@node3 slots=2\r\n"
        b"node4 slots = 3 max_slots=8\r\nnode5 max-slots=8 slots=1\r\n[fd00::6]:2\r\nfd00::7 slots=2\r\nn[8-9] slots=1"
    )
    assert told(read_hostfile(path)) == [
        "node1", "node2 4", "me@node3 2", "node4 3", "node5 1", "fd00::6 2", "fd00::7 2", "n8 1", "n9 1",
    ]  # fmt: skip


def test_lines_that_are_no_host_are_told_by_number(tmp_path: Path) -> None:
    path = tmp_path / "hosts"
    path.write_text("node1\n\nnode2 slots=none\nnode3 4\nnode4 gpus=1\nnode1 slots=2\n")
    with pytest.raises(ConfigError) as caught:
        read_hostfile(path)
    assert caught.value.problems == (
        f"{path}, line 3: node2 slots=none: 'none' is no number of ranks: 1 or more is expected",
        f"{path}, line 4: node3 4: a host is expected, as node1, node1:4 or `node1 slots=4`",
        f"{path}, line 5: node4 gpus=1: gpus= is not understood: `slots=4` is expected",
        f"--hostfile {path}: host node1 is named twice",
    )


def test_files_that_cannot_be_read(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"--hostfile .*none: No such file or directory"):
        read_hostfile(tmp_path / "none")
    with pytest.raises(ConfigError, match=r"Is a directory"):
        read_hostfile(tmp_path)
    (tmp_path / "utf16").write_text("node1\n", encoding="utf-16")
    with pytest.raises(ConfigError, match="it is no UTF-8 text"):
        read_hostfile(tmp_path / "utf16")
    (tmp_path / "empty").write_text("# nobody\n")
    with pytest.raises(ConfigError, match=r"empty: no host is named"):
        read_hostfile(tmp_path / "empty")


# ---- names that mean something

Resolve = Callable[..., list[str]]
HERE = ("127.0.0.1", "::1", "10.0.0.1", "fd00::1")


@pytest.fixture
def names(monkeypatch: pytest.MonkeyPatch) -> dict[str, list[str]]:
    """Name -> addresses: all that the name service knows, beside addresses themselves."""
    known = {"localhost": ["::1", "127.0.0.1"], "head": ["10.0.0.1"], "odd": ["127.0.1.1"], "node2": ["10.0.0.2"],
             "node3": ["10.0.0.3", "fd00::3"], "also3": ["fd00::3"]}  # fmt: skip

    def look_up(name: str, port: object, **_: object) -> list[tuple[object, ...]]:
        addresses = known.get(name, [name] if name[0].isdigit() or ":" in name else [])
        if not addresses:
            raise socket.gaierror(socket.EAI_NONAME, "Name or service not known")
        return [(socket.AF_INET, socket.SOCK_STREAM, 6, "", (address, 0)) for address in addresses]

    monkeypatch.setattr(socket, "getaddrinfo", look_up)
    return known


def plain(target: str) -> SshSettings:
    return SshSettings(hostname=target.rpartition("@")[2], port="22", has_proxy=False)


def resolved(words: str, **settings: SshSettings) -> list[str]:
    """Names in order, this machine in parentheses."""
    hosts = resolve(
        parse_hosts(words),
        settings_of=lambda target: settings.get(target.rpartition("@")[2]) or plain(target),
        addresses=HERE,
    )
    return [f"({host.name})" if host.is_here else host.name for host in hosts]


@pytest.mark.parametrize(
    ("words", "expected"),
    [
        ("node2,node3", ["node2", "node3"]),
        ("head,node2", ["(head)", "node2"]),
        ("node2,head", ["node2", "(head)"]),
        ("node2,odd", ["node2", "(odd)"]),
        ("node2,localhost,node3", ["(localhost)", "node2", "node3"]),
        ("node2,127.0.0.1", ["(127.0.0.1)", "node2"]),
        ("node2,::1", ["(::1)", "node2"]),
        ("node2,fd00::1", ["node2", "(fd00::1)"]),
    ],
)
def test_this_machine_is_found_and_localhost_goes_first(
    words: str, expected: list[str], names: dict[str, list[str]]
) -> None:
    assert resolved(words) == expected


@pytest.mark.parametrize(
    ("words", "problem"),
    [
        ("node2,nodee3",
         "host nodee3: the name cannot be resolved; correct it, or add it to /etc/hosts or ~/.ssh/config"),
        ("localhost,head", "hosts localhost and head are the same host (this machine): name it once"),
        ("odd,fd00::1", "hosts odd and fd00::1 are the same host (this machine): name it once"),
        ("node2,10.0.0.2", "hosts node2 and 10.0.0.2 are the same host (10.0.0.2 port 22): name it once"),
        ("node3,also3", "hosts node3 and also3 are the same host (fd00::3 port 22): name it once"),
    ],
)  # fmt: skip
def test_unknown_and_doubled_hosts(words: str, problem: str, names: dict[str, list[str]]) -> None:
    with pytest.raises(ConfigError) as caught:
        resolved(words)
    assert caught.value.problems == (problem,)


def test_all_unknown_hosts_are_told(names: dict[str, list[str]]) -> None:
    alias = SshSettings(hostname="gone.example", port="22", has_proxy=False)
    with pytest.raises(ConfigError) as caught:
        resolved("a,node2,alias", alias=alias)
    assert [problem.partition(":")[0] for problem in caught.value.problems] == [
        "host a", "host alias (gone.example in ssh's configuration)",
    ]  # fmt: skip


def test_tunnels_containers_and_jump_hosts(names: dict[str, list[str]]) -> None:
    """A loopback address on a port of its own, or behind another host, is not this machine; its own address is."""

    def at(hostname: str, port: str = "22", proxy: str = "") -> SshSettings:
        return SshSettings(hostname=hostname, port=port, has_proxy=bool(proxy), proxy=proxy)

    tunnels = {"vm1": at("127.0.0.1", "2222"), "vm2": at("localhost", "2223")}
    assert resolved("vm1,vm2,head", **tunnels) == ["vm1", "vm2", "(head)"]
    assert resolved("inner,node2", inner=at("localhost", proxy="bastion")) == ["inner", "node2"]
    assert resolved("head,inner", head=at("10.0.0.1", proxy="b"), inner=at("inner", proxy="b")) == ["(head)", "inner"]
    assert resolved("here", here=at("127.0.0.1")) == ["(here)"]
    assert resolved("head", head=at("10.0.0.1", "2222")) == ["(head)"]
    sites = {"a": at("192.168.0.5", proxy="site1"), "b": at("192.168.0.5", proxy="site2")}
    assert resolved("a,b", **sites) == ["a", "b"]
    with pytest.raises(ConfigError, match=r"hosts a and b are the same host \(db port 22 via site1\): name it once"):
        resolved("a,b", a=at("db", proxy="site1"), b=at("db", proxy="site1"))
    with pytest.raises(ConfigError, match="hosts vm1 and vm2 are the same host"):
        resolved("vm1,vm2", vm1=at("127.0.0.1", "2222"), vm2=at("127.0.0.1", "2222"))


# ---- aliases, by the real ssh


@pytest.fixture
def ssh_config(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A configuration that the real ssh reads: it knows the user's home from the accounts, not from HOME."""
    real = shutil.which("ssh")
    if real is None:
        pytest.skip("no ssh: install openssh-client")
    config, wrapper = tmp_path / "config", tmp_path / "bin" / "ssh"
    wrapper.parent.mkdir()
    wrapper.write_text(f'#!/bin/sh\nexec {real} -F {config} "$@"\n')
    wrapper.chmod(0o755)
    monkeypatch.setenv("PATH", f"{wrapper.parent}:/usr/bin:/bin")
    ssh_settings.cache_clear()
    config.write_text(
        "Host big\n  HostName 192.0.2.7\n  User worker\n"
        "Host vm*\n  HostName 127.0.0.1\nHost vm1\n  Port 2222\nHost vm2\n  Port 2223\n"
        "Host inner\n  ProxyJump me@bastion:2200\n"
        "Host odd\n  ProxyCommand nc %h %p\nHost direct\n  ProxyCommand none\n"
        "Match user special\n  HostName 192.0.2.8\n"
    )
    return config


def test_settings_of_aliases(ssh_config: Path) -> None:
    assert ssh_settings("big") == SshSettings(hostname="192.0.2.7", port="22", has_proxy=False)
    assert ssh_settings("vm1") == SshSettings(hostname="127.0.0.1", port="2222", has_proxy=False)
    assert ssh_settings("special@x").hostname == "192.0.2.8"
    assert ssh_settings("inner") == SshSettings(hostname="inner", port="22", has_proxy=True, proxy="me@bastion:2200")
    assert ssh_settings("odd").has_proxy
    assert not ssh_settings("direct").has_proxy


def test_aliases_are_resolved(ssh_config: Path) -> None:
    hosts = resolve(parse_hosts("big,vm1,vm2:3,inner"), addresses=HERE)
    assert told(hosts) == ["big", "vm1", "vm2 3", "inner"]
    assert not any(host.is_here for host in hosts)
    with pytest.raises(ConfigError, match=r"hosts big and 192\.0\.2\.7 are the same host \(192\.0\.2\.7 port 22\)"):
        resolve(parse_hosts("big,192.0.2.7"), addresses=HERE)


def test_without_ssh_a_name_is_itself(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    ssh_settings.cache_clear()
    monkeypatch.setenv("PATH", str(tmp_path))
    assert ssh_settings("me@nowhere") == SshSettings(hostname="nowhere", port="22", has_proxy=False)
    ssh_settings.cache_clear()
