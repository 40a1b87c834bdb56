"""Runs on three real hosts of a lab, each with its own sshd: what starts, what fails, what is left."""

from __future__ import annotations

import contextlib
import importlib.metadata
import json
import os
import re
import shlex
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np
import pytest
from safetensors.numpy import load_file

import fleetune
from lab import Lab
from lab.host import Host
from tests.conftest import TinyData, Train, losses_of, read_json

NAMES = ("node1", "node2", "node3")
PROMPT_S = 10.0
"""Within which a run ends where something answers."""

LOOP = """
import datetime, os, sys, time
import torch, torch.distributed as dist
rank = int(os.environ["RANK"])
print("up", rank, os.uname().nodename, flush=True)
print("to stderr", rank, file=sys.stderr, flush=True)
dist.init_process_group("gloo", timeout=datetime.timedelta(seconds=300))
for step in range(3000):
    dist.all_reduce(torch.ones(1000))
    time.sleep(0.02)
    if rank == 0 and step == 3:
        print("running", flush=True)
    if os.path.exists(f"fail.{rank}"):
        raise RuntimeError(f"out of luck on rank {rank}")
"""


@dataclass
class Run:
    """A `fleetune` command inside a host."""

    process: subprocess.Popen[str]
    lines: list[str] = field(default_factory=list)

    def wait_for(self, part: str) -> float:
        """Read up to a line; the time when it came."""
        assert self.process.stdout is not None
        for line in self.process.stdout:
            self.lines.append(line.rstrip("\n"))
            if part in line:
                return time.monotonic()
        pytest.fail(f"{part!r} was not said, but: {self.lines}")

    def end(self, timeout_s: float = 60) -> tuple[int, list[str]]:
        """Exit status and all lines."""
        rest = self.process.communicate(timeout=timeout_s)[0]
        self.lines += (rest or "").splitlines()
        return self.process.returncode, self.lines


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Where all hosts see the same files."""
    return tmp_path_factory.mktemp("hosts")


@pytest.fixture(scope="module")
def lab(folder: Path) -> Iterator[Lab]:
    if reason := Lab.unavailable(with_ssh=True):
        pytest.skip(reason)
    base = Path(*folder.parts[:3])
    with Lab.up(NAMES, with_ssh=True, keep=[base] if folder.is_relative_to("/tmp") else []) as lab:
        yield lab


@pytest.fixture
def launch(lab: Lab, tmp_path: Path) -> Iterator[Callable[..., Run]]:
    """Run a command of fleetune in node1, in a folder of the test's own; hosts must be left without a process."""
    started: list[Run] = []

    def start(*words: object, **environ: str) -> Run:
        command = [sys.executable, "-m", "fleetune", *map(str, words)]
        environ = {"HF_HUB_OFFLINE": "1", "PYTHONPATH": str(Path(fleetune.__file__).parents[1]), **environ}
        started.append(Run(lab["node1"].start(command, env=environ, cwd=tmp_path)))
        return started[-1]

    yield start
    for run in started:
        if run.process.poll() is None:
            run.process.kill()
        run.process.communicate()  # closes its pipe
    wait_until_idle(lab)


def ranks_of(host: Host, part: str = "") -> list[int]:
    """Processes of a run on a host: agents, guards and ranks."""
    found = []
    for pid in host.processes():
        with contextlib.suppress(OSError):
            line = Path(f"/proc/{pid}/cmdline").read_text().replace("\0", " ")
            if sys.executable in line and "inside.py" not in line and part in line:
                found.append(pid)
    return found


def clients_of(host: Host) -> list[int]:
    """Processes of ssh that carry a run."""
    found = []
    for pid in host.processes():
        with contextlib.suppress(OSError):
            if "BatchMode" in Path(f"/proc/{pid}/cmdline").read_text():
                found.append(pid)
    return found


def wait_until_idle(lab: Lab, timeout_s: float = 20) -> None:
    deadline = time.monotonic() + timeout_s
    while left := {host.name: pids for host in lab if (pids := ranks_of(host))}:
        assert time.monotonic() < deadline, f"processes are left: {left}"
        time.sleep(0.1)


