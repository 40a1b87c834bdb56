"""Our backends under their names in torch.distributed."""

from __future__ import annotations

import atexit
import os
from collections.abc import Callable
from datetime import timedelta
from types import ModuleType
from typing import Any

import torch.distributed as dist

from fleetune.comm.backends.seat import host_name, own_address
from fleetune.errors import ConfigError

SILENCE_VARIABLE = "FLEETUNE_PEER_SILENCE_S"
_SILENCE_S = 7.0
_MILLISECOND_S = 0.001

LoadModule = Callable[[str, int], ModuleType]
"""From this host's address and the world size to the backend's module, loaded and set up."""


def silence_limit() -> timedelta:
    """How long a rank may be silent before it is given up; 0 where nobody is to look after that, as under a debugger.

    Raises:
        ConfigError: FLEETUNE_PEER_SILENCE_S is no such time.
    """
    told = os.environ.get(SILENCE_VARIABLE)
    try:
        seconds = _SILENCE_S if told is None else float(told)
    except ValueError:
        seconds = -1.0
    if not 0 <= seconds < float("inf"):
        raise ConfigError(f"{SILENCE_VARIABLE}={told}: a number of seconds is expected, 0 for no limit")
    return timedelta(seconds=seconds)


def register(name: str, load_module: LoadModule) -> None:
    """Let `torch.distributed.init_process_group` know a backend; does nothing where it does already.

    Args:
        name: Of the backend.
        load_module: Called when the first group is made.
    """
    if name.upper() in dist.Backend._plugins:
        return

    def create(options: Any, backend_options: Any) -> Any:
        address = own_address(options.store, os.environ)
        module = load_module(address, options.group_size)
        timeout = options.timeout
        if not isinstance(timeout, timedelta):
            timeout = timedelta(seconds=float(timeout))
        return module.create(
            options.store, options.group_rank, options.group_size, max(timeout, timedelta(seconds=_MILLISECOND_S)),
            list(options.global_ranks_in_group), address, host_name(), silence_limit(),
        )  # fmt: skip

    dist.Backend.register_backend(name, create, extended_api=True, devices=["cpu"])


def close_at_exit(module: ModuleType) -> None:
    """Leave all groups when the interpreter goes, before what they stand on does."""
    atexit.register(module.close_all)
