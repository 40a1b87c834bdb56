"""Running the compiler: several at once, and none is left when this process is told to stop."""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import threading
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import FrameType
from typing import NoReturn

from fleetune.hardware.host import usable_cores
from fleetune.kernels.toolchain import compiler_environment

_LOOK_AGAIN_S = 0.02


@dataclass(frozen=True, kw_only=True)
class _Running:
    """A command, and the file that takes what it says."""

    command: Sequence[str]
    process: subprocess.Popen[bytes]
    output: Path

    def failure(self) -> str | None:
        """What the command has to say if it fails; waits for its end."""
        status = self.process.wait()
        if status == 0:
            return None
        said = self.output.read_text(errors="replace")
        end = f"ended by signal {-status}" if status < 0 else f"ended with status {status}"
        return f"$ {' '.join(self.command)}\n{said}\n{end}\n"


def run_all(commands: Sequence[Sequence[str]], folder: Path, environ: Mapping[str, str]) -> list[str]:
    """Run commands in a folder, as many at a time as there are cores.

    Returns:
        What those that failed had to say, in the order of the commands.
    """
    started: list[_Running] = []
    at_once = usable_cores()
    try:
        for command in commands:
            while sum(one.process.poll() is None for one in started) >= at_once:
                time.sleep(_LOOK_AGAIN_S)
            started.append(_start(command, folder / f"{len(started)}.out", environ))
        return [said for one in started if (said := one.failure()) is not None]
    except BaseException:  # Ctrl-C and SIGTERM among them
        for one in started:
            _end(one.process)
        raise


def _start(command: Sequence[str], output: Path, environ: Mapping[str, str]) -> _Running:
    with output.open("wb") as file:
        process = subprocess.Popen(
            command, stdin=subprocess.DEVNULL, stdout=file, stderr=subprocess.STDOUT, cwd=output.parent,
            env=compiler_environment(environ),
        )  # fmt: skip
    return _Running(command=command, process=process, output=output)


def _end(process: subprocess.Popen[bytes]) -> None:
    """End a compiler with all that it started: g++ itself would leave the compiler proper behind."""
    if process.poll() is None:
        for pid in _family(process.pid):
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        process.wait()


def _family(pid: int) -> list[int]:
    try:
        children = Path(f"/proc/{pid}/task/{pid}/children").read_text().split()
    except OSError:  # it has ended, or the system does not show them
        children = []
    return [pid, *(member for child in children for member in _family(int(child)))]


@contextlib.contextmanager
def cleaning_up_on_sigterm() -> Iterator[None]:
    """Let SIGTERM unwind the block, as Ctrl-C does, where it would end the process on the spot."""
    if threading.current_thread() is not threading.main_thread() or signal.getsignal(signal.SIGTERM) != signal.SIG_DFL:
        yield
        return
    signal.signal(signal.SIGTERM, _exit)
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, signal.SIG_DFL)


def _exit(number: int, frame: FrameType | None) -> NoReturn:
    raise SystemExit(128 + number)
