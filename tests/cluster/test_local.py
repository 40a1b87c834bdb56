"""The local launcher with real processes: 2 ranks, unless a test says otherwise."""

from __future__ import annotations

import contextlib
import os
import pty
import random
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path

import pytest

from fleetune.cluster.launchers.local import PEER_FAILED, plan_local, run_local
from fleetune.cluster.network import free_port
from fleetune.cluster.rank import read_rank
from fleetune.errors import ConfigError, LaunchError

TIMEOUT_S = 30.0
# With patience that no test waits for: each sets its own where it wants to see it end.
DRIVER = """
import fcntl, os, signal, sys, termios
from fleetune.cluster.launchers import local
signal.signal(signal.SIGINT, signal.default_int_handler)  # a shell's background job ignores it
signal.signal(signal.SIGHUP, signal.SIG_IGN if os.environ.get("NOHUP") else signal.SIG_DFL)
local.PEER_GRACE_S = float(os.environ["PEER_GRACE_S"])
local.FORCED_GRACE_S = float(os.environ["FORCED_GRACE_S"])
local.UNATTENDED_GRACE_S = float(os.environ["UNATTENDED_GRACE_S"])
if os.environ.get("TERMINAL"):
    fcntl.ioctl(0, termios.TIOCSCTTY, 0)
processes, script = int(sys.argv[1]), sys.argv[2]
command = [sys.executable, "-c", script]
sys.exit(local.run_local(local.plan_local(command, processes=processes, threads=1, environ=os.environ, cores=9)))
"""
RANK = """
import os, pathlib, signal, subprocess, sys, time
rank, folder = int(os.environ["RANK"]), pathlib.Path(os.environ["FOLDER"])
def note(name, text=""):
    (folder / f".{name}.{rank}").write_text(str(text))
    (folder / f".{name}.{rank}").rename(folder / f"{name}.{rank}")
def wait_for(name):
    while not (folder / name).exists():
        time.sleep(0.005)
def ready():
    note("pid", os.getpid())
def forever():
    while True:
        time.sleep(0.01)
def helper(*more):
    code = "import signal, time\\n" + "\\n".join(more) + "\\nprint(1, flush=True)\\ntime.sleep(600)"
    process = subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE)
    process.stdout.readline()
    note("helper", process.pid)
received = []
def on_signal(signum, _):
    received.append(signum)
    note("received", received)
def catch(*signums):
    for signum in signums:
        signal.signal(signum, on_signal)
"""
SAVE_THEN_STOP = """
catch(signal.SIGINT, signal.SIGTERM)
ready()
while not received:
    time.sleep(0.01)
note("saving")
wait_for("go")
sys.exit(128 + received[0])
"""


@dataclass
class Run:
    """A launcher in a process of its own, with ranks that leave notes in a folder."""

    process: subprocess.Popen[str]
    folder: Path
    ranks: range
    lines: list[str] = field(default_factory=list)

    def wait_for_notes(self, name: str) -> list[str]:
        files = [self.folder / f"{name}.{rank}" for rank in self.ranks]
        wait_until(lambda: all(file.exists() for file in files), f"{name} of all ranks")
        return [file.read_text() for file in files]

    def pids(self, name: str = "pid") -> list[int]:
        return [int(text) for text in self.wait_for_notes(name)]

    def send(self, signum: int) -> None:
        self.process.send_signal(signum)

    def wait_for_line(self, part: str) -> None:
        """Reads the launcher's standard error up to a line."""
        assert self.process.stderr is not None
        for line in self.process.stderr:
            self.lines.append(line)
            if part in line:
                return
        pytest.fail(f"{part!r} was not said, but: {self.lines}")

    def go(self) -> None:
        (self.folder / "go").touch()

    def end(self) -> tuple[int, str]:
        """Exit status and standard error."""
        _, rest = self.process.communicate(timeout=TIMEOUT_S)
        return self.process.returncode, "".join(self.lines) + (rest or "")


Launch = Callable[..., Run]


