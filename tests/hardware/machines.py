"""Machines as text files: what /sys and /proc show on them, written into a folder.

CPU numbering, siblings, nodes and caches are those that the machines' makers and users publish (`lscpu`,
`numactl --hardware`); see the docstring of each machine.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path


@dataclass(frozen=True, kw_only=True)
class Cpu:
    """One logical CPU, as its folder below /sys/devices/system/cpu shows it."""

    number: int
    siblings: str
    """thread_siblings_list; empty: the file is missing."""
    core_id: int
    l3: str = ""
    """shared_cpu_list of the L3 cache; empty: it has none."""
    package: int = 0
    node: int | None = 0
    """The node that its folder links to; None: no link."""


@dataclass(frozen=True, kw_only=True)
class Node:
    """One NUMA node, as its folder below /sys/devices/system/node shows it."""

    cpus: str
    memory_kb: int
    distances: str = "10"


@dataclass(frozen=True, kw_only=True)
class Machine:
    cpus: Sequence[Cpu]
    nodes: Mapping[int, Node] = field(default_factory=dict)
    """Empty: the node folder is missing."""
    allowed: str = ""
    """Cpus_allowed_list; empty: all."""
    memory_allowed: str = ""
    """Mems_allowed_list; empty: all nodes."""

    def write(self, root: Path, **more: str) -> Path:
        """Write the files below a root folder; `more` are further ones by path."""
        for path, text in {**self._cpu_files(), **self._node_files(), **self._process_files(), **more}.items():
            (root / path).parent.mkdir(parents=True, exist_ok=True)
            (root / path).write_text(text)
        return root

    def _cpu_files(self) -> dict[str, str]:
        files = {"sys/devices/system/cpu/online": f"0-{len(self.cpus) - 1}\n"}
        for cpu in self.cpus:
            folder = f"sys/devices/system/cpu/cpu{cpu.number}"
            files[f"{folder}/topology/physical_package_id"] = f"{cpu.package}\n"
            files[f"{folder}/topology/core_id"] = f"{cpu.core_id}\n"
            files |= {f"{folder}/topology/thread_siblings_list": f"{cpu.siblings}\n"} if cpu.siblings else {}
            files |= {} if cpu.node is None else {f"{folder}/node{cpu.node}/.link": ""}
            files |= {f"{folder}/online": "1\n"} if cpu.number else {}
            caches = [("1", "Data", cpu.siblings), ("1", "Instruction", cpu.siblings), ("2", "Unified", cpu.siblings)]
            for index, (level, kind, shared) in enumerate([*caches, *([("3", "Unified", cpu.l3)] if cpu.l3 else [])]):
                files[f"{folder}/cache/index{index}/level"] = f"{level}\n"
                files[f"{folder}/cache/index{index}/type"] = f"{kind}\n"
                files[f"{folder}/cache/index{index}/shared_cpu_list"] = f"{shared or cpu.number}\n"
        return files

    def _node_files(self) -> dict[str, str]:
        files = {}
        for number, node in self.nodes.items():
            folder = f"sys/devices/system/node/node{number}"
            files[f"{folder}/cpulist"] = f"{node.cpus}\n"
            files[f"{folder}/distance"] = f"{node.distances}\n"
            files[f"{folder}/meminfo"] = (
                f"Node {number} MemTotal:       {node.memory_kb} kB\nNode {number} MemFree:  1 kB\n"
            )
        return files

    def _process_files(self) -> dict[str, str]:
        allowed = self.allowed or f"0-{len(self.cpus) - 1}"
        memory = self.memory_allowed or ",".join(map(str, self.nodes)) or "0"
        masks = f"Cpus_allowed_list:\t{allowed}\nMems_allowed_list:\t{memory}\n"
        return {
            "proc/self/status": f"Name:\tpython\nPPid:\t1\n{masks}",
            "proc/sys/kernel/hostname": "node1\n",
        }


def offset_cpus(cores: int, *, offset: int, l3: str, **more: int) -> list[Cpu]:
    """One socket whose second siblings come after all first ones: 0 and `offset` are one core."""
    return [
        Cpu(number=core + second, siblings=f"{core},{core + offset}", core_id=core, l3=l3, **more)
        for second in (0, offset)
        for core in range(cores)
    ]


GIB_KB = 1 << 20

C5_9XLARGE = Machine(
    cpus=offset_cpus(18, offset=18, l3="0-35"),
    nodes={0: Node(cpus="0-35", memory_kb=72 * GIB_KB)},
)
"""Xeon Platinum 8124M: one socket of 18 cores, siblings (0,18), 72 GiB."""

C6I_16XLARGE = Machine(
    cpus=offset_cpus(32, offset=32, l3="0-63"),
    nodes={0: Node(cpus="0-63", memory_kb=128 * GIB_KB)},
)
"""Xeon Platinum 8375C: one socket of 32 cores, siblings (0,32), 128 GiB."""

R7IZ_METAL_16XL = Machine(
    cpus=offset_cpus(32, offset=32, l3="0-63"),
    nodes={0: Node(cpus="0-63", memory_kb=512 * GIB_KB)},
)
"""Xeon Gold 6455B (Sapphire Rapids): one socket of 32 cores without sub-NUMA clusters, 512 GiB. As bare metal Linux
numbers it, the second siblings after all cores."""


def _snc() -> Machine:
    node_cpus = (
        "0-2,5,6,10-12,15,16,40-42,45,46,50-52,55,56",
        "3,4,7-9,13,14,17-19,43,44,47-49,53,54,57-59",
        "20-22,25,26,30-32,35,36,60-62,65,66,70-72,75,76",
        "23,24,27-29,33,34,37-39,63,64,67-69,73,74,77-79",
    )
    first_cluster = {0, 1, 2, 5, 6, 10, 11, 12, 15, 16}  # of a socket's 20 cores
    cpus = [
        Cpu(
            number=second + socket * 20 + core,
            siblings=f"{socket * 20 + core},{socket * 20 + core + 40}",
            core_id=core,
            package=socket,
            l3="0-19,40-59" if socket == 0 else "20-39,60-79",
            node=2 * socket + (core not in first_cluster),
        )
        for second in (0, 40)
        for socket in (0, 1)
        for core in range(20)
    ]
    distances = ("10 11 21 21", "11 10 21 21", "21 21 10 11", "21 21 11 10")
    return Machine(
        cpus=cpus,
        nodes={
            number: Node(cpus=listed, memory_kb=48 * GIB_KB, distances=distances[number])
            for number, listed in enumerate(node_cpus)
        },
    )


TWO_SOCKETS_SNC2 = _snc()
"""2 x Xeon Gold 6148 with sub-NUMA clusters: 20 cores a socket, 10 a node, whose numbers are not in a row."""

TWO_SOCKETS_NO_SMT = Machine(
    cpus=[
        Cpu(
            number=number,
            siblings=f"{number}",
            core_id=number // 2,
            package=number % 2,
            node=number % 2,
            l3=",".join(map(str, range(number % 2, 24, 2))),
        )
        for number in range(24)
    ],
    nodes={
        0: Node(cpus=",".join(map(str, range(0, 24, 2))), memory_kb=96 * GIB_KB, distances="10 21"),
        1: Node(cpus=",".join(map(str, range(1, 24, 2))), memory_kb=96 * GIB_KB, distances="21 10"),
    },
)
"""2 x Xeon Gold 6126, SMT off, in a Dell PowerEdge: 12 cores a socket, even numbers on the first, odd on the second."""


def _ccx(core: int) -> str:
    first = core // 4 * 4
    return f"{first}-{first + 3},{first + 32}-{first + 35}"


EPYC_NPS4 = Machine(
    cpus=[
        Cpu(
            number=core + second,
            siblings=f"{core},{core + 32}",
            core_id=core,
            node=core // 8,
            l3=_ccx(core),
        )
        for second in (0, 32)
        for core in range(32)
    ],
    nodes={
        node: Node(
            cpus=f"{8 * node}-{8 * node + 7},{8 * node + 32}-{8 * node + 39}",
            memory_kb=64 * GIB_KB,
            distances=" ".join("10" if other == node else "12" for other in range(4)),
        )
        for node in range(4)
    },
)
"""AMD EPYC 7543P with four nodes a socket: 32 cores, each L3 of 4 cores, two of them a node; siblings (0,32)."""

C7G_16XLARGE = Machine(
    cpus=[Cpu(number=n, siblings=f"{n}", core_id=n, l3="0-63") for n in range(64)],
    nodes={0: Node(cpus="0-63", memory_kb=128 * GIB_KB)},
)
"""Graviton3: 64 cores without SMT, one socket, 128 GiB."""

GRAVITON_BARE = Machine(
    cpus=[Cpu(number=n, siblings="", core_id=-1, package=-1, node=None) for n in range(16)],
)
"""An Arm instance whose firmware has no tables of cores (ids of -1), in a container that shows no NUMA nodes."""

ADJACENT_SMT = Machine(
    cpus=[
        Cpu(number=n, siblings=f"{n // 2 * 2}-{n // 2 * 2 + 1}", core_id=n // 2, l3="0-15" if n < 16 else "16-31")
        for n in range(32)
    ],
    nodes={0: Node(cpus="0-31", memory_kb=128 * GIB_KB)},
    allowed="8-15",
)
"""An Azure D32as_v4 (EPYC 7452) as KVM and Hyper-V number it, siblings (0,1); a cpuset leaves 8-15."""

TWO_SOCKETS_C6I = Machine(
    cpus=[
        Cpu(
            number=socket * 32 + core + second,
            siblings=f"{socket * 32 + core},{socket * 32 + core + 64}",
            core_id=core,
            package=socket,
            node=socket,
            l3="0-31,64-95" if socket == 0 else "32-63,96-127",
        )
        for second in (0, 64)
        for socket in (0, 1)
        for core in range(32)
    ],
    nodes={
        0: Node(cpus="0-31,64-95", memory_kb=128 * GIB_KB, distances="10 20"),
        1: Node(cpus="32-63,96-127", memory_kb=128 * GIB_KB, distances="20 10"),
    },
)
"""c6i.32xlarge: 2 x Xeon Platinum 8375C, 32 cores a socket, siblings (0,64)."""

CXL = Machine(
    cpus=offset_cpus(32, offset=32, l3="0-63"),
    nodes={
        0: Node(cpus="0-63", memory_kb=128 * GIB_KB, distances="10 14"),
        1: Node(cpus="", memory_kb=256 * GIB_KB, distances="14 10"),
    },
)
"""One socket with a CXL expander: its memory is a node without CPUs."""
