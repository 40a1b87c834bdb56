"""Ranks on a running Ray cluster, placed and watched by Ray Train's TorchTrainer.

    plan_ray(job, num_hosts) -> RayPlan     what is asked of Ray, printable; touches nothing
    run_ray(plan)            -> status      runs it

Ray's workers are long-lived processes that have threads and libraries of their own. A rank is therefore a process
beside its worker: it takes its cores before any thread pool starts, as under every other launcher, and ends with the
worker.
"""

from __future__ import annotations

import json
import os
import shlex
import signal
import subprocess
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from fleetune.cluster.job import Job
from fleetune.cluster.launchers.processes import end_with_parent
from fleetune.cluster.network import DEFAULT_PORTS, free_port, parse_ports
from fleetune.errors import ConfigError, LaunchError

_MESSAGE_BYTES = 256
INSTALL = "pip install 'fleetune[ray]'"


@dataclass(frozen=True, kw_only=True)
class RayPlan:
    """A job on a Ray cluster. As a text, what Ray is asked for."""

    job: Job
    num_hosts: int
    processes: int
    """Ranks of each host."""

    @property
    def num_workers(self) -> int:
        """Ranks on all hosts."""
        return self.num_hosts * self.processes

    @property
    def placement(self) -> str:
        """How Ray is to spread the workers: one host each where that is what is meant."""
        return "STRICT_SPREAD" if self.processes == 1 else "SPREAD"

    def resources(self) -> dict[str, float]:
        """What Ray promises each worker."""
        return {"CPU": self.job.threads or 1}

    def __str__(self) -> str:
        variables = [f"  {name}={shlex.quote(value)}" for name, value in self.job.shown_environ().items()]
        return "\n".join([
            f"on the Ray cluster at {os.environ.get('RAY_ADDRESS', 'auto')}:",
            f"  TorchTrainer with {self.num_workers} workers of {self.resources()}, placed {self.placement}",
            f"  beside each: {shlex.join(self.job.command)}",
            "variables of all ranks:",
            *(variables or ["  none"]),
        ])  # fmt: skip


def plan_ray(job: Job, num_hosts: int | None) -> RayPlan:
    """Plan a job on the Ray cluster that RAY_ADDRESS, or this host's own Ray, names.

    Raises:
        ConfigError: The number of hosts is not told.
    """
    if num_hosts is None:
        raise ConfigError("--launcher ray: on how many hosts? Give --num_hosts")
    return RayPlan(job=job, num_hosts=num_hosts, processes=job.processes or 1)


def run_ray(plan: RayPlan) -> int:
    """Let Ray start the ranks, and wait for them.

    Returns:
        0, or 1 when a rank failed; Ray prints which.

    Raises:
        ConfigError: Ray is not installed.
        LaunchError: There is no cluster, or it is too small.
    """
    try:
        import ray
        from ray.train import RunConfig, ScalingConfig
        from ray.train.torch import TorchConfig, TorchTrainer
    except ImportError as error:
        raise ConfigError(f"--launcher ray: {error}; {INSTALL}") from None
    try:
        ray.init(address=os.environ.get("RAY_ADDRESS", "auto"), log_to_driver=True)
    except (ConnectionError, RuntimeError) as error:
        raise LaunchError(f"no Ray cluster to join: {error}; `ray start --head` starts one") from None
    try:
        check_size(plan, ray.nodes())
        trainer = TorchTrainer(
            be_worker,
            train_loop_config=worker_settings(plan),
            torch_config=TorchConfig(backend="gloo", timeout_s=plan.job.timeout_s),
            scaling_config=ScalingConfig(
                num_workers=plan.num_workers,
                resources_per_worker=plan.resources(),
                placement_strategy=plan.placement,
            ),
            run_config=RunConfig(storage_path=str(Path(plan.job.cwd, "ray").absolute())),
        )
        return _fit(trainer)
    finally:
        ray.shutdown()


