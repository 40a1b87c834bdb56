"""What processes on a host find, and what a host can be put through. Two hosts."""

from __future__ import annotations

import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from lab import Host, Lab, LabError
from lab.cgroups import no_cpu_controller
from lab.lab import _own_folders
from tests.lab.conftest import CORES, MBIT

PORT = 4321
SERVE = f"""
import socket
with socket.create_server(("", {PORT})) as server:
    print("listens", flush=True)
    while True:
        connection = server.accept()[0]
        while connection.recv(1 << 20):
            pass
"""
SEND = f"""
import socket, sys, time
with socket.create_connection((sys.argv[1], {PORT}), timeout=float(sys.argv[2])) as connection:
    print(connection.getsockopt(socket.IPPROTO_TCP, socket.TCP_CONGESTION, 16).rstrip(bytes(1)).decode(), flush=True)
    end = time.monotonic() + float(sys.argv[3])
    while time.monotonic() < end:
        connection.send(bytes(1 << 16))
"""
BURN = """
import time
end = time.perf_counter() + 1.5
while time.perf_counter() < end:
    pass
fields = open("/proc/self/stat").read().rsplit(")", 1)[1].split()
print((int(fields[11]) + int(fields[12])) / 100 / 1.5)
"""


@contextmanager
def serving(host: Host) -> Iterator[None]:
    """A server that swallows what it is sent."""
    with host.start([sys.executable, "-c", SERVE]) as server:
        try:
            assert server.stdout is not None
            assert server.stdout.readline() == "listens\n"
            yield
        finally:
            server.kill()


def send(sender: Host, receiver: str, *, patience_s: float = 5, seconds: float = 0) -> subprocess.CompletedProcess[str]:
    """Connect to the server of another host, and send for a time."""
    return sender.run([sys.executable, "-c", SEND, receiver, str(patience_s), str(seconds)], timeout=20)


def received_mbit(lab: Lab, seconds: float) -> float:
    """Rate at which the second host receives what the first one sends, Mbit/s: both counters, halfway through."""
    sender, receiver = lab
    with sender.start([sys.executable, "-c", SEND, receiver.name, "5", str(seconds + 1.5)]) as sending:
        assert sending.stdout is not None
        sending.stdout.readline()
        time.sleep(0.5)  # the connection starts slowly
        before, start = receiver.bytes_received(), time.monotonic()
        time.sleep(seconds)
        rate = (receiver.bytes_received() - before) * 8e-6 / (time.monotonic() - start)
        sending.kill()
    return rate


def test_each_has_its_name_and_address(lab: Lab) -> None:
    for host in lab:
        shown = host.run(["sh", "-c", "hostname; ip -4 -o addr show dev eth0"]).stdout.splitlines()
        assert shown[0] == host.name
        assert shown[1].split()[3] == f"{host.address}/24"
    assert [host.name for host in lab] == ["node1", "node2"]
    assert lab["node2"].address == f"10.{lab.number}.0.12"


def test_both_names_of_an_address_are_known(lab: Lab) -> None:
    node1, node2 = lab
    found = node1.run(["sh", "-c", f"getent hosts {node2.address}; getent hosts ::ffff:{node2.address}; hostname -f"])
    assert found.stdout.split() == [node2.address, "node2", f"::ffff:{node2.address}", "node2", "node1"]


def test_hosts_reach_each_other_with_cubic(lab: Lab) -> None:
    node1, node2 = lab
    with serving(node2):
        sent = send(node1, "node2")
    assert (sent.returncode, sent.stdout, sent.stderr) == (0, "cubic\n", "")


def test_the_machine_reaches_hosts(lab: Lab) -> None:
    with serving(lab["node1"]), socket.create_connection((lab["node1"].address, PORT), timeout=5) as connection:
        assert connection.getsockname()[0] == lab.machine_address


