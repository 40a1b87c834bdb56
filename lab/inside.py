"""The program between the machine and a host: makes the host's namespaces, or runs a command in them.

    inside.py boot HOST_FOLDER                      stays until the host ends; prints "up" when it is up
    inside.py enter HOST_FOLDER WORK_FOLDER COMMAND...

`lab.host` runs it by its path, so it imports the standard library only. To whoever started it, it behaves as the
command itself: it passes signals on, ends as the command does, and takes the command along when it is killed.
"""

from __future__ import annotations

import contextlib
import ctypes
import json
import os
import signal
import subprocess
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

NEW_MOUNTS, NEW_UTS, NEW_IPC, NEW_PIDS, NEW_NETWORK = 0x00020000, 0x04000000, 0x08000000, 0x20000000, 0x40000000
BIND, RECURSIVE, PRIVATE = 0x1000, 0x4000, 0x40000
SET_PARENT_DEATH_SIGNAL = 1
FORWARDED = {signal.SIGTERM, signal.SIGINT, signal.SIGHUP, signal.SIGQUIT, signal.SIGUSR1, signal.SIGUSR2}

libc = ctypes.CDLL(None, use_errno=True)


def main(arguments: list[str]) -> int:
    action, folder = arguments[0], Path(arguments[1])
    told = json.loads((folder / "host.json").read_text())
    signal.pthread_sigmask(signal.SIG_BLOCK, {*FORWARDED, signal.SIGCHLD})  # before the child can end
    if action == "boot":
        return boot(folder, told)
    return enter(folder, told, arguments[2], arguments[3:])


def boot(folder: Path, told: dict[str, Any]) -> int:
    """Make the host's namespaces, and process 1 in them, whose number on the machine goes to the file `pid`."""
    join_groups(told["groups"])
    with open(told["network"]) as network:
        system_call("setns", network.fileno(), NEW_NETWORK)
    system_call("unshare", NEW_MOUNTS | NEW_UTS | NEW_IPC | NEW_PIDS)
    os_name = told["name"].encode()
    system_call("sethostname", os_name, len(os_name))
    mount_own_folders(told)
    # Process 1 has to collect the orphans of its host: the kernel does so for one that ignores the end of children.
    init = start(["sleep", "infinity"], first=become_init)
    (folder / "pid").write_text(str(init.pid))
    print("up", flush=True)
    return mirror(init)


def become_init() -> None:
    mount("proc", "/proc", "proc")
    signal.signal(signal.SIGCHLD, signal.SIG_IGN)


def mount_own_folders(told: dict[str, Any]) -> None:
    """Cover what a host has of its own; all else is the machine's."""
    mount("none", "/", flags=RECURSIVE | PRIVATE)  # first of all: from here on, no mount reaches the machine
    mount("/sys/fs/cgroup", told["stash"], flags=BIND | RECURSIVE)
    mount("sysfs", "/sys", "sysfs")  # shows the network interfaces of the host, but no control groups
    mount(told["stash"], "/sys/fs/cgroup", flags=BIND | RECURSIVE)
    for kept in told["keep"]:
        inner = Path(told["tmp"]) / Path(kept).relative_to("/tmp")
        inner.mkdir(parents=True, exist_ok=True)
        mount(kept, str(inner), flags=BIND | RECURSIVE)
    mount(told["tmp"], "/tmp", flags=BIND | RECURSIVE)
    mount("tmpfs", "/run", "tmpfs", data="mode=755")
    mount("tmpfs", "/dev/shm", "tmpfs", data="mode=1777")
    mount(told["etc_hosts"], "/etc/hosts", flags=BIND)
    if told["etc_ssh"]:
        mount(told["etc_ssh"], "/etc/ssh", flags=BIND)
        Path("/run/sshd").mkdir(mode=0o755)
    personal = Path.home() / ".ssh"
    if personal.is_dir():  # keys and settings of the machine's user are no business of the hosts
        mount("tmpfs", str(personal), "tmpfs", data="mode=700")


def enter(folder: Path, told: dict[str, Any], work_folder: str, command: Sequence[str]) -> int:
    """Run a command in the namespaces of a host that is up."""
    join_groups(told["groups"])
    init = os.pidfd_open(int((folder / "pid").read_text()))
    system_call("setns", init, NEW_MOUNTS | NEW_UTS | NEW_IPC | NEW_PIDS | NEW_NETWORK)
    os.chdir(work_folder)
    try:
        return mirror(start(command))
    except FileNotFoundError:
        print(f"{told['name']}: no command {command[0]}", file=sys.stderr)
        return 127


def join_groups(groups: Sequence[str]) -> None:
    for group in groups:
        Path(group, "cgroup.procs").write_text("0")


def start(command: Sequence[str], first: Callable[[], None] | None = None) -> subprocess.Popen[bytes]:
    """Start the command as a child that ends with this process; only a child is in the new process namespace."""

    def prepare() -> None:
        system_call("prctl", SET_PARENT_DEATH_SIGNAL, signal.SIGKILL, 0, 0, 0)
        if first is not None:
            first()
        signal.pthread_sigmask(signal.SIG_SETMASK, ())

    return subprocess.Popen(command, preexec_fn=prepare)


def mirror(child: subprocess.Popen[bytes]) -> int:
    """Pass signals on to the child until it ends, then end in the same way.

    Those of a terminal (Ctrl-C) are not sent by a process: the child, in the same group, has got them by itself.
    """
    while child.poll() is None:
        received = signal.sigwaitinfo({*FORWARDED, signal.SIGCHLD})
        if received.si_signo != signal.SIGCHLD and received.si_code <= 0:
            child.send_signal(received.si_signo)
    if child.returncode < 0:
        number = -child.returncode
        with contextlib.suppress(OSError):  # SIGKILL cannot be set
            signal.signal(number, signal.SIG_DFL)
        signal.pthread_sigmask(signal.SIG_SETMASK, ())
        os.kill(os.getpid(), number)
    return child.returncode


def mount(source: str, target: str, kind: str = "none", *, flags: int = 0, data: str = "") -> None:
    system_call("mount", source.encode(), target.encode(), kind.encode(), ctypes.c_ulong(flags), data.encode())


def system_call(name: str, *arguments: Any) -> None:
    if getattr(libc, name)(*arguments) != 0:
        raise OSError(ctypes.get_errno(), f"{name}{arguments}: {os.strerror(ctypes.get_errno())}")


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
