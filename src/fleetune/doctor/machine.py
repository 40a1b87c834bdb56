"""The facts of this host, read without torch. What cannot be told is None, and never an error."""

from __future__ import annotations

import contextlib
import ctypes
import hashlib
import json
import platform
import re
import resource
import shutil
import socket
import subprocess
import sys
import tempfile
from collections.abc import Mapping
from importlib import metadata
from pathlib import Path

import psutil

from fleetune.cluster.job import forwarded, shown
from fleetune.cluster.network import interfaces
from fleetune.cluster.rank import is_loopback
from fleetune.doctor.facts import Cpus, Disk, Facts, Kernels, Network, Nic, Plan, Software
from fleetune.doctor.processes import read_listeners, read_remains
from fleetune.errors import FleetuneError
from fleetune.hardware.allocators import find_allocators, preloaded_allocator
from fleetune.hardware.host import read_host, read_text
from fleetune.hardware.pinning import plan_this_host
from fleetune.hardware.topology import Topology, read_topology
from fleetune.hardware.versions import read_versions

# x86-64's arch_prctl, its question for the features that a process may be granted, and the number of AMX's tiles among
# them (arch/x86/include/uapi/asm/prctl.h, asm/fpu/types.h).
_ARCH_PRCTL, _GET_SUPPORTED, _TILE_DATA = 158, 0x1021, 18

_RETIRED = ("intel_extension_for_pytorch", "oneccl_bind_pt", "torch_ccl", "oneccl_bindings_for_pytorch")


def read_facts(*, cache_dir: Path, ports: range, environ: Mapping[str, str], patience_s: float = 120) -> Facts:
    """The facts of this host.

    Args:
        cache_dir: Where tokens and kernels are kept.
        ports: Those that rank 0 may listen on.
        environ: Of a run on this host.
        patience_s: Longest wait for `import torch`.
    """
    asked = _ask_kernels(environ)  # takes longest, so it goes on beside the rest
    machine, topology = read_host(), read_topology()
    shm = Path("/dev/shm")
    facts = {
        "machine": machine,
        "cpus": read_cpus(topology),
        "plan": _read_plan(environ),
        "memory_available_bytes": int(psutil.virtual_memory().available),
        "shm_bytes": shutil.disk_usage(shm).total if shm.is_dir() else None,
        "disks": (_read_disk("cache", cache_dir), _read_disk("temporary files", Path(tempfile.gettempdir()))),
        "open_files": resource.getrlimit(resource.RLIMIT_NOFILE)[0],
        "allocators": tuple(allocator.name for allocator in find_allocators()),
        "preloaded": preloaded_allocator(environ),
        "software": read_software(),
        "network": read_network(environ),
        "listeners": read_listeners(ports),
        "remains": read_remains(cache_dir),
        "variables": shown(forwarded(environ)),
    }
    return Facts(**facts, kernels=_kernels_told(asked, patience_s))  # type: ignore[arg-type]


# ---- CPUs


def read_cpus(topology: Topology, root: Path = Path("/")) -> Cpus:
    """How the CPUs are set up.

    Args:
        topology: What the process may use of them.
        root: Folder that holds `proc` and `sys`.
    """
    folder = root / "sys/devices/system/cpu"
    smt = read_text(folder / "smt/active").strip()
    frequency = folder / f"cpu{topology.allowed_cpus[0]}/cpufreq"
    load = read_text(root / "proc/loadavg").split()
    return Cpus(
        num_online=topology.num_cpus,
        num_cores=len(topology.cores),
        num_nodes=len(topology.memory_nodes),
        smt={"1": True, "0": False}.get(smt),
        governor=read_text(frequency / "scaling_governor").strip() or None,
        driver=read_text(frequency / "scaling_driver").strip() or None,
        amx_granted=_amx_granted(),
        load=float(load[0]) if load else 0.0,
    )


def _amx_granted() -> bool | None:
    if platform.machine() != "x86_64":
        return None
    features = ctypes.c_uint64(0)
    status = ctypes.CDLL(None).syscall(_ARCH_PRCTL, _GET_SUPPORTED, ctypes.byref(features))
    return status == 0 and bool(features.value >> _TILE_DATA & 1)


def _read_plan(environ: Mapping[str, str]) -> Plan:
    told = environ.get("OMP_NUM_THREADS") or None
    try:
        plan = plan_this_host(environ, processes=None, threads=None)
    except FleetuneError as error:
        return Plan(processes=0, threads=0, reason="", problem=str(error), omp_num_threads=told)
    reason = plan.reasons.get("threads", "")
    return Plan(processes=len(plan.parts), threads=plan.parts[0].threads, reason=reason, omp_num_threads=told)


