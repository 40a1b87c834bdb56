"""Start the ranks by Slurm: within an allocation as a step of it, elsewhere as a batch job.

    plan_srun(job, ...)   -> SrunPlan      run_srun(plan)     -> exit status   waits for the ranks
    plan_sbatch(job, ...) -> SbatchPlan    run_sbatch(plan)   -> 0             submits a script and comes back
    run_with_slurm(job, ...)               whichever of both is due, or with dry_run the print alone

Slurm brings processes to hosts; ranks meet through torch.distributed at the first host of the step, at a port made
from the job's number (`cluster/rank.py`), and pin themselves. What a site wants beyond that (partition, account, time)
comes from Slurm's own variables: SBATCH_PARTITION, SBATCH_ACCOUNT, SBATCH_TIMELIMIT and so on.
"""

from __future__ import annotations

import os
import re
import shlex
import shutil
import signal
import subprocess
import sys
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path

from fleetune.cluster.job import (
    AS_RANK,
    Job,
    holds_secret,
    logs_folder,
    shown,
    shown_words,
    stop_notice,
    stops_on_usr1,
    told_ranks,
)
from fleetune.cluster.launchers.supervised import Failure, Program, run_program
from fleetune.cluster.meeting import own_address, split_ports
from fleetune.cluster.network import addresses_of, own_addresses
from fleetune.cluster.outputs import RankOutputs
from fleetune.cluster.rank import host_names, is_loopback
from fleetune.errors import ConfigError, LaunchError
from fleetune.hardware.pinning import plan_this_host

_RANK_OPTIONS = (
    "--distribution=block",
    "--cpu-bind=none",
    "--mpi=none",
    "--kill-on-bad-exit=1",
    "--chdir=/",
    "--input=none",
)
_SCRIPT = "slurm.sh"


@dataclass(frozen=True, kw_only=True)
class SrunPlan:
    """A step of the allocation that this process is in. As a text, it is what one would type."""

    command: tuple[str, ...]
    variables: Mapping[str, str] = field(repr=False)
    """Set on top of the user's environment."""
    environ: Mapping[str, str] = field(repr=False)
    """The user's environment; not shown."""
    hosts: tuple[str, ...]
    """Those of the allocation."""
    logs: Path
    network: str | None
    ports: range
    passes_on: Mapping[signal.Signals, signal.Signals] = field(repr=False)
    stop_notice: str = field(repr=False)

    def __str__(self) -> str:
        lines = [f"export {name}={shlex.quote(value)}" for name, value in shown(self.variables).items()]
        return "\n".join([*lines, shlex.join(shown_words(self.command))])


@dataclass(frozen=True, kw_only=True)
class SbatchPlan:
    """A batch job. As a text, it is the command and the script that it submits."""

    script: str
    """Holds no secrets: those reach the job through the environment, as Slurm hands it on."""
    path: Path
    """Where the script is written to."""
    log: str
    """What the job prints; %j is its number."""
    environ: Mapping[str, str] = field(repr=False)

    @property
    def command(self) -> tuple[str, ...]:
        """What submits the script."""
        return ("sbatch", "--parsable", str(self.path))

    def __str__(self) -> str:
        return f"# {shlex.join(self.command)}\n{self.script}"


