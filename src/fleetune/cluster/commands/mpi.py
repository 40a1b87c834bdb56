"""The flags of mpirun and mpiexec: Open MPI's, and those of hydra, which MPICH and Intel MPI have in common.

The same flag means the same in both where both have it, so one table reads either, whichever is installed here.
Sources: `mpirun --help all` of Open MPI 4.1 and `mpiexec.hydra -help` of MPICH 4; Intel MPI's developer reference.
"""

from __future__ import annotations

import ipaddress
import re

from fleetune.cluster.commands.flags import Flag, Meaning, fact, only, refused, without
from fleetune.cluster.commands.retired import LOGS, NO_MPI, PINNED, SSH, read_variables


def _variable(flag: str, values: tuple[str, ...]) -> Meaning:
    return read_variables({values[0]: values[1]})


def _exported(flag: str, values: tuple[str, ...]) -> Meaning:
    """Open MPI's -x NAME or -x NAME=VALUE."""
    name, equals, value = values[0].partition("=")
    return read_variables({name: value}) if equals else _names(flag, values)


def _names(flag: str, values: tuple[str, ...]) -> Meaning:
    return Meaning(handed_on=tuple(values[0].split(",")))


def _parameter(flag: str, values: tuple[str, ...]) -> Meaning:
    """Open MPI's --mca NAME VALUE."""
    name, value = values
    if name.endswith("tcp_if_include") or name == "prte_if_include":
        return _network(flag, (value,))
    return Meaning(notices=(f"{flag} {name}: {NO_MPI}",))


def _network(flag: str, values: tuple[str, ...]) -> Meaning:
    """An interface's name, or a network such as 10.0.0.0/8."""
    first = values[0].split(",")[0]
    try:
        ipaddress.ip_network(first, strict=False)
    except ValueError:
        return Meaning(facts={"interface": first})
    return Meaning(facts={"network": first})


def _mapping(flag: str, values: tuple[str, ...]) -> Meaning:
    """`ppr:2:node` tells the ranks of a host; other mappings place ranks within a host, where the plan does."""
    if match := re.fullmatch(r"ppr:(\d+):node(?::.*)?", values[0], re.IGNORECASE):
        return Meaning(facts={"ranks_per_host": match[1]})
    if values[0].lower().startswith("ppr:"):
        return Meaning(problems=(f"{flag} {values[0]}: give the ranks of a host as --processes, in front",))
    return Meaning(notices=(f"{flag} {values[0]}: {PINNED}",))


_HYDRA = (
    fact("ppn perhost grr", "ranks_per_host"),
    fact("rr", "ranks_per_host", value="1"),
    fact("f", "hostfile"),
    fact("hosts", "hosts"),
    Flag(names=("genv", "env"), reads=_variable, num_values=2, joins=True),
    Flag(names=("genvlist", "envlist"), reads=_names),
    without("genvall genvnone envall envnone info disable_hostname_propagation disable_auto_cleanup"),
    without("print_all_exitcodes print_rank_map pmi_port enable_x disable_x profile"),
    without("launcher_exec bootstrap_exec demux localhost usize nameserver tmpdir", num_values=1),
    only("launcher bootstrap", ("ssh",), "give --launcher slurm or ray in front, or leave it out: " + SSH),
    only("rmk", ("user",), "give --launcher slurm in front, or name the hosts"),
    without("membind topolib binding order_nodes", PINNED, num_values=1),
    without("gpus_per_proc", "fleetune works on CPUs", num_values=1),
    without("prepend_rank l", LOGS),
    without("prepend_pattern outfile_pattern errfile_pattern outfile errfile", LOGS, num_values=1),
    Flag(names=("iface",), reads=_network),
    refused("configfile", "several programs at once are not started: give one command", num_values=1),
    refused("skip_launch_node", "name the hosts without this one, as --hosts in front"),
)

_OPEN_MPI = (
    fact("N npernode", "ranks_per_host"),
    fact("pernode", "ranks_per_host", value="1"),
    fact("default_hostfile", "hostfile"),
    fact("H", "hosts"),
    Flag(names=("x",), reads=_exported),
    Flag(names=("mca", "gmca", "prtemca", "pmixmca", "omca"), reads=_parameter, num_values=2),
    Flag(names=("map_by",), reads=_mapping),
    without("bind_to_core bind_to_socket bycore bynode byslot bysocket report_bindings use_hwthread_cpus", PINNED),
    without("rank_by cpu_list cpu_set cpus_per_proc cpus_per_rank", PINNED, num_values=1),
    without("tag_output timestamp_output merge_stderr_to_stdout", LOGS),
    without("output_filename output", LOGS, num_values=1),
    without("allow_run_as_root oversubscribe nooversubscribe display_map display_allocation noprefix"),
    without("leave_session_attached show_progress q quiet do_not_resolve enable_recovery disable_recovery"),
    without("prefix path timeout max_restarts personality am tune stdin", num_values=1),
    refused("npersocket", "give the ranks of a host as --processes, in front", num_values=1),
    refused("rf rankfile", "give hosts and their ranks as --hosts node1:2,node2:2 in front", num_values=1),
    refused("nolocal", "name the hosts without this one, as --hosts in front"),
    refused("app", "several programs at once are not started: give one command", num_values=1),
)

MPI: tuple[Flag, ...] = (
    fact("n np c", "ranks"),
    fact("hostfile machinefile", "hostfile"),
    fact("host", "hosts"),
    without("bind_to", PINNED, num_values=1),
    without("v verbose"),
    refused("wdir workdir wd", "go there first: ranks work where the command is typed", num_values=1),
    *_HYDRA,
    *_OPEN_MPI,
)
