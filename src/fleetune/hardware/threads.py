"""How many threads a rank computes with, set in the rank itself."""

from __future__ import annotations

import os

from fleetune.hardware.host import choose_threads, usable_cores
from fleetune.hardware.pinning import Place


def set_threads(requested: int | None, *, local_world_size: int, speaks: bool, place: Place | None = None) -> int:
    """Set torch's threads for this rank: as its place says, or else as `choose_threads` does.

    Args:
        requested: The user's setting, or None to derive it.
        local_world_size: Count of ranks on this host.
        speaks: Whether this rank prints the notice, if there is one.
        place: The part of the host that this rank has taken, if it has.

    Returns:
        The number of threads.
    """
    import torch

    if place is not None:
        threads, notices = place.part.threads, place.notices
    else:
        threads, notice = choose_threads(os.environ, usable_cores(), local_world_size, requested)
        notices = (notice,) if notice else ()
    for notice in notices if speaks else ():
        print(notice, flush=True)
    torch.set_num_threads(threads)
    return threads