def run_with_slurm(
    job: Job, *, num_hosts: int | None, dry_run: bool, environ: Mapping[str, str], log_dir: Path | None = None
) -> int:
    """Start a job's ranks by Slurm: within an allocation wait for them, elsewhere submit a batch job.

    Args:
        job: What to run.
        num_hosts: On how many hosts; None for all of the allocation.
        dry_run: Print what would be run, and do nothing.
        environ: The user's environment.
        log_dir: Where what ranks say is kept; None for the output folder's, or the current one's.

    Returns:
        The exit status; see `supervised.run_program`. Of a batch job, 0 when it has been submitted.

    Raises:
        ConfigError: There is no Slurm here, or the allocation has fewer hosts.
        LaunchError: Slurm refuses, or ended without a rank that failed.
    """
    is_inside = "SLURM_JOB_ID" in environ
    program = "srun" if is_inside else "sbatch"
    if shutil.which(program, path=environ.get("PATH")) is None:
        raise ConfigError(
            f"--launcher slurm: there is no {program} on this host; run this on a host of the Slurm cluster (its "
            "packages: slurm-client; slurm-wlm and munge for a whole cluster)"
        )
    plan = (
        plan_srun(job, num_hosts=num_hosts, environ=environ, log_dir=log_dir)
        if is_inside
        else plan_sbatch(job, num_hosts=num_hosts, environ=environ, log_dir=log_dir)
    )
    if dry_run:
        print(plan)
        return 0
    return run_srun(plan) if isinstance(plan, SrunPlan) else run_sbatch(plan)


# ---- within an allocation


def plan_srun(
    job: Job,
    *,
    num_hosts: int | None,
    environ: Mapping[str, str],
    ranks: int | None = None,
    log_dir: Path | None = None,
) -> SrunPlan:
    """Plan a step.

    Args:
        job: What to run.
        num_hosts: On how many hosts; None for all of the allocation.
        environ: The user's environment, with Slurm's variables of the allocation.
        ranks: Of each host, where the job does not say; None for what the allocation says, or this host's plan.
        log_dir: Where what ranks say is kept.

    Raises:
        ConfigError: The allocation has fewer hosts.
    """
    hosts = host_names(environ.get("SLURM_JOB_NODELIST", ""))
    count = len(hosts) if num_hosts is None else num_hosts
    if count > len(hosts):
        raise ConfigError(
            f"--num_hosts {count}: the allocation, Slurm job {environ['SLURM_JOB_ID']}, has {len(hosts)} "
            f"({', '.join(hosts)}); ask for a larger one, or leave --num_hosts out"
        )
    told = environ.get("SLURM_NTASKS_PER_NODE", "")
    each = job.processes or (int(told) if told.isdecimal() else None) or ranks or ranks_here()
    return SrunPlan(
        command=(*_srun(str(count), str(count * each), str(each)), sys.executable, *AS_RANK, *job.command),
        variables={**job.environ, **told_ranks(job)},
        environ=dict(environ),
        hosts=tuple(hosts),
        logs=log_dir or logs_folder(job),
        network=job.network,
        ports=split_ports(job.port_range)[1],
        # SIGTERM makes srun kill its ranks; SIGUSR1 it passes on
        passes_on=dict.fromkeys(
            (signal.SIGINT, signal.SIGTERM, signal.SIGHUP), signal.SIGUSR1 if stops_on_usr1(job) else signal.SIGTERM
        ),
        stop_notice=stop_notice(job.command),
    )


def run_srun(plan: SrunPlan) -> int:
    """Run a step and wait for it.

    Returns:
        The exit status; see `supervised.run_program`.

    Raises:
        LaunchError: srun cannot be started, or ended without a rank that failed.
    """
    mine = own_addresses()
    others = [a for name in plan.hosts for a in addresses_of(name) if not is_loopback(a) and a not in mine]
    with RankOutputs(own_address(others, plan.network), plan.ports, plan.logs, {}) as outputs:
        program = Program(
            command=plan.command,
            environ={**plan.environ, **plan.variables},
            log=plan.logs / "srun.log",
            pass_on=plan.passes_on,
            force=(signal.SIGTERM,),
            failures=srun_failures,
            stop_notice=plan.stop_notice,
        )
        return run_program(program, outputs)


def srun_failures(said: str, outputs: RankOutputs) -> list[Failure]:
    """From lines such as `srun: error: node2: task 1: Exited with exit code 3`, in the order of time."""
    failures = []
    for match in re.finditer(r"^srun: error: \S+: tasks? (\d+)[\d,-]*: (.+)$", said, re.MULTILINE):
        status = _status(match[2])
        if status is not None:
            failures.append(Failure(rank=int(match[1]), status=status))
    return failures


