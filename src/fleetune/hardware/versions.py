"""Versions of what takes part in a run, without importing any of it."""

from __future__ import annotations

import platform
import re
from importlib import metadata


def read_versions() -> dict[str, str]:
    """Versions of Python, fleetune and what it depends on; of the optional ones those that are installed.

    A required distribution that is not installed has the version "missing".
    """
    versions = {"python": platform.python_version(), "fleetune": _version("fleetune") or "missing"}
    for requirement in _requirements():
        name = re.split(r"[^A-Za-z0-9._-]", requirement, maxsplit=1)[0]
        version = _version(name)
        if version is not None or "extra ==" not in requirement:
            versions[name] = version or "missing"
    return versions


def _requirements() -> list[str]:
    """What fleetune's own metadata asks for, without the tools of its developers."""
    try:
        requirements = metadata.requires("fleetune") or []
    except metadata.PackageNotFoundError:
        return []
    return [requirement for requirement in requirements if not re.search(r"""extra == ["']dev["']""", requirement)]


def _version(distribution: str) -> str | None:
    try:
        return metadata.version(distribution)
    except metadata.PackageNotFoundError:
        return None
