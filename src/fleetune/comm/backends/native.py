"""The C++ part of a backend: what it is built from, and the module that results, built once a host and cached."""

from __future__ import annotations

import importlib.machinery
import importlib.util
import os
import sys
import sysconfig
import threading
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from types import ModuleType

from fleetune.errors import KernelError
from fleetune.kernels.build import Build, Recipe, Say, build_library, read_sources
from fleetune.kernels.library import cache_folder

BUILD = "fleetune build-kernels --backends"
SOURCES = Path(__file__).parent / "csrc"
_lock = threading.Lock()
_loaded: dict[str, ModuleType] = {}


@dataclass(frozen=True, kw_only=True)
class NativePart:
    """What a backend's module is made of."""

    name: str
    """Of the backend, and of the folder of `csrc` that is its own."""
    compile_flags: tuple[str, ...] = ()
    link_flags: tuple[str, ...] = ()
    versions: Mapping[str, str] = field(default_factory=dict)
    """Of what it is built against: others are another build."""

    @property
    def module_name(self) -> str:
        """The name under which the module initialises itself."""
        return f"fleetune_{self.name}"

    def recipe(self) -> Recipe:
        """How it is built.

        Raises:
            KernelError: Python's headers are missing.
        """
        return Recipe(
            name=f"the parts of backend {self.name}",
            folder="backends",
            usual_time="a minute or two",
            command=BUILD,
            # -O1: it is torch's headers that take the time, and sums ask for more themselves.
            compile_flags=("-O1", "-fvisibility=hidden", "-isystem", str(_python_headers()), *self.compile_flags),
            # Python's own functions stay open: they are the interpreter's that loads the module.
            link_flags=("-ltorch_python", *self.link_flags, "-Wl,--exclude-libs,ALL", "-Wl,-z,undefs"),
        )

    def sources(self) -> dict[str, bytes]:
        """What all backends share, and this one's own."""
        content = read_sources(SOURCES)
        mine = {path: data for path, data in content.items() if "/" not in path or path.startswith(f"{self.name}/")}
        told = "".join(f"// {name} {version}\n" for name, version in sorted(self.versions.items()))
        return {**mine, "versions.h": told.encode()}


def _python_headers() -> Path:
    folder = Path(sysconfig.get_paths()["include"])
    if not (folder / "Python.h").is_file():
        raise KernelError(
            f"Python's headers are missing from {folder}",
            remedy=f"install them (Debian, Ubuntu: apt-get install python3-dev), then: {BUILD}",
        )
    return folder


def build_native(part: NativePart, say: Say, *, retry: bool = False, force: bool = False) -> Build:
    """Build a backend's module, unless it is there.

    Args:
        part: What it is made of.
        say: Told before and after compiling.
        retry: Compile even if that failed before.
        force: Compile even if it is there.

    Raises:
        KernelError: See `build_library`.
    """
    return build_library(
        part.recipe(), part.sources(), cache_folder(), say=say, environ=os.environ, retry=retry, force=force
    )  # fmt: skip


def load_native(part: NativePart, say: Say) -> ModuleType:
    """The module of a backend, built first where that was not done yet; once per process.

    Raises:
        KernelError: It cannot be built or loaded.
    """
    with _lock:
        if part.name not in _loaded:
            _loaded[part.name] = import_library(part, build_native(part, say).library)
        return _loaded[part.name]


def import_library(part: NativePart, library: Path) -> ModuleType:
    """Import the module that a library is.

    Raises:
        KernelError: It cannot be loaded.
    """
    loader = importlib.machinery.ExtensionFileLoader(part.module_name, str(library))
    spec = importlib.util.spec_from_file_location(part.module_name, library, loader=loader)
    assert spec is not None
    try:
        module = importlib.util.module_from_spec(spec)
        loader.exec_module(module)
    except ImportError as error:
        raise KernelError(
            f"the module of backend {part.name}, {library}, cannot be loaded ({error})",
            remedy=f"{BUILD} --force",
        ) from error
    sys.modules[part.module_name] = module
    return module
