"""One run of a bench: as a process of its own, with its wall time, and what stays of it."""

from __future__ import annotations

import contextlib
import json
import os
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

from fleetune.bench.plan import PlannedTurn
from fleetune.cluster.job import SETTINGS_VARIABLE
from fleetune.cluster.launchers.processes import end_with_parent
from fleetune.cluster.launchers.signals import SignalInbox
from fleetune.cluster.outputs import LOG_FOLDER
from fleetune.config.load import IN_ENVIRONMENT
from fleetune.files import disk_errors, remove
from fleetune.report.record import RECORD_FILE
from fleetune.report.turns import HISTORY_FILE, TURN_FILE, Turn, read_turn, train_command

STOCK_MODULE = "fleetune.bench.stock_trainer"
STOCK_SETTINGS = "FLEETUNE_BENCH_SETTINGS"
"""Holds the settings of a run of the stock trainer, as JSON."""
_KEPT = {RECORD_FILE, HISTORY_FILE, TURN_FILE, LOG_FOLDER, "all_results.json"}
"""Of an output folder: models and checkpoints of all runs would fill the disk."""
_PATIENCE_S = (5.0, 20.0)
"""What a run gets to end after it was asked, and after it was asked again."""
_REASON_LINES = 4


class BenchStopped(Exception):  # noqa: N818 - no error: somebody asked for it
    """A signal asked the bench to stop; the run that was under way is not counted."""

    def __init__(self, number: signal.Signals) -> None:
        self.number = number
        super().__init__(number.name)


def finished_turn(turn: PlannedTurn) -> Turn | None:
    """The run if it has been made, and made well; what failed is tried again."""
    if not (turn.folder / TURN_FILE).is_file():
        return None
    made = read_turn(turn.folder)
    return made if made.status == "finished" else None


def make_turn(turn: PlannedTurn) -> Turn:
    """Run it to its end, and keep its record.

    Raises:
        BenchStopped: A signal asked for it; nothing of the run stays.
        OutputError: The disk is full or cannot be written.
    """
    remove(turn.folder)
    with disk_errors(turn.folder):
        turn.folder.parent.mkdir(parents=True, exist_ok=True)
    command, variables = COMMANDS[turn.trainer](turn)
    began = time.perf_counter()
    try:
        status = run_to_end(command, variables, turn.log)
    except BenchStopped:
        remove(turn.folder)
        raise
    wall_s = time.perf_counter() - began
    has_failed = status != 0 or not (turn.folder / RECORD_FILE).is_file()
    made = Turn(
        name=turn.name, size=turn.size.label, trainer=turn.trainer, hosts=turn.size.num_hosts, round=turn.round,
        seed=turn.seed, status="failed" if has_failed else "finished",
        reason=reason_of(status, turn.log) if has_failed else None, wall_s=wall_s,
        command=train_command(turn.config.to_dict()),
    )  # fmt: skip
    prune(turn.folder)
    made.write(turn.folder)
    return read_turn(turn.folder)


def prune(folder: Path) -> None:
    """Remove the model and the checkpoints of a run."""
    for path in folder.iterdir() if folder.is_dir() else ():
        if path.name not in _KEPT:
            shutil.rmtree(path) if path.is_dir() else path.unlink()


def reason_of(status: int, log: Path) -> str:
    """Why a run failed: its own error message, else the last thing it said."""
    said = [line.strip() for line in log.read_text(encoding="utf-8", errors="replace").splitlines() if line.strip()]
    errors = [i for i, line in enumerate(said) if line.startswith("error")]
    told = said[errors[0] : errors[0] + _REASON_LINES] if errors else said[-1:]
    return " ".join(told) + (f" (exit status {status})" if status else " (it left no record)")


# ---- commands


def _train(turn: PlannedTurn) -> tuple[list[str], dict[str, str]]:
    """`fleetune train`; its settings travel as they do to ranks, in a variable."""
    command = [sys.executable, "-m", "fleetune", "train", "--config", f"{IN_ENVIRONMENT}{SETTINGS_VARIABLE}"]
    return command, {SETTINGS_VARIABLE: json.dumps(turn.config.to_dict())}


LAUNCHED = ("processes", "threads", "hosts", "hostfile", "launcher", "num_hosts", "network", "port_range", "timeout_s")
"""Settings that say where a script's ranks are started."""


def _stock(turn: PlannedTurn) -> tuple[list[str], dict[str, str]]:
    """The stock trainer under `fleetune launch`, on the same hosts and cores."""
    settings = turn.config.to_dict()
    command = [sys.executable, "-m", "fleetune", "launch", "--log_dir", str(turn.folder / LOG_FOLDER)]
    for name in LAUNCHED:
        if (value := settings[name]) is not None:
            command += [f"--{name}", ",".join(value) if isinstance(value, list) else str(value)]
    return [*command, "-m", STOCK_MODULE], {STOCK_SETTINGS: json.dumps(settings)}


COMMANDS: Mapping[str, Callable[[PlannedTurn], tuple[list[str], dict[str, str]]]] = {
    "fleetune": _train,
    "transformers": _stock,
}
"""Trainer -> (command, variables)."""


# ---- processes


def run_to_end(command: list[str], variables: Mapping[str, str], log: Path) -> int:
    """Run a command with what it says in a file.

    It has a session of its own, so that a terminal's Ctrl-C comes here alone, and ends when this process is killed.

    Returns:
        Its exit status.

    Raises:
        BenchStopped: A signal asked for it; the command has ended.
    """
    with _started(command, {**os.environ, **variables}, log) as process, SignalInbox() as inbox:
        while process.poll() is None:
            for number in inbox.wait(1.0):
                _end(process)
                raise BenchStopped(number)
    return process.returncode


@contextlib.contextmanager
def _started(command: list[str], environ: dict[str, str], log: Path) -> Iterator[subprocess.Popen[Any]]:
    with disk_errors(log), log.open("wb") as file:
        process = subprocess.Popen(
            command, env=environ, stdin=subprocess.DEVNULL, stdout=file, stderr=subprocess.STDOUT,
            start_new_session=True, preexec_fn=end_with_parent(signal.SIGTERM),
        )  # fmt: skip
    try:
        yield process
    finally:
        if process.poll() is None:
            _end(process)


def _end(process: subprocess.Popen[Any]) -> None:
    """Ask it to stop, ask again, which ends its ranks at once, and kill what still does not."""
    for patience_s in _PATIENCE_S:
        process.send_signal(signal.SIGTERM)
        with contextlib.suppress(subprocess.TimeoutExpired):
            process.wait(patience_s)
            return
    process.kill()
    process.wait()
