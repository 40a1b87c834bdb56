"""What would be done on a host: a plan that can be printed, and the commands of it."""

from __future__ import annotations

import os
import shlex
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from fleetune.cluster.environment.contents import MARKER, Contents, Difference, Listing, compare
from fleetune.cluster.environment.here import VERSIONS, Environment
from fleetune.cluster.environment.probe import HostFacts, lack_of_room, obstacles
from fleetune.cluster.hosts import Host
from fleetune.cluster.remote import ssh_command
from fleetune.errors import LaunchError

LIST = 'cd -- "$1" && exec find . -printf "$2"'

RECEIVE = " ".join(
    (
        "p=$1; d=$p.fleetune-new;",
        'undo() { rm -rf -- "$d"; exit "$1"; };',
        'mkdir -p -- "$(dirname -- "$p")" || exit 3;',
        # Making a folder is what only one can do, also where several hosts share a file system.
        'if mkdir -- "$d"; then :; elif [ -d "$d" ]; then read -r h i <"$d/owner";',
        'if [ "$h" = "$(uname -n)" ]; then kill -0 "$i" && exit 7; rm -rf -- "$d"; mkdir -- "$d" || exit 3;',
        'else exit 7; fi; else exit 3; fi; echo "$(uname -n) $$" >"$d/owner" || undo 3;',
        # Links share the old one's files and take no room; nothing is written into them, only other files put in place.
        'if [ "$2" = update ]; then cp -al -- "$p" "$d/env"; else mkdir -- "$d/env"; fi || undo 3;',
        'cd -- "$d/env" && head -c "$3" | xargs -0 -r rm -rf -- || undo 3;',
        f"tar -xpf - --no-same-owner && [ -e {MARKER} ] || undo 4;",
        'want=$4; shift 4; got=$(bin/python -B -I -c "$@" 2>&1);',
        'if [ "$got" = "$want" ]; then :; else rm -rf -- "$d"; echo "$got"; exit 5; fi;',
        'if [ -e "$p" ] || [ -L "$p" ]; then mv -T -- "$p" "$d/old" || undo 6; fi;',
        'mv -T -- "$d/env" "$p" || { mv -T -- "$d/old" "$p"; undo 6; }; cd /; rm -rf -- "$d"',
    )
)
"""For sh. Standard input: names to remove first, then a tar archive. Arguments: the environment's folder, `new` or
`update`, bytes of the names, what the program that follows must print, the program, its arguments.

It ends in one of two ways, whatever happens to the connection: the new environment in place of the old one, or the old
one as it was. Exit status 3: could not be prepared; 4: did not arrive whole; 5: does not work; 6: could not be put in
place; `BUSY`: another one is at it, here or on a host that shares the folder."""
BUSY = 7


@dataclass(frozen=True, kw_only=True)
class HostPlan:
    """What a host needs."""

    host: Host
    action: Literal["new", "update", "equal", "shared", "here"]
    """shared: the host sees this machine's very files. here: it is this machine."""
    difference: Difference = Difference(send=(), remove=())
    num_files: int = 0
    num_bytes: int = 0

    @property
    def has_to_send(self) -> bool:
        """Whether anything is sent."""
        return self.action in ("new", "update")

    def title(self) -> str:
        """One line for people."""
        size = f"{self.num_files:,} {'file' if self.num_files == 1 else 'files'}, {readable(self.num_bytes)}"
        if self.action == "update":
            num_gone = len(set(self.difference.remove) - set(self.difference.send))
            size += f"; {num_gone:,} removed" if num_gone else ""
        return {
            "new": f"new, {size}",
            "update": f"changed, {size}",
            "equal": "up to date, nothing to send",
            "shared": "sees this very environment (a shared folder), nothing to send",
            "here": "this machine, nothing to send",
        }[self.action]


def readable(num_bytes: int) -> str:
    """A size for people."""
    if num_bytes < 1000:
        return f"{num_bytes} bytes"
    return f"{num_bytes / 1e3:,.1f} kB" if num_bytes < 10e6 else f"{num_bytes / 1e6:,.0f} MB"