@pytest.fixture
def launch(tmp_path: Path) -> Iterator[Launch]:
    runs: list[Run] = []

    def start(script: str, *, processes: int = 2, terminal: int | None = None, **environ: str) -> Run:
        given = {
            "FOLDER": str(tmp_path),
            "PEER_GRACE_S": "60",
            "FORCED_GRACE_S": "60",
            "UNATTENDED_GRACE_S": "60",
            **environ,
        }
        streams = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE}
        if terminal is not None:
            given["TERMINAL"] = "1"
            streams = {"stdin": terminal, "stdout": terminal, "stderr": terminal}
        process = subprocess.Popen(
            [sys.executable, "-c", DRIVER, str(processes), RANK + script],
            env={**os.environ, **given},
            text=True,
            start_new_session=True,
            **streams,  # type: ignore[call-overload]
        )
        runs.append(Run(process, tmp_path, range(processes)))
        return runs[-1]

    yield start
    for run in runs:
        run.process.kill()
        for note in (*tmp_path.glob("pid.*"), *tmp_path.glob("helper.*")):  # what a failed test left running
            with contextlib.suppress(ProcessLookupError):
                os.kill(int(note.read_text()), signal.SIGKILL)
        run.process.communicate(timeout=TIMEOUT_S)


def wait_until(condition: Callable[[], bool], what: str) -> None:
    deadline = time.monotonic() + TIMEOUT_S
    while not condition():
        assert time.monotonic() < deadline, f"waited in vain for: {what}"
        time.sleep(0.01)


def is_alive(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] not in "ZX"
    except OSError:
        return False


def wait_until_gone(*pids: int) -> None:
    wait_until(lambda: not any(is_alive(pid) for pid in pids), f"end of {pids}")


# ---- the plan


def test_plan_gives_each_rank_its_environment() -> None:
    plan = plan_local(["python", "a b.py"], processes=2, threads=3, environ={}, main_port=23456, cores=8)
    assert plan.ranks[1] == {
        "RANK": "1",
        "WORLD_SIZE": "2",
        "LOCAL_RANK": "1",
        "LOCAL_WORLD_SIZE": "2",
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": "23456",
        "GLOO_SOCKET_IFNAME": "lo",
        "OMP_NUM_THREADS": "3",
        "FLEETUNE_LAUNCHER": "local",
        "PYTHONUNBUFFERED": "1",
    }
    info = read_rank(plan.ranks[1])
    assert info is not None
    assert (info.rank, info.launcher) == (1, "local")


def test_plan_is_printed_as_commands_without_the_users_environment() -> None:
    environ = {"TOKEN": "secret", "GLOO_SOCKET_IFNAME": "eth0"}
    plan = plan_local(["python", "a b.py"], processes=1, threads=1, environ=environ, main_port=23456, cores=8)
    assert str(plan) == (
        "RANK=0 WORLD_SIZE=1 LOCAL_RANK=0 LOCAL_WORLD_SIZE=1 MASTER_ADDR=127.0.0.1 MASTER_PORT=23456 "
        "GLOO_SOCKET_IFNAME=eth0 OMP_NUM_THREADS=1 FLEETUNE_LAUNCHER=local PYTHONUNBUFFERED=1 "
        "python 'a b.py'"
    )
    assert "secret" not in repr(plan)


@pytest.mark.parametrize(("processes", "threads", "warned"), [(2, 2, False), (5, 1, True), (2, 4, True)])
def test_more_than_the_cores_is_allowed_with_a_warning(processes: int, threads: int, warned: bool) -> None:
    plan = plan_local(["true"], processes=processes, threads=threads, environ={}, cores=4)
    assert bool(plan.warnings) == warned
    assert len(plan.ranks) == processes


def test_plan_refuses_all_problems_at_once() -> None:
    with pytest.raises(ConfigError) as caught:
        plan_local([], processes=0, threads=-1, environ={})
    assert [problem.split(":")[0] for problem in caught.value.problems] == [
        "processes=0",
        "threads=-1",
        "no command to run was given",
    ]


def test_free_port_is_free_and_below_the_ephemeral_range() -> None:
    port = free_port()
    assert 20000 <= port < 30000
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", port))


def test_free_port_passes_over_a_taken_one(monkeypatch: pytest.MonkeyPatch) -> None:
    free = free_port()
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        listener.listen()
        taken = listener.getsockname()[1]
        monkeypatch.setattr(random, "sample", lambda *_: [taken, free])
        assert free_port() == free


