"""One run as a process: its wall time, what stays of it, why it failed, and that it ends when it has to.

The trainer is a script that leaves a record; tests/bench/test_scaling.py has real ones.
"""

from __future__ import annotations

import json
import os
import signal
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from fleetune.bench import turn as turn_module
from fleetune.bench.plan import BenchOptions, BenchPlan, make_plan
from fleetune.bench.scaling import run_bench
from fleetune.bench.turn import BenchStopped, finished_turn, make_turn, reason_of
from fleetune.config import RunConfig
from fleetune.errors import OutputError
from tests.conftest import TinyData
from tests.report.records import a_record, write_run

TRAINER = """
import json, os, pathlib, shutil, sys, time
settings, record, mode = json.loads(os.environ["SETTINGS"]), sys.argv[1], sys.argv[2]
out = pathlib.Path(settings["output_dir"])
with open(os.environ["CALLS"], "a") as calls:
    calls.write(f"{os.getpid()} {out.name}\\n")
if mode == "fails" and settings["processes"] == 2:
    print("loading\\nerror: no memory on node2\\n  buy some")
    sys.exit(3)
if mode == "sleeps":
    time.sleep(100)
shutil.copytree(record, out)
(out / "model.safetensors").write_text("large")
(out / "checkpoint-5").mkdir()
(out / "logs").mkdir()
"""


@pytest.fixture
def plan(tiny_data: TinyData, tiny_model: Path, tmp_path: Path) -> BenchPlan:
    config = RunConfig(
        model=str(tiny_model), train_file=tiny_data.train, validation_file=tiny_data.validation, threads=1,
        output_dir=tmp_path / "bench",
    )  # fmt: skip
    return make_plan(config, BenchOptions(processes=(1, 2), repeat=2, steps=10))


