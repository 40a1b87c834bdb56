"""Where this host's cores and memory lie: sockets, NUMA nodes, physical cores with their siblings, shared caches.

Everything is read from text files under a root folder, so that any machine can be a test fixture. No file is trusted
alone: containers hide some, virtual machines and Arm boards fill some with -1, and core numbers repeat from socket to
socket. What cannot be told is None, and never an error.
"""

from __future__ import annotations

import os
import re
from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass, field
from pathlib import Path

from fleetune.hardware.host import read_text

# More threads in one core than any CPU has (POWER has 8): firmware without a table of cores reports a whole socket.
_MOST_SIBLINGS = 8


@dataclass(frozen=True, kw_only=True)
class Core:
    """One physical core, as far as this process may use it."""

    cpus: tuple[int, ...]
    """Its logical CPUs (SMT siblings) on which the process may run, ascending; at least one."""
    socket: int | None
    node: int | None
    """NUMA node; None where the system shows none."""
    l2: int | None
    """Lowest logical CPU with which it shares its L2 cache: the name of the group."""
    l3: int | None
    """The same for the L3 cache."""


@dataclass(frozen=True, kw_only=True)
class MemoryNode:
    """A NUMA node from which the process may take memory."""

    number: int
    memory_bytes: int
    distances: Mapping[int, int] = field(default_factory=dict)
    """NUMA node -> distance as the firmware tells it; 10 is the node itself."""


@dataclass(frozen=True, kw_only=True)
class Topology:
    """The part of a host that this process may use."""

    cores: tuple[Core, ...]
    """Physical cores; what shares a node, then a cache, stands side by side."""
    memory_nodes: tuple[MemoryNode, ...]
    """Empty where the system shows none."""
    num_cpus: int
    """Logical CPUs of the machine that are online, whether the process may use them or not."""

    @property
    def allowed_cpus(self) -> tuple[int, ...]:
        return tuple(sorted(cpu for core in self.cores for cpu in core.cpus))

    def memory_near(self, node: int) -> int | None:
        """The memory node next to a NUMA node, itself if it has memory; None where no memory nodes are shown."""
        far = 1 << 20
        near = min(
            self.memory_nodes,
            key=lambda memory: (memory.number != node, memory.distances.get(node, far), memory.number),
            default=None,
        )
        return None if near is None else near.number


def read_topology(root: Path = Path("/"), *, affinity: Collection[int] | None = None) -> Topology:
    """Read the topology of this host, cut to what the process may use.

    Args:
        root: Folder that holds `proc` and `sys`.
        affinity: Logical CPUs the process may run on; the calling thread's own mask when not given.
    """
    status = read_text(root / "proc/self/status")
    folder = root / "sys/devices/system/cpu"
    cpus = _numbered(folder, "cpu")
    allowed = frozenset(os.sched_getaffinity(0) if affinity is None else affinity)
    # The list `cpu/online` is no source: LXCFS fills it with the number of CPUs that a container's quota allows.
    offline = {cpu for cpu, path in cpus.items() if read_text(path / "online").strip() == "0"}
    listed = parse_cpu_list(status_field(status, "Cpus_allowed_list"))
    allowed = allowed & listed or allowed  # lists without a common CPU tell of two machines: the mask counts
    allowed = allowed - offline or allowed
    nodes = _numbered(root / "sys/devices/system/node", "node")
    return Topology(
        cores=_cores({cpu: folder / f"cpu{cpu}" for cpu in allowed}, _node_of_cpus(nodes)),
        memory_nodes=_memory_nodes(nodes, parse_cpu_list(status_field(status, "Mems_allowed_list"))),
        num_cpus=len(set(cpus) - offline | allowed),
    )


def parse_cpu_list(text: str) -> frozenset[int]:
    """CPUs or nodes of the kernel's spelling: "0-3,8" is 0, 1, 2, 3 and 8. Of other texts nothing is taken."""
    numbers: set[int] = set()
    for part in text.strip().split(","):
        if match := re.fullmatch(r"(\d+)(?:-(\d+))?", part.strip()):
            numbers.update(range(int(match[1]), int(match[2] or match[1]) + 1))
    return frozenset(numbers)


def format_cpu_list(cpus: Iterable[int]) -> str:
    """The kernel's spelling of some CPUs: 0, 1, 2, 3 and 8 are "0-3,8"."""
    runs: list[list[int]] = []
    for cpu in sorted(cpus):
        if runs and cpu == runs[-1][1] + 1:
            runs[-1][1] = cpu
        else:
            runs.append([cpu, cpu])
    return ",".join(f"{first}" if first == last else f"{first}-{last}" for first, last in runs)


def status_field(status: str, name: str) -> str:
    """A field of /proc/PID/status, as text; empty where it is not there."""
    match = re.search(rf"^{name}:[ \t]*(.*)$", status, re.MULTILINE)
    return match[1].strip() if match else ""


# ---- cores


