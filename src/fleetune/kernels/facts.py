"""What is known of a finished build: a small file beside the library.

It tells a damaged library before it is loaded, which would end the process (SIGBUS), and it lets a host that has no
compiler, and so cannot tell a build's name, find one that was made ahead.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from pathlib import Path

import torch

from fleetune.hardware.host import cpu_flags

LIBRARY, FACTS_FILE = "libfleetune.so", "build.json"
MEASURED = "products-*.json"
"""Files beside the library with what was measured of it, see `fleetune.kernels.contest`."""


@dataclass(frozen=True, kw_only=True)
class BuildFacts:
    """How a library was made, and what it is."""

    sources: str
    """See `sources_digest`."""
    torch: str
    """Version."""
    cpu_flags: tuple[str, ...]
    """What the CPU that it was made for can do."""
    compiler: str
    """Its version, and how it is called."""
    flags: str
    """Those that decide about the code."""
    sha256: str
    """Of the library."""

    def fits(self, sources: str) -> bool:
        """Whether the library is of these sources, for this torch, and for a CPU that can do no more than this one."""
        has_cpu = bool(self.cpu_flags) and set(self.cpu_flags) <= set(cpu_flags())
        return has_cpu and self.sources == sources and self.torch == torch.__version__


def sources_digest(sources: Mapping[str, bytes]) -> str:
    """SHA-256, in hex, of the C++ files.

    Args:
        sources: Path in the folder of the sources -> content, headers too.
    """
    content = {name: hashlib.sha256(data).hexdigest() for name, data in sources.items()}
    return hashlib.sha256(json.dumps(content, sort_keys=True).encode()).hexdigest()


def write_facts(folder: Path, *, sources: str, compiler: str, flags: str) -> BuildFacts:
    """Describe the library in a folder, in a file beside it.

    Raises:
        OSError: The library cannot be read, or the file not be written.
    """
    facts = BuildFacts(
        sources=sources, torch=str(torch.__version__), cpu_flags=cpu_flags(), compiler=compiler, flags=flags,
        sha256=_sha256(folder / LIBRARY),
    )  # fmt: skip
    (folder / FACTS_FILE).write_text(json.dumps(asdict(facts), indent=2) + "\n", encoding="utf-8")
    return facts


def read_facts(folder: Path) -> BuildFacts | None:
    """The facts of a build; None where there is none, or its library is not the one they are about."""
    try:
        told = json.loads((folder / FACTS_FILE).read_text(encoding="utf-8"))
        facts = BuildFacts(**{**told, "cpu_flags": tuple(told["cpu_flags"])})
        return facts if facts.sha256 == _sha256(folder / LIBRARY) else None
    except (OSError, ValueError, TypeError, KeyError):
        return None


def _sha256(file: Path) -> str:
    return hashlib.sha256(file.read_bytes()).hexdigest()