# ---- disks


def _read_disk(what: str, folder: Path) -> Disk:
    """Room in a folder, or in the nearest one that is there, and whether files can be made in it."""
    place = next((path for path in (folder, *folder.parents) if path.is_dir()), Path("/"))
    problem = None
    try:
        with tempfile.TemporaryFile(dir=place):
            pass
    except OSError as error:
        problem = error.strerror or str(error)
    return Disk(what=what, path=str(folder), free_bytes=shutil.disk_usage(place).free, problem=problem)


# ---- software


def read_software() -> Software:
    """What is installed, by its metadata: nothing of it is imported."""
    folder = Path(__file__).parents[1]
    digest = hashlib.sha256()
    for path in sorted(path for path in folder.rglob("*") if path.suffix in (".py", ".cpp", ".h")):
        digest.update(f"{path.relative_to(folder).as_posix()}\0".encode() + path.read_bytes())
    return Software(
        executable=sys.executable, versions=read_versions(), sources=digest.hexdigest()[:12],
        unmet=_unmet_requirements(), retired=tuple(_retired_extensions()),
    )  # fmt: skip


def _unmet_requirements() -> tuple[str, ...]:
    """As `pip check` would tell them, of fleetune's own."""
    try:
        from packaging.requirements import Requirement

        requirements = [Requirement(text) for text in metadata.requires("fleetune") or []]
    except (ImportError, metadata.PackageNotFoundError):
        return ()
    unmet = []
    for requirement in requirements:
        if requirement.marker is None or requirement.marker.evaluate({"extra": ""}):
            with contextlib.suppress(metadata.PackageNotFoundError):  # `read_versions` calls it missing
                version = metadata.version(requirement.name)
                if not requirement.specifier.contains(version, prereleases=True):
                    unmet.append(f"{requirement.name}{requirement.specifier} is needed, {version} is installed")
    return tuple(unmet)


def _retired_extensions() -> list[str]:
    found = []
    for name in _RETIRED:
        with contextlib.suppress(metadata.PackageNotFoundError):
            found.append(f"{name} {metadata.version(name)}")
    return found


# ---- torch and the kernels


def _ask_kernels(environ: Mapping[str, str]) -> subprocess.Popen[str]:
    return subprocess.Popen(
        [sys.executable, "-m", "fleetune.kernels.status"], stdin=subprocess.DEVNULL, stdout=subprocess.PIPE,
        stderr=subprocess.PIPE, text=True, env=dict(environ),
    )  # fmt: skip


def _kernels_told(asked: subprocess.Popen[str], patience_s: float) -> Kernels:
    try:
        out, err = asked.communicate(timeout=patience_s)
        return Kernels(**json.loads(out.splitlines()[-1]))
    except subprocess.TimeoutExpired:
        asked.kill()
        asked.communicate()
        return Kernels(torch=None, waited_s=patience_s)
    except (ValueError, TypeError, IndexError):
        last = err.strip().splitlines()[-1:] or [f"it ended with status {asked.returncode}"]
        return Kernels(torch=None, problem=last[0])


# ---- network


def read_network(environ: Mapping[str, str]) -> Network:
    """Names and addresses of this host."""
    told = environ.get("SSH_CONNECTION", "").split()  # client's address and port, then the server's
    mtus = {name: facts.mtu for name, facts in psutil.net_if_stats().items()}
    return Network(
        hostname_addresses=_addresses_of(socket.gethostname()),
        nics=tuple(
            Nic(name=one.name, address=one.address, mtu=mtus.get(one.name, 0))
            for one in interfaces()
            if not is_loopback(one.address)
        ),
        ssh_address=_plain(told[2]) if len(told) == 4 else None,
        ssh_client=_plain(told[0]) if len(told) == 4 else None,
        has_ipv6=bool(read_text(Path("/proc/net/if_inet6")).strip()),
    )


def _plain(address: str) -> str:
    """An IPv4 address that came in an IPv6 socket."""
    return re.sub("^::ffff:", "", address)


def _addresses_of(name: str) -> tuple[str, ...]:
    try:
        found = socket.getaddrinfo(name, None, type=socket.SOCK_STREAM)
    except (OSError, UnicodeError):
        return ()
    return tuple(dict.fromkeys(str(entry[4][0]) for entry in found))
