"""Ranks on several hosts, each host's started by an agent that the user's ssh brings up.

    plan_ssh(job, hosts, log_dir) -> SshPlan    which command starts what where, printable; touches nothing
    run_ssh(plan)                 -> status     runs it

Nothing of a run is decided on trust: hosts report who they are and which versions they have, the first says at which of
its addresses and ports the ranks meet, and each other host tries to connect there before any rank is started.
"""

from __future__ import annotations

import shlex
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from fleetune.cluster.hosts import Host
from fleetune.cluster.job import Job, as_words
from fleetune.cluster.launchers.connection import start_command
from fleetune.cluster.launchers.head import Head
from fleetune.cluster.launchers.local import say
from fleetune.cluster.launchers.rank_logs import RankLogs
from fleetune.cluster.network import address_towards, parse_network, parse_ports
from fleetune.cluster.rank import RankInfo, as_environment, is_loopback
from fleetune.cluster.remote import ssh_settings
from fleetune.errors import LaunchError
from fleetune.hardware.host_plan import HostPlan

_MUST_AGREE = ("fleetune", "torch", "transformers")


@dataclass(frozen=True, kw_only=True)
class SshPlan:
    """A job on hosts. As a text, what is run where."""

    job: Job
    hosts: tuple[Host, ...]
    """The first has rank 0."""
    log_dir: Path
    """Where what each rank says is kept, on this machine."""

    def __str__(self) -> str:
        lines = [
            f"{host.name}{' (this machine)' if host.is_here else ''}:\n" + self._of_host(host) for host in self.hosts
        ]
        settings = [f"  {name}={shlex.quote(value)}" for name, value in self.job.shown_environ().items()]
        return "\n".join([*lines, "variables of all ranks, sent over the connection:", *(settings or ["  none"]),
                          f"logs: {self.log_dir}/<host>.<rank>.log"])  # fmt: skip

    def _of_host(self, host: Host) -> str:
        count = self.job.processes or host.slots
        ranks = f"{count} rank{'s' if count != 1 else ''}" if count else "one rank for each of its NUMA nodes"
        named = {"RANK": "...", "WORLD_SIZE": "...", "MASTER_ADDR": self._address(), "MASTER_PORT": self._port(),
                 "GLOO_SOCKET_IFNAME": f"interface in {self.job.network or 'the route there'}"}  # fmt: skip
        if self.job.threads is not None:
            named["OMP_NUM_THREADS"] = str(self.job.threads)
        return (f"  run here:  {shlex.join(start_command(host, self.job.timeout_s))}\n"
                f"  run there: {ranks} in {self.job.cwd}: {as_words(named, self.job.command)}")  # fmt: skip

    def _address(self) -> str:
        """Where this machine would meet the others; of another first host only the host itself can say."""
        others = names_of(self.hosts[1:])
        if not self.hosts[0].is_here or not others:
            return f"address of {self.hosts[0].name} towards {others[0]}" if others else "127.0.0.1"
        return address_towards(others[0]) or f"address towards {others[0]}"

    def _port(self) -> str:
        return f"free port of {self.job.port_range or '20000-29999'}"


def plan_ssh(job: Job, hosts: Sequence[Host], log_dir: Path) -> SshPlan:
    """Plan a job on hosts.

    Args:
        job: What ranks execute.
        hosts: As `hosts.resolve` gives them; the first has rank 0.
        log_dir: Folder for what the ranks say.

    Raises:
        ConfigError: The network or the ports of the job are none.
    """
    if job.network is not None:
        parse_network(job.network)
    if job.port_range is not None:
        parse_ports(job.port_range)
    return SshPlan(job=job, hosts=tuple(hosts), log_dir=log_dir)


def survey_hosts(plan: SshPlan) -> dict[str, HostPlan]:
    """Ask all hosts how their ranks would share them; starts no rank.

    Returns:
        Name of a host -> its plan, in the order of ranks.

    Raises:
        LaunchError: A host cannot take part.
    """
    with Head(plan.job, plan.hosts, RankLogs(plan.log_dir)) as head:
        surveys = head.survey(names_of(plan.hosts[1:]))
        check_alike(surveys)
        return {name: HostPlan.from_dict(survey["plan"]) for name, survey in surveys.items()}


def names_of(hosts: Sequence[Host]) -> list[str]:
    """What the user's ssh would connect to, for each host."""
    return [ssh_settings(host.target).hostname for host in hosts]


