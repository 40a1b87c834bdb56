"""Which rank this process is, told from the variables that its launcher set.

Every launcher speaks a dialect of the same few facts; `DIALECTS` is the dictionary. A set of variables counts
only when it is complete, so that a leftover (`PMIX_RANK` next to Open MPI's own, `WORLD_SIZE` exported by a
Slurm script) does no harm. When no set is complete but one is begun, that is an error: the silent alternative
would be to train each rank alone.
"""

from __future__ import annotations

import os
import re
import zlib
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from fleetune.cluster.network import DEFAULT_PORTS, parse_ports
from fleetune.errors import ConfigError

# What ranks are told that somebody else's launcher starts; the settings of the same names.
NETWORK_VARIABLE = "FLEETUNE_NETWORK"
PORT_RANGE_VARIABLE = "FLEETUNE_PORT_RANGE"
THREADS_VARIABLE = "FLEETUNE_THREADS"
CWD_VARIABLE = "FLEETUNE_CWD"
"""The job's folder."""
RANKS_VARIABLE = "FLEETUNE_RANKS_PER_HOST"
"""Ranks of each host, in the hosts' order, as 2,2,1."""


@dataclass(frozen=True, kw_only=True)
class RankInfo:
    """One rank's place among all, and where they meet."""

    rank: int
    """Number of this rank, from 0 to `world_size` - 1."""
    world_size: int
    """Count of ranks on all hosts."""
    local_rank: int
    """Number of this rank on its host, from 0 to `local_world_size` - 1."""
    local_world_size: int
    """Count of ranks on this host."""
    launcher: str
    """Who started the ranks: local, ssh, torchrun, openmpi, pmi, slurm, pmix, or env for hand-set variables."""
    main_address: str
    """Address of rank 0's host."""
    main_port: int
    """TCP port at which rank 0 listens for the others."""

    @property
    def is_ours(self) -> bool:
        """Whether fleetune started it: then variables are from the plan, and who launches says what happens."""
        return self.launcher in OWN_LAUNCHERS


@dataclass(frozen=True, kw_only=True)
class Dialect:
    """The variables in which one launcher tells a rank its place; of several names the first one set counts."""

    launcher: str
    rank: tuple[str, ...]
    world_size: tuple[str, ...]
    local_rank: tuple[str, ...] = ()
    local_world_size: tuple[str, ...] = ()
    node: str | None = None
    """Index of the host, into a list such as "2(x3),1" when the local world size is one."""
    job: tuple[str, ...] = ()
    """Variables, all equal on all ranks, that together tell this run from others on the same hosts."""
    hosts: tuple[str, ...] = ()
    """Lists of the hosts, such as "node[01-03],gpu1"; rank 0 is on the first."""


# The first complete set wins: what runs inside something else stands before it (torchrun started by srun,
# mpirun inside a Slurm step, and every mpirun that speaks PMIx underneath).
DIALECTS = (
    Dialect(
        launcher="env",
        rank=("RANK",),
        world_size=("WORLD_SIZE",),
        local_rank=("LOCAL_RANK",),
        local_world_size=("LOCAL_WORLD_SIZE", "LOCAL_SIZE"),
    ),
    Dialect(
        launcher="openmpi",
        rank=("OMPI_COMM_WORLD_RANK",),
        world_size=("OMPI_COMM_WORLD_SIZE",),
        local_rank=("OMPI_COMM_WORLD_LOCAL_RANK",),
        local_world_size=("OMPI_COMM_WORLD_LOCAL_SIZE",),
        job=("PMIX_NAMESPACE",),
    ),
    Dialect(
        launcher="pmi",
        rank=("PMI_RANK",),
        world_size=("PMI_SIZE",),
        local_rank=("MPI_LOCALRANKID", "PALS_LOCAL_RANKID"),
        local_world_size=("MPI_LOCALNRANKS", "PALS_LOCAL_SIZE"),
    ),
    Dialect(
        launcher="slurm",
        rank=("SLURM_PROCID",),
        world_size=("SLURM_STEP_NUM_TASKS", "SLURM_NTASKS"),
        local_rank=("SLURM_LOCALID",),
        # SLURM_NTASKS_PER_NODE is what the allocation asked for; the lists are what the step got.
        local_world_size=("SLURM_STEP_TASKS_PER_NODE", "SLURM_TASKS_PER_NODE", "SLURM_NTASKS_PER_NODE"),
        node="SLURM_NODEID",
        job=("SLURM_JOB_ID", "SLURM_STEP_ID"),
        hosts=("SLURM_STEP_NODELIST", "SLURM_JOB_NODELIST"),
    ),
    # PMIx hands its sizes out by calls, not by variables, so WORLD_SIZE has to come from the user.
    Dialect(
        launcher="pmix",
        rank=("PMIX_RANK",),
        world_size=("WORLD_SIZE",),
        local_rank=("LOCAL_RANK",),
        local_world_size=("LOCAL_WORLD_SIZE",),
        job=("PMIX_NAMESPACE",),
    ),
)

