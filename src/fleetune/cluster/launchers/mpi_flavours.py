"""What the implementations of mpirun are told, each in its own words, and how they behave: a table, `FLAVOURS`."""

from __future__ import annotations

import os
import re
import shlex
import signal
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

from fleetune.cluster.job import Job
from fleetune.cluster.launchers.supervised import Failure
from fleetune.cluster.meeting import Meeting, split_ports
from fleetune.cluster.outputs import RankOutputs
from fleetune.cluster.remote import OPTIONS, SSH


@dataclass(frozen=True, kw_only=True)
class Flavour:
    """One implementation of mpirun: how it is told what every one of them is told, and how it behaves."""

    name: str
    told_by: str
    """What `mpirun --version` holds."""
    host_line: str
    """A line of the host file."""
    arguments: Callable[[Meeting, Job], list[str]]
    """Options, but for the host file, the number of ranks and the variables."""
    hostfile_option: str
    names: Callable[[Sequence[str]], list[str]]
    """Options that forward variables by their names."""
    variables: Callable[[Meeting, Job], dict[str, str]]
    """Its own settings that have no option, or whose option shows too much."""
    as_root: Mapping[str, str]
    """Variables without which it refuses to serve root."""
    stop: signal.Signals | None
    """What it passes on to ranks and does not follow itself; None where it passes on whatever asks it to stop."""
    force: tuple[signal.Signals, ...]
    """What makes it end its ranks at once."""
    ends_all: bool
    """Whether it ends all ranks when one has failed."""
    failures: Callable[[str, RankOutputs], list[Failure]]


def flavour_of(version: str) -> Flavour | None:
    """The flavour from what `mpirun --version` says."""
    return next((flavour for flavour in FLAVOURS if re.search(flavour.told_by, version)), None)


# ---- their words


def _ssh_options(job: Job) -> list[str]:
    return [option.format(timeout_s=min(10, job.timeout_s)) for option in OPTIONS]


def _openmpi_4(meeting: Meeting, job: Job) -> list[str]:
    settings = {
        "plm": "rsh",  # ssh, also within a Slurm allocation
        "plm_rsh_agent": shlex.join([SSH, *_ssh_options(job)]),
        "plm_rsh_no_tree_spawn": "1",  # only this host needs to reach the others by ssh
        "oob_tcp_if_include": meeting.network,
        "btl_tcp_if_include": meeting.network,
        "oob_tcp_dynamic_ipv4_ports": split_ports(job.port_range)[0],
    }
    options = [word for name, value in settings.items() if value for word in ("--mca", name, value)]
    return ["--map-by", "slot", "--bind-to", "none", "-wdir", "/", *options]


def _openmpi_5(meeting: Meeting, job: Job) -> list[str]:
    settings = {
        "plm": "ssh",
        "plm_ssh_agent": shlex.join([SSH, *_ssh_options(job)]),
        "plm_ssh_no_tree_spawn": "1",
        "prte_if_include": meeting.network,
        "oob_tcp_dynamic_ipv4_ports": split_ports(job.port_range)[0],
    }
    options = [word for name, value in settings.items() if value for word in ("--prtemca", name, value)]
    options += ["--mca", "btl_tcp_if_include", meeting.network] if meeting.network else []
    return ["--map-by", "slot", "--bind-to", "none", "--wdir", "/", *options]


def _mpich(meeting: Meeting, job: Job) -> list[str]:
    return [
        "-launcher",
        "ssh",
        "-rmk",
        "user",
        "-bind-to",
        "none",
        "-wdir",
        "/",
        *_iface(meeting),
        "-print-all-exitcodes",
    ]


def _intel(meeting: Meeting, job: Job) -> list[str]:
    return ["-launcher", "ssh", "-wdir", "/", *_iface(meeting), "-print-all-exitcodes"]


def _iface(meeting: Meeting) -> list[str]:
    return [] if meeting.interface is None or meeting.network is None else ["-iface", meeting.interface]


def _mpich_variables(meeting: Meeting, job: Job) -> dict[str, str]:
    return {"HYDRA_LAUNCHER_EXTRA_ARGS": shlex.join(_ssh_options(job)), **_hydra_ports("MPIEXEC_PORT_RANGE", job)}


def _intel_variables(meeting: Meeting, job: Job) -> dict[str, str]:
    return {
        "I_MPI_HYDRA_BOOTSTRAP_EXEC_EXTRA_ARGS": shlex.join(_ssh_options(job)),
        "I_MPI_PIN": "off",
        **_hydra_ports("I_MPI_PORT_RANGE", job),
    }


