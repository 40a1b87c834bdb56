"""Whether torch can be imported, and which kernels a run would find: one line of JSON. Builds nothing.

python -m fleetune.kernels.status
"""

from __future__ import annotations

import json
import os
from typing import Any


def read_status() -> dict[str, Any]:
    """Version of torch; the compiler, or why there is none; the library, if it is there; what FLEETUNE_KERNELS says."""
    try:
        import torch
    except Exception as error:
        return {"torch": None, "problem": f"{type(error).__name__}: {str(error).splitlines()[0] if str(error) else ''}"}
    from fleetune.errors import KernelError
    from fleetune.kernels import build, library
    from fleetune.kernels.toolchain import find_toolchain

    told: dict[str, Any] = {"torch": str(torch.__version__), "wish": os.environ.get(library.VARIABLE) or None}
    toolchain = None
    try:
        toolchain = find_toolchain(os.environ)
        told["compiler"] = toolchain.name
    except KernelError as error:
        told["no_compiler"] = f"{error.reason} ({error.remedy})"
    found = build.find_build(build.SOURCES, library.cache_folder(), toolchain)
    return told | {"built": None if found is None else str(found.library)}


if __name__ == "__main__":
    print(json.dumps(read_status()))
