"""Whether this process is a rank, or the one that starts the ranks: here, or on several hosts."""

from __future__ import annotations

import os
import socket
from collections.abc import Callable, Sequence
from pathlib import Path

from fleetune.cluster.hosts import Host, parse_hosts, read_hostfile, resolve
from fleetune.cluster.job import Job, fleetune_job, through_as_rank
from fleetune.cluster.launchers.local import plan_local, run_local
from fleetune.cluster.launchers.mpirun import run_with_mpirun
from fleetune.cluster.launchers.ray_train import plan_ray, run_ray
from fleetune.cluster.launchers.slurm import run_with_slurm
from fleetune.cluster.launchers.ssh import plan_ssh, run_ssh, survey_hosts
from fleetune.cluster.outputs import LOG_FOLDER
from fleetune.cluster.rank import RankInfo, rank_variable, read_rank
from fleetune.config import RunConfig
from fleetune.errors import ConfigError
from fleetune.hardware.host_plan import HostPlan
from fleetune.hardware.pinning import plan_this_host


def start_ranks(
    words: Sequence[str], config: RunConfig, *, log_dir: Path = Path(LOG_FOLDER), dry_run: bool = False
) -> int | None:
    """Start the ranks of a command and wait for them, where the settings ask for several.

    Args:
        words: The command of fleetune, and its own arguments: the same for every rank.
        config: The settings: ranks get them, too.
        log_dir: Where what the ranks of several hosts say is kept.
        dry_run: Print what would be run, and touch nothing.

    Returns:
        Exit status of the ranks; None when this process itself is a rank, or the only one needed.

    Raises:
        ConfigError: Hosts cannot be used, or an outer launcher started another number of ranks than asked for.
        LaunchError: A host cannot take part.
    """
    info = read_rank(os.environ)
    if info is not None:
        check_processes(config.processes, info)
        return None
    check_hosts_asked(config)
    job = fleetune_job(words, config.to_dict(), os.environ, **job_settings(config))
    if wants_hosts(config):
        return start_on_hosts(job, config, log_dir=log_dir, dry_run=dry_run)
    if len(plan_ranks(None, processes=job.processes, threads=job.threads).parts) > 1:
        return start_here(job, dry_run=dry_run)
    if dry_run:
        print("this process is the only rank: nothing else would be started")
        return 0
    return None


def start_script(job: Job, config: RunConfig, *, log_dir: Path, dry_run: bool) -> int:
    """Start a user's script as ranks, and wait for them.

    Args:
        job: Of the script.
        config: Says where.
        log_dir: Where what the ranks of several hosts say is kept.
        dry_run: Print what would be run, and touch nothing.

    Returns:
        Exit status of the ranks.

    Raises:
        ConfigError: Hosts cannot be used.
        LaunchError: A host cannot take part.
    """
    check_hosts_asked(config)
    if not wants_hosts(config):
        return start_here(through_as_rank(job), dry_run=dry_run)
    if chosen_launcher(config) in ("ssh", "ray"):  # all ranks of the others go that way
        job = through_as_rank(job)
    return start_on_hosts(job, config, log_dir=log_dir, dry_run=dry_run)


def start_here(job: Job, *, dry_run: bool) -> int:
    """The ranks of a job on this machine."""
    plan = plan_ranks(None, processes=job.processes, threads=job.threads)
    local = plan_local(
        job.command,
        processes=len(plan.parts),
        threads=plan.parts[0].threads,
        environ={**os.environ, **job.environ},
    )
    if dry_run:
        print(local)
        return 0
    return run_local(local)


def start_on_hosts(job: Job, config: RunConfig, *, log_dir: Path, dry_run: bool) -> int:
    """The ranks of a job on several hosts, by the launcher that the settings name."""
    return LAUNCHERS[chosen_launcher(config)](job, config, log_dir, dry_run)


def _with_ssh(job: Job, config: RunConfig, log_dir: Path, dry_run: bool) -> int:
    plan = plan_ssh(job, hosts_of(config), log_dir)
    if dry_run:
        print(plan)
        return 0
    return run_ssh(plan)


def plan_hosts(config: RunConfig) -> dict[str, HostPlan]:
    """The plans of all hosts that the settings name, as the hosts themselves make them; starts no rank.

    Raises:
        ConfigError: Hosts cannot be used, or are not known before a scheduler has chosen them.
        LaunchError: A host cannot take part.
    """
    if chosen_launcher(config) not in ("ssh", "mpirun"):
        raise ConfigError(f"--launcher {config.launcher}: which hosts take part is known only once they are given")
    job = fleetune_job(["train"], config.to_dict(), os.environ, **job_settings(config))
    return survey_hosts(plan_ssh(job, hosts_of(config), Path(LOG_FOLDER)))


def _with_ray(job: Job, config: RunConfig, log_dir: Path, dry_run: bool) -> int:
    plan = plan_ray(job, config.num_hosts)
    if dry_run:
        print(plan)
        return 0
    return run_ray(plan)


