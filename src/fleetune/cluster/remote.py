"""Commands on other hosts, by the user's own OpenSSH client.

Configuration, agent, jump hosts and shared connections are therefore the user's; nothing asks for a password, and host
keys are checked as the user has it. What a command must know comes on its standard input: no secret is in a command.
"""

from __future__ import annotations

import functools
import shlex
import subprocess
from collections.abc import Sequence
from dataclasses import dataclass

SSH = "ssh"
OPTIONS = ("-T", "-o", "BatchMode=yes", "-o", "ConnectTimeout={timeout_s}", "-o", "ServerAliveInterval=15")
"""Of every connection: no terminal, no question, and an end to waiting."""
CONNECT_TIMEOUT_S = 10
FAILED = 255
"""ssh's own exit status, where no command was run or the connection was lost."""


@dataclass(frozen=True, kw_only=True)
class SshSettings:
    """What the user's ssh would do with a name."""

    hostname: str
    """Name or address that it connects to."""
    port: str
    has_proxy: bool
    """Whether it goes through another host, which may know names that are unknown here."""


def ssh_command(target: str, command: Sequence[str], *, connect_timeout_s: int = CONNECT_TIMEOUT_S) -> list[str]:
    """The command line that runs a command on a host.

    The remote shell sees each argument quoted, whatever characters it holds.

    Args:
        target: `host` or `user@host`.
        command: Program and arguments.
        connect_timeout_s: Longest wait for the connection.
    """
    options = [option.format(timeout_s=connect_timeout_s) for option in OPTIONS]
    return [SSH, *options, "--", target, shlex.join(command)]


@functools.cache
def ssh_settings(target: str) -> SshSettings:
    """Ask the user's ssh what it would do with a name; without ssh, the name itself on port 22."""
    plain = SshSettings(hostname=target.rpartition("@")[2], port="22", has_proxy=False)
    try:
        answer = subprocess.run([SSH, "-G", "--", target], capture_output=True, text=True, timeout=10)
    except (OSError, subprocess.TimeoutExpired):
        return plain
    if answer.returncode != 0:
        return plain
    told = dict(line.split(" ", 1) for line in answer.stdout.splitlines() if " " in line)
    proxies = (told.get("proxyjump", "none"), told.get("proxycommand", "none"))
    return SshSettings(
        hostname=told.get("hostname", plain.hostname),
        port=told.get("port", plain.port),
        has_proxy=any(proxy != "none" for proxy in proxies),
    )


def why_ssh_failed(said: str) -> tuple[str, str]:
    """From ssh's own last words: what is wrong, and how to mend it.

    Args:
        said: Its standard error.
    """
    for words, reason, remedy in _REASONS:
        if words in said:
            return reason, remedy
    last = said.strip().splitlines()[-1] if said.strip() else "ssh said nothing"
    return last, "try `ssh -v HOST true` by hand"


_REASONS = (
    ("Could not resolve hostname", "the name cannot be resolved",
     "correct it, or add it to /etc/hosts or ~/.ssh/config"),
    ("REMOTE HOST IDENTIFICATION HAS CHANGED", "its host key is another than the known one",
     "if the host was set up anew: `ssh-keygen -R HOST`, then `ssh HOST` once to accept the new key"),
    ("Host key verification failed", "its host key is not known here",
     "connect once with `ssh HOST` and accept the key, or put it into known_hosts with ssh-keyscan"),
    ("Permission denied", "it refuses the key", "`ssh-copy-id HOST`, or start an agent that has the key"),
    ("Connection refused", "nothing listens on its ssh port", "start sshd there, or give the port in ~/.ssh/config"),
    ("Connection timed out", "no answer", "is it up, and does the firewall let ssh (TCP port 22) through?"),
    ("No route to host", "no route to it", "is it up, and in a network that this machine reaches?"),
    ("Network is unreachable", "no route to it", "is it up, and in a network that this machine reaches?"),
)  # fmt: skip
