"""The doctor on real hosts of a lab: well, and with the faults that it is there for."""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
import sysconfig
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest

from fleetune.doctor.examine import pairings
from lab import Lab
from lab.host import Host
from tests.conftest import REPOSITORY

MBIT = 200.0
PYTHONPATH = f"{REPOSITORY / 'src'}:{REPOSITORY}"
SITE_PACKAGES = Path(sysconfig.get_paths()["purelib"])


@pytest.mark.parametrize("count", [0, 1, 2, 3, 4, 5, 8])
def test_pairings_meet_everybody_once_each_way_and_nobody_twice_in_a_round(count: int) -> None:
    names = [f"node{i}" for i in range(count)]
    rounds = list(pairings(names))
    for pairs in rounds:
        busy = [name for pair in pairs for name in pair]
        assert len(busy) == len(set(busy))
    met = [pair for pairs in rounds for pair in pairs]
    assert sorted(met) == sorted((a, b) for a in names for b in names if a != b)


Report = dict[str, Any]


def doctor(head: Host, hosts: Sequence[str], *words: str, status: int) -> Report:
    """Run the doctor on a host; gives its JSON."""
    result = head.run(
        [sys.executable, "-m", "fleetune", "doctor", "--hosts", ",".join(hosts), "--json", *words],
        env={"PYTHONPATH": PYTHONPATH, "HF_HUB_OFFLINE": "1"},
        timeout=120,
    )
    assert (result.returncode, result.stderr) == (status, ""), result.stdout[-3000:]
    report: Report = json.loads(result.stdout)
    return report


def told(report: Report, check: str, host: str | None = None) -> list[tuple[str, str]]:
    """Status and reason of a check's findings, of one host where it is named."""
    return [
        (one["status"], one["reason"])
        for one in report["findings"]
        if one["check"] == check and (host is None or host in one["hosts"])
    ]


def up(hosts: int) -> Any:
    if reason := Lab.unavailable(with_ssh=True):
        pytest.skip(reason)
    return Lab.up(hosts, mbit=MBIT, with_ssh=True)


def cover(host: Host, path: Path | str, content: str) -> None:
    """Let a host see other content in a file; nobody else does."""
    host.run(
        ["sh", "-c", 'cat > /run/cover && mount --bind /run/cover "$1"', "sh", str(path)], stdin=content
    ).check_returncode()
    host.run(["mv", "/run/cover", f"/run/cover-{Path(path).name}"]).check_returncode()


def hide(host: Host, folder: Path) -> None:
    """Let a host see an empty folder; nobody else does."""
    host.run(["mount", "-t", "tmpfs", "none", str(folder)]).check_returncode()


# ---- hosts that are well


@pytest.fixture(scope="module")
def lab() -> Iterator[Lab]:
    with up(3) as lab:
        yield lab


NAMES = ("node1", "node2", "node3")


def test_hosts_that_are_well(lab: Lab) -> None:
    report = doctor(lab["node1"], NAMES, status=0)
    assert {one["status"] for one in report["findings"]} <= {"ok", "warning"}
    for check in ("ssh", "ssh to itself", "python", "versions", "clocks", "same hardware", "interface", "connections",
                  "round trip", "bandwidth", "hostname", "ports", "leftovers", "torch", "kernels"):  # fmt: skip
        assert {status for status, _ in told(report, check)} == {"ok"}, check
    # Every host to every host and itself, on three ports of the range and one of the system's.
    assert len(report["connections"]) == 3 * 3 * 4
    assert sum(20000 <= one["port"] < 30000 for one in report["connections"]) == 3 * 3 * 3
    assert all(one["address"].startswith("10.") for one in report["connections"])
    rates = {(one["source"], one["target"]): one["mbit_per_s"] for one in report["transfers"]}
    assert len(rates) == 6
    assert all(0.7 * MBIT < rate < 1.05 * MBIT for rate in rates.values()), rates
    assert "fleetune" not in lab["node2"].run(["ps", "-eo", "args"]).stdout  # nothing is left running


def test_a_head_elsewhere_and_a_head_alone(lab: Lab) -> None:
    """The first host is the head, wherever the command is typed."""
    report = doctor(lab["node1"], ("node2", "root@node1"), status=0)
    listened = {name: host["listened"]["address"] for name, host in report["hosts"].items()}
    assert listened == {"node2": lab["node2"].address, "node1": lab["node1"].address}
    report = doctor(lab["node1"], ("node3",), status=0)
    assert report["hosts"]["node3"]["listened"]["address"] == "127.0.0.1"
    assert not report["hosts"]["node3"]["is_here"]


