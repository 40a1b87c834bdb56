"""What a host tells of itself: the facts that the checks judge. They travel as JSON."""

from __future__ import annotations

import dataclasses
import types
import typing
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, TypeVar

from fleetune.hardware.host import HostFacts

T = TypeVar("T")


@dataclass(frozen=True, kw_only=True)
class Cpus:
    """How the CPUs are set up."""

    num_online: int
    """Logical CPUs of the machine."""
    num_cores: int
    """Physical cores that a run may use."""
    num_nodes: int
    """NUMA nodes with memory; 0 where none are shown."""
    smt: bool | None
    """Whether cores run two threads each; None where it is not shown."""
    governor: str | None
    """What sets the clock rate; None where it is not shown, as in virtual machines."""
    driver: str | None
    """What the governor acts through."""
    amx_granted: bool | None
    """Whether the kernel lets a process use AMX; None on other CPUs than x86."""
    load: float
    """Processes that computed or waited for a CPU, on average of the last minute."""


@dataclass(frozen=True, kw_only=True)
class Plan:
    """What a run would make of the cores."""

    processes: int
    threads: int
    """Of each process."""
    reason: str
    """Where the number of threads comes from."""
    problem: str | None = None
    """Why there is no plan."""
    omp_num_threads: str | None = None
    """The variable, where it is set."""


@dataclass(frozen=True, kw_only=True)
class Disk:
    """A folder that a run writes to."""

    what: str
    path: str
    free_bytes: int
    problem: str | None = None
    """Why nothing can be written there."""


@dataclass(frozen=True, kw_only=True)
class Software:
    """What is installed."""

    executable: str
    """The Python that answers."""
    versions: Mapping[str, str]
    """Of Python, fleetune and what it depends on."""
    sources: str
    """Digest of fleetune's own files: versions under development have the same number."""
    unmet: tuple[str, ...]
    """Requirements of fleetune that the installed versions do not meet."""
    retired: tuple[str, ...]
    """Archived extensions of torch that are installed, as `name version`."""


@dataclass(frozen=True, kw_only=True)
class Kernels:
    """What torch and the compiled kernels are like; asked in a process of its own."""

    torch: str | None
    """Version that `import torch` gives; None where that fails."""
    problem: str | None = None
    """Why torch cannot be imported."""
    waited_s: float | None = None
    """How long was waited for an answer in vain; None where there is one."""
    compiler: str | None = None
    no_compiler: str | None = None
    """Why there is none that can be used."""
    built: str | None = None
    """The library, where it has been built."""
    wish: str | None = None
    """What FLEETUNE_KERNELS says."""


@dataclass(frozen=True, kw_only=True)
class Nic:
    """An interface with one of its addresses, loopback left out."""

    name: str
    address: str
    mtu: int


@dataclass(frozen=True, kw_only=True)
class Network:
    """Names and addresses."""

    hostname_addresses: tuple[str, ...]
    """What the host's own name resolves to; empty where it does not."""
    nics: tuple[Nic, ...]
    ssh_address: str | None
    """The address under which ssh has reached this host; None on the machine that the command runs on."""
    ssh_client: str | None
    """The address from which it came: of that machine, or of a jump host."""
    has_ipv6: bool


@dataclass(frozen=True, kw_only=True)
class Listener:
    """A TCP port that somebody listens on."""

    port: int
    address: str
    pid: int | None
    """None where the process is another user's."""
    process: str | None


@dataclass(frozen=True, kw_only=True)
class Running:
    """A process of fleetune's of this user."""

    pid: int
    what: str
    age_s: float
    is_orphan: bool
    """Whether what started it is gone."""


@dataclass(frozen=True, kw_only=True)
class Remains:
    """What earlier runs left."""

    running: tuple[Running, ...]
    shared_memory: tuple[str, ...]
    """Files in /dev/shm of this user that nothing has open."""
    partial: tuple[str, ...]
    """Unfinished folders and files of the cache older than a day."""


@dataclass(frozen=True, kw_only=True)
class Facts:
    """One host."""

    machine: HostFacts
    cpus: Cpus
    plan: Plan
    memory_available_bytes: int
    shm_bytes: int | None
    """Size of /dev/shm; None where there is none."""
    disks: tuple[Disk, ...]
    open_files: int
    """Files and sockets that a process may have open."""
    allocators: tuple[str, ...]
    preloaded: str | None
    software: Software
    kernels: Kernels
    network: Network
    listeners: tuple[Listener, ...]
    """In the port range, and on torchrun's port."""
    remains: Remains
    variables: Mapping[str, str]
    """Of libraries, secrets left out."""


def to_json(value: Any) -> Any:
    """A dataclass as JSON-ready values."""
    return dataclasses.asdict(value)


def from_json(kind: type[T], told: Any) -> T:
    """A dataclass from what `to_json` gave.

    Raises:
        ValueError: It is of another version: something is missing, or more than was expected.
    """
    try:
        return typing.cast(T, _read(kind, told))
    except (TypeError, KeyError, AttributeError) as error:
        raise ValueError(f"not as expected: {error}") from error


def _read(kind: Any, told: Any) -> Any:
    origin, arguments = typing.get_origin(kind), typing.get_args(kind)
    if isinstance(kind, type) and dataclasses.is_dataclass(kind):
        hints = typing.get_type_hints(kind)
        return kind(**{name: _read(hints[name], value) for name, value in told.items()})
    if origin is tuple:
        return tuple(_read(arguments[0], value) for value in told)
    if origin in (types.UnionType, typing.Union):
        wanted = next(argument for argument in arguments if argument is not type(None))
        return None if told is None else _read(wanted, told)
    return told
