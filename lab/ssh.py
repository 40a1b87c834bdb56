"""Keys and settings by which a lab's hosts accept each other, and nobody else.

Everything lies in the lab's state folder, under paths that are the same on the machine and in the hosts: one
`ssh_config` serves `ssh -F` here, and is /etc/ssh/ssh_config there.
"""

from __future__ import annotations

import shutil
from collections.abc import Mapping
from pathlib import Path

from lab.commands import LabError, call

SERVER = Path("/usr/sbin/sshd")


def write_all(folder: Path, hosts: Mapping[str, str], etc_ssh: Mapping[str, Path]) -> Path:
    """Make the user's key and each host's, and write who knows whom.

    Args:
        folder: Where the user's side goes.
        hosts: Name -> address.
        etc_ssh: Name -> the folder that is the host's /etc/ssh.

    Returns:
        The settings for `ssh -F`.
    """
    if not SERVER.exists():
        raise LabError(f"no {SERVER}: install openssh-server")
    folder.mkdir(mode=0o700)
    _make_key(folder / "id")
    config = folder / "ssh_config"
    config.write_text(_client_settings(folder, hosts))
    known = []
    for name, address in hosts.items():
        etc_ssh[name].mkdir(mode=0o700)
        key = _make_key(etc_ssh[name] / "host_key")
        known.append(f"{name},{address} {key}\n")
        (etc_ssh[name] / "sshd_config").write_text(_server_settings(folder))
        shutil.copy(config, etc_ssh[name] / "ssh_config")
    (folder / "known_hosts").write_text("".join(known))
    return config


def _make_key(path: Path) -> str:
    """Make a key pair without a passphrase; returns the public one."""
    call("ssh-keygen", "-q", "-t", "ed25519", "-N", "", "-C", "fleetune-lab", "-f", str(path))
    return " ".join(path.with_suffix(".pub").read_text().split()[:2])


def _client_settings(folder: Path, hosts: Mapping[str, str]) -> str:
    """By name or by address, strictly known hosts only, and never a question."""
    names = "".join(f"Host {name}\n  HostName {address}\n  HostKeyAlias {name}\n" for name, address in hosts.items())
    return names + (
        f"Host {' '.join(hosts)} {' '.join(hosts.values())}\n"
        "  User root\n"
        f"  IdentityFile {folder}/id\n"
        "  IdentitiesOnly yes\n"
        "  IdentityAgent none\n"
        f"  UserKnownHostsFile {folder}/known_hosts\n"
        "  GlobalKnownHostsFile /dev/null\n"
        "  StrictHostKeyChecking yes\n"
        "  UpdateHostKeys no\n"
        "  BatchMode yes\n"
        "  ConnectTimeout 5\n"
    )


def _server_settings(folder: Path) -> str:
    """A launcher opens many connections at once: none may be dropped at random."""
    return (
        "Port 22\n"
        "HostKey /etc/ssh/host_key\n"
        f"AuthorizedKeysFile {folder}/id.pub\n"
        "PermitRootLogin prohibit-password\n"
        "PasswordAuthentication no\n"
        "KbdInteractiveAuthentication no\n"
        "UsePAM no\n"
        "StrictModes no\n"
        "UseDNS no\n"
        "MaxStartups 300\n"
        "MaxSessions 300\n"
        "Subsystem sftp internal-sftp\n"
    )
