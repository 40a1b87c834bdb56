"""Memory allocators beside the C library's: which are installed, and what preloads them.

Nothing is preloaded from here: tcmalloc and jemalloc help some machines and slow others, so somebody has to measure.
"""

from __future__ import annotations

import platform
import subprocess
import sys
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path

_LIBRARIES = {
    "tcmalloc": ("libtcmalloc_minimal.so.4", "libtcmalloc.so.4"),  # the whole one adds profilers, and threads of theirs
    "jemalloc": ("libjemalloc.so.2",),
}
"""Allocator -> its libraries, the better one first."""

# Where Debian and Ubuntu, Fedora, RHEL and SUSE, and a build from source put libraries.
_FOLDERS = ("usr/lib/{machine}-linux-gnu", "usr/lib64", "usr/lib", "usr/local/lib64", "usr/local/lib")

# jemalloc's options in PyTorch's and Intel's guides: huge arrays in arenas of their own, freed by a thread of its own.
_JEMALLOC_OPTIONS = "oversize_threshold:1,background_thread:true,metadata_thp:auto"

_ELF_MACHINES = {"x86_64": 62, "aarch64": 183}
"""Name of a machine -> number in an ELF header (elf.h: EM_X86_64, EM_AARCH64)."""


@dataclass(frozen=True, kw_only=True)
class Allocator:
    """An allocator that is installed."""

    name: str
    """tcmalloc or jemalloc."""
    library: Path

    def environment(self, environ: Mapping[str, str]) -> dict[str, str]:
        """Variables with which a process starts with this allocator; what the user set is kept.

        Args:
            environ: What the process would be started with otherwise.
        """
        before = environ.get("LD_PRELOAD", "")
        variables = {"LD_PRELOAD": f"{self.library}:{before}" if before else str(self.library)}
        if self.name == "jemalloc" and "MALLOC_CONF" not in environ:
            variables["MALLOC_CONF"] = _JEMALLOC_OPTIONS
        return variables


def find_allocators(
    root: Path = Path("/"),
    *,
    prefix: Path = Path(sys.prefix),
    machine: str = platform.machine(),
    linker_cache: str | None = None,
) -> tuple[Allocator, ...]:
    """The allocators that a process of this machine can preload, at most one library each.

    Args:
        root: Folder that holds `usr`.
        prefix: Of the Python environment: conda puts libraries into its `lib`.
        machine: Name of the processor's architecture, as `uname -m` gives it.
        linker_cache: What `ldconfig -p` prints; asked for when not given.
    """
    cached = _cached(_linker_cache() if linker_cache is None else linker_cache)
    folders = [prefix / "lib", *(root / folder.format(machine=machine) for folder in _FOLDERS)]
    found = []
    for name, libraries in _LIBRARIES.items():
        paths = (path for library in libraries for path in _paths(library, folders, cached))
        usable = next((path for path in paths if _fits(path, machine)), None)
        found += [] if usable is None else [Allocator(name=name, library=usable)]
    return tuple(found)


def preloaded_allocator(environ: Mapping[str, str]) -> str | None:
    """The allocator that LD_PRELOAD names, if it names one."""
    told = environ.get("LD_PRELOAD", "")
    return next((name for name in _LIBRARIES if f"lib{name}" in told), None)


def _paths(library: str, folders: list[Path], cached: list[tuple[str, Path]]) -> Iterator[Path]:
    """Where a library may be: the places of the distributions, then what the linker knows."""
    yield from (folder / library for folder in folders)
    yield from (path for name, path in cached if name == library)


def _fits(path: Path, machine: str) -> bool:
    """Whether a file is a 64-bit library for this machine, with a path that LD_PRELOAD can hold."""
    if set(" :") & set(str(path)):  # both separate the libraries of LD_PRELOAD
        return False
    try:
        with path.open("rb") as file:
            header = file.read(20)
    except OSError:
        return False
    # elf(5): the magic number, the class (2: 64 bits), the byte order (1: little-endian), then the machine at 18.
    return header[:6] == b"\x7fELF\x02\x01" and int.from_bytes(header[18:20], "little") == _ELF_MACHINES.get(machine)


def _cached(listing: str) -> list[tuple[str, Path]]:
    """Name and path of each library, from lines like "libjemalloc.so.2 (libc6,x86-64) => /usr/lib/libjemalloc.so.2"."""
    lines = (line.partition(" => ") for line in listing.splitlines())
    return [(before.split()[0], Path(path.strip())) for before, arrow, path in lines if arrow and before.split()]


def _linker_cache() -> str:
    for command in ("ldconfig", "/sbin/ldconfig", "/usr/sbin/ldconfig"):  # not on every user's PATH
        try:
            return subprocess.run(
                [command, "-p"], capture_output=True, text=True, errors="replace", timeout=10, check=True
            ).stdout
        except (OSError, subprocess.SubprocessError):
            continue
    return ""
