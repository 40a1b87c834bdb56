"""Commands on other hosts, by the user's own OpenSSH client.

Configuration, agent, jump hosts and shared connections are therefore the user's; nothing asks for a password, and host
keys are checked as the user has it. What a command must know comes on its standard input: no secret is in a command.
"""

from __future__ import annotations

import functools
import os
import re
import shlex
import subprocess
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

SSH = "ssh"
OPTIONS = (
    *("-T", "-o", "BatchMode=yes", "-o", "ConnectTimeout={timeout_s}", "-o", "ServerAliveInterval=15"),
    *("-o", "ClearAllForwardings=yes", "-o", "RemoteCommand=none"),
)
"""Of every connection: no terminal, no question, an end to waiting; and nothing of what the user's configuration adds
to a login by hand: the first of several connections takes a forwarded port, a command of its own excludes ours."""
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
    proxy: str = ""
    """That host, or the command that connects to it, as ssh's configuration has it."""


def ssh_command(target: str, command: Sequence[str], *, connect_timeout_s: int = CONNECT_TIMEOUT_S) -> list[str]:
    """The command line that runs a command on a host.

    Each argument reaches the program whole, whatever characters it holds, under every login shell that knows single
    quotes: sh, bash, dash, ksh, zsh, csh, tcsh, fish.

    Args:
        target: `host` or `user@host`.
        command: Program and arguments.
        connect_timeout_s: Longest wait for the connection.
    """
    options = [option.format(timeout_s=connect_timeout_s) for option in OPTIONS]
    return [SSH, *options, "--", target, remote_words(command)]


def remote_words(command: Sequence[str]) -> str:
    """A command as the text that a login shell is given.

    Shells agree on what single quotes hold, but for little: csh takes ! and the end of a line for its own, fish a
    backslash before another one or a quote. A command with such is spelled in octal, which `sh` there reads.
    """
    assert command, "without a command, ssh would start a shell"
    text = " ".join(map(_quoted, command))
    if not re.search(r"[!\n\r]|\\[\\']|[^\x00-\x7f]", text):
        return text
    octal = "".join(chr(byte) if byte in _LITERAL else f"\\0{byte:03o}" for byte in os.fsencode(text))
    return f"exec sh -c {_quoted(_READ_OCTAL)} sh {_quoted(octal)}"


_PLAIN = re.compile(r"[A-Za-z0-9@+:,./_-][A-Za-z0-9@%+=:,./_-]*")
"""A word that means itself in every shell; zsh and tcsh have an idea of = at its beginning, csh of %."""
_LITERAL = frozenset(b' $&*+,-./0123456789:;<=>?@ABCDEFGHIJKLMNOPQRSTUVWXYZ[]^_abcdefghijklmnopqrstuvwxyz{|}~"()#%')
_READ_OCTAL = 'eval "exec $(printf %b "$1")"'


def _quoted(word: str) -> str:
    if _PLAIN.fullmatch(word):
        return word
    quoted = shlex.quote(word)
    return quoted if quoted != word else f"'{word}'"


def python_command(words: Sequence[str], environ: Mapping[str, str]) -> list[str]:
    """The command that runs this Python on another host, where the user's own variables do not arrive.

    Args:
        words: Its arguments.
        environ: The user's; of its variables, PYTHONPATH decides what Python finds.
    """
    path = environ.get("PYTHONPATH")
    return [*(["env", f"PYTHONPATH={path}"] if path else []), sys.executable, *words]


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
    proxies = [told[word] for word in ("proxyjump", "proxycommand") if told.get(word, "none") != "none"]
    return SshSettings(
        hostname=told.get("hostname", plain.hostname),
        port=told.get("port", plain.port),
        has_proxy=bool(proxies),
        proxy=" ".join(proxies),
    )


def why_ssh_failed(said: str, target: str = "HOST") -> tuple[str, str]:
    """From ssh's own last words: what is wrong, and how to mend it.

    Args:
        said: Its standard error.
        target: What it was given as the host, for the remedy.
    """
    for pattern, reason, remedy in _REASONS:
        if re.search(pattern, said):
            return reason, remedy.replace("HOST", target)
    if not said.strip():
        return (
            "ssh ended without a word: what it ran there was killed, or it was ended here",
            f"see there whether memory is used up (`ssh {target} dmesg`), or try `ssh -v {target} true`",
        )
    return said.strip().splitlines()[-1].strip(), f"try `ssh -v {target} true` by hand"


_REASONS = (
    (r"REMOTE HOST IDENTIFICATION HAS CHANGED|REVOKED HOST KEY", "its host key is another than the known one",
     "if the host was set up anew: `ssh-keygen -R HOST`, then `ssh HOST` once to accept the new key"),
    (r"Host key verification failed", "its host key is not known here",
     "connect once with `ssh HOST` and accept the key, or put it into known_hosts with ssh-keyscan"),
    (r"Bad owner or permissions|Bad configuration option|[Tt]erminating, \d+ bad configuration",
     "this machine's ssh configuration is refused by ssh", "mend what `ssh -G HOST` complains about"),
    (r"UNPROTECTED PRIVATE KEY FILE", "the private key may be read by others, so ssh does not use it",
     "`chmod 600` the key file that `ssh HOST true` names"),
    (r"Too many authentication failures", "it refuses the keys: the agent offers too many",
     "name the one key in ~/.ssh/config, with IdentityFile and `IdentitiesOnly yes`"),
    (r"Permission denied \(", "it refuses the key", "`ssh-copy-id HOST`, or start an agent that has the key"),
    (r"Unable to negotiate", "its ssh server and this ssh have no method in common", "update the older of the two"),
    (r"open failed: administratively prohibited", "the jump host does not forward connections",
     "AllowTcpForwarding in the jump host's sshd_config"),
    (r"[Cc]ould not resolve hostname|Name or service not known", "the name cannot be resolved",
     "correct it, or add it to /etc/hosts or ~/.ssh/config"),
    (r"Connection refused", "nothing listens on its ssh port", "start sshd there, or give the port in ~/.ssh/config"),
    (r"server \S+ not responding|Broken pipe|Connection to \S+ closed by remote host",
     "the connection was lost", "is it up still, and is its network?"),
    (r"(Connection|Operation)( to \S+ port \d+)? timed out", "no answer",
     "is it up, and does the firewall let ssh (TCP port 22) through?"),
    (r"No route to host|Network is unreachable", "no route to it",
     "is it up, and in a network that this machine reaches?"),
    (r"kex_exchange_identification|Connection (closed|reset) by", "it closes the connection before the login",
     "its sshd's log says why: too many connections (MaxStartups), a user or an address that it does not take"),
)  # fmt: skip
"""(what ssh says, what is wrong, how to mend it), the first that fits; what several say together, the cause first."""