def plan_host(
    host: Host,
    environment: Environment,
    contents: Contents,
    facts: HostFacts,
    listing: Listing | None,
    *,
    force: bool = False,
) -> HostPlan:
    """Decide what is done on a host.

    Args:
        host: Which one.
        environment: This one.
        contents: Its files.
        facts: Of the host.
        listing: Files of the environment on the host, if we made that; None else.
        force: Replace an environment that we did not make.

    Raises:
        LaunchError: It cannot be set up; lists all reasons.
    """
    if facts.identity and facts.identity == identity(environment):
        return HostPlan(host=host, action="shared")
    if problems := list(obstacles(facts, environment, force=force)):
        raise LaunchError("; ".join(problems))
    is_ours = facts.found == "ours" and listing is not None
    is_from_here = facts.marker.get("from") == environment.head
    newest = facts.marker.get("newest_s") if is_from_here else None
    difference = compare(contents, listing if is_ours else None, newest if isinstance(newest, float) else None)
    if not difference.send:
        return HostPlan(host=host, action="equal")
    entries = contents.all
    sent = [entries[name] for name in difference.send if name != MARKER and entries[name].kind == "f"]
    num_bytes = sum(entry.num_bytes for entry in sent)
    room = sum(-(-entry.num_bytes // 4096) * 4096 for entry in sent)
    if problem := lack_of_room(facts, room, len(difference.send)):
        raise LaunchError(f"{environment.prefix} does not fit there: {problem}")
    return HostPlan(
        host=host,
        action="update" if is_ours else "new",
        difference=difference,
        num_files=len(sent),
        num_bytes=num_bytes,
    )


def identity(environment: Environment) -> str:
    """What the probe says of a host that sees this very environment."""
    found = [(environment.prefix / folder).stat() for folder in ("bin", environment.site_packages)]
    return " ".join(f"{status.st_ino}.{int(status.st_ctime)}" for status in found)


# ---- commands


def on_host(host: Host, command: list[str], connect_timeout_s: int) -> list[str]:
    """The command line that runs a command on a host; this machine needs no ssh."""
    return command if host.is_here else ssh_command(host.target, command, connect_timeout_s=connect_timeout_s)


def receive_command(plan: HostPlan, environment: Environment) -> list[str]:
    """What takes the archive in."""
    num_removed = len(removals(plan))
    return [
        *("sh", "-c", RECEIVE, "sh", str(environment.prefix), plan.action, str(num_removed), environment.versions),
        *(VERSIONS, *environment.modules),
    ]


def removals(plan: HostPlan) -> bytes:
    """Names that go first, each with a NUL."""
    return _names(plan.difference.remove)


def tar_command(contents: Contents, lists: tuple[Path, Path]) -> list[str]:
    """What makes the archive; `lists` name the files of the environment, and those of the stage."""
    parts = zip((contents.prefix, contents.stage), lists, strict=True)
    each = [word for folder, names in parts for word in ("-C", str(folder), "-T", str(names))]
    return ["tar", "-cf", "-", "--format=gnu", "--no-recursion", "--null", "--verbatim-files-from", *each]


def file_lists(plan: HostPlan, contents: Contents) -> tuple[bytes, bytes]:
    """What the two files of `tar_command` hold. A folder that the stage links to is named so that tar follows."""
    of_prefix = [name for name in plan.difference.send if name in contents.of_prefix]
    of_stage = [name for name in plan.difference.send if name not in contents.of_prefix]
    of_stage = [f"{name}/." if (contents.stage / name).is_symlink() else name for name in of_stage]
    return _names(of_prefix), _names(of_stage)


def _names(names: Iterable[str]) -> bytes:
    return b"".join(os.fsencode(name) + b"\0" for name in names)


def check_command(environment: Environment) -> list[str]:
    """What tells the versions on a host."""
    return [str(environment.prefix / "bin/python"), "-B", "-I", "-c", VERSIONS, *environment.modules]


def kernels_command(environment: Environment) -> list[str]:
    """What compiles the kernels on a host."""
    return [str(environment.prefix / "bin/python"), "-m", "fleetune", "build-kernels"]


SHOWN = 10
"""Names of files in a plan that is printed."""


def lines(
    plan: HostPlan, environment: Environment, contents: Contents, *, with_kernels: bool, connect_timeout_s: int
) -> list[str]:
    """The plan for people: what would be sent, and the exact commands."""
    told = [f"{plan.host.name}: {plan.title()}"]
    if plan.action == "update":
        changes = [("-", name) for name in plan.difference.remove if name not in plan.difference.send]
        changes += [("+", name) for name in plan.difference.send if name != MARKER]
        told += [f"    {sign} {name}" for sign, name in changes[:SHOWN]]
        told += [f"    ... and {len(changes) - SHOWN:,} more"] if len(changes) > SHOWN else []

    def there(command: list[str]) -> str:
        return shlex.join(on_host(plan.host, command, connect_timeout_s))

    if plan.has_to_send:
        lists = (Path(f"{plan.host.name}.files"), Path(f"{plan.host.name}.staged"))
        told.append(f"    {shlex.join(tar_command(contents, lists))} | {there(receive_command(plan, environment))}")
    elif plan.action != "here":
        told.append(f"    {there(check_command(environment))}")
    if with_kernels:
        told.append(f"    {there(kernels_command(environment))}")
    return told
