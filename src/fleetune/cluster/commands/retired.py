"""What the published guides set and what happens here instead: the sentences, and the variables they are said of."""

from __future__ import annotations

import re
from collections.abc import Mapping

from fleetune.cluster.commands.flags import Meaning

GLOO = "oneCCL's PyTorch bindings were archived in 2025: gradients travel through gloo"
IPEX = "Intel Extension for PyTorch was archived in 2026; `model = fleetune.optimize(model)` makes encoders fast"
PINNED = "every rank gets its own cores from the plan of its host (`fleetune plan` shows it)"
MEETING = "ranks meet at the first host; its address and a free port are found"
LOGS = "what each rank says is kept in the folder logs"
SSH = "hosts are reached by ssh"
RESTARTS = "when a rank fails, all end and the reason is shown; nothing is started again by itself"
ONE_START = "fleetune starts the ranks of all hosts from one: type it once, on the first host"
NO_MPI = "MPI starts processes at most: gradients do not travel through it"
LIBFABRIC = "libfabric is not used: gradients travel over TCP, through gloo"
PRELOADED = "allocator and OpenMP library stay torch's own; `fleetune plan` tells which allocators are installed"

THREADS = "OMP_NUM_THREADS"
"""Its value is the threads of a rank, which our plan knows by that name."""

_VARIABLES: tuple[tuple[str, str], ...] = (
    (r"CCL_\w+|ATL_\w+", GLOO),
    (r"I_MPI_\w+|HYDRA_\w+|OMPI_\w+|MPICH_\w+", PINNED),
    (r"KMP_(AFFINITY|BLOCKTIME|HW_SUBSET|SETTINGS|TPAUSE|FORKJOIN_BARRIER_PATTERN|REDUCTION_BARRIER_PATTERN"
     r"|PLAIN_BARRIER_PATTERN)", PINNED),
    (r"FI_\w+|PSM3_\w+", LIBFABRIC),
    (r"LD_PRELOAD", PRELOADED),
    (r"MASTER_ADDR|MASTER_PORT", MEETING),
)  # fmt: skip
"""Pattern of a variable's name -> what happens instead."""

_INHERITED = re.compile(r"CCL_\w+")
"""Of the user's own environment, those that a guide told them to export. Others serve other programs, too, or count:
what is preloaded stays so."""


def read_variables(variables: Mapping[str, str]) -> Meaning:
    """What variables that a command sets for its ranks mean here: threads, nothing any more, or what they say."""
    kept: dict[str, str] = {}
    facts: dict[str, str] = {}
    notices = []
    for name, value in variables.items():
        says = next((says for pattern, says in _VARIABLES if re.fullmatch(pattern, name)), None)
        if name == THREADS:
            facts["threads"] = value
        elif says is not None:
            notices.append(f"{name}: {says}")
        else:
            kept[name] = value
    return Meaning(facts=facts, variables=kept, notices=tuple(notices))


def read_environment(environ: Mapping[str, str]) -> Meaning:
    """The same of those variables that guides tell their readers to export; all others stay as they are."""
    told = {name: value for name, value in environ.items() if _INHERITED.fullmatch(name) and value}
    return Meaning(notices=read_variables(told).notices)
