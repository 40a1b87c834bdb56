"""What can be told of a host without Python: a shell prints the files that `read_host` reads."""

from __future__ import annotations

import subprocess
import tempfile
from pathlib import Path

from fleetune.cluster.remote import ssh_command
from fleetune.hardware.host import HostFacts, read_host

_FILES = (
    *("/proc/cpuinfo", "/proc/meminfo", "/proc/self/cgroup", "/proc/self/mountinfo"),
    *("/proc/sys/kernel/hostname", "/proc/sys/kernel/osrelease"),
)
_MARK = "==fleetune=="
_SCRIPT = (
    f'for file in {" ".join(_FILES)}; do echo "{_MARK} $file"; cat "$file"; done; '
    f'echo "{_MARK} cpus"; nproc; echo "{_MARK} pythons"; command -v python3 && python3 --version'
)


def read_plain_host(target: str, *, timeout_s: float) -> tuple[HostFacts | None, str]:
    """The hardware of a host that runs a POSIX shell.

    Args:
        target: What ssh is given.
        timeout_s: Longest wait.

    Returns:
        The facts, without those of Python; None where the shell does not answer either. And which Python there is.
    """
    command = ssh_command(target, ["sh", "-c", _SCRIPT])
    try:
        answer = subprocess.run(command, capture_output=True, text=True, errors="replace", timeout=timeout_s)
    except subprocess.TimeoutExpired:
        return None, ""
    if _MARK not in answer.stdout:
        return None, ""
    return facts_of(answer.stdout)


def facts_of(printed: str) -> tuple[HostFacts, str]:
    """The facts of what the shell has printed, and which Python it knows of."""
    sections = dict(part.partition("\n")[::2] for part in printed.split(f"{_MARK} ")[1:])
    cpus, pythons = sections.pop("cpus", "").strip(), sections.pop("pythons", "").split()
    with tempfile.TemporaryDirectory(prefix="fleetune-") as folder:
        for name, text in sections.items():
            path = Path(folder) / name.lstrip("/")
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_text(text)
        facts = read_host(Path(folder), affinity=range(int(cpus) if cpus.isdecimal() else 1))
    return facts, f"{pythons[0]} is Python {pythons[-1]}" if len(pythons) > 1 else "there is no python3"
