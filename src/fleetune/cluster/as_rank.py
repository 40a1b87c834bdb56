"""What every rank of mpirun, Slurm and Ray goes through on its host: `python -m fleetune.cluster.as_rank -- COMMAND`.

It reads its place among all from the launcher's variables, says it again in those of torchrun, which every program
knows, finds the network interface that leads to the first rank's host, and becomes the command. So signals and the
exit status are the command's own, and nothing stands between it and its launcher. Only where the launcher lets the
others run on when a rank has failed (MPICH and Intel MPI), it stays above the command, to tell the head how that ended.
"""

from __future__ import annotations

import contextlib
import ctypes
import itertools
import os
import signal
import socket
import subprocess
import sys
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence

from fleetune.cluster.network import Interface, address_towards, addresses_of, inside, interface_of, interfaces
from fleetune.cluster.outputs import OUTPUT_VARIABLE, connect
from fleetune.cluster.rank import (
    CWD_VARIABLE,
    NETWORK_VARIABLE,
    RANKS_VARIABLE,
    THREADS_VARIABLE,
    RankInfo,
    as_environment,
    host_names,
    is_loopback,
    rank_variable,
    read_rank,
)
from fleetune.errors import ConfigError, FleetuneError
from fleetune.hardware.pinning import plan_this_host, take_place

_OWN_MODULES = ("-m", "fleetune")
_PASSED_ON = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGUSR1, signal.SIGUSR2)
_GLANCE_S = 0.2
_PR_SET_PDEATHSIG = 1
_prctl = ctypes.CDLL(None).prctl
_prctl.argtypes = (ctypes.c_int, *[ctypes.c_ulong] * 4)

LookUp = Callable[[str], Sequence[str]]
"""Name -> its addresses."""


def main(words: Sequence[str]) -> int:
    """Become the command of a rank; returns only when that cannot be."""
    try:
        return _become(words[1:] if words[:1] == ["--"] else words)
    except FleetuneError as error:
        print(f"error on {_hostname()}: {error}", file=sys.stderr, flush=True)
        return _status_of(error)
    except OSError as error:
        what = error.filename or next((word for word in words if word != "--"), "")
        print(f"error on {_hostname()}: {what}: {error.strerror}", file=sys.stderr, flush=True)
        return _status_of(error)


def rank_environment(
    info: RankInfo, environ: Mapping[str, str], *, among: Iterable[Interface], look_up: LookUp
) -> dict[str, str]:
    """The variables that a rank gets on top of its launcher's.

    Args:
        info: Its place.
        environ: Its environment.
        among: The interfaces of its host.
        look_up: Finds the addresses of a name.

    Raises:
        ConfigError: The first rank's host has no address that this host could reach.
    """
    group = str(group_rank(info, environ))
    address, interface = meeting_place(info, environ, among=tuple(among), look_up=look_up)
    variables = as_environment(info) | {
        "MASTER_ADDR": address, "GROUP_RANK": group, "NODE_RANK": group, "FLEETUNE_LAUNCHER": info.launcher,
        "PYTHONUNBUFFERED": "1",
    }  # fmt: skip
    if interface is not None and not environ.get("GLOO_SOCKET_IFNAME"):
        variables["GLOO_SOCKET_IFNAME"] = interface
    return variables


def meeting_place(
    info: RankInfo, environ: Mapping[str, str], *, among: tuple[Interface, ...], look_up: LookUp
) -> tuple[str, str | None]:
    """Address at which the first rank is reached from this host, and the interface that leads there.

    A host's own name may mean 127.0.1.1 to itself, where /etc/hosts says so, and its real address to all others. So
    addresses are handed on, never names.

    Raises:
        ConfigError: There is no such address.
    """
    if info.local_world_size == info.world_size:
        return info.main_address, "lo" if is_loopback(info.main_address) else None
    found = [text for text in look_up(info.main_address) if _in_network(text, environ)]
    mine = {interface.address for interface in among}
    if any(is_loopback(address) or address in mine for address in look_up(info.main_address)):
        address = _own_address(found, environ, among, look_up)
        return address, interface_of(address, among)
    if not (real := [address for address in found if not is_loopback(address)]):
        raise ConfigError(_unreachable(info.main_address, environ))
    own = inside(environ[NETWORK_VARIABLE], among) if environ.get(NETWORK_VARIABLE) else ()
    if own:
        return real[0], own[0].name
    return real[0], interface_of(address_towards(real[0]) or "", among)


def group_rank(info: RankInfo, environ: Mapping[str, str]) -> int:
    """Number of this rank's host among the hosts."""
    if info.is_ours and environ.get("GROUP_RANK"):
        return int(environ["GROUP_RANK"])
    if environ.get("SLURM_NODEID") and info.launcher == "slurm":
        return int(environ["SLURM_NODEID"])
    if told := environ.get(RANKS_VARIABLE):
        ends = list(itertools.accumulate(map(int, told.split(","))))
        return sum(end <= info.rank for end in ends)
    return info.rank // info.local_world_size


# ---- where to meet


