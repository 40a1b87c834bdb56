"""Slurm: plans and scripts as texts, stand-ins first on PATH, and a real one on three hosts."""

from __future__ import annotations

import dataclasses
import os
import re
import shlex
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from fleetune.cluster.job import Job
from fleetune.cluster.launchers.slurm import plan_sbatch, plan_srun, run_with_slurm, srun_failures
from fleetune.cluster.outputs import RankOutputs
from fleetune.errors import ConfigError, LaunchError
from fleetune.hardware.pinning import plan_this_host
from lab import Lab
from tests.cluster.lab_runs import (
    ENVIRONMENT,
    WORKER,
    assert_nothing_left,
    assert_same_weights,
    command_of,
    run,
    settings_of,
    start,
    wait_for,
)
from tests.cluster.slurm_lab import slurm_up, unavailable
from tests.conftest import TinyData, Train, environment

ALLOCATE = ["salloc", "--nodes=3", "--exclusive", "--quiet"]


@pytest.fixture(scope="module")
def kept(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """All that hosts must see."""
    return tmp_path_factory.getbasetemp()


@pytest.fixture(scope="module")
def lab(kept: Path) -> Iterator[Lab]:
    if reason := Lab.unavailable(with_ssh=True) or unavailable():
        pytest.skip(reason)
    if not kept.is_relative_to("/tmp"):
        pytest.skip(f"temporary folders are in {kept}, not under /tmp")
    with Lab.up(3, with_ssh=True, keep=[kept]) as lab:
        yield lab


@pytest.fixture(scope="module")
def slurm(lab: Lab, kept: Path) -> Iterator[dict[str, str]]:
    """The variables with which Slurm's commands find the cluster."""
    folder = kept / "slurm"
    folder.mkdir()
    with slurm_up(lab, folder) as environ:
        yield environ


@pytest.mark.slow
def test_a_batch_job_trains_the_model_of_one_process(
    lab: Lab, slurm: dict[str, str], train: Train, tiny_model: Path, tiny_data: TinyData, tmp_path: Path
) -> None:
    """Three hosts; ranks of each from the host's plan."""
    one = train("one", per_device_train_batch_size=33)
    settings = settings_of(tmp_path, tiny_model, tiny_data, output_dir=tmp_path / "three")
    description = {"launcher": "slurm", "num_hosts": 3, "settings": settings}
    result = run(lab.hosts[0], tmp_path, description, {**slurm, "HF_TOKEN": "sesame"})
    assert result.returncode == 0, result.stderr
    log = finished(lab, slurm, result.stdout)
    text = log.read_text()
    assert_same_weights(tmp_path / "three", one)
    assert "ranks          3 processes x 1 thread" in text
    assert "sesame" not in (tmp_path / "three" / "logs" / "slurm.sh").read_text()
    assert_nothing_left(lab)


@pytest.mark.slow
def test_a_step_of_an_allocation_trains_the_model_of_one_process(
    lab: Lab, slurm: dict[str, str], train: Train, tiny_model: Path, tiny_data: TinyData, tmp_path: Path
) -> None:
    one = train("one", per_device_train_batch_size=33)
    settings = settings_of(tmp_path, tiny_model, tiny_data, output_dir=tmp_path / "three")
    description = {"launcher": "slurm", "processes": 1, "settings": settings}
    result = lab.hosts[0].run(
        [*ALLOCATE, *command_of(description)], env={**ENVIRONMENT, **slurm}, cwd=tmp_path, timeout=200
    )
    assert result.returncode == 0, result.stdout + result.stderr
    assert_same_weights(tmp_path / "three", one)
    logs = tmp_path / "three" / "logs"
    assert {path.name for path in logs.iterdir()} == {"node1.0.log", "node2.1.log", "node3.2.log", "srun.log"}
    assert_nothing_left(lab)


def test_the_failing_rank_of_a_step_is_told_last(lab: Lab, slurm: dict[str, str], tmp_path: Path) -> None:
    """Two ranks a host: the third is on the second host."""
    description = {"launcher": "slurm", "num_hosts": 2, "processes": 2, "script": [*write_worker(tmp_path), "fails"]}
    result = lab.hosts[0].run(
        [*ALLOCATE, *command_of(description)], env={**ENVIRONMENT, **slurm}, cwd=tmp_path, timeout=60
    )
    assert result.returncode == 5, result.stdout + result.stderr
    told = [line for line in result.stderr.splitlines() if not line.startswith("salloc:")]
    log = tmp_path / "logs" / "node2.2.log"
    assert told[-2:] == [
        "the disk is on fire",
        f"fleetune: rank 2 on node2 failed with exit status 5 (its output: {log})",
    ]
    assert_nothing_left(lab)


def test_a_killed_rank_ends_the_step(lab: Lab, slurm: dict[str, str], tmp_path: Path) -> None:
    description = {"launcher": "slurm", "processes": 1, "script": [*write_worker(tmp_path), "stays"]}
    process = lab.hosts[0].start([*ALLOCATE, *command_of(description)], env={**ENVIRONMENT, **slurm}, cwd=tmp_path)
    wait_until_up(tmp_path, 3)
    lab.hosts[1].run(["kill", "-9", (tmp_path / "up.1").read_text()]).check_returncode()
    said, _ = process.communicate(timeout=30)
    assert "fleetune: rank 1 on node2 was killed by SIGKILL: often the kernel's out-of-memory killer" in said
    assert process.returncode == 137, said
    assert_nothing_left(lab)


@pytest.mark.slow
@pytest.mark.parametrize("how", [signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGKILL])
def test_a_stopped_step_leaves_nothing(how: signal.Signals, lab: Lab, slurm: dict[str, str], tmp_path: Path) -> None:
    """A script that knows nothing of signals; its starter runs in an allocation that goes on."""
    number = allocated(lab, slurm)
    environ = {**slurm, "SLURM_JOB_ID": number, "SLURM_JOB_NODELIST": "node[1-3]"}
    description = {"launcher": "slurm", "processes": 1, "script": [*write_worker(tmp_path), "stays"]}
    process = start(lab.hosts[0], tmp_path, description, environ)
    try:
        wait_until_up(tmp_path, 3)
        process.send_signal(how)
        said, _ = process.communicate(timeout=30)
        assert process.returncode == (-how if how == signal.SIGKILL else 128 + how), said
        assert_nothing_left(lab)
    finally:
        lab.hosts[0].run(["scancel", number], env=slurm)


def test_a_canceled_batch_job_leaves_nothing(lab: Lab, slurm: dict[str, str], tmp_path: Path) -> None:
    description = {"launcher": "slurm", "num_hosts": 3, "processes": 1, "script": [*write_worker(tmp_path), "stays"]}
    result = run(lab.hosts[0], tmp_path, description, slurm)
    wait_until_up(tmp_path, 3)
    lab.hosts[0].run(["scancel", number_of(result.stdout)], env=slurm).check_returncode()
    finished(lab, slurm, result.stdout)
    assert_nothing_left(lab)


def allocated(lab: Lab, slurm: dict[str, str]) -> str:
    """The number of an allocation of all hosts that stays until it is cancelled."""
    lab.hosts[0].run([*ALLOCATE, "--no-shell"], env=slurm).check_returncode()
    return lab.hosts[0].run(["squeue", "--noheader", "--states=RUNNING", "--format=%i"], env=slurm).stdout.strip()


def number_of(said: str) -> str:
    match = re.match(r"submitted as Slurm job (\d+)", said)
    assert match, said
    return match[1]


def finished(lab: Lab, slurm: dict[str, str], said: str) -> Path:
    """Wait for a batch job; gives its log."""
    squeue = ["squeue", "--noheader", "--job", number_of(said)]
    wait_for(lambda: not lab.hosts[0].run(squeue, env=slurm).stdout.strip(), "the batch job ends", timeout_s=200)
    log = re.search(r"tail -F (\S+)", said)
    assert log
    return Path(log[1])


def write_worker(folder: Path) -> list[str]:
    (folder / "worker.py").write_text(WORKER)
    return ["worker.py", str(folder)]


def wait_until_up(folder: Path, count: int) -> None:
    wait_for(lambda: len(list(folder.glob("up.*"))) == count, f"{count} ranks are up")


@pytest.mark.slow
def test_ctrl_c_saves_and_says_how_to_go_on(
    lab: Lab, slurm: dict[str, str], tiny_model: Path, tiny_data: TinyData, tmp_path: Path
) -> None:
    settings = settings_of(
        tmp_path, tiny_model, tiny_data, output_dir=tmp_path / "three", num_train_epochs=10000, save_strategy="no",
    )  # fmt: skip
    number = allocated(lab, slurm)
    environ = {**slurm, "SLURM_JOB_ID": number, "SLURM_JOB_NODELIST": "node[1-3]"}
    description = {"launcher": "slurm", "processes": 1, "settings": settings}
    process = start(lab.hosts[0], tmp_path, description, environ)
    try:
        log = tmp_path / "three" / "logs" / "node1.0.log"
        wait_for(lambda: log.exists() and "step 9 " in log.read_text(), "the run trains", timeout_s=120)
        process.send_signal(signal.SIGINT)
        said, _ = process.communicate(timeout=60)
        assert process.returncode == 130, said
        assert re.search(r"stopped at step \d+, saved; to go on: the same command with --resume_from_checkpoint", said)
        assert_nothing_left(lab)
    finally:
        lab.hosts[0].run(["scancel", number], env=slurm)


# ---- plans as texts


JOB = Job(
    command=("python", "-m", "fleetune", "train", "--config", "env:FLEETUNE_SETTINGS"),
    environ={"HF_TOKEN": "sesame", "FLEETUNE_SETTINGS": '{"output_dir": "out"}'},
    cwd=Path("/my work"),
    processes=2,
    network="10.0.0.0/8",
    port_range="29500-29509",
)
ALLOCATION = {"SLURM_JOB_ID": "77", "SLURM_JOB_NODELIST": "node[1-2],gpu1"}
AS_RANK_HERE = f"{sys.executable} -m fleetune.cluster.as_rank -- {shlex.join(JOB.command)}"
RANK_OPTIONS = "--distribution=block --cpu-bind=none --mpi=none --kill-on-bad-exit=1 --chdir=/ --input=none"


def test_a_step_as_text() -> None:
    assert (
        str(plan_srun(JOB, num_hosts=None, environ=ALLOCATION))
        == f"""\
export HF_TOKEN='(not shown)'
export FLEETUNE_SETTINGS='{{"output_dir": "out"}}'
export FLEETUNE_CWD='/my work'
export FLEETUNE_NETWORK=10.0.0.0/8
export FLEETUNE_PORT_RANGE=29500-29509
srun --nodes=3 --ntasks=6 --ntasks-per-node=2 {RANK_OPTIONS} {AS_RANK_HERE}"""
    )


def test_ranks_of_a_step() -> None:
    job = dataclasses.replace(JOB, processes=None)
    inherited = {**ALLOCATION, "SLURM_NTASKS_PER_NODE": "4"}
    assert "--ntasks=8" in plan_srun(job, num_hosts=2, environ=inherited, ranks=5).command
    assert "--ntasks=10" in plan_srun(job, num_hosts=2, environ=ALLOCATION, ranks=5).command
    with pytest.raises(ConfigError, match=r"--num_hosts 4: the allocation, Slurm job 77, has 3 \(node1, node2, gpu1\)"):
        plan_srun(JOB, num_hosts=4, environ=ALLOCATION)


def test_what_ctrl_c_becomes() -> None:
    assert set(plan_srun(JOB, num_hosts=1, environ=ALLOCATION).passes_on.values()) == {signal.SIGUSR1}
    script = dataclasses.replace(JOB, command=("python", "train.py"))
    assert set(plan_srun(script, num_hosts=1, environ=ALLOCATION).passes_on.values()) == {signal.SIGTERM}


BATCH = f"""\
#!/bin/bash
# Written by fleetune; submit it again with: sbatch '/my work/out/logs/slurm.sh'
#SBATCH --job-name=fleetune
#SBATCH --nodes=4
#SBATCH --ntasks-per-node=2
#SBATCH --output="/my work/out/logs/slurm-%j.log"
#SBATCH --exclusive

export FLEETUNE_SETTINGS='{{"output_dir": "out"}}'
export FLEETUNE_CWD='/my work'
export FLEETUNE_NETWORK=10.0.0.0/8
export FLEETUNE_PORT_RANGE=29500-29509
ranks=2
exec srun --nodes=4 --ntasks=$((4 * ranks)) --ntasks-per-node="$ranks" {RANK_OPTIONS} \\
  {AS_RANK_HERE}
"""


def test_a_batch_script_as_text() -> None:
    plan = plan_sbatch(JOB, num_hosts=4, environ={"PATH": "/bin"})
    assert str(plan) == f"# sbatch --parsable '/my work/out/logs/slurm.sh'\n{BATCH}"
    assert plan.environ == {"PATH": "/bin", **JOB.environ}
    assert "sesame" not in repr(plan)


def test_a_batch_script_asks_the_first_host_for_its_ranks() -> None:
    script = plan_sbatch(dataclasses.replace(JOB, processes=None), num_hosts=4, environ={}).script
    assert "--ntasks-per-node=2" not in script
    assert f"ranks=$({sys.executable} -m fleetune.cluster.launchers.slurm) || exit 1\n" in script


def test_a_batch_job_needs_a_number_of_hosts() -> None:
    with pytest.raises(ConfigError, match="--num_hosts is missing"):
        plan_sbatch(JOB, num_hosts=None, environ={})


def test_failures_as_srun_tells_them() -> None:
    said = """\
srun: error: node2: task 1: Exited with exit code 3
srun: launch/slurm: _step_signal: Terminating StepId=7.0
slurmstepd-node1: error: *** STEP 7.0 ON node1 CANCELLED AT 2026-11-30T21:40:38 ***
srun: error: node3: tasks 2-3: Terminated
srun: error: node1: task 0: Killed
srun: error: node4: task 4: Out Of Memory
srun: error: node5: task 5: Segmentation fault (core dumped)
"""
    outputs = RankOutputs("127.0.0.1", range(1, 2), Path("/nowhere"), {})
    assert [(failure.rank, failure.status) for failure in srun_failures(said, outputs)] == [
        (1, 3), (2, 143), (0, 137), (4, 137), (5, 139),
    ]  # fmt: skip


# ---- stand-ins


def stand_in(folder: Path, name: str, script: str) -> dict[str, str]:
    """A program of that name first on PATH; it leaves its arguments and one variable in files."""
    (folder / "bin").mkdir()
    path = folder / "bin" / name
    path.write_text(f'#!/bin/sh\necho "$@" > {folder}/arguments\necho "$HF_TOKEN" > {folder}/token\n{script}\n')
    path.chmod(0o755)
    return {"PATH": f"{folder}/bin:{os.environ['PATH']}"}


def test_a_job_is_submitted_and_how_to_follow_it_is_said(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    environ = stand_in(tmp_path, "sbatch", "echo '4711;lab'")
    job = dataclasses.replace(JOB, cwd=tmp_path)
    assert run_with_slurm(job, num_hosts=4, dry_run=False, environ=environ) == 0
    script = tmp_path / "out" / "logs" / "slurm.sh"
    assert (tmp_path / "arguments").read_text() == f"--parsable {script}\n"
    assert (tmp_path / "token").read_text() == "sesame\n"
    assert script.read_text() == plan_sbatch(job, num_hosts=4, environ={}).script
    assert (
        capsys.readouterr().out
        == f"""\
submitted as Slurm job 4711; its script is {script}
  log      tail -F {script.parent}/slurm-4711.log
  state    squeue --job 4711
  cancel   scancel 4711  (a training run saves first)
"""
    )


def test_what_sbatch_says_is_told(tmp_path: Path) -> None:
    environ = stand_in(tmp_path, "sbatch", "echo 'sbatch: error: invalid partition specified: x' >&2; exit 1")
    with pytest.raises(LaunchError, match="exit status 1: sbatch: error: invalid partition specified: x"):
        run_with_slurm(dataclasses.replace(JOB, cwd=tmp_path), num_hosts=4, dry_run=False, environ=environ)


def test_what_srun_says_is_told_where_no_rank_failed(tmp_path: Path) -> None:
    environ = stand_in(tmp_path, "srun", "echo 'srun: error: Unable to create step' >&2; exit 1")
    job = dataclasses.replace(JOB, cwd=tmp_path, network=None, port_range=None)
    with pytest.raises(LaunchError, match=r"(?s)srun failed with exit status 1.*Unable to create step"):
        run_with_slurm(job, num_hosts=1, dry_run=False, environ={**environ, **ALLOCATION})


def test_a_dry_run_submits_nothing(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    environ = stand_in(tmp_path, "sbatch", "")
    assert run_with_slurm(dataclasses.replace(JOB, cwd=tmp_path), num_hosts=4, dry_run=True, environ=environ) == 0
    assert capsys.readouterr().out.startswith(f"# sbatch --parsable {tmp_path}/out/logs/slurm.sh\n#!/bin/bash\n")
    assert {path.name for path in tmp_path.iterdir()} == {"bin"}


@pytest.mark.parametrize(("environ", "program"), [({}, "sbatch"), (ALLOCATION, "srun")])
def test_without_slurm_the_packages_are_named(environ: dict[str, str], program: str, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=f"there is no {program} on this host.*slurm-client"):
        run_with_slurm(JOB, num_hosts=1, dry_run=False, environ={**environ, "PATH": str(tmp_path)})


def test_the_ranks_of_this_host() -> None:
    words = [sys.executable, "-m", "fleetune.cluster.launchers.slurm"]
    result = subprocess.run(words, capture_output=True, text=True, timeout=60, env=environment())
    plan = plan_this_host(environment(), processes=None, threads=None)
    assert (result.stdout, result.stderr) == (f"{len(plan.parts)}\n", "")