def _with_mpirun(job: Job, config: RunConfig, log_dir: Path, dry_run: bool) -> int:
    return run_with_mpirun(job, hosts_of(config), dry_run=dry_run, environ=os.environ, log_dir=job.cwd / log_dir)


def _with_slurm(job: Job, config: RunConfig, log_dir: Path, dry_run: bool) -> int:
    return run_with_slurm(
        job, num_hosts=config.num_hosts, dry_run=dry_run, environ=os.environ, log_dir=job.cwd / log_dir
    )


Launcher = Callable[[Job, RunConfig, Path, bool], int]
"""(job, settings, folder for logs, whether only to print) -> exit status."""
LAUNCHERS: dict[str, Launcher] = {"ssh": _with_ssh, "mpirun": _with_mpirun, "slurm": _with_slurm, "ray": _with_ray}


# ---- what the settings ask for


def wants_hosts(config: RunConfig) -> bool:
    """Whether the settings ask for other hosts than this one."""
    return config.hosts is not None or config.hostfile is not None or config.launcher != "auto"


def check_hosts_asked(config: RunConfig) -> None:
    """Refuse a number of hosts with nothing that would start ranks on them, which would train on this one alone.

    Raises:
        ConfigError: It is asked for.
    """
    if config.num_hosts is not None and config.num_hosts > 1 and not wants_hosts(config):
        raise ConfigError(
            f"--num_hosts {config.num_hosts}: nothing starts ranks on other hosts; give --hosts, --hostfile or "
            "--launcher"
        )


def starts_elsewhere(config: RunConfig) -> bool:
    """Whether rank 0, which has model and data, is on another host than this one."""
    if not wants_hosts(config) or chosen_launcher(config) not in ("ssh", "mpirun"):
        return False
    return not hosts_of(config)[0].is_here


def chosen_launcher(config: RunConfig) -> str:
    """What starts the ranks.

    Raises:
        ConfigError: It needs hosts, and none are named.
    """
    launcher = "ssh" if config.launcher == "auto" else config.launcher
    has_hosts = config.hosts is not None or config.hostfile is not None
    if launcher in ("ssh", "mpirun") and not has_hosts:
        raise ConfigError(f"--launcher {launcher}: on which hosts? Give --hosts or --hostfile")
    if launcher in ("slurm", "ray") and has_hosts:
        raise ConfigError(f"--launcher {launcher} chooses the hosts itself: give --num_hosts in place of their names")
    return launcher


def hosts_of(config: RunConfig) -> tuple[Host, ...]:
    """The hosts that the settings name, this machine found among them; the first has rank 0.

    Raises:
        ConfigError: They name none, one twice, or names that mean nothing.
    """
    return resolve(named_hosts(config))


def named_hosts(config: RunConfig) -> tuple[Host, ...]:
    """The same, before their names are looked up.

    Raises:
        ConfigError: They name none, or one twice.
    """
    if config.hosts is not None and config.hostfile is not None:
        raise ConfigError("--hosts and --hostfile: give one")
    if config.hosts is not None:
        hosts = parse_hosts(config.hosts)
    else:
        assert config.hostfile is not None
        hosts = read_hostfile(config.hostfile)
    if config.num_hosts is not None and config.num_hosts != len(hosts):
        raise ConfigError(f"--num_hosts {config.num_hosts}: {len(hosts)} hosts are named")
    return hosts


def job_settings(config: RunConfig) -> dict[str, object]:
    """Those settings that are fields of a `Job`."""
    names = ("processes", "threads", "network", "port_range", "timeout_s")
    return {name: getattr(config, name) for name in names}


# ---- this host's plan


def plan_ranks(info: RankInfo | None, *, processes: int | None, threads: int | None) -> HostPlan:
    """The plan of this host, for the ranks that an outer launcher started where it did.

    Args:
        info: Which rank this process is, if it is one.
        processes: Ranks of each host that the settings ask for.
        threads: Threads of each that the settings ask for.

    Raises:
        ConfigError: An outer launcher started another number of ranks than the settings ask for.
    """
    if info is None:
        return plan_this_host(os.environ, processes=processes, threads=threads)
    check_processes(processes, info)
    return plan_this_host(
        os.environ,
        processes=info.local_world_size,
        threads=threads,
        local_rank=info.local_rank,
        rank_variable=rank_variable(os.environ),
    )


def check_processes(processes: int | None, info: RankInfo) -> None:
    """Refuse settings that ask for another number of ranks on this host than an outer launcher started.

    Raises:
        ConfigError: They do.
    """
    if processes is not None and processes != info.local_world_size and not info.is_ours:
        here = "" if info.local_world_size == info.world_size else f" on {socket.gethostname()}"
        raise ConfigError(
            f"--processes {processes}: {info.launcher} started {info.local_world_size} ranks{here}; leave it out"
        )


def silence_connections() -> None:
    """Keep torch from printing what it thinks of connections, unless the user has said what it should print.

    It warns, with a trace of C++ calls, where a peer is gone, and where an address has no name; ranks say themselves
    what matters of it. Counts before torch is loaded.
    """
    os.environ.setdefault("TORCH_CPP_LOG_LEVEL", "ERROR")
