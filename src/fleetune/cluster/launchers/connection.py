"""The head's end of an agent: a process that carries messages to a host and back."""

from __future__ import annotations

import collections
import contextlib
import json
import os
import signal
import subprocess
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass

from fleetune.cluster.hosts import Host
from fleetune.cluster.launchers.agent import MARK, Message, agent_command
from fleetune.cluster.launchers.processes import end_with_parent
from fleetune.cluster.remote import CONNECT_TIMEOUT_S, FAILED, python_command, ssh_command, why_ssh_failed
from fleetune.errors import LaunchError

_LAST_WORDS = 20
_MOST_UNHANDLED = 1000
"""Messages of a host that wait for the head: a rank that prints faster waits at its pipe, not in our memory."""
_CLOSING_S = 2.0
NO_PROGRAM = (126, 127)
"""Exit statuses of a shell that cannot run a command."""


@dataclass(frozen=True, kw_only=True)
class Said:
    """One message of an agent, or that its connection has ended."""

    host: Host
    message: Message | None
    """None at the end of the connection."""


def start_command(host: Host, timeout_s: int) -> list[str]:
    """What is run here to start the agent of a host: on this machine no ssh is needed."""
    if host.is_here:
        return agent_command()
    command = python_command(agent_command()[1:], os.environ)
    return ssh_command(host.target, command, connect_timeout_s=min(CONNECT_TIMEOUT_S, timeout_s))


class Connection:
    """The agent of one host. Must be made in the main thread: its process ends with the thread that started it.

    Args:
        host: Where it is.
        timeout_s: Longest wait for the connection.
        put: Gets what the agent says, from a thread.
    """

    def __init__(self, host: Host, timeout_s: int, put: Callable[[Said], None]) -> None:
        self.host, self.heard = host, time.monotonic()
        self._is_full = self.has_ended = False
        """Whether its ranks have ended, or it has gone."""
        self._put, self._room, self._telling = put, threading.Semaphore(_MOST_UNHANDLED), threading.Lock()
        self._errors: collections.deque[str] = collections.deque(maxlen=_LAST_WORDS)
        command = start_command(host, timeout_s)
        try:
            self._process = subprocess.Popen(
                command,
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=subprocess.PIPE,
                start_new_session=True,  # a terminal's Ctrl-C is for the head alone
                preexec_fn=end_with_parent(),
            )
        except OSError as error:
            raise LaunchError(f"cannot start {command[0]}: {error.strerror}; install openssh-client") from error
        self._readers = [threading.Thread(target=read, daemon=True) for read in (self._read, self._read_errors)]
        for reader in self._readers:
            reader.start()

    def tell(self, message: Message) -> None:
        """Send a message, from any thread; one to an agent that is gone is lost."""
        assert self._process.stdin is not None
        with self._telling, contextlib.suppress(OSError, ValueError):
            self._process.stdin.write(json.dumps(message).encode() + b"\n")
            self._process.stdin.flush()

    def handled(self) -> None:
        """One of its messages has been handled: there is room for another."""
        self._room.release()

    def silence_s(self) -> float:
        """Seconds since the host was heard of; none while its messages wait for the head."""
        return 0.0 if self._is_full else time.monotonic() - self.heard

    def close(self, grace_s: float = _CLOSING_S) -> None:
        """End the connection: the agent, if it is there, ends its ranks."""
        with contextlib.suppress(OSError, ValueError):
            assert self._process.stdin is not None
            self._process.stdin.close()
        try:
            self._process.wait(grace_s)
        except subprocess.TimeoutExpired:
            self._process.send_signal(signal.SIGKILL)
            self._process.wait()
        for reader, pipe in zip(self._readers, (self._process.stdout, self._process.stderr), strict=True):
            reader.join(_CLOSING_S)
            if pipe is not None and not reader.is_alive():  # a shared connection of ssh's may keep the other end
                pipe.close()

    def why_gone(self) -> str:
        """Why the connection ended, with how to mend it."""
        status = self._process.wait()
        self._readers[1].join(1.0)
        said = "\n".join(self._errors)
        if not self.host.is_here and status == FAILED:
            return "; ".join(why_ssh_failed(said, self.host.target))
        python = agent_command()[0]
        if status in NO_PROGRAM:
            return f"there is no {python}; `fleetune setup --hosts {self.host.target}` puts this environment there"
        if "No module named" in said and "fleetune" in said:
            return f"{python} has no fleetune; `fleetune setup --hosts {self.host.target}` puts this environment there"
        if status < 0:
            return f"its agent was killed by {signal.Signals(-status).name}"
        last = said.strip().splitlines()[-1:] or ["it said nothing"]
        return f"its agent ended with exit status {status}: {last[0]}"

    def _read(self) -> None:
        assert self._process.stdout is not None
        for line in self._process.stdout:
            text = line.decode(errors="replace")
            if text.startswith(MARK):
                self._is_full = not self._room.acquire(blocking=False)
                if self._is_full:
                    self._room.acquire()
                self.heard, self._is_full = time.monotonic(), False
                self._put(Said(host=self.host, message=json.loads(text.removeprefix(MARK))))
        self._put(Said(host=self.host, message=None))

    def _read_errors(self) -> None:
        assert self._process.stderr is not None
        for line in self._process.stderr:
            self._errors.append(line.decode(errors="replace").rstrip())