@pytest.fixture
def loop(launch: Callable[..., Run], tmp_path: Path) -> Callable[..., Run]:
    """Three ranks on three hosts that exchange something in every step."""
    (tmp_path / "loop.py").write_text(LOOP)

    def start(*settings: object) -> Run:
        return launch("launch", "--hosts", ",".join(NAMES), "--timeout_s", "8", *settings, "loop.py")

    return start


@contextlib.contextmanager
def hidden(host: Host, path: Path, content: Path | None = None) -> Iterator[None]:
    """Put something else in a path's place, on one host: a file, or an empty folder."""
    over = (
        ["mount", "-t", "tmpfs", "none", str(path)] if content is None else ["mount", "--bind", str(content), str(path)]
    )
    host.run(over).check_returncode()
    try:
        yield
    finally:
        host.run(["umount", "--lazy", str(path)]).check_returncode()


# ---- what works


@pytest.mark.slow
def test_three_hosts_train_the_model_that_one_process_trains(
    launch: Callable[..., Run], train: Train, tiny_data: TinyData, tiny_model_with_dropout: Path, tmp_path: Path
) -> None:
    one = train("one", model=tiny_model_with_dropout, per_device_train_batch_size=33)
    settings = {
        "model": tiny_model_with_dropout, "train_file": tiny_data.train, "validation_file": tiny_data.validation,
        "output_dir": "three", "learning_rate": 1e-3, "scale_lr": "none", "num_train_epochs": 2, "logging_steps": 1,
        "report_to": "none", "per_device_train_batch_size": 11, "cache_dir": tmp_path / "cache",
    }  # fmt: skip
    words = [word for name, value in settings.items() for word in (f"--{name}", value)]
    run = launch("train", "--hosts", ",".join(NAMES), *words)
    status, lines = run.end(timeout_s=200)
    assert status == 0, "\n".join(lines)
    three = tmp_path / "three"
    np.testing.assert_allclose(losses_of(three), losses_of(one), rtol=2e-5)
    expected = load_file(one / "model.safetensors")
    for name, value in load_file(three / "model.safetensors").items():
        np.testing.assert_allclose(value, expected[name], rtol=1e-3, atol=2e-5, err_msg=name)
    assert read_json(three / "record.json")["plan"]["processes"] == 3
    assert sorted(path.name for path in (three / "logs").iterdir()) == [f"node{i + 1}.{i}.log" for i in range(3)]


def test_a_script_gets_the_variables_of_torchrun(launch: Callable[..., Run], lab: Lab, tmp_path: Path) -> None:
    (tmp_path / "tell.py").write_text(
        "import json, os, sys\n"
        "about = {'host': os.uname().nodename, 'argv': sys.argv[1:], 'cwd': os.getcwd()}\n"
        "print(json.dumps({**about, 'cores': len(os.sched_getaffinity(0)), **os.environ}))\n"
    )
    (tmp_path / "hosts").write_text("# two ranks on the second\nnode1\nnode2 slots=2\n")
    odd = ["a b", "it's", '"', "$HOME", "*", "", "ä\nö", "--hosts"]
    run = launch("launch", "--hostfile", "hosts", "--threads", "1", "tell.py", *odd, HF_TOKEN="sesame", OTHER="x")
    status, lines = run.end()
    assert status == 0, lines
    told = [
        json.loads((tmp_path / "logs" / name).read_text()) for name in ("node1.0.log", "node2.1.log", "node2.2.log")
    ]
    expected = {
        "RANK": "012", "LOCAL_RANK": "001", "LOCAL_WORLD_SIZE": "122", "WORLD_SIZE": "333", "GROUP_RANK": "011",
        "OMP_NUM_THREADS": "111",
    }  # fmt: skip
    for name, values in expected.items():
        assert [rank[name] for rank in told] == list(values), name
    assert {rank["MASTER_ADDR"] for rank in told} == {lab["node1"].address}
    assert len({rank["MASTER_PORT"] for rank in told}) == 1
    assert {rank["GLOO_SOCKET_IFNAME"] for rank in told} == {"eth0"}
    assert [rank["host"] for rank in told] == ["node1", "node2", "node2"]
    assert [rank["argv"] for rank in told] == [odd] * 3
    if len(os.sched_getaffinity(0)) == 2:
        assert [rank["cores"] for rank in told] == [2, 1, 1]  # each of node2's ranks keeps to its own
    assert {rank["cwd"] for rank in told} == {str(tmp_path)}
    assert {rank["HF_TOKEN"] for rank in told} == {"sesame"}  # a variable of a library's
    assert ["OTHER" in rank for rank in told] == [True, False, False]
    assert json.loads(lines[-1])["RANK"] == "0"  # of rank 0 alone on the terminal
    assert not any("sesame" in line for line in lines[:-1])


