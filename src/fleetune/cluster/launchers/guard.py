"""Kills the process groups named on standard input when that input ends, unless told that all is well.

Run as a program of its own by the local launcher, which holds the other end of the pipe: however the launcher
ends, the kernel closes the pipe. (PR_SET_PDEATHSIG reaches the ranks too, and at once, but not the processes
that ranks started.) Imports nothing of fleetune, so that it is there within milliseconds.
"""

from __future__ import annotations

import contextlib
import os
import signal
import sys

ALL_WELL = "all well"


def main() -> None:
    groups = []
    for line in sys.stdin:
        if line.strip() == ALL_WELL:
            return
        groups.append(int(line))
    for group in groups:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(group, signal.SIGKILL)


if __name__ == "__main__":
    main()
