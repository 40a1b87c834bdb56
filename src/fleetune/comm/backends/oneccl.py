"""oneCCL's library for CPUs, from the extra [ccl]: where it is, how to build against it, and what it is told.

The library comes under Intel's licence as its user's own package; nothing of it is part of fleetune.
"""

from __future__ import annotations

import importlib.metadata
import os
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path

from fleetune.comm.backends.native import NativePart
from fleetune.errors import BackendError

INSTALL = 'pip install "fleetune[ccl]"'
_PACKAGES = ("oneccl-cpu-devel", "impi-rt")
_INFINIBAND = Path("/sys/class/infiniband")
"""Adapters of InfiniBand, RoCE and EFA are listed there."""


@dataclass(frozen=True, kw_only=True)
class OneCcl:
    """An installed oneCCL."""

    headers: Path
    """Folder that has `oneapi/ccl.hpp`."""
    archive: Path
    """The static library."""
    libfabric: Path
    """What it sends through."""
    versions: Mapping[str, str]
    """Package -> version."""

    def part(self) -> NativePart:
        """What the backend's module is made of."""
        return NativePart(
            name="ccl",
            compile_flags=("-isystem", str(self.headers)),
            link_flags=(str(self.archive), "-ldl", "-lrt", "-lpthread"),
            versions=self.versions,
        )


def find_oneccl() -> OneCcl:
    """The oneCCL that pip has installed.

    Raises:
        BackendError: It is not installed, or not whole.
    """
    files: dict[str, Path] = {}
    versions = {}
    for package in _PACKAGES:
        try:
            distribution = importlib.metadata.distribution(package)
        except importlib.metadata.PackageNotFoundError:
            raise BackendError(f"backend ccl needs {package}, which is not installed", remedy=INSTALL) from None
        versions[package] = distribution.version
        for file in distribution.files or ():
            files.setdefault(_end_of(file.as_posix()), Path(str(file.locate())).resolve())
    found = [files.get(end) for end in _WANTED]
    missing = [end for end, path in zip(_WANTED, found, strict=True) if path is None or not path.is_file()]
    if missing:
        packages = " and ".join(f"{name} {version}" for name, version in versions.items())
        raise BackendError(f"{packages} have no {' and no '.join(missing)}", remedy=f"{INSTALL} --force-reinstall")
    header, archive, libfabric = (path for path in found if path is not None)
    return OneCcl(headers=header.parents[1], archive=archive, libfabric=libfabric, versions=versions)


_WANTED = ("oneapi/ccl.hpp", "cpu/lib/libccl.a", "libfabric.so.1")


def _end_of(path: str) -> str:
    return next((end for end in _WANTED if path.endswith(f"/{end}")), path)


@dataclass(frozen=True, kw_only=True)
class Surroundings:
    """What oneCCL's settings depend on."""

    libfabric: Path
    interface: str | None
    """The network interface that leads to the other hosts; None where that is not known."""
    local_world_size: int | None
    """Ranks on this host; None where that is not known."""
    world_size: int
    cores: frozenset[int]
    """On which this process may run."""
    num_cores: int
    """Of the host."""
    has_fast_network: bool
    """InfiniBand or the like, which libfabric then chooses."""


@dataclass(frozen=True, kw_only=True)
class Setting:
    """A variable of oneCCL or libfabric, and what it should be."""

    name: str
    why: str
    value: Callable[[Surroundings], str | None]
    """None: it stays as it is."""


def _if_several(value: str) -> Callable[[Surroundings], str | None]:
    return lambda there: None if there.local_world_size == 1 else value


def _hierarchy(there: Surroundings) -> str | None:
    several = there.local_world_size is not None and 1 < there.local_world_size < there.world_size
    return "2d" if several else None


def _worker(there: Surroundings) -> str | None:
    return str(max(there.cores)) if there.cores and len(there.cores) < there.num_cores else None


def _always(value: str) -> Callable[[Surroundings], str]:
    return lambda there: value


def _row(name: str, value: Callable[[Surroundings], str | None], why: str) -> Setting:
    return Setting(name=name, value=value, why=why)


# fmt: off
SETTINGS = (
    _row("CCL_ATL_TRANSPORT", _always("ofi"), "libfabric carries, so no MPI launcher is needed"),
    _row("CCL_PROCESS_LAUNCHER", _always("none"), "ranks meet in torch's store"),
    _row("CCL_OFI_LIBRARY_PATH", lambda there: str(there.libfabric), "the libfabric that impi-rt brings"),
    _row("FI_PROVIDER_PATH", lambda there: str(there.libfabric.parent), "and its parts"),
    _row("FI_PROVIDER", lambda there: None if there.has_fast_network else "tcp", "there is no faster network"),
    _row("FI_TCP_IFACE", lambda there: there.interface, "the interface that leads to the other ranks"),
    _row("CCL_KVS_IFACE", lambda there: there.interface, "the interface that leads to the other ranks"),
    _row("CCL_LOG_LEVEL", _always("error"), "its warnings tell that these settings were made"),
    _row("CCL_YIELD", _always("sched_yield"), "its thread gives its core to others in place of spinning"),
    _row("CCL_WORKER_AFFINITY", _worker, "its thread stays on the cores of this rank"),
    _row("CCL_ATL_SHM", _if_several("1"), "ranks of a host share memory"),
    _row("CCL_ALLREDUCE", _hierarchy, "within hosts first, so that each link is crossed once"),
)
# fmt: on


def surroundings(found: OneCcl, interface: str | None, world_size: int, environ: Mapping[str, str]) -> Surroundings:
    """What oneCCL's settings depend on, here."""
    local = environ.get("LOCAL_WORLD_SIZE", "")
    return Surroundings(
        libfabric=found.libfabric,
        interface=interface,
        local_world_size=int(local) if local.isdigit() else None,
        world_size=world_size,
        cores=frozenset(os.sched_getaffinity(0)),
        num_cores=os.cpu_count() or 1,
        has_fast_network=_INFINIBAND.is_dir() and any(_INFINIBAND.iterdir()),
    )


@dataclass(frozen=True, kw_only=True)
class Chosen:
    """A variable as it will be."""

    name: str
    value: str
    why: str
    is_users: bool
    """It was set already."""

    def __str__(self) -> str:
        return f"{self.name}={self.value} ({'as it was set' if self.is_users else self.why})"


def choose_settings(there: Surroundings, environ: Mapping[str, str]) -> tuple[Chosen, ...]:
    """All variables that have a value, be it the user's, which wins, or ours."""
    chosen = []
    for setting in SETTINGS:
        users = environ.get(setting.name)
        value = setting.value(there) if users is None else users
        if value is not None:
            chosen.append(Chosen(name=setting.name, value=value, why=setting.why, is_users=users is not None))
    return tuple(chosen)
