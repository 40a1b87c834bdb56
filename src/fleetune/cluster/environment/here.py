"""This process's Python environment: what other hosts are given, and what they must have for it."""

from __future__ import annotations

import json
import os
import platform
import socket
import subprocess
import sys
import sysconfig
from collections.abc import Iterator
from dataclasses import dataclass
from importlib import metadata
from pathlib import Path
from typing import Literal

from fleetune.errors import ConfigError, LaunchError

VERSIONS = "import importlib, platform, sys; print(platform.python_version(), *(importlib.import_module(name).__version__ for name in sys.argv[1:]))"  # noqa: E501
"""Program that tells the version of Python and of the modules that are its arguments, by importing them. Without
quotes and line ends, so that it can be read in a command that is shown."""


@dataclass(frozen=True, kw_only=True)
class Environment:
    """A virtual or conda environment."""

    prefix: Path
    kind: Literal["venv", "conda"]
    base: Path | None
    """The interpreter outside that a virtual environment leads to: every host must have it. None for conda."""
    site_packages: Path
    """Relative to the prefix."""
    python: str
    """Version."""
    modules: tuple[str, ...]
    """Those that are imported on a host before its environment counts as complete."""
    versions: str
    """What the program `VERSIONS` tells of them here."""
    machine: str
    """Architecture, as `uname -m` has it."""
    glibc: tuple[int, ...]
    package: Path | None
    """fleetune's own folder, where it is not in `site_packages` but in a checkout; None else."""
    head: str
    """What tells this machine from others."""
    warnings: tuple[str, ...] = ()

    def title(self) -> str:
        """One line for people."""
        told = zip(("Python", *self.modules), self.versions.split(), strict=False)
        return f"{self.prefix} ({self.kind}, {', '.join(f'{name} {version}' for name, version in told)})"


def read_environment(prefix: Path | None = None) -> Environment:
    """The environment that this process runs in.

    Raises:
        ConfigError: It is none that can be sent.
    """
    prefix = Path(sys.prefix) if prefix is None else prefix
    kind = _kind(prefix)
    modules = ("fleetune", *(name for name in ("torch",) if _is_installed(name)))
    package = Path(__file__).resolve().parents[2]
    is_inside = package.is_relative_to(prefix.resolve())
    return Environment(
        prefix=prefix,
        kind=kind,
        base=_base(prefix) if kind == "venv" else None,
        site_packages=Path(sysconfig.get_path("purelib")).relative_to(prefix),
        python=platform.python_version(),
        modules=modules,
        versions=_versions(modules),
        machine=os.uname().machine,
        glibc=_glibc(os.confstr("CS_GNU_LIBC_VERSION") if hasattr(os, "confstr") else None),
        package=None if is_inside else package,
        head=_machine(),
        warnings=tuple(_warnings(prefix, kind)),
    )


def _kind(prefix: Path) -> Literal["venv", "conda"]:
    if (prefix / "pyvenv.cfg").is_file():
        return "venv"
    if (prefix / "conda-meta").is_dir():
        return "conda"
    raise ConfigError(
        f"fleetune runs in {prefix}, which is neither a virtual nor a conda environment, and cannot be sent to other "
        "hosts: `python3 -m venv FOLDER`, install fleetune there, and run FOLDER/bin/fleetune setup"
    )


def _base(prefix: Path) -> Path:
    """Where the links of `bin/python` leave the environment; of one that was made with copies, its `home`."""
    path = prefix / "bin" / "python"
    while path.is_symlink():
        path = Path(os.path.normpath(path.parent / path.readlink()))
        if not path.is_relative_to(prefix):
            return path
    settings = dict(_settings(prefix / "pyvenv.cfg"))
    name = f"python{sys.version_info.major}.{sys.version_info.minor}"
    return Path(settings.get("home", "/usr/bin")) / name


def _settings(path: Path) -> Iterator[tuple[str, str]]:
    for line in path.read_text(encoding="utf-8").splitlines():
        name, equals, value = line.partition("=")
        if equals:
            yield name.strip(), value.strip()


def _is_installed(name: str) -> bool:
    try:
        metadata.version(name)
    except metadata.PackageNotFoundError:
        return False
    return True


def _versions(modules: tuple[str, ...]) -> str:
    """Asked of another process: this one is not to load torch."""
    ran = subprocess.run([sys.executable, "-B", "-c", VERSIONS, *modules], capture_output=True, text=True)
    if ran.returncode != 0:
        last = (ran.stderr.strip().splitlines() or ["no message"])[-1]
        raise LaunchError(f"this environment is not complete, so it is not sent: importing {modules} says {last!r}")
    return ran.stdout.strip()


def _glibc(told: str | None) -> tuple[int, ...]:
    """`glibc 2.36` -> (2, 36); () where there is none."""
    return tuple(int(part) for part in (told or "").rpartition(" ")[2].split(".") if part.isdecimal())


def _machine() -> str:
    number = Path("/etc/machine-id")
    return f"{socket.gethostname()} {number.read_text().strip() if number.is_file() else ''}".strip()


def _warnings(prefix: Path, kind: str) -> Iterator[str]:
    settings = dict(_settings(prefix / "pyvenv.cfg")) if kind == "venv" else {}
    if settings.get("include-system-site-packages", "").lower() == "true":
        yield "packages of the system's Python, which this environment also uses, are not sent: hosts need their own"
    for distribution in metadata.distributions():
        name = distribution.metadata["Name"]
        origin = json.loads(distribution.read_text("direct_url.json") or "{}")
        if origin.get("dir_info", {}).get("editable") and name != "fleetune":
            yield (
                f"{name} is installed from {origin['url']} with -e, and that folder is not sent: "
                "install it without -e, or copy the folder to the same place on every host"
            )
