"""Facts of a host that is well, to be changed where a test wants it ill."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from fleetune.cluster.hosts import Host
from fleetune.doctor.examine import Clock, Examination, Place, Scope, Trouble, View
from fleetune.doctor.facts import Cpus, Disk, Facts, Kernels, Network, Nic, Plan, Remains, Software
from fleetune.doctor.meter import Attempt, Outcome, Transfer
from fleetune.hardware.host import HostFacts

SCOPE = Scope(ports=range(20000, 30000), environ={})
VERSIONS = {"python": "3.11.7", "fleetune": "0.1.0", "torch": "2.13.0", "transformers": "5.24.0", 
            "tokenizers": "0.23.3", "numpy": "2.4.6"}  # fmt: skip

FACTS = Facts(
    machine=HostFacts(
        hostname="node1", cpu_model="Intel Xeon Platinum 8375C", isa=("avx2", "avx512f", "avx512_vnni"),
        allowed_cpus=tuple(range(32)), cpu_quota=None, usable_cores=32, memory_bytes=128_000_000_000,
        memory_limit_bytes=None, kernel="6.1.0-18-amd64", python="3.11.7",
    ),
    cpus=Cpus(
        num_online=32, num_cores=16, num_nodes=2, smt=True, governor="performance", driver="intel_pstate",
        amx_granted=False, load=0.4,
    ),
    plan=Plan(processes=2, threads=8, reason="8 a rank: its physical cores"),
    memory_available_bytes=120_000_000_000,
    shm_bytes=64_000_000_000,
    disks=(
        Disk(what="cache", path="/home/u/.cache/fleetune", free_bytes=80_000_000_000),
        Disk(what="temporary files", path="/tmp", free_bytes=20_000_000_000),
    ),
    open_files=1024,
    allocators=("tcmalloc",),
    preloaded=None,
    software=Software(
        executable="/opt/venv/bin/python", versions=VERSIONS, sources="0123456789ab", unmet=(), retired=(),
    ),
    kernels=Kernels(torch="2.13.0", compiler="g++ 12.2.0 (/usr/bin/g++)", built="/home/u/.cache/fleetune/k.so"),
    network=Network(
        hostname_addresses=("10.0.0.11",), nics=(Nic(name="eth0", address="10.0.0.11", mtu=1500),),
        ssh_address="10.0.0.11", ssh_client="10.0.0.11", has_ipv6=True,
    ),
    listeners=(),
    remains=Remains(running=(), shared_memory=(), partial=()),
    variables={},
)  # fmt: skip


def changed(part: str | None = None, facts: Facts = FACTS, **changes: Any) -> Facts:
    """Facts with some fields changed, of a part such as `cpus`, or their own."""
    if part is None:
        return replace(facts, **changes)
    return replace(facts, **{part: replace(getattr(facts, part), **changes)})


def view(number: int, facts: Facts | None = FACTS, **changes: Any) -> View:
    """Host `nodeN`; the first is this machine."""
    host = Host(name=f"node{number}", is_here=number == 1)
    address = f"10.0.0.{10 + number}"
    if facts is not None:
        machine = replace(facts.machine, hostname=host.name)
        nics = (replace(facts.network.nics[0], address=address), *facts.network.nics[1:])
        network = replace(facts.network, hostname_addresses=(address,), nics=nics)
        facts = replace(facts, machine=machine, network=network)
        told = {
            "clock": Clock(offset_s=0.0, uncertainty_s=0.0002),
            "place": Place(address=address, interface="eth0", ports=(20000, 25000, 29999, 40001)),
        }
        changes = {**told, **changes}
    return View(host=host, facts=facts, **changes)


def attempt(
    source: int, target: int, outcome: Outcome = "reached", port: int = 20000, **changes: Any
) -> tuple[str, Attempt]:
    """One connection between two hosts by their numbers."""
    trip = 0.0001 if outcome == "reached" else None
    told = {"round_trip_s": trip, **changes}
    made = Attempt(target=f"node{target}", address=f"10.0.0.{10 + target}", port=port, outcome=outcome, **told)
    return f"node{source}", made


def transfer(source: int, target: int, mbit_per_s: float | None, said: str | None = None) -> tuple[str, Transfer]:
    return f"node{source}", Transfer(target=f"node{target}", mbit_per_s=mbit_per_s, said=said)


def examination(*views: View, **changes: Any) -> Examination:
    """What was seen of some hosts; of three that are well where none are given."""
    return Examination(**{"scope": SCOPE, "views": views or tuple(view(n) for n in (1, 2, 3)), **changes})


def trouble(kind: str, said: str = "", within_s: float = 10.0) -> Trouble:
    return Trouble(kind=kind, said=said, within_s=within_s)