# ---- an undisturbed run


def test_ranks_write_to_the_launchers_streams(launch: Launch) -> None:
    run = launch("print(f'out {rank}'); print(f'err {rank}', file=sys.stderr)")
    out, err = run.process.communicate(timeout=TIMEOUT_S)
    assert run.process.returncode == 0
    assert sorted(out.splitlines()) == ["out 0", "out 1"]
    assert sorted(err.splitlines()) == ["err 0", "err 1"]


def test_lines_of_several_ranks_stay_whole(launch: Launch) -> None:
    """`print` of several values to a pipe is several writes, and ranks share the pipe."""
    run = launch("for i in range(2000):\n    print('rank', rank, 'line', i)\nprint('no end', rank, end='')")
    out, _ = run.process.communicate(timeout=TIMEOUT_S)
    told = [f"rank {rank} line {i}" for rank in range(2) for i in range(2000)] + ["no end 0", "no end 1"]
    assert sorted(out.splitlines()) == sorted(told)


def test_one_rank(launch: Launch) -> None:
    assert launch("sys.exit(0)", processes=1).end() == (0, "")


def test_signal_handlers_are_restored() -> None:
    signums = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGCHLD)
    before = [signal.getsignal(signum) for signum in signums]
    assert run_local(plan_local(["true"], processes=2, threads=1, environ=os.environ, cores=2)) == 0
    assert [signal.getsignal(signum) for signum in signums] == before


def test_command_that_does_not_exist() -> None:
    plan = plan_local(["/no/such program", "x"], processes=2, threads=1, environ=os.environ, cores=2)
    with pytest.raises(LaunchError, match=r"cannot start '/no/such program' x: .*: No such file or directory"):
        run_local(plan)


def test_warning_is_said(capfd: pytest.CaptureFixture[str]) -> None:
    assert run_local(plan_local(["true"], processes=3, threads=1, environ=os.environ, cores=2)) == 0
    assert "warning: 3 processes with 1 thread each share 2 usable cores" in capfd.readouterr().err


def test_helpers_left_behind_by_a_finished_rank_are_ended(launch: Launch) -> None:
    run = launch("helper('signal.signal(signal.SIGTERM, signal.SIG_IGN)')", FORCED_GRACE_S="0.2")
    helpers = run.pids("helper")
    assert run.end() == (0, "")
    wait_until_gone(*helpers)


# ---- a rank fails


def test_first_failure_ends_the_others_and_gives_the_status(launch: Launch) -> None:
    run = launch(
        """
helper()
catch(signal.SIGTERM)
ready()
if rank == 1:
    wait_for("pid.0")
    sys.exit(3)
while not received:
    time.sleep(0.01)
sys.exit(9)
"""
    )
    pids = run.pids() + run.pids("helper")
    status, said = run.end()
    assert (status, said) == (3, "fleetune: rank 1 failed with exit status 3\n")
    assert (run.folder / "received.0").read_text() == f"[{signal.SIGTERM:d}]"
    wait_until_gone(*pids)


def test_rank_that_ends_because_of_a_peer_does_not_shadow_it(launch: Launch) -> None:
    run = launch(
        f"""
ready()
if rank == 0:
    sys.exit({PEER_FAILED})
wait_for("pid.0")
stat = pathlib.Path("/proc") / (folder / "pid.0").read_text() / "stat"
while ") Z" not in stat.read_text():
    time.sleep(0.01)
time.sleep(0.2)  # the launcher has seen it end, and now waits for the one that says why
sys.exit(5)
"""
    )
    assert run.end() == (5, "fleetune: rank 1 failed with exit status 5\n")


def test_lost_peer_whose_others_hang(launch: Launch) -> None:
    script = f"ready(); wait_for('pid.0')\nif rank == 0: sys.exit({PEER_FAILED})\nforever()"
    status, said = launch(script, FORCED_GRACE_S="0.1").end()
    assert (status, said) == (PEER_FAILED, f"fleetune: rank 0 failed with exit status {PEER_FAILED}\n")


