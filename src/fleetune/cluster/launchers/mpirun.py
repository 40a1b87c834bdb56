"""Start the ranks by the user's own mpirun: Open MPI 4 and 5, MPICH, Intel MPI, told apart by themselves.

    plan_mpirun(job, hosts, flavour, ...) -> MpirunPlan     host file, command line, variables; printable
    run_mpirun(plan)                      -> exit status    runs it
    run_with_mpirun(job, hosts, ...)      -> exit status    both, or with dry_run the print alone

mpirun brings processes to hosts, and no more: ranks meet through torch.distributed, and pin themselves, so binding is
turned off. Variables are named on its command line, their values travel inside.
"""

from __future__ import annotations

import os
import shlex
import shutil
import signal
import subprocess
import sys
import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from fleetune.cluster.hosts import Host
from fleetune.cluster.job import AS_RANK, Job, logs_folder, shown, shown_words, stop_notice, stops_on_usr1, told_ranks
from fleetune.cluster.launchers.mpi_flavours import FLAVOURS, Flavour, flavour_of
from fleetune.cluster.launchers.supervised import Program, run_program
from fleetune.cluster.meeting import Meeting, meet, split_ports
from fleetune.cluster.outputs import OUTPUT_VARIABLE, RankOutputs
from fleetune.cluster.rank import RANKS_VARIABLE
from fleetune.errors import ConfigError
from fleetune.hardware.pinning import plan_this_host

HOSTFILE = "HOSTFILE"
"""Stands for the host file's path in a plan; the file is temporary."""


@dataclass(frozen=True, kw_only=True)
class MpirunPlan:
    """How mpirun is to be run. As a text, it is what one would type, with what the files hold."""

    flavour: Flavour
    command: tuple[str, ...]
    """Has `HOSTFILE` in place of the host file's path."""
    hostfile: str
    variables: Mapping[str, str] = field(repr=False)
    """Set on top of the user's environment; those of the job reach the ranks."""
    environ: Mapping[str, str] = field(repr=False)
    """The user's environment; not shown."""
    rank_hosts: tuple[str, ...]
    """The host of every rank."""
    meeting: Meeting
    logs: Path
    ports: range
    """Those that the ranks' output may come to."""
    passes_on: Mapping[signal.Signals, signal.Signals] = field(repr=False)
    stop_notice: str = field(repr=False)

    def __str__(self) -> str:
        lines = [f"# {self.flavour.name}; {HOSTFILE} is a temporary file:"]
        lines += [f"#   {line}" for line in self.hostfile.splitlines()]
        lines += [f"export {name}={shlex.quote(value)}" for name, value in shown(self.variables).items()]
        return "\n".join([*lines, shlex.join(shown_words(self.command))])


def run_with_mpirun(
    job: Job, hosts: Sequence[Host], *, dry_run: bool, environ: Mapping[str, str], log_dir: Path | None = None
) -> int:
    """Start a job's ranks by mpirun and wait for them.

    Args:
        job: What to run.
        hosts: Where; as `hosts.resolve` gives them.
        dry_run: Print what would be run, and do nothing.
        environ: The user's environment.
        log_dir: Where what ranks say is kept; None for the output folder's, or the current one's.

    Returns:
        The exit status; see `supervised.run_program`.

    Raises:
        ConfigError: There is no mpirun, or no way to the hosts.
        LaunchError: It cannot be run, or ended without a rank that failed.
    """
    program, flavour = find_mpirun(environ)
    counts = ranks_per_host(job, hosts, environ)
    plan = plan_mpirun(job, hosts, flavour, program=program, counts=counts, meeting=meet(job, hosts), environ=environ,
                       log_dir=log_dir)  # fmt: skip
    if dry_run:
        print(plan)
        return 0
    return run_mpirun(plan)


