"""Commands of the system (`ip`, `tc`, `ssh-keygen`), and the error that tells what one of them said."""

from __future__ import annotations

import os
import subprocess
from collections.abc import Sequence

SYSTEM_PATH = "/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin"
"""`ip` and `sshd` are not in the PATH of every shell."""
inherited_locks: set[int] = set()
"""Descriptors that commands hold, too: an `ip` that outlives a killed owner keeps others from sweeping up under it."""


class LabError(RuntimeError):
    """The lab could not do what it was asked: the message tells the command or value, and what went wrong."""


def call(*command: str, lines: Sequence[str] = ()) -> str:
    """Run a command to its end.

    Args:
        command: Program and arguments.
        lines: What it reads from its standard input, such as the orders of `ip -batch -`.

    Returns:
        What it wrote to its standard output.

    Raises:
        LabError: It failed, or is not installed.
    """
    stdin = "".join(f"{line}\n" for line in lines)
    try:
        done = subprocess.run(
            command,
            input=stdin,
            capture_output=True,
            text=True,
            env={**os.environ, "PATH": SYSTEM_PATH},
            pass_fds=tuple(inherited_locks),
            start_new_session=True,  # a Ctrl-C is for this process, which decides what still has to be run
        )
    except FileNotFoundError:
        raise LabError(f"no command `{command[0]}` in {SYSTEM_PATH}") from None
    if done.returncode != 0:
        asked = " ".join(command) + (f" with input\n{stdin}" if stdin else "")
        raise LabError(f"`{asked}` ended with {done.returncode}: {done.stderr.strip()}")
    return done.stdout