def test_a_slow_link_is_named(lab: Lab) -> None:
    lab["node2"].set_link(20)
    try:
        report = doctor(lab["node1"], NAMES, status=0)
    finally:
        lab["node2"].set_link(MBIT)
    ((status, reason),) = told(report, "bandwidth", "node2")
    assert status == "warning"
    assert "Mbit/s at best, to and from every other host" in reason
    assert told(report, "bandwidth", "node1") == told(report, "bandwidth", "node3") == []


def nft(host: Host, *rules: str) -> None:
    """Filter what comes in to a host; without rules, let everything in again."""
    table = "".join(f"add rule inet doctor in {rule}\n" for rule in rules)
    chain = "add chain inet doctor in { type filter hook input priority 0; }\n"
    script = f"add table inet doctor\nflush table inet doctor\n{chain}{table}"
    host.run(["nft", "-f", "-"], stdin=script).check_returncode()


@pytest.mark.slow
@pytest.mark.skipif(shutil.which("nft") is None, reason="no nft: install nftables")
def test_firewalls(lab: Lab) -> None:
    """One drops, one knows the port range only, one rejects; each is told apart, and blamed alone."""
    new = "tcp flags & (syn | ack) == syn"
    nft(lab["node1"], f"{new} tcp dport 30000-65535 drop")
    nft(lab["node2"], f"{new} tcp dport 20000-29999 drop")
    nft(lab["node3"], f"{new} tcp dport 20000-65535 reject with tcp reset")
    try:
        report = doctor(lab["node1"], NAMES, status=1)
    finally:
        for host in lab:
            nft(host)
    found = [one for one in report["findings"] if one["check"] == "connections"]
    reasons = {one["reason"].split(":")[0]: one for one in found}
    assert set(reasons) == {"timed out", "refused"}
    assert reasons["refused"]["hosts"] == ["node3"]
    assert "The doctor was listening there: a firewall rejects" in reasons["refused"]["reason"]
    assert set(reasons["timed out"]["hosts"]) <= {"node1", "node2"}
    by_host = {
        (one["target"], one["port"] < 30000): one["outcome"]
        for one in report["connections"]
        if one["source"] != one["target"]
    }
    assert by_host == {
        ("node1", True): "reached", ("node1", False): "timeout", ("node2", True): "timeout",
        ("node2", False): "reached", ("node3", True): "refused", ("node3", False): "refused",
    }  # fmt: skip


@pytest.mark.slow
@pytest.mark.skipif(shutil.which("nft") is None, reason="no nft: install nftables")
def test_a_firewall_that_knows_the_port_range_only(lab: Lab) -> None:
    nft(lab["node3"], "tcp flags & (syn | ack) == syn tcp dport 30000-65535 drop")
    try:
        report = doctor(lab["node1"], NAMES, status=1)
    finally:
        nft(lab["node3"])
    ((status, reason),) = told(report, "connections")
    assert status == "failure"
    assert "The port range is open, but ranks' own connections take any port above 32768" in reason
    assert [one["hosts"] for one in report["findings"] if one["check"] == "connections"] == [["node3"]]


def test_a_network_that_one_host_is_not_in(lab: Lab) -> None:
    address = lab["node1"].address
    report = doctor(lab["node1"], NAMES, "--network", f"{address}/32", status=1)
    assert told(report, "interface", "node1")[0][0] == "ok"
    ((status, reason),) = told(report, "interface", "node2")
    assert status == "failure"
    assert reason.startswith(f"no address in --network {address}/32; it has eth0 {lab['node2'].address}")


# ---- hosts with faults: one each


FAULTY = tuple(f"node{number}" for number in range(1, 10))