def test_ports_and_network_are_kept_to(launch: Callable[..., Run], lab: Lab, tmp_path: Path) -> None:
    (tmp_path / "tell.py").write_text("import os; print(os.environ['MASTER_ADDR'], os.environ['MASTER_PORT'])")
    network = re.sub(r"\.\d+$", ".0/24", lab["node1"].address)
    for ports in ("23456", "23456-23456"):
        run = launch("launch", "--hosts", "node1,node2", "--network", network, "--port_range", ports, "tell.py")
        status, lines = run.end()
        assert status == 0, lines
        assert lines[-1] == f"{lab['node1'].address} 23456"


def test_a_run_from_a_machine_that_takes_no_part(launch: Callable[..., Run], lab: Lab, tmp_path: Path) -> None:
    (tmp_path / "tell.py").write_text("import os; print(os.uname().nodename, os.environ['MASTER_ADDR'])")
    status, lines = launch("launch", "--hosts", "node2,node3", "tell.py").end()
    assert (status, lines[-1]) == (0, f"node2 {lab['node2'].address}")
    where = f"fleetune: rank 0 is on node2: model, data and output are that host's, in its {tmp_path}"
    assert where in lines


def test_a_jump_host_and_connections_that_are_shared(launch: Callable[..., Run], lab: Lab, tmp_path: Path) -> None:
    """As a user's ~/.ssh/config has them: node3 is reached by way of node2, and connections stay open for the next."""
    original = lab["node1"].run(["cat", "/etc/ssh/ssh_config"]).stdout
    shared = "ControlMaster auto\nControlPath /run/to-%C\nControlPersist 60\n"
    (tmp_path / "config").write_text(f"Host node3\nProxyJump node2\nHost *\n{shared}{original}")
    (tmp_path / "tell.py").write_text("import os; print(os.environ['RANK'], os.environ['SSH_CONNECTION'])")
    with hidden(lab["node1"], Path("/etc/ssh/ssh_config"), tmp_path / "config"):
        for _ in range(2):  # the second finds the connections of the first
            status, lines = launch("launch", "--hosts", "node2,node3", "tell.py").end()
            assert status == 0, lines
            came_from = (tmp_path / "logs" / "node3.1.log").read_text().split()[1]
            assert came_from == lab["node2"].address
        assert lab["node1"].run(["sh", "-c", "ls /run/to-* | wc -l"]).stdout.strip() == "2"
        for name in ("node3", "node2"):
            lab["node1"].run(["ssh", "-O", "exit", name]).check_returncode()


def test_a_host_name_that_means_loopback_does_no_harm(lab: Lab, loop: Callable[..., Run], tmp_path: Path) -> None:
    """As Debian's /etc/hosts has it: the host's own name is 127.0.1.1."""
    names = lab["node1"].run(["cat", "/etc/hosts"]).stdout
    with contextlib.ExitStack() as undo:
        for host in lab:
            own = tmp_path / f"hosts.{host.name}"
            own.write_text(f"127.0.1.1 {host.name}\n{re.sub(rf'.* {host.name}$', '', names, flags=re.MULTILINE)}")
            undo.enter_context(hidden(host, Path("/etc/hosts"), own))
        run = loop()
        run.wait_for("running")
        run.process.send_signal(signal.SIGINT)
        assert run.end()[0] == 130