def _status(words: str) -> int | None:
    """Exit status from how srun puts it: an exit code, or the C library's name of a signal."""
    if exited := re.match(r"Exited with exit code (\d+)", words):
        return int(exited[1])
    if words.startswith("Out Of Memory"):
        return 128 + signal.SIGKILL
    named = (number for number in signal.Signals if words.startswith(signal.strsignal(number) or "?"))
    return next((128 + number for number in named), None)


def _srun(num_hosts: str, num_ranks: str, ranks: str) -> list[str]:
    return [
        "srun", f"--nodes={num_hosts}", f"--ntasks={num_ranks}", f"--ntasks-per-node={ranks}", *_RANK_OPTIONS
    ]  # fmt: skip


# ---- outside


def plan_sbatch(
    job: Job, *, num_hosts: int | None, environ: Mapping[str, str], log_dir: Path | None = None
) -> SbatchPlan:
    """Plan a batch job.

    Args:
        job: What to run.
        num_hosts: On how many hosts.
        environ: The user's environment.
        log_dir: Where the script and the log go.

    Raises:
        ConfigError: The number of hosts is not told.
    """
    if num_hosts is None:
        raise ConfigError("--num_hosts is missing: on how many hosts of the Slurm cluster to train, as --num_hosts 4")
    logs = log_dir or logs_folder(job)
    log = str(logs / "slurm-%j.log")
    settings = {"job-name": "fleetune", "nodes": num_hosts, "ntasks-per-node": job.processes, "output": _as_option(log)}
    options = [f"--{name}={value}" for name, value in settings.items() if value is not None] + ["--exclusive"]
    variables = {**job.environ, **told_ranks(job)}
    lines = [
        "#!/bin/bash",
        "# Written by fleetune; submit it again with: sbatch " + shlex.quote(str(logs / _SCRIPT)),
        *(f"#SBATCH {option}" for option in options),
        "",
        *(f"export {name}={shlex.quote(value)}" for name, value in variables.items() if not holds_secret(name)),
        f"ranks={job.processes or _ranks_by_this_module()}",
        " ".join([
            "exec", *_srun(str(num_hosts), f"$(({num_hosts} * ranks))", '"$ranks"'), "\\\n ",
            shlex.join([sys.executable, *AS_RANK, *job.command]),
        ]),
    ]  # fmt: skip
    return SbatchPlan(script="\n".join(lines) + "\n", path=logs / _SCRIPT, log=log, environ={**environ, **job.environ})


def run_sbatch(plan: SbatchPlan) -> int:
    """Write the script, submit it, and say how to follow it.

    Returns:
        0.

    Raises:
        LaunchError: sbatch refuses it.
    """
    plan.path.parent.mkdir(parents=True, exist_ok=True)
    plan.path.write_text(plan.script)
    answer = subprocess.run(plan.command, env=dict(plan.environ), capture_output=True, text=True)
    if answer.returncode != 0:
        raise LaunchError(
            f"{shlex.join(plan.command)} failed with exit status {answer.returncode}: {answer.stderr.strip()}"
        )
    number = answer.stdout.strip().partition(";")[0]  # the cluster's name may follow
    log = plan.log.replace("%j", number)
    print(f"submitted as Slurm job {number}; its script is {plan.path}\n"
          f"  log      tail -F {shlex.quote(log)}\n"
          f"  state    squeue --job {number}\n"
          f"  cancel   scancel {number}  (a training run saves first)", flush=True)  # fmt: skip
    return 0


def ranks_here() -> int:
    """Ranks that this host has by its own plan; a batch script asks for it on the first host of the job."""
    return len(plan_this_host(os.environ, processes=None, threads=None).parts)


def _as_option(text: str) -> str:
    """As sbatch reads it in a script: quoted where it holds spaces."""
    return f'"{text}"' if " " in text else text


def _ranks_by_this_module() -> str:
    return f"$({shlex.join([sys.executable, '-m', 'fleetune.cluster.launchers.slurm'])}) || exit 1"


if __name__ == "__main__":
    print(ranks_here())