OWN_LAUNCHERS = ("local", "ssh")
_LOOPBACK = ("localhost", "::1", "ip6-localhost")


def read_rank(environ: Mapping[str, str]) -> RankInfo | None:
    """Read this process's rank from its environment.

    Args:
        environ: Usually `os.environ`.

    Returns:
        The rank, or `None` for a process that no launcher started.

    Raises:
        ConfigError: The variables contradict each other or are only half there, or ranks are on several hosts
            and nothing says where rank 0 is. Every problem is listed with variable and value.
    """
    environ = _without_empty_and_foreign(environ)
    dialect = _spoken_dialect(environ)
    if dialect is None:
        return None
    local = _lone_local(dialect, environ)
    if local is not None:
        environ = {**environ, dialect.local_rank[0]: local[0], dialect.local_world_size[0]: local[1]}
    numbers = _numbers(dialect, environ)
    address, port = _meeting_point(dialect, environ, all_local=numbers["world_size"] == numbers["local_world_size"])
    return RankInfo(**numbers, launcher=_launcher(dialect, environ), main_address=address, main_port=port)


def rank_variable(environ: Mapping[str, str]) -> str | None:
    """Name of the variable in which a launcher told this process its rank; None where none did.

    Of a rank that `as_rank` has prepared, it is the launcher's own, not the RANK that was added.

    Raises:
        ConfigError: The variables of a rank are only half there.
    """
    environ = _without_empty_and_foreign(environ)
    dialect = _spoken_dialect(environ)
    if dialect is None:
        return None
    outer = next((other for other in DIALECTS if other.launcher == environ.get("FLEETUNE_LAUNCHER")), dialect)
    return _name(outer.rank, environ) or _name(dialect.rank, environ)


def speaks_for_all(environ: Mapping[str, str]) -> bool:
    """Whether this process is the first rank, or none: files and folders of the settings are of its host.

    Raises:
        ConfigError: See `read_rank`.
    """
    info = read_rank(environ)
    return info is None or info.rank == 0


def as_environment(info: RankInfo) -> dict[str, str]:
    """The variables from which ``torch.distributed.init_process_group("env://")`` reads a rank."""
    return {
        "RANK": str(info.rank),
        "WORLD_SIZE": str(info.world_size),
        "LOCAL_RANK": str(info.local_rank),
        "LOCAL_WORLD_SIZE": str(info.local_world_size),
        "MASTER_ADDR": info.main_address,
        "MASTER_PORT": str(info.main_port),
    }


def host_names(text: str) -> list[str]:
    """The hosts of a list as Slurm writes it: `node[08-10,12],gpu1` is node08, node09, node10, node12, gpu1."""
    names = []
    for entry in re.split(r",(?![^\[]*\])", text):
        match = re.fullmatch(r"(.*?)\[([^\]]*)\](.*)", entry)
        if match is None:
            names += [entry] if entry else []
            continue
        for part in match[2].split(","):
            first, _, last = part.partition("-")
            numbers = range(int(first), int(last or first) + 1)
            names += host_names(",".join(f"{match[1]}{number:0{len(first)}}{match[3]}" for number in numbers))
    return names


def is_loopback(address: str) -> bool:
    """Whether an address, as a text, means this very host."""
    return address in _LOOPBACK or address.startswith("127.")


# ---- which dialect


def _without_empty_and_foreign(environ: Mapping[str, str]) -> dict[str, str]:
    """Drop empty variables, and those that describe a Slurm shell and not a rank.

    A batch script and an interactive shell carry SLURM_PROCID=0 (and perhaps PMI or PMIx variables) of their
    own, beside the SLURM_NTASKS of the whole allocation. They are no rank: only a numbered job step is.
    """
    kept = {name: value for name, value in environ.items() if value != ""}
    if "SLURM_JOB_ID" not in kept or _is_numbered_step(kept.get("SLURM_STEP_ID", "")):
        return kept
    foreign = ["SLURM_PROCID", "SLURM_LOCALID"]
    if not _is_complete(_dialect("openmpi"), kept):
        foreign += ["PMIX_RANK"]
    if not _is_complete(_dialect("pmi"), kept):
        foreign += ["PMI_RANK", "PMI_SIZE"]
    return {name: value for name, value in kept.items() if name not in foreign}