def test_a_dry_run_touches_nothing(launch: Callable[..., Run], lab: Lab, tmp_path: Path) -> None:
    (tmp_path / "loop.py").write_text(LOOP)
    run = launch("launch", "--hosts", "node1,user@node2:2", "--dry_run", "loop.py", "a b", HF_TOKEN="sesame")
    status, lines = run.end()
    assert status == 0
    text = "\n".join(lines)
    agent = f"{sys.executable} -m fleetune.cluster.launchers.agent"
    assert f"run here:  {agent}" in text
    ssh = (
        "ssh -T -o BatchMode=yes -o ConnectTimeout=10 -o ServerAliveInterval=15 -o ClearAllForwardings=yes "
        "-o RemoteCommand=none"
    )
    there = f"env PYTHONPATH={Path(fleetune.__file__).parents[1]} {agent}"
    assert f"run here:  {ssh} -- user@node2 {shlex.quote(there)}" in text
    assert f"MASTER_ADDR={lab['node1'].address}" in text
    assert f"2 ranks in {tmp_path}: " in text
    assert f"{sys.executable} loop.py 'a b'" in text
    assert "sesame" not in text
    assert [path.name for path in tmp_path.iterdir()] == ["loop.py"]


# ---- hosts that cannot take part


def test_hosts_that_cannot_take_part_are_all_named(launch: Callable[..., Run], lab: Lab, tmp_path: Path) -> None:
    (tmp_path / "tell.py").write_text("")
    began = time.monotonic()
    status, lines = launch("launch", "--hosts", "node1,nobody@node2,node3", "--timeout_s", "8", "tell.py").end()
    assert time.monotonic() - began < PROMPT_S
    assert (status, lines) == (1, ["error: host node2: it refuses the key; `ssh-copy-id nobody@node2`, or start an "
                                   "agent that has the key"])  # fmt: skip


def test_names_that_mean_nothing(launch: Callable[..., Run], tmp_path: Path) -> None:
    (tmp_path / "tell.py").write_text("")
    status, lines = launch("launch", "--hosts", "node1,node9,nod3", "tell.py").end()
    assert status == 2
    remedy = "the name cannot be resolved; correct it, or add it to /etc/hosts or ~/.ssh/config"
    assert lines == [f"error: host node9: {remedy}", f"host nod3: {remedy}"]


def test_a_host_without_fleetune_and_one_without_python(launch: Callable[..., Run], lab: Lab, tmp_path: Path) -> None:
    (tmp_path / "tell.py").write_text("")
    package, programs = Path(fleetune.__file__).parent, Path(sys.executable).parent
    with hidden(lab["node2"], package), hidden(lab["node3"], programs):
        status, lines = launch("launch", "--hosts", "node1,node2,node3", "tell.py").end()
    assert status == 1
    assert sorted(line.removeprefix("error: ") for line in lines) == [
        f"host node2: {sys.executable} has no fleetune; `fleetune setup --hosts node2` puts this environment there",
        f"host node3: there is no {sys.executable}; `fleetune setup --hosts node3` puts this environment there",
    ]


def test_a_script_needs_its_folder_on_every_host(launch: Callable[..., Run], lab: Lab, tmp_path: Path) -> None:
    """In the home folder of a host, a file of the same name may be another script."""
    (tmp_path / "tell.py").write_text("")
    lab["node2"].run(["mount", "-t", "tmpfs", "none", str(tmp_path.parent)]).check_returncode()
    try:
        status, lines = launch("launch", "--hosts", "node1,node2,node3", "tell.py").end()
    finally:
        lab["node2"].run(["umount", "--lazy", str(tmp_path.parent)]).check_returncode()
    assert (status, lines) == (1, [
        f"error: host node2: there is no folder {tmp_path}, where the script is started",
        "make it there, or start from a folder that is",
    ])  # fmt: skip


def test_another_version_on_one_host(launch: Callable[..., Run], lab: Lab, tmp_path: Path) -> None:
    (tmp_path / "tell.py").write_text("")
    files = importlib.metadata.files("torch") or []
    metadata = next(Path(str(file.locate())) for file in files if file.name == "METADATA")
    version = importlib.metadata.version("torch")
    other = tmp_path / "METADATA"
    other.write_text(metadata.read_text().replace(f"Version: {version}", "Version: 2.12.0", 1))
    with hidden(lab["node3"], metadata, other):
        status, lines = launch("launch", "--hosts", "node1,node2,node3", "tell.py").end()
    assert (status, lines) == (1, [
        f"error: host node3: torch 2.12.0, but node1 has {version}",
        "`fleetune setup --hosts node3` puts this environment there",
    ])  # fmt: skip


