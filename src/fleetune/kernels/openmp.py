"""Which OpenMP runtime a loaded library uses.

A process may hold several: scikit-learn's wheel, for one, brings a copy of its own. What matters is that the kernels
use the one that torch does. With another, each has its own pool of threads: the number of threads set in torch does
not hold for the kernels, and the two pools keep each other off the cores.
"""

from __future__ import annotations

import ctypes
from pathlib import Path

from fleetune.errors import KernelError

_MAPS = Path("/proc/self/maps")
_SYMBOL = "omp_get_max_threads"  # every OpenMP runtime has it: GNU's, LLVM's and Intel's


def openmp_of(library: str) -> Path | None:
    """The OpenMP runtime that a library uses, or None when it uses none; loads the library.

    Args:
        library: Its path, or the name of one that is loaded.

    Raises:
        OSError: It cannot be loaded.
    """
    # The linker's own search, through all that the library needs.
    function = getattr(ctypes.CDLL(library), _SYMBOL, None)
    if function is None:
        return None
    address = ctypes.cast(function, ctypes.c_void_p).value
    assert address is not None
    try:
        maps = _MAPS.read_text(encoding="utf-8", errors="surrogateescape")
    except OSError:  # a system that does not show it
        return None
    return mapped_file(maps, address)


def torch_openmp() -> Path | None:
    """The OpenMP runtime that torch uses; None when it uses none, or does not say."""
    import torch  # noqa: F401  (loads the library that is asked here)

    try:
        return openmp_of("libtorch_cpu.so")
    except OSError:  # a torch that is built in another way
        return None


def mapped_file(maps: str, address: int) -> Path | None:
    """The file that an address lies in.

    Args:
        maps: Text of /proc/PID/maps; the format of a line is in proc_pid_maps(5).
        address: In the memory of that process.
    """
    for line in maps.splitlines():
        fields = line.split(maxsplit=5)
        start, _, end = fields[0].partition("-")
        if int(start, 16) <= address < int(end, 16):
            return Path(fields[5]) if len(fields) == 6 and fields[5].startswith("/") else None
    return None


def check_openmp(library: Path) -> Path | None:
    """Make sure that the compiled kernels compute with torch's threads; loads them.

    Returns:
        The OpenMP runtime they use, if they use one.

    Raises:
        KernelError: They use another than torch.
        OSError: They cannot be loaded.
    """
    ours, torchs = openmp_of(str(library)), torch_openmp()
    if ours is not None and torchs is not None and ours != torchs:
        raise KernelError(
            f"the compiled kernels use the OpenMP runtime {ours}, torch uses {torchs}",
            remedy="name a compiler that fits torch's in CXX, then: fleetune build-kernels --force",
        )
    return ours
