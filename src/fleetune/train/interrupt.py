"""Ctrl-C and SIGTERM while training: finish the step, save on all ranks, end. A second one ends at once.

SIGUSR1 means the same: it is what Open MPI's mpirun passes on to ranks without ending them a second later, and what
Slurm is often asked to send before a job's time is over.
"""

from __future__ import annotations

import os
import signal
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from types import FrameType

SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGUSR1)
_SAME_REQUEST_S = 1.0  # a launcher may deliver one Ctrl-C twice: from the terminal, and passed on


class StopRequest:
    """Set by the first signal.

    Args:
        speaks: Whether to tell the user that the signal was heard; a launcher of ours does so itself.
    """

    def __init__(self, *, speaks: bool = False) -> None:
        self._speaks = speaks
        self.signal: int | None = None
        self._when = 0.0

    def __bool__(self) -> bool:
        return self.signal is not None

    def receive(self, number: int, frame: FrameType | None) -> None:
        """The handler of the signals."""
        if self.signal is None:
            self.signal, self._when = number, time.monotonic()
            if self._speaks:
                with suppress(OSError):
                    os.write(2, b"\nstopping after the current step; press Ctrl-C again to end at once\n")
        elif time.monotonic() - self._when > _SAME_REQUEST_S:
            os._exit(128 + number)


class Stopped(Exception):  # noqa: N818 - an outcome, not an error
    """The run was asked to stop and has saved what it had.

    Args:
        step: Updates done.
        signal_number: The signal, where this rank received it.
    """

    def __init__(self, step: int, signal_number: int | None) -> None:
        self.step, self.signal_number = step, signal_number or signal.SIGTERM
        super().__init__(f"stopped at step {step}, saved; to go on: the same command with --resume_from_checkpoint")


@contextmanager
def listening(*, speaks: bool = False) -> Iterator[StopRequest]:
    """Take the first SIGINT, SIGTERM or SIGUSR1 as a request to stop, for the time of a `with` block.

    Outside the main thread, where Python allows no handlers, signals keep their meaning.
    """
    request = StopRequest(speaks=speaks)
    if threading.current_thread() is not threading.main_thread():
        yield request
        return
    before = {number: signal.signal(number, request.receive) for number in SIGNALS}
    try:
        yield request
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