def run_ssh(plan: SshPlan) -> int:
    """Start the ranks on all hosts, wait for them, and say which one failed first, where and why.

    The first SIGINT, SIGTERM or SIGHUP asks all ranks to stop, which may save; a second one ends them. When a rank or a
    host fails, all others are ended. Agents whose connection ends or falls silent end their ranks themselves.

    Returns:
        The status of the first rank that failed; else 128 + signal number when stopped; else 0.

    Raises:
        LaunchError: A host cannot take part; names each, with reason and remedy.
    """
    with Head(plan.job, plan.hosts, RankLogs(plan.log_dir)) as head:
        surveys = head.survey(names_of(plan.hosts[1:]))
        check_alike(surveys)
        address, port, interfaces = head.meet(surveys[plan.hosts[0].name]["address"])
        ranks = rank_variables(surveys, interfaces, address, port)
        say(summary(surveys, ranks, address, port))
        if not plan.hosts[0].is_here:
            say(f"rank 0 is on {plan.hosts[0].name}: model, data and output are that host's, in its {plan.job.cwd}")
        head.start(ranks)
        return head.watch()


# ---- what follows from the hosts' answers


def check_alike(surveys: Mapping[str, Mapping[str, Any]]) -> None:
    """Refuse hosts whose versions are not those of the first.

    Raises:
        LaunchError: Names each host and difference.
    """
    first, *others = surveys
    expected = surveys[first]["versions"]
    problems = []
    for name in others:
        found = surveys[name]["versions"]
        wrong = [key for key in _MUST_AGREE if found.get(key) != expected.get(key)]
        if found["python"].split(".")[:2] != expected["python"].split(".")[:2]:
            wrong.append("python")
        problems += [f"host {name}: {key} {found.get(key)}, but {first} has {expected.get(key)}" for key in wrong]
    if problems:
        names = ",".join(dict.fromkeys(problem.split(":")[0].removeprefix("host ") for problem in problems))
        raise LaunchError("\n".join([*problems, f"`fleetune setup --hosts {names}` puts this environment there"]))


def rank_variables(
    surveys: Mapping[str, Mapping[str, Any]], interfaces: Mapping[str, str | None], address: str, port: int
) -> dict[str, list[dict[str, str]]]:
    """The variables of each rank of each host, beside those that all share.

    Args:
        surveys: Host -> what it said of itself; in the order of ranks.
        interfaces: Host -> interface that leads to the place where ranks meet.
        address: Where rank 0 listens.
        port: TCP port there.
    """
    threads = {name: [part["threads"] for part in survey["plan"]["parts"]] for name, survey in surveys.items()}
    world_size, first_rank = sum(map(len, threads.values())), 0
    variables: dict[str, list[dict[str, str]]] = {}
    for index, name in enumerate(surveys):
        own = {
            "FLEETUNE_LAUNCHER": "ssh",
            "GROUP_RANK": str(index),
            "GROUP_WORLD_SIZE": str(len(surveys)),
            "PYTHONUNBUFFERED": "1",
        }
        if (interface := interfaces[name]) is not None:
            own["GLOO_SOCKET_IFNAME"] = interface
        infos = [
            RankInfo(rank=first_rank + local, world_size=world_size, local_rank=local,
                     local_world_size=len(threads[name]), launcher="ssh", main_address=address, main_port=port)
            for local in range(len(threads[name]))
        ]  # fmt: skip
        variables[name] = [
            as_environment(info) | own | {"OMP_NUM_THREADS": str(threads[name][info.local_rank])} for info in infos
        ]
        first_rank += len(infos)
    return variables


def summary(
    surveys: Mapping[str, Mapping[str, Any]], ranks: Mapping[str, Sequence[Mapping[str, str]]], address: str, port: int
) -> str:
    """One line: who takes part, with which ranks, and where they meet."""
    parts = [f"{name} ({_numbers([int(variables['RANK']) for variables in of])})" for name, of in ranks.items()]
    count = sum(map(len, ranks.values()))
    meeting = "" if is_loopback(address) else f"; meeting at {address} port {port}"
    return f"{len(surveys)} hosts, {count} ranks: {', '.join(parts)}{meeting}"


def _numbers(numbers: Sequence[int]) -> str:
    return str(numbers[0]) if len(numbers) == 1 else f"{numbers[0]}-{numbers[-1]}"
