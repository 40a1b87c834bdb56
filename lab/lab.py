"""Several hosts on this machine, for as long as a `with` block lasts."""

from __future__ import annotations

import contextlib
import json
import os
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path

from lab import cgroups, network, ssh, state
from lab.cgroups import HostGroup
from lab.commands import LabError, call
from lab.host import Host
from lab.network import MAX_HOSTS, Network

PROBE = """
ip link add lab type bridge
ip link add plug type veth peer name other
tc qdisc replace dev plug root tbf rate 1mbit burst 128kb latency 50ms
"""
"""Tried in namespaces of its own, where it leaves nothing: what a lab needs of the kernel, and may be refused."""


class Lab:
    """Hosts that see each other, and nothing else. Made by `up`, which is a context manager.

    Args:
        hosts: In the order of their names.
        network: Names and addresses.
        ssh_config: Settings for `ssh -F`, on the machine and in hosts alike; `None` without ssh.
    """

    def __init__(self, hosts: Sequence[Host], *, network: Network, ssh_config: Path | None) -> None:
        self.hosts, self.ssh_config = list(hosts), ssh_config
        self.number, self.machine_address = network.number, network.machine_address

    def __iter__(self) -> Iterator[Host]:
        return iter(self.hosts)

    def __getitem__(self, name: str) -> Host:
        return {host.name: host for host in self.hosts}[name]

    @classmethod
    @contextlib.contextmanager
    def up(
        cls,
        hosts: int | Sequence[str],
        *,
        cpu_quota: float | None = None,
        mbit: float | None = None,
        with_ssh: bool = False,
        keep: Sequence[str | Path] = (),
    ) -> Iterator[Lab]:
        """Bring hosts up, and take everything down when the block is left, in whatever way.

        What a killed process left behind is taken down first.

        Args:
            hosts: Their names, or how many: node1, node2 and so on.
            cpu_quota: CPU time of each, in cores; keep the sum a little below what the machine has.
            mbit: Rate of each one's link, Mbit/s each way.
            with_ssh: Whether each runs an ssh server.
            keep: Folders under /tmp that hosts see, too, as those of this Python and of this package; all else there
                is their own.

        Raises:
            LabError: Something is refused or missing; `unavailable` tells most of it beforehand.
        """
        names = [f"node{i + 1}" for i in range(hosts)] if isinstance(hosts, int) else list(hosts)
        kept = [Path(folder).absolute() for folder in keep]
        _check(names, kept)
        kept += [folder for folder in _own_folders() if folder not in kept]
        with contextlib.ExitStack() as undo:
            number = undo.enter_context(state.claimed())
            lab = cls._make(number, names, kept, with_ssh=with_ssh)
            for host in lab:
                undo.callback(host.kill)
                host.boot()
            for host in lab:  # only now: with a small quota, booting takes its time
                host.set_quota(cpu_quota)
                host.set_link(mbit)
            yield lab

    @classmethod
    def _make(cls, number: int, names: Sequence[str], keep: Sequence[Path], *, with_ssh: bool) -> Lab:
        """Network, control groups and state folder, before any process runs."""
        net, hierarchies = Network(number=number), cgroups.find_hierarchies()
        addresses = {name: net.address(index) for index, name in enumerate(names)}
        folders = {name: state.host_folder(number, name) for name in names}
        (state.folder_of(number) / "etc_hosts").write_text(_etc_hosts(addresses))
        network.build(net)
        hosts = []
        for index, (name, folder) in enumerate(folders.items()):
            group = HostGroup(hierarchies=hierarchies, name=f"{state.group_of(number)}/{name}")
            network.connect(net, name, index)
            group.make()
            _write_host(folder, name, net, group, keep, with_ssh=with_ssh)
            hosts.append(Host(name=name, index=index, net=net, folder=folder, group=group, with_ssh=with_ssh))
        etc_ssh = {name: folder / "ssh" for name, folder in folders.items()}
        config = ssh.write_all(state.folder_of(number) / "ssh", addresses, etc_ssh) if with_ssh else None
        return cls(hosts, network=net, ssh_config=config)

    @staticmethod
    def unavailable(*, with_ssh: bool = False, with_quota: bool = False) -> str | None:
        """Why a lab cannot be made here; `None` where it can."""
        if os.geteuid() != 0:
            return "a lab of several hosts needs root"
        if with_ssh and not ssh.SERVER.exists():
            return f"no {ssh.SERVER}: install openssh-server"
        try:
            separate = ["unshare", "--net", "--mount", "--uts", "--ipc", "--pid", "--fork", "--mount-proc"]
            call(*separate, "sh", "-ec", PROBE)
        except LabError as error:
            return f"no lab of several hosts: {error}"
        return cgroups.no_cpu_controller() if with_quota else None


def _own_folders() -> list[Path]:
    """Of this environment's Python and of this package, those that lie under /tmp: hosts run commands of both."""
    paths = [Path(sys.prefix).absolute(), Path(__file__).absolute().parents[1]]
    return sorted({Path(*path.parts[:3]) for path in paths if path.parts[:2] == ("/", "tmp") and len(path.parts) > 2})


def _check(names: Sequence[str], keep: Sequence[Path]) -> None:
    """Refuse what cannot work, before anything is made."""
    problems = [
        f"{name!r} is no host name: expected letters, digits and hyphens"
        for name in names
        if not (name.isascii() and name.replace("-", "").isalnum()) or name == "localhost"
    ]
    if not 1 <= len(set(names)) == len(names) <= MAX_HOSTS:
        problems.append(f"{len(names)} hosts named {', '.join(names)}: expected 1 to {MAX_HOSTS}, all different")
    for folder in keep:
        if not folder.is_dir() or not folder.is_relative_to("/tmp") or folder == Path("/tmp"):
            problems.append(f"{folder} cannot be kept visible: expected a folder under /tmp; others are visible anyway")
    if problems:
        raise LabError("; ".join(problems))


def _etc_hosts(addresses: dict[str, str]) -> str:
    """Names of all hosts. c10d looks up names of IPv4 addresses in their IPv6 form, hence the second line of each."""
    lines = (f"{address} {name}\n::ffff:{address} {name}\n" for name, address in addresses.items())
    return "127.0.0.1 localhost\n::1 localhost\n" + "".join(lines)


def _write_host(
    folder: Path, name: str, net: Network, group: HostGroup, keep: Sequence[Path], *, with_ssh: bool
) -> None:
    """Make a host's folder, with what `lab/inside.py` has to know."""
    for made in (folder / "stash", folder / "tmp"):
        made.mkdir(parents=True)
    (folder / "tmp").chmod(0o1777)
    told = {
        "name": name,
        "network": str(network.NAMESPACES / net.namespace(name)),
        "groups": [str(path) for path in group.folders()],
        "etc_hosts": str(folder.parents[1] / "etc_hosts"),
        "etc_ssh": str(folder / "ssh") if with_ssh else None,
        "tmp": str(folder / "tmp"),
        "stash": str(folder / "stash"),
        "keep": [str(path) for path in keep],
    }
    (folder / "host.json").write_text(json.dumps(told, indent=1))