def test_nothing_leaves_the_machine(lab: Lab) -> None:
    """Hosts know no way out; and without the bridge the machine refuses the lab's addresses."""
    sent = send(lab["node1"], "192.0.2.1")
    assert sent.returncode == 1
    assert "Network is unreachable" in sent.stderr
    bridge = f"lab{lab.number}"
    subprocess.run(["ip", "link", "set", bridge, "down"], check=True)
    try:
        route = subprocess.run(["ip", "route", "get", lab["node1"].address], capture_output=True, text=True)
    finally:
        subprocess.run(["ip", "link", "set", bridge, "up"], check=True)
    assert route.returncode != 0
    assert "No route to host" in route.stderr


def test_link_has_its_rate(lab: Lab) -> None:
    node1, node2 = lab
    with serving(node2):
        shaped = received_mbit(lab, 1.5)
        node1.set_link(None)
        node2.set_link(None)
        free = received_mbit(lab, 0.5)
    for host in lab:
        host.set_link(MBIT)
    assert 0.8 * MBIT < shaped < 1.1 * MBIT
    assert free > 2 * MBIT


def test_counters_count_both_ways(lab: Lab) -> None:
    node1, node2 = lab
    before = [(host.bytes_sent(), host.bytes_received()) for host in lab]
    with serving(node2):
        send(node1, "node2", seconds=0.3)
    (sent1, got1), (sent2, got2) = (
        (host.bytes_sent() - sent, host.bytes_received() - got) for host, (sent, got) in zip(lab, before, strict=True)
    )
    assert sent1 > 500_000
    assert got2 > 500_000
    assert max(got1, sent2) < 200_000, "acknowledgements only"


def test_cut_and_join(lab: Lab) -> None:
    node1, node2 = lab
    with serving(node2):
        node1.cut()
        while_cut = send(node1, "node2", patience_s=1)
        node1.join()
        after = send(node1, "node2")
    assert while_cut.returncode == 1
    assert any(words in while_cut.stderr for words in ("timed out", "No route to host"))
    assert (after.returncode, after.stdout) == (0, "cubic\n")


def test_quota_is_what_a_process_gets(lab: Lab) -> None:
    if reason := no_cpu_controller():
        pytest.skip(reason)
    node1 = lab["node1"]
    node1.set_quota(CORES)
    limited = float(node1.run([sys.executable, "-c", BURN]).stdout)
    node1.set_quota(None)
    free = float(node1.run([sys.executable, "-c", BURN]).stdout)
    assert 0.6 * CORES < limited < 1.1 * CORES
    assert free > 1.4 * CORES
    with pytest.raises(LabError, match=r"expected 0\.1 or more"):
        node1.set_quota(0.01)


def test_own_folders_and_shared_ones(lab: Lab, kept: Path) -> None:
    node1, node2 = lab
    for folder in ("/tmp", "/run", "/dev/shm"):
        node1.run(["touch", f"{folder}/of-node1"]).check_returncode()
        assert node2.run(["ls", f"{folder}/of-node1"]).returncode == 2
        assert not Path(folder, "of-node1").exists()
    own = {"of-node1", kept.relative_to("/tmp").parts[0], *(folder.name for folder in _own_folders())}
    assert set(node1.run(["ls", "/tmp"]).stdout.split()) == own
    seen = node2.run(["sh", "-c", "cat note; pwd; echo back > answer"], cwd=kept)
    assert seen.stdout == f"from the machine{kept}\n"
    assert (kept / "answer").read_text() == "back\n"
    assert node1.run(["ls", "/sys/class/net"]).stdout.split() == ["eth0", "lo"]