def test_a_port_that_is_taken(launch: Callable[..., Run], lab: Lab, tmp_path: Path) -> None:
    (tmp_path / "tell.py").write_text("")
    code = "import socket, time; s = socket.create_server(('', 23457)); print('up', flush=True); time.sleep(60)"
    holder = lab["node1"].start([sys.executable, "-c", code])
    try:
        assert holder.stdout is not None
        holder.stdout.readline()
        status, lines = launch("launch", "--hosts", "node1,node2", "--port_range", "23457", "tell.py").end()
    finally:
        holder.kill()
        holder.communicate()
    assert (status, lines) == (1, [
        f"error: host node1: no TCP port from 23457 to 23457 is free on {lab['node1'].address}; "
        "give another --port_range"
    ])  # fmt: skip


def test_a_host_that_does_not_answer(launch: Callable[..., Run], lab: Lab, tmp_path: Path) -> None:
    (tmp_path / "tell.py").write_text("")
    lab["node3"].cut()
    try:
        began = time.monotonic()
        status, lines = launch("launch", "--hosts", ",".join(NAMES), "--timeout_s", "6", "tell.py").end()
        assert time.monotonic() - began < 6 + PROMPT_S
    finally:
        lab["node3"].join()
    assert status == 1
    assert len(lines) == 1
    assert re.match(r"error: host node3: (no answer|no route to it)", lines[0]), lines


# ---- ranks and hosts that fail while they run


def test_a_rank_that_fails_is_told_last_with_its_host(loop: Callable[..., Run], tmp_path: Path) -> None:
    run = loop()
    run.wait_for("running")
    (tmp_path / "fail.2").touch()
    began = time.monotonic()
    status, lines = run.end()
    assert time.monotonic() - began < PROMPT_S
    log = tmp_path / "logs" / "node3.2.log"
    assert status == 1
    assert lines[-2:] == [
        "[node3 rank 2] [rank2]: RuntimeError: out of luck on rank 2",  # torch names the rank, too
        f"fleetune: node3: rank 2 failed with exit status 1 (all it said: {log.relative_to(tmp_path)})",
    ]
    assert "RuntimeError: out of luck on rank 2" in log.read_text()
    assert "to stderr 1" in (tmp_path / "logs" / "node2.1.log").read_text()
    assert not any("up 1" in line for line in lines)


def test_a_killed_rank(loop: Callable[..., Run], lab: Lab) -> None:
    run = loop()
    run.wait_for("running")
    began = time.monotonic()
    os.kill(ranks_of(lab["node2"], "loop.py")[0], signal.SIGKILL)
    status, lines = run.end()
    assert time.monotonic() - began < PROMPT_S
    assert status == 137
    assert lines[-1].startswith("fleetune: node2: rank 1 was killed by SIGKILL: not by the kernel for memory")


def test_a_rank_that_used_up_the_memory(loop: Callable[..., Run], lab: Lab, tmp_path: Path) -> None:
    groups = Path("/sys/fs/cgroup/memory")
    if not os.access(groups, os.W_OK):
        pytest.skip(f"no memory controller of cgroup v1 at {groups} that can be written to")
    script = (tmp_path / "loop.py").read_text()
    (tmp_path / "loop.py").write_text(script.replace(
        'if os.path.exists(f"fail.{rank}"):', 'if os.path.exists(f"fail.{rank}"):\n        b = bytearray(600 << 20)'
    ))  # fmt: skip
    run, group = loop(), groups / f"fleetune-test-{os.getpid()}"
    run.wait_for("running")
    group.mkdir()
    try:
        (group / "memory.limit_in_bytes").write_text(str(300 << 20))
        (group / "cgroup.procs").write_text(str(ranks_of(lab["node3"], "loop.py")[0]))
        (tmp_path / "fail.2").touch()
        status, lines = run.end()
    finally:
        group.rmdir()
    assert status == 137
    assert lines[-1].startswith(
        "fleetune: node3: rank 2 was killed by SIGKILL: the kernel ended it because memory was used up; free memory"
    )


