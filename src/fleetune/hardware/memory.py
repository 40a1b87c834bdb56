"""Memory that the C library keeps after it was freed."""

from __future__ import annotations

import contextlib
import ctypes


def return_freed_memory() -> None:
    """Give pages that were freed back to the system, where the C library can (glibc).

    Loading a model and reading data leave holes in the heap, between which later allocations would lie.
    """
    with contextlib.suppress(OSError, AttributeError):
        ctypes.CDLL(None).malloc_trim(0)
