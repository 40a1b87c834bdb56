"""Whether the hosts are alike."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping

from fleetune.doctor.examine import Examination
from fleetune.doctor.finding import Finding, about, ok, warning
from fleetune.hardware.host import HostFacts

_GB = 1e9


def same_hardware(examination: Examination) -> list[Finding]:
    """Hosts that are not as most of them are: each update waits for the slowest."""
    machines = {view.name: view.machine for view in examination.views if view.machine is not None}
    if len(machines) < 2:
        return []
    told = {name: _described(machine) for name, machine in machines.items()}
    usual = {aspect: Counter(one[aspect] for one in told.values()).most_common(1)[0][0] for aspect in _ASPECTS}
    found = []
    for name, one in told.items():
        other = [f"{one[aspect]}, not {usual[aspect]}" for aspect in _ASPECTS if one[aspect] != usual[aspect]]
        if other:
            reason = f"other hardware than most hosts: {'; '.join(other)}"
            fix = "hosts of one kind, since each update waits for the slowest"
            found.append(about(warning(reason, fix), "same hardware", name))
    return found or [about(ok(f"all alike: {_in_short(next(iter(told.values())))}"), "same hardware", *machines)]


_ASPECTS = ("CPU", "instructions", "cores", "memory")


def _described(machine: HostFacts) -> dict[str, str]:
    return {
        "CPU": machine.cpu_model,
        "instructions": " ".join(machine.isa) or "no vector instructions",
        "cores": f"{machine.usable_cores} usable core{'s' if machine.usable_cores != 1 else ''}",
        "memory": f"{machine.memory_bytes / _GB:.0f} GB",
    }


def _in_short(told: Mapping[str, str]) -> str:
    return f"{told['CPU']}, {told['cores']}, {told['memory']}"