@pytest.mark.parametrize("fault", ["cut", "freeze", "kill"])
def test_a_host_that_is_lost(loop: Callable[..., Run], lab: Lab, fault: str) -> None:
    run, host = loop(), lab["node3"]
    run.wait_for("running")
    began = time.monotonic()
    if fault == "kill":
        host.cut()
    {"cut": host.cut, "freeze": host.freeze, "kill": host.kill}[fault]()
    try:
        status, lines = run.end()
        assert time.monotonic() - began < 8 + PROMPT_S
        assert ranks_of(lab["node1"]) == ranks_of(lab["node2"]) == []
    finally:
        if fault == "freeze":
            host.thaw()
        else:
            host.join()
        if fault == "kill":
            host.boot()
    assert status == 1
    assert re.match(r"fleetune: node3: lost: not heard of for \d+ s: is it up, and its link\?", lines[-1])
    wait_until_idle(lab)  # also the host that was out of reach ends its ranks


# ---- stopping


def test_ctrl_c_stops_all_hosts(loop: Callable[..., Run]) -> None:
    run = loop()
    run.wait_for("running")
    began = time.monotonic()
    run.process.send_signal(signal.SIGINT)
    status, lines = run.end()
    assert (status, lines[-1]) == (130, "fleetune: all ranks are asked to stop; press Ctrl-C again to end at once")
    assert time.monotonic() - began < PROMPT_S


@pytest.mark.parametrize(("signum", "expected"), [(signal.SIGTERM, 143), (signal.SIGHUP, 129)])
def test_other_ways_to_stop(loop: Callable[..., Run], signum: int, expected: int) -> None:
    run = loop()
    run.wait_for("running")
    run.process.send_signal(signum)
    assert run.end()[0] == expected


def test_a_second_ctrl_c_ends_ranks_that_take_their_time(launch: Callable[..., Run], lab: Lab, tmp_path: Path) -> None:
    (tmp_path / "stubborn.py").write_text(
        "import signal, time\n"
        "signal.signal(signal.SIGTERM, signal.SIG_IGN)\n"
        "print('running', flush=True)\n"
        "time.sleep(99)\n"
    )
    run = launch("launch", "--hosts", ",".join(NAMES), "stubborn.py")
    run.wait_for("running")
    run.process.send_signal(signal.SIGINT)
    run.wait_for("all ranks are asked to stop")
    time.sleep(0.5)
    assert run.process.poll() is None
    began = time.monotonic()
    run.process.send_signal(signal.SIGINT)
    assert run.end()[0] == 130
    assert time.monotonic() - began < PROMPT_S


def test_ctrl_c_while_a_host_does_not_answer(launch: Callable[..., Run], lab: Lab, tmp_path: Path) -> None:
    (tmp_path / "tell.py").write_text("")
    lab["node3"].freeze()
    try:
        run = launch("launch", "--hosts", ",".join(NAMES), "--timeout_s", "50", "tell.py")
        while len(clients_of(lab["node1"])) < 2:
            time.sleep(0.1)
        began = time.monotonic()
        run.process.send_signal(signal.SIGINT)
        status, lines = run.end()
        assert time.monotonic() - began < PROMPT_S
        assert (status, [line for line in lines if line]) == (130, ["interrupted: nothing more was written"])
    finally:
        lab["node3"].thaw()


def test_nothing_is_left_when_the_head_is_killed(loop: Callable[..., Run], lab: Lab) -> None:
    run = loop()
    run.wait_for("running")
    run.process.kill()
    run.process.wait()
    wait_until_idle(lab)


def test_nothing_is_left_when_an_ssh_connection_is_lost(loop: Callable[..., Run], lab: Lab) -> None:
    run = loop()
    run.wait_for("running")
    clients = clients_of(lab["node1"])
    assert len(clients) == 2
    os.kill(clients[1], signal.SIGKILL)
    status, lines = run.end()
    assert status == 1
    assert lines[-1].startswith("fleetune: node3: lost: ")


def test_the_plan_of_all_hosts(launch: Callable[..., Run]) -> None:
    run = launch("plan", "--hosts", "node1,node2:2,node3", "--threads", "1")
    status, lines = run.end()
    assert status == 0
    assert [line.split()[:2] for line in lines[1:5]] == [["0", "node1"], ["1", "node2"], ["2", "node2"], ["3", "node3"]]
    assert lines[-2:] == [
        "global batch   64 examples = 4 processes x 16",
        "learning rate  2e-05 x 4 (--scale_lr linear, 4 processes) = 8e-05, linear",
    ]