def plan_mpirun(
    job: Job,
    hosts: Sequence[Host],
    flavour: Flavour,
    *,
    program: str,
    counts: Sequence[int],
    meeting: Meeting,
    environ: Mapping[str, str],
    is_root: bool | None = None,
    log_dir: Path | None = None,
) -> MpirunPlan:
    """Plan how mpirun runs a job.

    Args:
        job: What to run.
        hosts: Where.
        flavour: Which implementation it is.
        program: Its path.
        counts: Ranks of each host.
        meeting: Where the ranks meet.
        environ: The user's environment.
        is_root: Whether the user is root, whom Open MPI refuses unless told otherwise; found out when not given.
        log_dir: Where what ranks say is kept.
    """
    to_ranks = {**job.environ, **_told_ranks(job, counts, meeting)}
    root = os.geteuid() == 0 if is_root is None else is_root
    lines = [
        flavour.host_line.format(host=host.name if host.is_here else host.target, count=count)
        for host, count in zip(hosts, counts, strict=True)
    ]
    command = [
        program, *flavour.arguments(meeting, job), flavour.hostfile_option, HOSTFILE, "-n", str(sum(counts)),
        *flavour.names([*to_ranks, OUTPUT_VARIABLE]), sys.executable, *AS_RANK, *job.command,
    ]  # fmt: skip
    stop = flavour.stop if stops_on_usr1(job) else None
    return MpirunPlan(
        flavour=flavour,
        command=tuple(command),
        hostfile="".join(f"{line}\n" for line in lines),
        # The flavour's own come last: MPICH's hydra loses the last variable of its environment on other hosts.
        variables={**(flavour.as_root if root else {}), **to_ranks, **flavour.variables(meeting, job)},
        environ=dict(environ),
        rank_hosts=tuple(host.name for host, count in zip(hosts, counts, strict=True) for _ in range(count)),
        meeting=meeting,
        logs=log_dir or logs_folder(job),
        ports=split_ports(job.port_range)[1],
        passes_on={
            signal.SIGINT: stop or signal.SIGINT,
            signal.SIGTERM: stop or signal.SIGTERM,
            signal.SIGHUP: stop or signal.SIGTERM,
        },
        stop_notice=stop_notice(job.command),
    )


def run_mpirun(plan: MpirunPlan) -> int:
    """Run a plan.

    Returns:
        The exit status; see `supervised.run_program`.

    Raises:
        LaunchError: mpirun cannot be started, or ended without a rank that failed.
    """
    with tempfile.TemporaryDirectory(prefix="fleetune-") as folder:
        hostfile = Path(folder) / "hosts"
        hostfile.write_text(plan.hostfile)
        names = dict(enumerate(plan.rank_hosts))
        with RankOutputs(
            plan.meeting.own_address, plan.ports, plan.logs, names, wants_status=not plan.flavour.ends_all
        ) as outputs:
            program = Program(
                command=tuple(str(hostfile) if word == HOSTFILE else word for word in plan.command),
                environ=_with_last(plan.environ, plan.variables),
                log=plan.logs / "mpirun.log",
                pass_on=plan.passes_on,
                force=plan.flavour.force,
                failures=plan.flavour.failures,
                stop_notice=plan.stop_notice,
            )
            return run_program(program, outputs)


# ---- what there is


def find_mpirun(environ: Mapping[str, str]) -> tuple[str, Flavour]:
    """The user's mpirun, and which one it is.

    Raises:
        ConfigError: There is none, or one that is not known.
    """
    path = shutil.which("mpirun", path=environ.get("PATH"))
    if path is None:
        raise ConfigError(
            "--launcher mpirun: there is no mpirun on this host; install one, on every host, with "
            "`apt-get install openmpi-bin` (or mpich; or `pip install impi-rt` for Intel's), or take --launcher ssh"
        )
    answer = subprocess.run([path, "--version"], capture_output=True, text=True, env=dict(environ), timeout=30)
    said = f"{answer.stdout}\n{answer.stderr}"
    flavour = flavour_of(said)
    if flavour is None:
        known = ", ".join(known.name for known in FLAVOURS)
        raise ConfigError(
            f"--launcher mpirun: {path} is none of {known}; `mpirun --version` says: {said.strip()[:300]}"
        )
    if flavour.name == "Intel MPI":  # mpirun is a shell script there, and keeps signals to itself
        path = shutil.which("mpiexec.hydra", path=f"{Path(path).parent}:{environ.get('PATH', '')}") or path
    # Hydra takes its daemons from where it seems to lie; Open MPI's name decides what it is.
    return path if flavour.as_root else os.path.realpath(path), flavour


def ranks_per_host(job: Job, hosts: Sequence[Host], environ: Mapping[str, str]) -> list[int]:
    """Ranks of each host: --processes, else the host file's slots, else what this host would have."""
    default = job.processes or len(plan_this_host(environ, processes=None, threads=job.threads).parts)
    return [job.processes or host.slots or default for host in hosts]


# ---- what ranks are told


def _with_last(environ: Mapping[str, str], variables: Mapping[str, str]) -> dict[str, str]:
    """All variables, those that are set on top at the end and in their order."""
    return {**{name: value for name, value in environ.items() if name not in variables}, **variables}


def _told_ranks(job: Job, counts: Sequence[int], meeting: Meeting) -> dict[str, str]:
    return {
        "MASTER_ADDR": meeting.main_address,
        "MASTER_PORT": str(meeting.main_port),
        RANKS_VARIABLE: ",".join(map(str, counts)),
        **told_ranks(job),
    }