def _own_address(
    found: Sequence[str], environ: Mapping[str, str], among: tuple[Interface, ...], look_up: LookUp
) -> str:
    """The address of this host, where the first rank is, that the others use."""
    network = environ.get(NETWORK_VARIABLE)
    if network:
        if own := inside(network, among):
            return own[0].address
        raise ConfigError(f"--network {network}: no address of {_hostname()} is in it")
    mine = {interface.address for interface in among}
    if real := [address for address in found if address in mine and not is_loopback(address)]:
        return real[0]
    listed = environ.get("SLURM_STEP_NODELIST") or environ.get("SLURM_JOB_NODELIST") or ""
    for peer in itertools.chain.from_iterable(map(look_up, host_names(listed))):
        if not is_loopback(peer) and peer not in mine and (towards := address_towards(peer)):
            return towards
    means = ", ".join(found) or "nothing"
    raise ConfigError(
        f"{_hostname()}: its name means {means}, and no way to the other hosts is known: give --network, as 10.0.0.0/8"
    )


def _in_network(address: str, environ: Mapping[str, str]) -> bool:
    network = environ.get(NETWORK_VARIABLE)
    return not network or bool(inside(network, [Interface(name="", address=address)]))


def _unreachable(name: str, environ: Mapping[str, str]) -> str:
    within = f" in the network {environ[NETWORK_VARIABLE]}" if environ.get(NETWORK_VARIABLE) else ""
    return (
        f"the first rank's host {name} has no address{within} that {_hostname()} knows: add it to /etc/hosts or the "
        "name server, or set MASTER_ADDR to its address"
    )


# ---- becoming the command


def _become(command: Sequence[str]) -> int:
    """The exit status of the command, where the head wants to know it; else never returns but by an error."""
    if not command:
        raise ConfigError("as_rank: a command is expected after --")
    info = read_rank(os.environ)
    if info is None:
        raise ConfigError("as_rank: no variables of mpirun, srun or another launcher are set")
    _end_with_parent()
    head = connect(os.environ, rank=info.rank, host=_hostname())
    os.environ.pop(OUTPUT_VARIABLE, None)
    with _told(head):
        os.environ.update(rank_environment(info, os.environ, among=interfaces(), look_up=addresses_of))
        if tuple(command[1:3]) != _OWN_MODULES:  # our own programs take their part of the host by themselves
            _take_part(info)
            _check_folder(os.environ.get(CWD_VARIABLE))
        _change_folder(os.environ.get(CWD_VARIABLE))
        if head is None:
            os.execvp(command[0], list(command))
        status = _run(command)
        with contextlib.suppress(OSError):  # the head may be gone, and the launcher will end this host's ranks
            head.sendall(str(status).encode())
    return status


@contextlib.contextmanager
def _told(head: socket.socket | None) -> Iterator[None]:
    """Tell the head of an error before the command has started, too."""
    try:
        yield
    except (FleetuneError, OSError) as error:
        if head is not None:
            with contextlib.suppress(OSError):
                head.sendall(str(_status_of(error)).encode())
        raise
    finally:
        if head is not None:
            head.close()


def _run(command: Sequence[str]) -> int:
    """Run the command below this process: signals are passed on to it, and it ends with us."""
    received: list[int] = []
    for number in _PASSED_ON:
        signal.signal(number, lambda number, frame: received.append(number))
    child = subprocess.Popen(command, preexec_fn=_end_with_parent)
    while (code := child.poll()) is None:
        while received:
            child.send_signal(received.pop(0))
        with contextlib.suppress(subprocess.TimeoutExpired):
            child.wait(_GLANCE_S)
    return 128 - code if code < 0 else code


def _status_of(error: FleetuneError | OSError) -> int:
    """As shells have it for commands that cannot be found, or not be run."""
    if isinstance(error, FleetuneError):
        return error.exit_status
    return 127 if isinstance(error, FileNotFoundError) else 126


def _take_part(info: RankInfo) -> None:
    """Cores, threads and memory of this rank; the command inherits them."""
    threads = os.environ.get(THREADS_VARIABLE)
    plan = plan_this_host(
        os.environ,
        processes=info.local_world_size,
        threads=int(threads) if threads else None,
        local_rank=info.local_rank,
        rank_variable=rank_variable(os.environ),
    )
    take_place(plan, info.local_rank)


def _check_folder(folder: str | None) -> None:
    """A script of the same name in another folder may be another script.

    Raises:
        ConfigError: This host has no such folder.
    """
    if folder and not os.path.isdir(folder):
        raise ConfigError(
            f"{_hostname()}: there is no folder {folder}, where the script is started: make it there, or start from a "
            "folder that is"
        )


def _change_folder(folder: str | None) -> None:
    """Work in the job's folder; a host that does not have it starts where ssh would."""
    for place in (folder, os.path.expanduser("~")):
        with contextlib.suppress(OSError):
            if place:
                return os.chdir(place)
    return None


def _end_with_parent() -> None:
    """Ask the kernel to end this process when the one above it is killed: Open MPI's mpirun would leave it behind."""
    _prctl(_PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)


def _hostname() -> str:
    return os.environ.get("SLURMD_NODENAME") or socket.gethostname().partition(".")[0]


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