def _is_numbered_step(step: str) -> bool:
    """Slurm numbers the batch script, the interactive shell and other special steps from 0xfffffff0 up."""
    return step.isdecimal() and int(step) < 0xFFFFFFF0


def _spoken_dialect(environ: Mapping[str, str]) -> Dialect | None:
    for dialect in DIALECTS:
        if _is_complete(dialect, environ):
            return dialect
    for dialect in DIALECTS:
        if _lone_local(dialect, environ) is not None:
            return dialect
    if problems := [problem for dialect in DIALECTS for problem in _half_set(dialect, environ)]:
        raise ConfigError(problems)
    return None


def _dialect(launcher: str) -> Dialect:
    return next(dialect for dialect in DIALECTS if dialect.launcher == launcher)


def _name(names: tuple[str, ...], environ: Mapping[str, str]) -> str | None:
    return next((name for name in names if name in environ), None)


def _facts(dialect: Dialect) -> tuple[tuple[str, ...], ...]:
    return (dialect.rank, dialect.world_size, dialect.local_rank, dialect.local_world_size)


def _is_complete(dialect: Dialect, environ: Mapping[str, str]) -> bool:
    if dialect.launcher == "slurm" and "SLURM_STEP_ID" not in environ:
        return False
    return all(_name(names, environ) for names in _facts(dialect))


def _lone_local(dialect: Dialect, environ: Mapping[str, str]) -> tuple[str, str] | None:
    """Local rank and local world size where env:// or PMIx variables leave them out, as env:// allows.

    A loopback MASTER_ADDR can only mean that all ranks are here. Any other is read as one rank per host,
    which is how cluster operators that set these four variables (Kubeflow) start them.
    """
    rank, world_size = _name(dialect.rank, environ), _name(dialect.world_size, environ)
    if dialect.launcher not in ("env", "pmix") or rank is None or world_size is None:
        return None
    if _name(dialect.local_rank + dialect.local_world_size, environ):
        return None
    if is_loopback(environ.get("MASTER_ADDR", "")):
        return environ[rank], environ[world_size]
    return "0", "1"


def _half_set(dialect: Dialect, environ: Mapping[str, str]) -> list[str]:
    """One sentence when some variables of a dialect are there and others are not."""
    if dialect.launcher == "slurm" and not {"SLURM_PROCID", "SLURM_STEP_ID"} <= set(environ):
        return []  # the size of an allocation is no rank
    if dialect.launcher == "pmix" and "PMIX_RANK" not in environ:
        return []  # it borrows the other names from env://
    found = [name for names in _facts(dialect) if (name := _name(names, environ))]
    missing = [" or ".join(names) for names in _facts(dialect) if not _name(names, environ)]
    if not found:
        return []
    there = ", ".join(f"{name}={environ[name]}" for name in found)
    return [
        f"{there} is set, but not {', '.join(missing)}: a rank of {dialect.launcher} has all of them. "
        f"Set the missing ones, or unset {found[0]} to start without a launcher"
    ]


def _launcher(dialect: Dialect, environ: Mapping[str, str]) -> str:
    if dialect.launcher != "env":
        return dialect.launcher
    return environ.get("FLEETUNE_LAUNCHER") or ("torchrun" if "TORCHELASTIC_RUN_ID" in environ else "env")


# ---- the numbers


def _numbers(dialect: Dialect, environ: Mapping[str, str]) -> dict[str, int]:
    """Rank, world size and their local counterparts, checked against each other."""
    keys = ("rank", "world_size", "local_rank", "local_world_size")
    names = {key: _name(variables, environ) or "" for key, variables in zip(keys, _facts(dialect), strict=True)}
    texts = {key: environ[name] for key, name in names.items()}
    texts["local_world_size"] = _of_this_node(dialect, environ, texts["local_world_size"])
    problems = [
        f"{names[key]}={environ[names[key]]} is not a whole number of 0 or more"
        for key, text in texts.items()
        if not _is_count(text)
    ]
    if problems:
        raise ConfigError(problems)
    numbers = {key: int(text) for key, text in texts.items()}
    problems = _contradictions(numbers, {key: f"{name}={environ[name]}" for key, name in names.items()})
    problems += _second_opinions(dialect, environ, numbers)
    if problems:
        raise ConfigError(problems)
    return numbers


def _is_count(text: str) -> bool:
    return text.isascii() and text.isdecimal()


