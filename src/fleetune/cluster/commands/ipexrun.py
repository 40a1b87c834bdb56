"""The flags of ipexrun and `python -m intel_extension_for_pytorch.cpu.launch`, old names and new ones.

Source: the launch script's guide and its argument parsers, versions 1.10 to 2.8. Without --nnodes (or --distributed,
before 2.0) it starts one process, or copies of the script that know nothing of each other.
"""

from __future__ import annotations

from fleetune.cluster.commands.flags import Flag, Meaning, fact, only, refused, without
from fleetune.cluster.commands.retired import GLOO, IPEX, LOGS, MEETING, PINNED, PRELOADED


def _hosts(flag: str, values: tuple[str, ...]) -> Meaning:
    """One rank for each NUMA node, unless another flag tells the ranks of a host."""
    return Meaning(facts={"num_hosts": values[0]})


def _distributed(flag: str, values: tuple[str, ...]) -> Meaning:
    return Meaning(facts={"num_hosts": "1"})


IPEXRUN: tuple[Flag, ...] = (
    Flag(names=("nnodes",), reads=_hosts),
    Flag(names=("distributed",), reads=_distributed, num_values=0),
    fact("nprocs_per_node nproc_per_node", "ranks_per_host"),
    fact("hostfile", "hostfile"),
    fact("master_port", "port"),
    fact("ncores_per_instance ncore_per_instance", "threads"),
    fact("m module", "module", value="true"),
    fact("no_python", "no_python", value="true"),
    only("ninstances", ("1", "0", "-1"), "these would be copies that know nothing of each other; ranks that train "
         "together are --nnodes 1 --nprocs-per-node N"),
    only("instance_idx", ("-1", "0"), "one process of several is not started alone"),
    without("master_addr", MEETING, num_values=1),
    without("ccl_worker_count", GLOO, num_values=1),
    without("logical_core_for_ccl logical_cores_for_ccl", GLOO),
    without("use_logical_core use_logical_cores skip_cross_node_cores bind_numa_node throughput_mode latency_mode"
            " disable_numactl disable_taskset use_e_cores", PINNED),
    without("node_id nodes_list core_list cores_list multi_task_manager strategy", PINNED, num_values=1),
    without("enable_tcmalloc enable_jemalloc use_default_allocator disable_iomp benchmark", PRELOADED),
    without("memory_allocator omp_runtime", PRELOADED, num_values=1),
    without("auto_ipex auto_ipex_verbose disable_ipex_graph_mode", IPEX),
    without("dtype", IPEX, num_values=1),
    without("log_path log_dir log_file_prefix", LOGS, num_values=1),
    without("multi_instance verbose"),
    refused("more_mpi_params extra_mpi_params", "give these to mpirun, and that command to fleetune", num_values=1),
)  # fmt: skip