def test_environment_is_bare(lab: Lab, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("OF_THE_CALLER", "1")
    shown = lab["node1"].run(["env"], env={"GIVEN": "a b"}).stdout.splitlines()
    assert {line.split("=")[0] for line in shown} == {"PATH", "HOME", "LANG", "GIVEN"}
    assert "GIVEN=a b" in shown


def test_a_process_answers_as_if_it_were_here(lab: Lab) -> None:
    """Output, input, return codes, ends by signals, and signals that it handles."""
    node1 = lab["node1"]
    assert node1.run(["sh", "-c", "cat; echo err >&2; exit 7"], stdin="in").stdout == "in"
    assert node1.run(["sh", "-c", "exit 7"]).returncode == 7
    assert node1.run(["sh", "-c", "kill -SEGV $$"]).returncode == -signal.SIGSEGV
    missing = node1.run(["no-such-program"])
    assert (missing.returncode, missing.stderr) == (127, "node1: no command no-such-program\n")
    script = "trap 'echo asked; exit 3' TERM; echo ready; while :; do sleep 0.05; done"
    with node1.start(["sh", "-c", script]) as process:
        assert process.stdout is not None
        assert process.stdout.readline() == "ready\n"
        process.terminate()
        assert process.communicate(timeout=5)[0] == "asked\n"
    assert process.returncode == 3


def test_time_limit_ends_the_process_itself(lab: Lab) -> None:
    node1 = lab["node1"]
    with pytest.raises(subprocess.TimeoutExpired):
        node1.run(["sleep", "98765"], timeout=0.5)
    assert not any("98765" in Path(f"/proc/{pid}/cmdline").read_text() for pid in node1.processes())


def test_killed_host_is_gone_and_boots_again(lab: Lab) -> None:
    node1, node2 = lab
    with node2.start(["sleep", "1000"]) as process:
        assert len(node2.processes()) >= 3
        node2.kill()
        assert process.wait(timeout=5) == -signal.SIGKILL
    assert node2.processes() == []
    with pytest.raises(LabError, match="node2 is down"):
        node2.run(["true"])
    assert "Connection refused" in send(node1, "node2").stderr
    node2.boot()
    with serving(node2):
        assert send(node1, "node2").returncode == 0


def test_frozen_host_stands_still(lab: Lab) -> None:
    node1 = lab["node1"]
    counting = "import time\nfor i in range(1000):\n    print(i, flush=True)\n    time.sleep(0.02)"
    with node1.start([sys.executable, "-c", counting]) as process:
        assert process.stdout is not None
        process.stdout.readline()
        node1.freeze()
        times = [ticks(node1) for _ in range(2) if not time.sleep(0.3)]
        with pytest.raises(LabError, match="node1 is frozen"):
            node1.run(["true"])
        node1.thaw()
        time.sleep(1)
        assert times[0] == times[1] < ticks(node1)
        process.kill()


def ticks(host: Host) -> int:
    """Voluntary context switches of a host's processes: they grow with every sleep."""
    texts = [Path(f"/proc/{pid}/status").read_text() for pid in host.processes()]
    return sum(int(text.split("\nvoluntary_ctxt_switches:")[1].split()[0]) for text in texts)


def test_ssh_with_known_hosts_only(lab: Lab) -> None:
    """Words survive the shells; the settings serve hosts and machine; a key that is not known is refused."""
    words = ["printf", "%s|", "a  b", "$HOME", "it's"]
    quoted = " ".join("'" + word.replace("'", "'\"'\"'") + "'" for word in words)
    assert lab.ssh_config is not None
    here = subprocess.run(
        ["ssh", "-F", str(lab.ssh_config), "node2", f"hostname; {quoted}"], capture_output=True, text=True, timeout=20
    )
    assert (here.returncode, here.stdout, here.stderr) == (0, "node2\na  b|$HOME|it's|", "")
    node1, node2 = lab
    assert node1.run(["ssh", node2.address, "hostname"]).stdout == "node2\n"
    unknown = node1.run(["ssh", "-o", "UserKnownHostsFile=/dev/null", "node2", "true"])
    assert unknown.returncode == 255
    assert "Host key verification failed" in unknown.stderr
    keys = [host.run(["cat", "/etc/ssh/host_key.pub"]).stdout for host in lab]
    assert keys[0] != keys[1]