def test_killed_rank_is_told_in_words(launch: Launch) -> None:
    run = launch("ready(); forever()")
    pids = run.pids()
    os.kill(pids[1], signal.SIGKILL)
    status, said = run.end()
    assert status == 137
    assert said == (
        "fleetune: rank 1 was killed by SIGKILL: not by the kernel for memory; by a user, a scheduler or a daemon such "
        "as systemd-oomd\n"
    )
    wait_until_gone(*pids)


@pytest.mark.parametrize(
    ("signum", "words"),
    [(int(signal.SIGSEGV), "SIGSEGV: a crash in native code"), (40, "signal 40"), (int(signal.SIGUSR1), "SIGUSR1")],
)
def test_other_signals_in_words(launch: Launch, signum: int, words: str) -> None:
    status, said = launch(f"os.kill(os.getpid(), {signum})", processes=1).end()
    assert status == 128 + signum
    assert f"rank 0 was killed by {words}" in said


def test_peer_that_ignores_sigterm_is_killed(launch: Launch) -> None:
    script = """
signal.signal(signal.SIGTERM, signal.SIG_IGN)
helper("signal.signal(signal.SIGTERM, signal.SIG_IGN)")
ready()
if rank == 1:
    wait_for("pid.0")
    sys.exit(4)
forever()
"""
    run = launch(script, PEER_GRACE_S="0.2", FORCED_GRACE_S="0.2")
    pids = run.pids() + run.pids("helper")
    assert run.end() == (4, "fleetune: rank 1 failed with exit status 4\n")
    wait_until_gone(*pids)


# ---- asked to stop


@pytest.mark.parametrize(
    ("sent", "passed_on"),
    [
        (signal.SIGINT, signal.SIGINT),
        (signal.SIGTERM, signal.SIGTERM),
        (signal.SIGHUP, signal.SIGTERM),
    ],
)
def test_first_signal_is_passed_on_once_and_ranks_may_save(
    launch: Launch, sent: signal.Signals, passed_on: signal.Signals
) -> None:
    run = launch(SAVE_THEN_STOP)
    pids = run.pids()
    run.send(sent)
    run.wait_for_line("all ranks are asked to stop; press Ctrl-C again to end at once")
    run.wait_for_notes("saving")
    if sent == signal.SIGHUP:
        run.send(signal.SIGHUP)  # the shell passes it on as well
    run.go()
    status, said = run.end()
    assert status == 128 + passed_on
    assert "fail" not in said
    assert "killed" not in said
    assert run.wait_for_notes("received") == [f"[{passed_on:d}]"] * 2
    wait_until_gone(*pids)


def test_ranks_that_finish_all_the_same(launch: Launch) -> None:
    run = launch("catch(signal.SIGINT); ready(); wait_for('go')")
    run.pids()
    run.send(signal.SIGINT)
    run.wait_for_notes("received")
    run.go()
    assert run.end()[0] == 0


def test_ranks_without_a_handler_are_not_called_failed(launch: Launch) -> None:
    run = launch("signal.signal(signal.SIGINT, signal.SIG_DFL); ready(); forever()")
    run.pids()
    run.send(signal.SIGINT)
    status, said = run.end()
    assert status == 130
    assert said == "fleetune: all ranks are asked to stop; press Ctrl-C again to end at once\n"


def test_failure_while_saving_is_a_failure(launch: Launch) -> None:
    run = launch(SAVE_THEN_STOP.replace("sys.exit(", "sys.exit(7 if rank else "))
    run.pids()
    run.send(signal.SIGTERM)
    run.wait_for_notes("saving")
    run.go()
    status, said = run.end()
    assert status == 7
    assert said.endswith("fleetune: rank 1 failed with exit status 7\n")


@pytest.mark.parametrize("second", [signal.SIGINT, signal.SIGTERM])
def test_second_signal_ends_ranks_at_once(launch: Launch, second: signal.Signals) -> None:
    script = "helper('signal.signal(signal.SIGTERM, signal.SIG_IGN)'); " + (
        "catch(signal.SIGINT, signal.SIGTERM); ready(); forever()"
    )
    run = launch(script, FORCED_GRACE_S="0.2")
    pids = run.pids() + run.pids("helper")
    run.send(signal.SIGINT)
    run.wait_for_line("asked to stop")
    run.wait_for_notes("received")
    run.send(second)
    status, said = run.end()
    assert status == 128 + second
    assert "fail" not in said
    wait_until_gone(*pids)


