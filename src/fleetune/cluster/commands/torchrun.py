"""The flags of torchrun and `python -m torch.distributed.launch`. Source: torch/distributed/run.py of PyTorch 2.13."""

from __future__ import annotations

from fleetune.cluster.commands.flags import Flag, Meaning, fact, refused, without
from fleetune.cluster.commands.retired import LOGS, MEETING, PINNED, RESTARTS


def _hosts(flag: str, values: tuple[str, ...]) -> Meaning:
    """--nnodes 2; or 1:4, for a number that changes while it runs."""
    least, _, most = values[0].partition(":")
    if most and least != most:
        return Meaning(problems=(f"{flag} {values[0]}: the number of hosts is fixed here; give {most}",))
    return Meaning(facts={"num_hosts": least})


def _ranks(flag: str, values: tuple[str, ...]) -> Meaning:
    """--nproc_per_node 2; cpu means one for each core, auto one for each device."""
    if values[0].isdecimal():
        return Meaning(facts={"ranks_per_host": values[0]})
    return Meaning(
        facts={"ranks_per_host": ""},
        notices=(f"{flag} {values[0]}: one rank for each NUMA node, with its cores as threads",),
    )


TORCHRUN: tuple[Flag, ...] = (
    Flag(names=("nnodes",), reads=_hosts),
    Flag(names=("nproc_per_node",), reads=_ranks),
    fact("node_rank", "host_rank"),
    fact("master_port", "port"),
    fact("m module", "module", value="true"),
    fact("no_python", "no_python", value="true"),
    without("master_addr rdzv_backend rdzv_endpoint rdzv_id rdzv_conf local_addr", MEETING, num_values=1),
    without("standalone use_env use_env_vars"),
    without("max_restarts monitor_interval", RESTARTS, num_values=1),
    without("start_method role event_log_handler logs_specs signals_to_handle shutdown_timeout", num_values=1),
    without("log_dir r redirects t tee local_ranks_filter", LOGS, num_values=1),
    without("duplicate_stdout_filters duplicate_stderr_filters", LOGS, num_values=1),
    without("numa_binding", PINNED, num_values=1),
    refused("run_path", "give the script as python would be given it"),
    refused("virtual_local_rank", "ranks of a host are numbered from 0"),
)