def _hydra_ports(name: str, job: Job) -> dict[str, str]:
    ports, _ = split_ports(job.port_range)
    return {} if ports is None else {name: ports.replace("-", ":")}


def _openmpi_failures(said: str, outputs: RankOutputs) -> list[Failure]:
    """It names the first rank that failed."""
    found = [(m.start(), int(m[1]), int(m[2])) for m in re.finditer(
        r"Process name:\s*\[.*,(\d+)\]\s*Exit code:\s*(\d+)", said)]  # fmt: skip
    found += [(m.start(), int(m[1]), 128 + int(m[2])) for m in re.finditer(
        r"process rank (\d+) with PID \d+ on node\s+\S+\s+exited\s+on\s+signal\s+(\d+)", said)]  # fmt: skip
    return [Failure(rank=rank, status=status) for _, rank, status in sorted(found)]


def _hydra_failures(said: str, outputs: RankOutputs) -> list[Failure]:
    """It tells of the process whose signal ended the run, and else the wait status of every rank, in their order."""
    failures = []
    for match in _TERMINATED.finditer(said):
        told, pid, host, wait_status = match[1], int(match[2]), match[3], int(match[4])
        named = (output.rank for output in outputs.ranks.values() if (output.pid, output.hostname) == (pid, host))
        rank = int(told) if told else next(named, None)
        if rank is not None:
            failures.append(Failure(rank=rank, status=_exit_status(wait_status)))
    _, _, listed = said.rpartition("Exit codes:")
    statuses = [int(text) for line in _EXIT_CODES.findall(listed) for text in line.split(",")]
    failed = {rank: Failure(rank=rank, status=_exit_status(status)) for rank, status in enumerate(statuses) if status}
    return [*failures, *(failed[rank] for rank in dict.fromkeys([*outputs.ended, *failed]) if rank in failed)]


_TERMINATED = re.compile(
    r"(?:RANK (\d+) )?PID (\d+) RUNNING AT (\S+)\s*=\s*(?:EXIT CODE|EXIT STATUS|KILLED BY SIGNAL): (\d+)"
)
_EXIT_CODES = re.compile(r"\[[^\]]*\] (\d+(?:,\d+)*)")


def _exit_status(wait_status: int) -> int:
    code = os.waitstatus_to_exitcode(wait_status)
    return 128 - code if code < 0 else code


def _each_by_x(names: Sequence[str]) -> list[str]:
    return [word for name in names for word in ("-x", name)]


def _as_genvlist(names: Sequence[str]) -> list[str]:
    return ["-genvlist", ",".join(names)]


def _nothing(meeting: Meeting, job: Job) -> dict[str, str]:
    return {}


def _openmpi(name: str, told_by: str, arguments: Callable[[Meeting, Job], list[str]]) -> Flavour:
    return Flavour(
        name=name,
        told_by=told_by,
        host_line="{host} slots={count}",
        arguments=arguments,
        hostfile_option="--hostfile",
        names=_each_by_x,
        variables=_nothing,
        as_root={"OMPI_ALLOW_RUN_AS_ROOT": "1", "OMPI_ALLOW_RUN_AS_ROOT_CONFIRM": "1"},
        stop=signal.SIGUSR1,  # SIGTERM would end the ranks a second later
        force=(signal.SIGTERM,),
        ends_all=True,
        failures=_openmpi_failures,
    )


def _hydra(
    name: str,
    told_by: str,
    arguments: Callable[[Meeting, Job], list[str]],
    variables: Callable[[Meeting, Job], dict[str, str]],
) -> Flavour:
    return Flavour(
        name=name,
        told_by=told_by,
        host_line="{host}:{count}",
        arguments=arguments,
        hostfile_option="-machinefile",
        names=_as_genvlist,
        variables=variables,
        as_root={},
        stop=None,
        force=(signal.SIGINT, signal.SIGINT),  # a second Ctrl-C means to end all at once
        ends_all=False,
        failures=_hydra_failures,
    )


FLAVOURS = (
    _hydra("Intel MPI", r"Intel\(R\) MPI Library", _intel, _intel_variables),
    _openmpi("Open MPI 5", r"\(Open MPI\) [5-9]|prterun", _openmpi_5),
    _openmpi("Open MPI 4", r"Open ?MPI|OpenRTE", _openmpi_4),
    _hydra("MPICH", r"HYDRA build details", _mpich, _mpich_variables),
)