def test_nohup_is_respected(launch: Launch) -> None:
    run = launch("ready(); wait_for('go')", NOHUP="1")
    run.pids()
    run.send(signal.SIGHUP)
    run.go()
    assert run.end() == (0, "")


# ---- a terminal


def test_ctrl_c_on_a_terminal_reaches_each_rank_once(launch: Launch) -> None:
    ours, theirs = pty.openpty()
    run = launch("note('tty', sys.stdout.isatty())\n" + SAVE_THEN_STOP, terminal=theirs)
    os.close(theirs)
    run.pids()
    os.write(ours, b"\x03")
    run.wait_for_notes("saving")
    run.go()
    assert run.process.wait(TIMEOUT_S) == 130
    os.close(ours)
    assert run.wait_for_notes("received") == [f"[{signal.SIGINT:d}]"] * 2
    assert run.wait_for_notes("tty") == ["True", "True"]


def test_closed_terminal_lets_ranks_save(launch: Launch) -> None:
    ours, theirs = pty.openpty()
    run = launch(SAVE_THEN_STOP, terminal=theirs)
    os.close(theirs)
    run.pids()
    os.close(ours)
    run.wait_for_notes("saving")
    run.go()
    assert run.process.wait(TIMEOUT_S) == 143
    assert run.wait_for_notes("received") == [f"[{signal.SIGTERM:d}]"] * 2


# ---- the launcher dies


def test_killed_launcher_leaves_no_orphan(launch: Launch) -> None:
    script = """
signal.signal(signal.SIGTERM, signal.SIG_IGN)
helper("signal.signal(signal.SIGTERM, signal.SIG_IGN)")
ready()
forever()
"""
    run = launch(script)
    pids = run.pids() + run.pids("helper") + children(run.process.pid)
    run.process.kill()
    wait_until_gone(*pids)


def test_ranks_die_with_the_launcher_even_without_the_guard(launch: Launch) -> None:
    run = launch("ready(); forever()")
    pids = run.pids()
    (guard,) = set(children(run.process.pid)) - set(pids)
    os.kill(guard, signal.SIGKILL)
    run.process.kill()
    wait_until_gone(*pids)


def test_guard_ends_with_a_finished_run(launch: Launch) -> None:
    run = launch("ready(); wait_for('go')")
    pids = run.pids()
    (guard,) = set(children(run.process.pid)) - set(pids)
    os.kill(guard, signal.SIGTERM)  # whoever tells all processes to stop tells it too: it must not listen
    assert is_alive(guard)
    run.go()
    assert run.end() == (0, "")
    wait_until_gone(guard)


def children(pid: int) -> list[int]:
    found = []
    for entry in Path("/proc").glob("[0-9]*/stat"):
        with contextlib.suppress(OSError):
            if int(entry.read_text().rpartition(")")[2].split()[1]) == pid:
                found.append(int(entry.parent.name))
    return found


STUBBORN = "catch(signal.SIGINT, signal.SIGTERM); ready(); forever()"


@pytest.mark.parametrize("signum", [signal.SIGTERM, signal.SIGHUP])
def test_stubborn_ranks_are_ended_where_nobody_will_ask_again(launch: Launch, signum: int) -> None:
    run = launch(STUBBORN, UNATTENDED_GRACE_S="0.3", PEER_GRACE_S="0.3")
    pids = run.pids()
    run.send(signum)
    assert run.end()[0] == 128 + signum
    wait_until_gone(*pids)


def test_after_ctrl_c_ranks_have_all_the_time(launch: Launch) -> None:
    run = launch(SAVE_THEN_STOP, UNATTENDED_GRACE_S="0.1", PEER_GRACE_S="0.1")
    run.pids()
    run.send(signal.SIGINT)
    run.wait_for_notes("saving")
    time.sleep(1.0)
    run.go()
    assert run.end()[0] == 130