def check_size(plan: RayPlan, nodes: list[dict[str, Any]]) -> None:
    """Refuse what Ray would wait for without an end.

    Args:
        plan: What is asked for.
        nodes: What `ray.nodes()` gives.

    Raises:
        LaunchError: The cluster has fewer hosts or CPUs; says which.
    """
    cpus = {node["NodeManagerAddress"]: int(node["Resources"].get("CPU", 0)) for node in nodes if node["Alive"]}
    wanted = int(plan.resources()["CPU"]) * plan.processes
    if sum(count >= wanted for count in cpus.values()) < plan.num_hosts:
        has = ", ".join(f"{address}: {count}" for address, count in cpus.items())
        raise LaunchError(f"{plan.num_hosts} hosts with {wanted} CPUs each are asked for; the Ray cluster has {has}")


def worker_settings(plan: RayPlan) -> dict[str, Any]:
    """What every worker is told, as plain values; `node` is where model and data are."""
    job = plan.job
    return {
        "command": list(job.command),
        "environ": dict(job.environ),
        "cwd": str(job.cwd),
        "port_range": job.port_range,
        "node": ray_node(),
    }


def _fit(trainer: Any) -> int:
    from ray.train import ControllerError, TrainingFailedError, WorkerGroupError

    try:
        trainer.fit()
    except (TrainingFailedError, ControllerError, WorkerGroupError) as error:
        lines = [line.strip() for line in str(error).splitlines() if "RankError" in line or "rank " in line]
        raise LaunchError((lines or [str(error)])[-1]) from None
    return 0


class RankError(RuntimeError):
    """A rank beside a Ray worker failed."""


def be_worker(told: Mapping[str, Any]) -> None:
    """What a worker of Ray does: runs its rank, and waits for it.

    Raises:
        RankError: The rank failed; Ray then ends the others.
    """
    from ray import train

    context = train.get_context()
    ports = DEFAULT_PORTS if told["port_range"] is None else parse_ports(told["port_range"])
    address = ray_address()
    mine = {"address": address, "port": free_port(address, ports), "node": ray_node()}
    all_ranks = _exchange(mine)
    # Ray numbers ranks as it likes, each host's one after the other; ours begin on the host that has model and data.
    first = next((number for number, one in enumerate(all_ranks) if one["node"] == told["node"]), 0)
    world_size = context.get_world_size()
    place = {
        "RANK": (context.get_world_rank() - first) % world_size,
        "WORLD_SIZE": world_size,
        "LOCAL_RANK": context.get_local_rank(),
        "LOCAL_WORLD_SIZE": context.get_local_world_size(),
        "GROUP_RANK": context.get_node_rank(),
        "MASTER_ADDR": all_ranks[first]["address"],
        "MASTER_PORT": all_ranks[first]["port"],
        "PYTHONUNBUFFERED": 1,
    }
    run_beside(told, {name: str(value) for name, value in place.items()})


def ray_node() -> str:
    """Ray's name for this host."""
    import ray

    return str(ray.get_runtime_context().get_node_id())


def ray_address() -> str:
    """The address of this host in Ray's network."""
    import ray

    return str(ray.util.get_node_ip_address())


def _exchange(mine: Mapping[str, Any]) -> list[dict[str, Any]]:
    """What each worker has to say, in the order of Ray's ranks, through the process group that TorchTrainer made."""
    import torch
    import torch.distributed as dist

    text = json.dumps(mine).encode().ljust(_MESSAGE_BYTES)
    everyone = [torch.empty(_MESSAGE_BYTES, dtype=torch.uint8) for _ in range(dist.get_world_size())]
    dist.all_gather(everyone, torch.frombuffer(bytearray(text), dtype=torch.uint8))
    return [json.loads(bytes(one.tolist())) for one in everyone]


def run_beside(told: Mapping[str, Any], place: Mapping[str, str]) -> None:
    """Run a rank as a process of its own, which ends when this one does.

    Args:
        told: Of `worker_settings`.
        place: The rank's variables.

    Raises:
        RankError: It failed.
    """
    rank = subprocess.Popen(
        told["command"],
        env={**os.environ, **told["environ"], **place},
        cwd=told["cwd"] if Path(told["cwd"]).is_dir() else None,
        stdin=subprocess.DEVNULL,
        preexec_fn=end_with_parent(),
    )
    if status := rank.wait():
        how = f"was killed by {signal.Signals(-status).name}" if status < 0 else f"failed with exit status {status}"
        raise RankError(f"rank {place['RANK']} on {os.uname().nodename} {how}")
