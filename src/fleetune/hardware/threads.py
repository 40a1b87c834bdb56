"""How many threads a rank computes with, set in the rank itself."""

from __future__ import annotations

import os

from fleetune.hardware.host import choose_threads, usable_cores


def set_threads(requested: int | None, *, local_world_size: int, speaks: bool) -> int:
    """Set torch's threads for this rank; see `choose_threads` for how many.

    Args:
        requested: The user's setting, or None to derive it.
        local_world_size: Count of ranks on this host.
        speaks: Whether this rank prints the notice, if there is one.

    Returns:
        The number of threads.
    """
    import torch

    threads, notice = choose_threads(os.environ, usable_cores(), local_world_size, requested)
    if notice and speaks:
        print(notice, flush=True)
    torch.set_num_threads(threads)
    return threads
