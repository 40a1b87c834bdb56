"""One host of a lab: starts and ends processes in it, and changes what it is granted."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import IO

from lab import network
from lab.cgroups import HostGroup
from lab.commands import SYSTEM_PATH, LabError
from lab.network import Network
from lab.processes import end_processes, processes_in, wait_until
from lab.ssh import SERVER

ENVIRONMENT = {"PATH": SYSTEM_PATH, "HOME": str(Path.home()), "LANG": "C.UTF-8"}
"""All that a process finds, as on a host that one reaches by ssh: nothing of the caller's own."""
INSIDE = (sys.executable, "-I", "-S", str(Path(__file__).with_name("inside.py")))
"""The program that makes and enters hosts; without site-packages it starts in 50 ms."""

Stream = int | IO[str] | None


def entering(folder: Path, work_folder: str | Path, command: Sequence[str]) -> list[str]:
    """The command line that runs a command in the host of a folder; see `lab/inside.py`."""
    return [*INSIDE, "enter", str(folder), str(work_folder), *command]


class Host:
    """A host, made by `Lab.up`.

    Args:
        name: Its host name.
        index: Its place in the lab, from 0.
        net: The network that it is plugged into.
        folder: Its part of the lab's state folder.
        group: Its control groups.
        with_ssh: Whether it runs an ssh server.
    """

    def __init__(self, *, name: str, index: int, net: Network, folder: Path, group: HostGroup, with_ssh: bool) -> None:
        self.name, self.address = name, net.address(index)
        self._index, self._network, self._folder, self._group = index, net, folder, group
        self._namespace, self._with_ssh = network.NAMESPACES / net.namespace(name), with_ssh
        self._init: subprocess.Popen[str] | None = None
        self._started: list[subprocess.Popen[str]] = []
        self._is_frozen = False

    # ---- processes

    def run(
        self,
        command: Sequence[str],
        *,
        env: Mapping[str, str] | None = None,
        cwd: str | Path = "/",
        stdin: str = "",
        timeout: float | None = None,
    ) -> subprocess.CompletedProcess[str]:
        """Run a command to its end.

        Args:
            command: Program and arguments.
            env: Variables on top of `ENVIRONMENT`.
            cwd: Working folder, as the host sees it.
            stdin: What it reads.
            timeout: After so many seconds it is killed.

        Raises:
            subprocess.TimeoutExpired: It was killed.
            LabError: The host is down or frozen.
        """
        return subprocess.run(
            self._entering(command, cwd),
            input=stdin,
            capture_output=True,
            text=True,
            env={**ENVIRONMENT, **(env or {})},
            timeout=timeout,
            start_new_session=True,
        )

    def start(
        self,
        command: Sequence[str],
        *,
        env: Mapping[str, str] | None = None,
        cwd: str | Path = "/",
        stdout: Stream = subprocess.PIPE,
        stderr: Stream = subprocess.STDOUT,
    ) -> subprocess.Popen[str]:
        """Start a command. Signals that are sent to it arrive, and its return code is the command's own."""
        process = subprocess.Popen(
            self._entering(command, cwd),
            stdin=subprocess.DEVNULL,
            stdout=stdout,
            stderr=stderr,
            text=True,
            env={**ENVIRONMENT, **(env or {})},
            start_new_session=True,  # Ctrl-C is for whoever holds the lab
        )
        self._started.append(process)
        return process

    def processes(self) -> list[int]:
        """What runs on the host, as the machine numbers it."""
        return processes_in(self._namespace)

    def _entering(self, command: Sequence[str], cwd: str | Path) -> list[str]:
        if self._init is None or self._init.poll() is not None:
            raise LabError(f"{self.name} is down: it was killed, and not booted again")
        if self._is_frozen:
            raise LabError(f"{self.name} is frozen, and would not start {command[0]}: thaw it first")
        return entering(self._folder, cwd, command)

    # ---- up and down

    def boot(self) -> None:
        """Start it: after `Lab.up` has made it, or after `kill`. Its limits and its link are as they were."""
        if self._init is not None:
            raise LabError(f"{self.name} is up already")
        self._init = subprocess.Popen(
            [*INSIDE, "boot", str(self._folder)],
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            env=ENVIRONMENT,
            start_new_session=True,
        )
        assert self._init.stdout is not None
        if self._init.stdout.readline() != "up\n":
            said = self._init.communicate()[1]
            self._init = None
            raise LabError(f"{self.name} does not boot: {said.strip()}")
        if self._with_ssh:
            self._serve_ssh()

    def kill(self) -> None:
        """End every process at once. The network stack still closes their connections: for a lost host, `cut` first."""
        if self._init is None:
            return
        if self._is_frozen:
            self.thaw()
        for process in (self._init, *self._started):  # one that has just begun may not be in the namespace yet
            process.kill()
        end_processes(self._namespace)
        (self._folder / "pid").unlink(missing_ok=True)
        self._init.communicate()
        self._init = None
        for process in self._started:
            process.wait()

    def freeze(self) -> None:
        """Stop every process where it stands; the network stack goes on answering, as on a host that hangs."""
        self._group.freeze()
        self._is_frozen = True

    def thaw(self) -> None:
        self._group.thaw()
        self._is_frozen = False

    def _serve_ssh(self) -> None:
        """Start the server, which goes into the background before it listens: wait until it does."""
        self.run([str(SERVER), "-E", "/run/sshd.log"]).check_returncode()
        listens = ["ss", "-Hltn", "sport = 22"]
        if not wait_until(lambda: bool(self.run(listens).stdout), timeout_s=20):
            raise LabError(f"{self.name}: sshd does not listen: {self.run(['cat', '/run/sshd.log']).stdout.strip()}")

    # ---- limits

    def set_quota(self, cores: float | None) -> None:
        """Grant CPU time, in cores; `None` for all there is."""
        self._group.set_quota(cores)

    def set_link(self, mbit: float | None) -> None:
        """Limit the link to a rate, Mbit/s each way; `None` takes the limit off."""
        network.set_link(self._network, self.name, self._index, mbit)

    def cut(self) -> None:
        """Take the link down, as if the cable were pulled: packets are lost in silence."""
        network.set_carrier(self._network, self._index, on=False)

    def join(self) -> None:
        """Bring the link up again."""
        network.set_carrier(self._network, self._index, on=True)

    def bytes_sent(self) -> int:
        """Since the lab came up, headers included."""
        return network.counted_bytes(self._network, self._index, "rx")

    def bytes_received(self) -> int:
        """Since the lab came up, headers included."""
        return network.counted_bytes(self._network, self._index, "tx")