@pytest.fixture(scope="module")
def ill() -> Iterator[tuple[Lab, Report]]:
    """A healthy head, and eight hosts that are not; one run of the doctor finds everything."""
    if shutil.which("nft") is None:
        pytest.skip("no nft: install nftables")
    with up(9) as lab:
        _, own_name, sshd, cut, dropped, key, python, package, version = lab
        hosts_file = own_name.run(["cat", "/etc/hosts"]).stdout
        cover(own_name, "/etc/hosts", f"127.0.1.1 {own_name.name}\n{hosts_file}")
        own_name.start([sys.executable, "-m", "http.server", "29500", "--bind", "127.0.0.1"], stdout=subprocess.DEVNULL)
        own_name.start(["sleep", "300"], env={"FLEETUNE_LAUNCHER": "local"}, stdout=subprocess.DEVNULL)
        own_name.run(["sh", "-c", "echo > /dev/shm/torch_7_7"]).check_returncode()
        sshd.run(["sh", "-c", "kill $(cat /run/sshd.pid)"]).check_returncode()
        cut.cut()
        nft(dropped, "tcp dport 22 drop")
        settings = key.run(["cat", "/etc/ssh/sshd_config"]).stdout
        keys = next(line.split()[1] for line in settings.splitlines() if line.startswith("AuthorizedKeysFile"))
        cover(key, keys, "")
        hide(python, Path(sys.prefix))
        hide(package, REPOSITORY / "src")
        for path in SITE_PACKAGES.glob("__editable__*fleetune*.pth"):
            cover(package, path, "")
        metadata = next(SITE_PACKAGES.glob("torch-*.dist-info")) / "METADATA"
        lines = metadata.read_text(encoding="utf-8").splitlines()
        changed = ["Version: 2.12.1" if line.startswith("Version: ") else line for line in lines]
        cover(version, metadata, "\n".join(changed))
        yield lab, doctor(lab["node1"], (*FAULTY, "nosuch"), "--timeout_s", "8", status=1)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("check", "host", "words"),
    [
        ("ssh", "node3", "ssh: nothing listens on its ssh port"),
        ("ssh", "node4", "ssh: no "),  # the kernel says so when nobody answers for the address, or ssh's patience ends
        ("ssh", "node5", "ssh: no answer"),
        ("ssh", "node6", "ssh: it refuses the key"),
        ("python", "node7", f"this Python is not there (env: '{sys.executable}': No such file or directory); "),
        ("python", "node8", "Python is there, but fleetune is not installed in it"),
        ("versions", "node9", "other versions than on node1: torch 2.12.1, not "),
        ("name", "nosuch", "host nosuch: the name cannot be resolved"),
    ],
)
def test_a_failure_is_told_with_its_host(ill: tuple[Lab, Report], check: str, host: str, words: str) -> None:
    ((status, reason),) = told(ill[1], check, host)
    assert status == "failure"
    assert words in reason


@pytest.mark.slow
@pytest.mark.parametrize(
    ("check", "words"),
    [
        ("hostname", "its own name node2 means 127.0.1.1"),
        ("ports", "port 29500 by python -m http.server (pid "),
        ("leftovers", "`sleep` has been running for "),
        ("leftovers", "1 unused in /dev/shm"),
    ],
)
def test_a_warning_is_told_with_its_host(ill: tuple[Lab, Report], check: str, words: str) -> None:
    ((status, reason),) = told(ill[1], check, "node2")
    assert status == "warning"
    assert words in reason


@pytest.mark.slow
def test_what_can_be_told_without_python_is_told(ill: tuple[Lab, Report]) -> None:
    """Also of the host whose Python is gone."""
    hosts = ill[1]["hosts"]
    here = hosts["node1"]["facts"]["machine"]
    for name in ("node7", "node8"):
        assert hosts[name]["facts"] is None
        plain = hosts[name]["without_python"]
        assert plain["hostname"] == name
        assert [plain[key] for key in ("cpu_model", "isa", "memory_bytes", "kernel")] == [
            here[key] for key in ("cpu_model", "isa", "memory_bytes", "kernel")
        ]


@pytest.mark.slow
def test_those_that_answer_are_measured_all_the_same(ill: tuple[Lab, Report]) -> None:
    assert {one["source"] for one in ill[1]["transfers"]} == {"node1", "node2", "node9"}
    assert told(ill[1], "connections")[0][0] == "ok"


def test_a_frozen_host_ends_the_wait(lab: Lab) -> None:
    lab["node3"].freeze()
    try:
        report = doctor(lab["node1"], NAMES, "--timeout_s", "3", status=1)
    finally:
        lab["node3"].thaw()
    ((status, reason),) = told(report, "ssh", "node3")
    assert (status, reason) in [("failure", "ssh: no answer"), ("failure", "ssh: no answer within 3 s")]
