"""The backend `ccl` of torch.distributed, over oneCCL's library for CPUs.

    import fleetune.comm.ccl
    torch.distributed.init_process_group("ccl")        # or "cpu:ccl"

Importing it registers the name and does nothing else. The first group builds the backend's C++ part, once a host
(`fleetune build-kernels --backends` does so ahead), and sets oneCCL's variables where the user has not
(`settings_table`). The extra [ccl] must be installed.
"""

from __future__ import annotations

import os
import sys
import threading
from types import ModuleType

from fleetune.comm.backends.native import load_native
from fleetune.comm.backends.oneccl import Chosen, choose_settings, find_oneccl, surroundings
from fleetune.comm.backends.registry import close_at_exit, register
from fleetune.comm.backends.seat import interface_name

NAME = "ccl"
OLD_NAME = "oneccl_bindings_for_pytorch"

_lock = threading.Lock()
_module: ModuleType | None = None
_chosen: tuple[Chosen, ...] = ()


def _say(line: str) -> None:
    print(line, file=sys.stderr, flush=True)


def _load(address: str, world_size: int) -> ModuleType:
    """The backend's module, with oneCCL's variables set: it reads them when the first group is made."""
    global _module, _chosen
    with _lock:
        if _module is None:
            found = find_oneccl()
            there = surroundings(found, interface_name(address), world_size, os.environ)
            _chosen = choose_settings(there, os.environ)
            module = load_native(found.part(), _say)
            os.environ.update({setting.name: setting.value for setting in _chosen})
            close_at_exit(module)
            _module = module
        return _module


def settings_table() -> tuple[Chosen, ...]:
    """oneCCL's variables in this process, and why they are so; empty before its first group."""
    return _chosen


def alias_oneccl_bindings() -> ModuleType:
    """Let `import oneccl_bindings_for_pytorch` find this module, for scripts that were written for that package.

    An installed package of that name stays what it is.
    """
    return sys.modules.setdefault(OLD_NAME, sys.modules[__name__])


register(NAME, _load)
