"""Which kernels this process computes with: the compiled ones, or the same in plain PyTorch.

The environment variable FLEETUNE_KERNELS decides:

    not set      the compiled ones; where they cannot be had, plain PyTorch and one line that says why
    compiled     the compiled ones; where they cannot be had, an error
    reference    plain PyTorch, nothing is compiled or loaded
"""

from __future__ import annotations

import contextlib
import os
import sys
import threading
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from fleetune.config import RunConfig
from fleetune.errors import ConfigError, FleetuneError, KernelError
from fleetune.kernels import build
from fleetune.kernels.build import Say, build_kernels
from fleetune.kernels.openmp import check_openmp

VARIABLE = "FLEETUNE_KERNELS"
_CHOICES = ("compiled", "reference")


@dataclass(frozen=True, kw_only=True)
class Kernels:
    """What a process computes with."""

    compiled: bool
    reason: str | None
    """Why plain PyTorch is used, in one line; None with the compiled kernels."""
    path: Path | None
    """The library; None with plain PyTorch."""

    @property
    def name(self) -> str:
        """What to call them in a plan or a record."""
        return "compiled" if self.compiled else "plain PyTorch"


def _tell(line: str) -> None:
    print(line, file=sys.stderr, flush=True)


_lock = threading.Lock()
_loaded: Kernels | None = None
_num_using_reference = 0


def cache_folder() -> Path:
    """Where compiled kernels are kept: the user's cache, for all runs, wherever one keeps its tokens."""
    return RunConfig.cache_dir.expanduser()


def load_kernels(say: Say = _tell) -> Kernels:
    """Load the kernels, compiling them first where that was not done yet. Once per process: later calls do nothing.

    Args:
        say: Told before and after compiling, and why plain PyTorch is used where that was not asked for.

    Raises:
        ConfigError: FLEETUNE_KERNELS is neither of its values.
        KernelError: It is `compiled`, and they cannot be had.
    """
    global _loaded
    if _loaded is None:
        with _lock:
            if _loaded is None:
                _loaded = choose_kernels(build.SOURCES, cache_folder(), environ=os.environ, say=say)
    return _loaded


def failure_to_load(say: Say) -> FleetuneError | None:
    """Load the kernels as `load_kernels` does, for a rank that will say with its peers what was wrong."""
    try:
        load_kernels(say)
    except (ConfigError, KernelError) as error:
        return error
    return None


def kernels_wished(environ: Mapping[str, str]) -> str | None:
    """What FLEETUNE_KERNELS says, if it is set.

    Raises:
        ConfigError: It is neither of its values.
    """
    wish = environ.get(VARIABLE) or None
    if wish is not None and wish not in _CHOICES:
        raise ConfigError(f"{VARIABLE}={wish}: {' or '.join(_CHOICES)} is expected")
    return wish


def choose_kernels(sources: Path, cache_dir: Path, *, environ: Mapping[str, str], say: Say) -> Kernels:
    """Do the work of `load_kernels`, every time.

    Args:
        sources: Folder of the C++ files.
        cache_dir: See `build_kernels`.
        environ: Holds FLEETUNE_KERNELS.
        say: See `load_kernels`.

    Raises:
        ConfigError: FLEETUNE_KERNELS is neither of its values.
        KernelError: It is `compiled`, and they cannot be had.
    """
    wish = kernels_wished(environ)
    if wish == "reference":
        return Kernels(compiled=False, reason=f"{VARIABLE}=reference asks for plain PyTorch", path=None)
    try:
        path = build_kernels(sources, cache_dir, say=say, environ=environ).library
        load_library(path)
    except KernelError as error:
        if wish == "compiled":
            raise
        reason = f"{error.reason}: the kernels run in plain PyTorch, which is slower ({error.remedy})"
        say(reason)
        return Kernels(compiled=False, reason=reason, path=None)
    return Kernels(compiled=True, reason=None, path=path)


def load_library(path: Path) -> Path | None:
    """Load compiled kernels into this process, and check that they compute with torch's threads.

    Returns:
        The OpenMP runtime they use, if they use one.

    Raises:
        KernelError: They cannot be loaded, or use another runtime than torch.
    """
    try:
        torch.ops.load_library(path)
        return check_openmp(path)
    except OSError as error:
        raise KernelError(
            f"the compiled kernels {path} cannot be loaded ({error})", remedy="fleetune build-kernels --force"
        ) from error


def raw_ops() -> Any:
    """The operations without gradients: `torch.ops.fleetune`, or the module `reference` with the same functions.

    Raises:
        ConfigError, KernelError: See `load_kernels`, which this calls.
    """
    if _num_using_reference == 0 and load_kernels().compiled:
        return torch.ops.fleetune
    from fleetune.kernels import reference

    return reference


@contextlib.contextmanager
def using_reference() -> Iterator[None]:
    """Plain PyTorch inside of the block, in all threads of the process: for tests and comparisons."""
    global _num_using_reference
    with _lock:
        _num_using_reference += 1
    try:
        yield
    finally:
        with _lock:
            _num_using_reference -= 1
