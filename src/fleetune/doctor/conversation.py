"""Talking to the probe of one host: a process here, or one at the other end of an ssh connection."""

from __future__ import annotations

import contextlib
import json
import os
import select
import subprocess
import tempfile
import time
from collections.abc import Mapping, Sequence
from typing import Any

from fleetune.doctor.probe import MARK

_END_S = 5.0


class NoAnswerError(Exception):
    """A probe did not answer.

    Args:
        status: What it, or ssh, ended with; None where it is just silent.
        said: Its standard error.
        within_s: How long was waited.
    """

    def __init__(self, status: int | None, said: str, within_s: float) -> None:
        self.status, self.said, self.within_s = status, said, within_s
        super().__init__(f"no answer within {within_s:g} s" if status is None else f"ended with status {status}")


class Conversation:
    """A probe that answers requests. A context manager: at its end, the probe ends.

    Args:
        command: What starts the probe.
        environ: Of the command.
    """

    def __init__(self, command: Sequence[str], environ: Mapping[str, str] | None = None) -> None:
        self._errors = tempfile.TemporaryFile()  # noqa: SIM115 (closed by `close`)
        self._process = subprocess.Popen(
            command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=self._errors, env=environ
        )
        self._buffer = b""

    def __enter__(self) -> Conversation:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def ask(self, what: str, *, timeout_s: float, **details: Any) -> dict[str, Any]:
        """Send a request and wait for the answer.

        Args:
            what: A request of `Probe.answers`.
            timeout_s: Longest wait.
            details: Its arguments.

        Raises:
            NoAnswerError: There is none in time, or the probe has ended.
        """
        assert self._process.stdin is not None
        with contextlib.suppress(OSError):  # it ended: reading tells how
            self._process.stdin.write(json.dumps({"do": what, **details}).encode() + b"\n")
            self._process.stdin.flush()
        deadline = time.monotonic() + timeout_s
        while (line := self._line(deadline)) is not None:
            if line.startswith(MARK):
                answer: dict[str, Any] = json.loads(line.removeprefix(MARK))
                return answer
        raise self._no_answer(timeout_s)

    def _line(self, deadline: float) -> str | None:
        """The next line of its output; None at its end, or when the time is over."""
        assert self._process.stdout is not None
        descriptor = self._process.stdout.fileno()
        while b"\n" not in self._buffer:
            left = deadline - time.monotonic()
            if left <= 0 or not select.select([descriptor], [], [], left)[0]:
                return None
            if not (more := os.read(descriptor, 1 << 16)):
                return None
            self._buffer += more
        line, _, self._buffer = self._buffer.partition(b"\n")
        return line.decode(errors="replace")

    def _no_answer(self, within_s: float) -> NoAnswerError:
        with contextlib.suppress(subprocess.TimeoutExpired):  # its output may end a moment before it does
            self._process.wait(0.2)
        self._errors.seek(0)
        return NoAnswerError(self._process.poll(), self._errors.read().decode(errors="replace"), within_s)

    def close(self) -> None:
        """End the probe, and wait for its end."""
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        with contextlib.suppress(OSError):
            self._process.stdin.close()
        try:
            self._process.wait(_END_S)
        except subprocess.TimeoutExpired:  # a host that is cut off, or frozen
            self._process.kill()
            self._process.wait()
        self._process.stdout.close()
        self._errors.close()