def _contradictions(numbers: Mapping[str, int], told: Mapping[str, str]) -> list[str]:
    problems = []
    for part, whole in (("rank", "world_size"), ("local_rank", "local_world_size")):
        if numbers[part] >= numbers[whole]:
            problems.append(f"{told[part]} must be smaller than {told[whole]}")
    if numbers["local_world_size"] > numbers["world_size"]:
        problems.append(f"{told['local_world_size']} cannot be greater than {told['world_size']}")
    return problems


def _second_opinions(dialect: Dialect, environ: Mapping[str, str], numbers: Mapping[str, int]) -> list[str]:
    """A launcher's script often exports RANK or WORLD_SIZE too: then they must say the same."""
    return [
        f"{name}={environ[name]} contradicts {_name(names, environ)}={numbers[key]}: unset {name}"
        for name, names, key in (
            ("RANK", dialect.rank, "rank"),
            ("WORLD_SIZE", dialect.world_size, "world_size"),
        )
        if name in environ and environ[name] != str(numbers[key])
    ]


def _of_this_node(dialect: Dialect, environ: Mapping[str, str], counts: str) -> str:
    """The count for this host. Slurm writes run lengths: "2(x3),1" is 2, 2, 2, 1. Other texts are left as they are."""
    if dialect.node is None or not re.fullmatch(r"\d+(\(x\d+\))?(,\d+(\(x\d+\))?)*", counts):
        return counts
    per_node = []
    for count, times in re.findall(r"(\d+)(?:\(x(\d+)\))?", counts):
        per_node += [count] * int(times or 1)
    if len(set(per_node)) == 1:
        return str(per_node[0])
    node = environ.get(dialect.node, "")
    return per_node[int(node)] if _is_count(node) and int(node) < len(per_node) else counts


# ---- where the ranks meet


def _meeting_point(dialect: Dialect, environ: Mapping[str, str], *, all_local: bool) -> tuple[str, int]:
    address = environ.get("MASTER_ADDR") or ("127.0.0.1" if all_local else _first_host(dialect, environ))
    told = environ.get("MASTER_PORT")
    if told is not None and not (_is_count(told) and 1 <= int(told) <= 65535):
        raise ConfigError(f"MASTER_PORT={told} is not a TCP port: a number from 1 to 65535 is expected")
    port = int(told) if told is not None else _shared_port(dialect, environ, all_local=all_local)
    problems = []
    if address is None:
        problems.append(
            "MASTER_ADDR is not set, and the ranks are on several hosts: set it to the name or address of "
            "rank 0's host, the same on all ranks"
        )
    if port is None:
        problems.append("MASTER_PORT is not set: set it to a port that is free on rank 0's host, the same on all ranks")
    if address is None or port is None:
        raise ConfigError(problems)
    return address, port


def _shared_port(dialect: Dialect, environ: Mapping[str, str], *, all_local: bool) -> int | None:
    """A port that all ranks derive alike without talking; `None` when they share nothing to derive it from.

    One of `--port_range`, where that is given.
    """
    if dialect.job and all(name in environ for name in dialect.job):
        shared = ".".join(environ[name] for name in dialect.job)
    elif all_local:
        shared = str(_launcher_pid(_name(dialect.rank, environ) or ""))
    else:
        return None
    ports = parse_ports(environ[PORT_RANGE_VARIABLE]) if PORT_RANGE_VARIABLE in environ else DEFAULT_PORTS
    return ports[zlib.crc32(f"{dialect.launcher}:{shared}".encode()) % len(ports)]


def _first_host(dialect: Dialect, environ: Mapping[str, str]) -> str | None:
    name = _name(dialect.hosts, environ)
    return next(iter(host_names(environ[name])), None) if name is not None else None


def _launcher_pid(rank_variable: str) -> int:
    """Process that started all ranks of this host: the nearest ancestor without a rank of its own.

    The parent alone would not do: `mpirun bash -c "...; python ..."` puts another shell above every rank.
    """
    pid = os.getppid()
    while pid > 1 and _has_variable(pid, rank_variable) and (parent := _parent(pid)) is not None:
        pid = parent
    return pid


def _has_variable(pid: int, name: str) -> bool:
    try:
        return any(
            entry.startswith(f"{name}=".encode()) for entry in Path(f"/proc/{pid}/environ").read_bytes().split(b"\0")
        )
    except OSError:
        return False


def _parent(pid: int) -> int | None:
    try:
        return int(Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[1])
    except (OSError, ValueError, IndexError):
        return None
