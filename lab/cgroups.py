"""Control groups of a lab and its hosts: CPU time, and freezing; in the words of cgroup v1 or v2."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from lab.commands import LabError
from lab.processes import wait_until

PERIOD_US = 10_000
"""A host gets its share of CPU time every 10 ms: at the default of 100 ms it would compute in visible jerks."""
MIN_CORES = 0.1
"""The kernel grants no less than 1 ms a period."""
MOUNTS = Path("/proc/mounts")

Settings = list[tuple[str, str]]
"""Files of a group, and what is written to them, in order."""


@dataclass(frozen=True, kw_only=True)
class Words:
    """How one version of cgroups says what a lab asks for."""

    weight: Settings
    """For the lab's group: other work on the machine must not starve the hosts below their quotas."""
    quota: Callable[[str], Settings]
    """For a quota in microseconds a period, or "-1"."""
    frozen: tuple[Settings, str, str]
    """What freezes; the file that then tells when all processes have stopped; the line it has by then."""
    thawed: Settings


V1 = Words(
    weight=[("cpu.shares", "65536")],
    # A period is refused while the quota is too large for it.
    quota=lambda us: [("cpu.cfs_quota_us", "-1"), ("cpu.cfs_period_us", f"{PERIOD_US}"), ("cpu.cfs_quota_us", us)],
    frozen=([("freezer.state", "FROZEN")], "freezer.state", "FROZEN"),
    thawed=[("freezer.state", "THAWED")],
)
V2 = Words(
    weight=[("cpu.weight", "6400")],
    quota=lambda us: [("cpu.max", f"{us.replace('-1', 'max')} {PERIOD_US}")],
    frozen=([("cgroup.freeze", "1")], "cgroup.events", "frozen 1"),
    thawed=[("cgroup.freeze", "0")],
)


@dataclass(frozen=True, kw_only=True)
class Hierarchies:
    """Where this machine has its control groups; `None` for what it does not have."""

    words: Words
    cpu: Path | None
    freezer: Path | None

    def folders(self) -> list[Path]:
        """Each hierarchy once: of v2 there is only one."""
        return [path for path in dict.fromkeys((self.cpu, self.freezer)) if path is not None]


def find_hierarchies() -> Hierarchies:
    """Those of v1 where v1 has the CPU controller, else the one of v2."""
    fields = [line.split() for line in MOUNTS.read_text().splitlines()]
    v1 = {name: Path(f[1]) for f in fields if f[2] == "cgroup" for name in f[3].split(",")}
    v2 = next((Path(f[1]) for f in fields if f[2] == "cgroup2"), None)
    if "cpu" in v1 or v2 is None:
        return Hierarchies(words=V1, cpu=_writable(v1.get("cpu")), freezer=_writable(v1.get("freezer")))
    has_cpu = "cpu" in (v2 / "cgroup.controllers").read_text().split()
    return Hierarchies(words=V2, cpu=_writable(v2) if has_cpu else None, freezer=_writable(v2))


def _writable(folder: Path | None) -> Path | None:
    return folder if folder is not None and os.access(folder, os.W_OK) else None


@dataclass(frozen=True, kw_only=True)
class HostGroup:
    """The control groups of one host: a folder of the same name in each hierarchy."""

    hierarchies: Hierarchies
    name: str
    """The lab's group and the host's in it, such as fleetune-lab-77/node1."""

    def folders(self) -> list[Path]:
        return [hierarchy / self.name for hierarchy in self.hierarchies.folders()]

    def make(self) -> None:
        """Make the groups, the lab's too."""
        for folder in self.folders():
            folder.parent.mkdir(exist_ok=True)
        if self.hierarchies.cpu is not None:
            lab = (self.hierarchies.cpu / self.name).parent
            if self.hierarchies.words is V2:
                for above in (lab.parent, lab):  # a controller works in a group only where those above hand it on
                    _write(above, [("cgroup.subtree_control", "+cpu")])
            _write(lab, self.hierarchies.words.weight)
        for folder in self.folders():
            folder.mkdir()

    def set_quota(self, cores: float | None) -> None:
        """Grant CPU time, in cores; `None` for all there is."""
        if self.hierarchies.cpu is None:
            if cores is not None:
                raise LabError(f"no quota of {cores} cores: {no_cpu_controller()}")
            return
        if cores is not None and cores < MIN_CORES:
            raise LabError(f"a quota of {cores} cores: expected {MIN_CORES} or more, or None for no limit")
        us = "-1" if cores is None else str(round(cores * PERIOD_US))
        _write(self.hierarchies.cpu / self.name, self.hierarchies.words.quota(us))

    def freeze(self) -> None:
        """Stop every process of the host where it stands, and wait until all have stopped."""
        settings, file, line = self.hierarchies.words.frozen
        folder = self._freezer()
        _write(folder, settings)
        if not wait_until(lambda: line in (folder / file).read_text().splitlines(), timeout_s=5):
            self.thaw()
            raise LabError(f"{folder} does not freeze within 5 s")

    def thaw(self) -> None:
        _write(self._freezer(), self.hierarchies.words.thawed)

    def _freezer(self) -> Path:
        if self.hierarchies.freezer is None:
            raise LabError("hosts cannot be frozen here: this machine lets us make no group of cgroup's freezer")
        return self.hierarchies.freezer / self.name


def no_cpu_controller() -> str | None:
    """Why quotas are unavailable; `None` where they are not."""
    if find_hierarchies().cpu is not None:
        return None
    return f"no cgroup controller for CPU time that can be written to, among those of {MOUNTS}"


def remains(lab_group: str) -> list[Path]:
    """The groups there are of a lab and its hosts, inner ones first."""
    labs = [path for hierarchy in find_hierarchies().folders() if (path := hierarchy / lab_group).is_dir()]
    return [path for lab in labs for path in (*(p for p in sorted(lab.iterdir()) if p.is_dir()), lab)]


def thaw_remains(lab_group: str) -> None:
    """Frozen processes of cgroup v1 do not even end."""
    for folder in remains(lab_group):
        for file, text in find_hierarchies().words.thawed:
            if (folder / file).exists():
                _write(folder, [(file, text)])


def remove(lab_group: str) -> None:
    """Remove the groups of a lab. Its processes have ended, but the kernel may take a moment to know."""

    def removed() -> bool:
        for folder in remains(lab_group):
            with contextlib.suppress(OSError):
                folder.rmdir()
        return not remains(lab_group)

    if not wait_until(removed, timeout_s=5):
        raise LabError(f"control groups are still in use: {', '.join(map(str, remains(lab_group)))}")


def _write(folder: Path, settings: Settings) -> None:
    for file, text in settings:
        try:
            (folder / file).write_text(text)
        except OSError as error:
            raise LabError(f"{folder / file} does not take {text!r}: {error.strerror}") from error
