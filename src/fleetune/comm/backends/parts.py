"""The backends that have a C++ part, and whether it can be built here."""

from __future__ import annotations

from collections.abc import Callable, Mapping

from fleetune.comm.backends.native import NativePart
from fleetune.comm.backends.oneccl import find_oneccl
from fleetune.errors import BackendError

PARTS: Mapping[str, Callable[[], NativePart]] = {"ccl": lambda: find_oneccl().part()}
"""By the name of the backend; what it needs may be missing, which is a `BackendError`."""


def native_parts() -> dict[str, NativePart | str]:
    """By the name of the backend, its part, or why there is none, with what mends that."""
    found: dict[str, NativePart | str] = {}
    for name, find in PARTS.items():
        try:
            found[name] = find()
        except BackendError as error:
            found[name] = str(error)
    return found
