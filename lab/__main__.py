"""A lab by hand: `python -m lab up 4 --quota 0.4 --mbit 200 --ssh`; see docs/lab.md."""

from __future__ import annotations

import argparse
import os
import shlex
import signal
import sys
from pathlib import Path

from lab import Lab, LabError, state
from lab.host import ENVIRONMENT, entering


def main() -> int:
    """Returns the exit code; a command that runs in a host takes the place of this process."""
    arguments = _parser().parse_args()
    try:
        {"up": _up, "run": _run, "down": _down}[arguments.action](arguments)
    except LabError as error:
        print(f"lab: {error}", file=sys.stderr)
        return 1
    return 0


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="python -m lab", description="Several hosts on this machine.")
    actions = parser.add_subparsers(dest="action", required=True)
    up = actions.add_parser("up", help="bring hosts up, until Ctrl-C")
    up.add_argument("hosts", type=int, help="how many: node1, node2, ...")
    up.add_argument("--quota", type=float, help="CPU time of each, in cores")
    up.add_argument("--mbit", type=float, help="rate of each one's link, Mbit/s")
    up.add_argument("--ssh", action="store_true", help="with an ssh server on each")
    up.add_argument("--keep", type=Path, nargs="*", default=[], help="folders under /tmp that hosts see, too")
    run = actions.add_parser("run", help="run a command in a host: run node1 -- CMD")
    run.add_argument("--lab", type=int, help="number of the lab, where there are several")
    run.add_argument("host")
    run.add_argument("command", nargs="+")
    actions.add_parser("down", help="take down what killed processes left")
    return parser


def _up(arguments: argparse.Namespace) -> None:
    if reason := Lab.unavailable(with_ssh=arguments.ssh, with_quota=arguments.quota is not None):
        raise LabError(reason)
    ends = {signal.SIGINT, signal.SIGTERM, signal.SIGHUP}
    signal.pthread_sigmask(signal.SIG_BLOCK, ends)  # a Ctrl-C while hosts boot waits until they have
    with Lab.up(
        arguments.hosts, cpu_quota=arguments.quota, mbit=arguments.mbit, with_ssh=arguments.ssh, keep=arguments.keep
    ) as lab:
        for host in lab:
            print(f"{host.name}  {host.address}  python -m lab run --lab {lab.number} {host.name} -- CMD")
        if lab.ssh_config is not None:
            print(f"ssh -F {lab.ssh_config} {lab.hosts[0].name}")
        print("Ctrl-C takes the lab down", flush=True)
        signal.sigwait(ends)


def _run(arguments: argparse.Namespace) -> None:
    living = state.living()
    if arguments.lab is None and len(living) != 1:
        raise LabError(f"{len(living)} labs are up: {living or 'start one'}; tell which one by --lab")
    number = living[0] if arguments.lab is None else arguments.lab
    folder = state.host_folder(number, arguments.host)
    if not (folder / "pid").exists():
        raise LabError(f"lab {number} has no host {arguments.host} that is up")
    line = entering(folder, "/", arguments.command)
    os.execve(line[0], line, {**ENVIRONMENT, "TERM": os.environ.get("TERM", "dumb")})


def _down(_: argparse.Namespace) -> None:
    swept, living = state.sweep(), state.living()
    print(f"taken down: {', '.join(map(str, swept)) or 'nothing'}")
    for number in living:
        owner = (state.folder_of(number) / "owner").read_text()
        print(
            f"lab {number} is process {owner}'s: it takes it down itself when it ends ({shlex.join(['kill', owner])})"
        )


if __name__ == "__main__":
    sys.exit(main())