def _numbered(folder: Path, word: str) -> dict[int, Path]:
    """Number -> path of what is called `word` and a number in a folder."""
    try:
        names = os.listdir(folder)
    except OSError:
        return {}
    return {int(m[1]): folder / name for name in names if (m := re.fullmatch(rf"{word}(\d+)", name))}


def _cores(cpus: Mapping[int, Path], node_of: Mapping[int, int]) -> tuple[Core, ...]:
    """The physical cores of some logical CPUs, each with its folder."""
    siblings: dict[object, list[int]] = {}
    for cpu in sorted(cpus):
        siblings.setdefault(_core_key(cpu, cpus[cpu] / "topology"), []).append(cpu)
    cores = [_core(tuple(members), cpus[members[0]], node_of) for members in siblings.values()]
    return tuple(sorted(cores, key=_place))


def _core(members: tuple[int, ...], folder: Path, node_of: Mapping[int, int]) -> Core:
    first, caches = members[0], _shared_caches(folder / "cache")
    linked = min(_numbered(folder, "node"), default=None)  # each CPU's folder has a link to its node, too
    return Core(
        cpus=members,
        socket=_socket(folder / "topology"),
        node=node_of.get(first, linked),
        l2=caches.get(2),
        l3=caches.get(3),
    )


def _place(core: Core) -> tuple[int, ...]:
    """Sort key that puts neighbours side by side; what is unknown comes last."""
    last = 1 << 20
    told = (core.node, core.socket, core.l3, core.l2)
    return (*(last if number is None else number for number in told), core.cpus[0])


def _core_key(cpu: int, topology: Path) -> object:
    """What the logical CPUs of one physical core have in common, and no others."""
    for name in ("core_cpus_list", "thread_siblings_list"):  # the second is the name before Linux 5.3
        listed = parse_cpu_list(read_text(topology / name))
        if cpu in listed and len(listed) <= _MOST_SIBLINGS:
            return "siblings", min(listed)
    socket, core = _socket(topology), _number(topology / "core_id")
    if socket is None or core is None:  # Arm before firmware tables: without siblings, as Arm servers are
        return "alone", cpu
    return "numbers", socket, _number(topology / "die_id"), core  # core numbers repeat from socket to socket


def _socket(topology: Path) -> int | None:
    """Number of the socket, or the lowest CPU of it where there is none; None when neither is told."""
    number = _number(topology / "physical_package_id")
    if number is not None:
        return number
    return min(parse_cpu_list(read_text(topology / "core_siblings_list")), default=None)


def _number(path: Path) -> int | None:
    """A number of 0 or more; -1 is how the kernel says that it does not know."""
    text = read_text(path).strip()
    return int(text) if text.isascii() and text.isdecimal() else None


def _shared_caches(folder: Path) -> dict[int, int]:
    """Cache level -> lowest logical CPU that shares the data cache of that level."""
    shared = {}
    for index in _numbered(folder, "index").values():
        level, cpus = _number(index / "level"), parse_cpu_list(read_text(index / "shared_cpu_list"))
        if level is not None and cpus and read_text(index / "type").strip() != "Instruction":
            shared[level] = min(cpus)
    return shared


# ---- NUMA nodes


def _node_of_cpus(nodes: Mapping[int, Path]) -> dict[int, int]:
    return {cpu: number for number, path in nodes.items() for cpu in parse_cpu_list(read_text(path / "cpulist"))}


def _memory_nodes(nodes: Mapping[int, Path], allowed: Collection[int]) -> tuple[MemoryNode, ...]:
    """Nodes that have memory, of those that the process's cpuset allows."""
    found = []
    numbers = sorted(nodes)
    for number in numbers:
        size = re.search(r"MemTotal:\s+(\d+) kB", read_text(nodes[number] / "meminfo"))
        told = read_text(nodes[number] / "distance").split()
        # One distance for every node that is online, in the order of their numbers.
        distances = dict(zip(numbers, map(int, told), strict=True)) if len(told) == len(numbers) else {}
        if size and int(size[1]) > 0:
            found.append(MemoryNode(number=number, memory_bytes=int(size[1]) * 1024, distances=distances))
    return tuple(node for node in found if node.number in allowed) or tuple(found)


# ---- who bound this process


def launcher_cpus(variable: str, environ: Mapping[str, str], root: Path = Path("/")) -> frozenset[int]:
    """Logical CPUs on which the launcher of this rank may run; empty when that cannot be told.

    The launcher is the nearest ancestor that does not belong to the rank. A script between the two does: it has
    the rank's number in its environment.

    Args:
        variable: Name of the variable in which the launcher told the rank its number.
        environ: The rank's environment.
        root: Folder that holds `proc`.
    """
    mine = f"{variable}={environ.get(variable, '')}"
    status = read_text(root / "proc/self/status")
    while (parent := status_field(status, "PPid")) not in ("", "0"):
        status = read_text(root / "proc" / parent / "status")
        if mine not in read_text(root / "proc" / parent / "environ").split("\0"):
            return parse_cpu_list(status_field(status, "Cpus_allowed_list"))
    return frozenset()