@pytest.fixture
def trains(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[[str], Callable[[], list[str]]]:
    """Put a script in the trainer's place: one that is well, "fails" with 2 processes, or "sleeps"."""
    script, record = tmp_path / "trainer.py", write_run(tmp_path / "record", a_record())
    script.write_text(TRAINER)
    monkeypatch.setenv("CALLS", str(tmp_path / "calls"))

    def calls() -> list[str]:
        path = tmp_path / "calls"
        return [line.split()[1] for line in path.read_text().splitlines()] if path.exists() else []

    def choose(mode: str) -> Callable[[], list[str]]:
        command = [sys.executable, str(script), str(record), mode]
        make = lambda turn: (command, {"SETTINGS": json.dumps(turn.config.to_dict())})  # noqa: E731
        monkeypatch.setattr(turn_module, "COMMANDS", {"fleetune": make})
        return calls

    return choose


Trains = Callable[[str], Callable[[], list[str]]]


def test_its_record_stays_and_its_model_does_not(plan: BenchPlan, trains: Trains) -> None:
    trains("well")
    turn = plan.turns()[1]
    began = time.perf_counter()
    made = make_turn(turn)
    assert made.wall_s is not None
    assert 0 < made.wall_s < time.perf_counter() - began
    assert (made.status, made.size, made.round, made.seed, made.record["step"]) == (
        "finished",
        "2 processes",
        1,
        42,
        11,
    )
    assert len(made.history) == 11
    assert {path.name for path in turn.folder.iterdir()} == {"record.json", "trainer_state.json", "turn.json", "logs"}
    assert finished_turn(turn) == made
    assert finished_turn(plan.turns()[0]) is None


def test_a_failure_has_its_reason_and_is_tried_again(plan: BenchPlan, trains: Trains) -> None:
    trains("fails")
    turn = plan.turns()[1]
    made = make_turn(turn)
    assert (made.status, made.reason) == ("failed", "error: no memory on node2 buy some (exit status 3)")
    assert finished_turn(turn) is None
    trains("well")
    assert make_turn(turn).status == "finished"


def test_reasons(tmp_path: Path) -> None:
    log = tmp_path / "log"
    for said, status, expected in (
        ("a\nb\n\n", 1, "b (exit status 1)"), ("", -9, " (exit status -9)"), ("done\n", 0, "done (it left no record)"),
        ("x\nerror on rank 1: y\n  z\nlast\n", 2, "error on rank 1: y z last (exit status 2)"),
    ):  # fmt: skip
        log.write_text(said)
        assert reason_of(status, log) == expected


def test_all_runs_then_the_report_and_nothing_twice(
    plan: BenchPlan, trains: Trains, capsys: pytest.CaptureFixture[str]
) -> None:
    calls = trains("well")
    assert run_bench(plan, ["fleetune", "bench"], print) == 0
    assert calls() == ["fleetune", *(turn.name for turn in plan.turns())]
    assert {path.name for path in plan.folder.iterdir()} >= {
        "bench.json",
        "report.html",
        "report.md",
        "report.csv",
        "report.json",
    }
    assert "1 process " in capsys.readouterr().out
    assert run_bench(plan, ["fleetune", "bench"], print) == 0
    assert len(calls()) == 5
    assert "4 of 4 runs are there already" in capsys.readouterr().out


def test_more_rounds_go_on_and_other_settings_are_refused(
    plan: BenchPlan, trains: Trains, tiny_data: TinyData, tiny_model: Path
) -> None:
    calls = trains("well")
    run_bench(plan, [], lambda line: None)
    config = RunConfig(
        model=str(tiny_model), train_file=tiny_data.train, validation_file=tiny_data.validation, threads=1,
        output_dir=plan.folder,
    )  # fmt: skip
    more = make_plan(config, BenchOptions(processes=(1, 2), repeat=3, steps=10))
    assert run_bench(more, [], lambda line: None) == 0
    assert len(calls()) == 5 + 1 + 2
    other = make_plan(config.replace(learning_rate=1e-3), BenchOptions(processes=(1, 2), repeat=3, steps=20))
    with pytest.raises(OutputError, match=r"(?s)--learning_rate was 2e-05, is 0\.001.*--steps was 10, is 20"):
        run_bench(other, [], lambda line: None)
    assert run_bench(other, [], lambda line: None, anew=True) == 0
    assert not list(plan.folder.glob("runs/*-round4-*"))


def test_a_folder_of_something_else_is_left_alone(plan: BenchPlan, trains: Trains) -> None:
    trains("well")
    plan.folder.mkdir()
    (plan.folder / "thesis.tex").write_text("")
    with pytest.raises(OutputError, match="holds no bench"):
        run_bench(plan, [], lambda line: None, anew=True)
    assert [path.name for path in plan.folder.iterdir()] == ["thesis.tex"]


def test_a_size_that_fails_is_left_out_and_the_others_stand(
    plan: BenchPlan, trains: Trains, capsys: pytest.CaptureFixture[str]
) -> None:
    calls = trains("fails")
    assert run_bench(plan, [], print) == 1
    names = [turn.name for turn in plan.turns()]
    assert calls() == ["fleetune", names[0], names[1], names[2]]
    out = capsys.readouterr().out
    assert "failed  2 processes: round 1: error: no memory on node2 buy some (exit status 3)" in out
    rows = json.loads((plan.folder / "report.json").read_text())["rows"]
    assert [(row["size"], len(row["runs"]), len(row["failures"])) for row in rows] == [
        ("1 process", 2, 0),
        ("2 processes", 0, 1),
    ]
    page = (plan.folder / "report.html").read_text()
    assert "What failed" in page
    assert "no memory on node2" in page


def test_a_signal_ends_the_run_and_leaves_nothing_of_it(plan: BenchPlan, trains: Trains, tmp_path: Path) -> None:
    calls = trains("sleeps")
    turn = plan.turns()[0]
    with interrupted_after(lambda: bool(calls())), pytest.raises(BenchStopped) as stop:
        make_turn(turn)
    assert stop.value.number == signal.SIGINT
    pid = int((tmp_path / "calls").read_text().split()[0])
    assert not Path(f"/proc/{pid}").exists()
    assert not turn.folder.exists()


def test_a_bench_that_is_stopped_says_how_to_go_on(
    plan: BenchPlan, trains: Trains, capsys: pytest.CaptureFixture[str]
) -> None:
    calls = trains("sleeps")
    with interrupted_after(lambda: bool(calls())):
        assert run_bench(plan, [], print) == 130
    assert "stopped: 4 of 4 runs are missing; the same command goes on" in capsys.readouterr().out
    trains("well")
    assert run_bench(plan, [], print) == 0


class interrupted_after:  # noqa: N801 - a context manager
    """Send this process SIGINT once something is so."""

    def __init__(self, condition: Callable[[], bool]) -> None:
        self._condition, self._left = condition, threading.Event()
        self._thread = threading.Thread(target=self._wait)

    def __enter__(self) -> None:
        self._thread.start()

    def __exit__(self, *_: object) -> None:
        self._left.set()
        self._thread.join()

    def _wait(self) -> None:
        while not self._condition():
            if self._left.wait(0.05):
                return
        os.kill(os.getpid(), signal.SIGINT)
