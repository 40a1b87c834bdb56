"""Where the time of real runs went: parts add up, a slow rank is seen, traces and trackers are there."""

from __future__ import annotations

import json
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest

from fleetune import RunConfig, finetune
from fleetune.cluster.network import free_port
from fleetune.kernels.library import load_kernels
from fleetune.report.record import RunRecord
from fleetune.timing.parts import PARTS, names_of
from fleetune.train import finish, loop, program
from tests.conftest import TinyData, Train, environment, fleetune, read_json

SHARE = 0.02
"""Of the wall time that the parts may miss it by."""


def total(figures: dict[str, Any], *groups: str) -> float:
    return float(sum(seconds for group in groups or PARTS for seconds in figures[group].values()))


class Watch:
    """Takes the wall time of a run and of its loop from outside.

    The end is where the figures are put together: what follows is the writing of them.
    """

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.wall_s = self.loop_s = 0.0
        run_rank, train, gather = program.run_rank, loop.train, finish.gather_times

        def timed_run(*args: Any, **kwargs: Any) -> RunRecord:
            self._began = time.monotonic()
            return run_rank(*args, **kwargs)

        def timed_loop(run: Any) -> None:
            began = time.monotonic()
            train(run)
            self.loop_s = time.monotonic() - began

        def timed_gather(run: Any) -> dict[str, Any]:
            self.wall_s = time.monotonic() - self._began
            return gather(run)

        monkeypatch.setattr(program, "run_rank", timed_run)
        monkeypatch.setattr(program, "train", timed_loop)
        monkeypatch.setattr(finish, "gather_times", timed_gather)


def test_parts_add_up_to_the_wall_time_of_the_run_and_of_its_steps(
    tiny_model_with_dropout: Path, tiny_data: TinyData, cache_dir: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """In this process, which computes alone."""
    watch = Watch(monkeypatch)
    record = finetune(
        RunConfig(
            model=str(tiny_model_with_dropout), train_file=tiny_data.train, validation_file=tiny_data.validation,
            test_file=tiny_data.test, do_predict=True, cache_dir=cache_dir, output_dir=tmp_path / "out",
            num_train_epochs=4, per_device_train_batch_size=8, logging_steps=2, threads=1, report_to=("none",),
        )
    )  # fmt: skip
    told = record.time
    (figures,) = told["per_rank"]
    assert total(figures) == pytest.approx(watch.wall_s, rel=SHARE)
    assert figures["wall_s"] == pytest.approx(watch.wall_s, rel=SHARE)
    around = record.seconds["evaluation"] + record.seconds["checkpoints"]
    in_loop = figures["around"]["evaluation"] + figures["around"]["checkpoints"]
    assert total(figures, "steps") + in_loop == pytest.approx(watch.loop_s, rel=SHARE)
    assert in_loop == pytest.approx(around, rel=SHARE)
    assert told["num_steps"] == record.step == len(told["step_s"]["seconds"]) == 48
    assert sum(told["step_s"]["seconds"]) == pytest.approx(total(figures, "steps"), rel=SHARE)
    assert told["mean"] == {name: value for name, value in figures.items() if name != "rank"}
    assert (figures["sent_bytes"], figures["hidden_communication"], figures["interface"]) == (0, 0.0, None)
    assert figures["steps"]["waiting"] == figures["steps"]["communication"] == 0.0
    expected = {"framework", "optimizer", "data", "rest"}
    expected |= {"products", "attention", "kernels"} if load_kernels().compiled else set()
    assert {name for name, seconds in figures["steps"].items() if seconds > 0} == expected
    assert all(figures["around"][name] > 0 for name in ("evaluation", "checkpoints", "prediction", "output"))
    assert all(figures["start_up"][name] > 0 for name in ("model", "tokens", "setup"))


@pytest.fixture(scope="module")
def two_ranks(
    tiny_model: Path, tiny_data: TinyData, cache_dir: Path, tmp_path_factory: pytest.TempPathFactory
) -> tuple[Path, str]:
    """A run of 12 steps on 2 ranks, with a trace of 3 of them and a tracker that does not work; and what it said."""
    output = tmp_path_factory.mktemp("run") / "out"
    result = fleetune(
        "train", "--model", tiny_model, "--train_file", tiny_data.train, "--validation_file", tiny_data.validation,
        "--cache_dir", cache_dir, "--output_dir", output, "--processes", 2, "--threads", 1, "--num_train_epochs", 2,
        "--per_device_train_batch_size", 8, "--logging_steps", 2, "--profile", 3, "--report_to", "tensorboard",
    )  # fmt: skip
    return output, result.stdout


def test_parts_of_every_rank_add_up(two_ranks: tuple[Path, str]) -> None:
    record = read_json(two_ranks[0] / "record.json")
    told = record["time"]
    assert [figures["rank"] for figures in told["per_rank"]] == [0, 1]
    for figures in told["per_rank"]:
        assert total(figures) == pytest.approx(figures["wall_s"], rel=SHARE)
        assert all(tuple(figures[group]) == names_of(group) for group in PARTS)
        assert all(seconds >= 0 for group in PARTS for seconds in figures[group].values())
        assert figures["start_up"]["imports"] > 0
        assert figures["start_up"]["meeting"] > 0
        assert figures["steps"]["communication"] > 0
        assert figures["sent_bytes"] == 0
    first = told["per_rank"][0]
    assert sum(told["step_s"]["seconds"]) == pytest.approx(total(first, "steps"), rel=SHARE)
    assert told["mean"]["wall_s"] == pytest.approx(sum(f["wall_s"] for f in told["per_rank"]) / 2)
    assert first["start_up"]["trackers"] > 0


def test_the_closing_lines_say_where_the_time_went(two_ranks: tuple[Path, str]) -> None:
    (line,) = (line for line in two_ranks[1].splitlines() if line.startswith("time: "))
    assert "start-up" in line
    assert line.count("%") >= 4


def test_every_rank_has_a_trace_of_the_steps_asked_for(two_ranks: tuple[Path, str]) -> None:
    output, said = two_ranks
    assert f"traces of 3 steps are in {output}/trace_rank_*.json" in said
    assert {path.name for path in output.glob("trace*")} == {"trace_rank_0.json", "trace_rank_1.json"}
    for rank in (0, 1):
        events = read_json(output / f"trace_rank_{rank}.json")["traceEvents"]
        spans = [event for event in events if event["ph"] == "X"]
        assert {event["pid"] for event in events} == {rank}
        steps = [event for event in spans if event["name"].startswith("step ")]
        assert [event["name"] for event in steps] == ["step 3", "step 4", "step 5"]
        names = {event["name"] for event in spans}
        assert names >= {"forward and backward", "waiting for other ranks", "optimizer", "data", "reduce 0", "gather 0"}
        if load_kernels().compiled:
            assert names >= {"matrix products", "attention", "other kernels"}
        end = max(event["ts"] + event["dur"] for event in steps)
        of_thread = [event for event in spans if event["tid"] == 2 and event["name"] not in KERNELS]
        covered = sum(min(e["ts"] + e["dur"], end) - max(e["ts"], 0) for e in of_thread if e["ts"] < end)
        assert covered == pytest.approx(end, rel=SHARE)  # the training thread is always in some part


KERNELS = ("matrix products", "attention", "other kernels")

SLOW_RANK = """
import os, sys, time
from fleetune.train import loop
pack = loop.pack
if os.environ["RANK"] == "1":
    loop.pack = lambda *args: (time.sleep(0.25), pack(*args))[1]
from fleetune.cli.main import main
main(sys.argv[1:])
"""


def test_who_waits_for_a_slow_rank_says_so(
    tiny_model: Path, tiny_data: TinyData, cache_dir: Path, tmp_path: Path
) -> None:
    """2 ranks, of which the second sleeps a quarter of a second in each of 8 steps, when it assembles its batch."""
    words = [
        "train", "--model", str(tiny_model), "--train_file", str(tiny_data.train), "--do_eval", "false", "--cache_dir",
        str(cache_dir), "--output_dir", str(tmp_path / "out"), "--max_steps", "8", "--report_to", "none", "--threads",
        "1", "--save_strategy", "no",
    ]  # fmt: skip
    port = str(free_port("127.0.0.1"))
    ranks = [
        subprocess.Popen(
            [sys.executable, "-c", SLOW_RANK, *words], stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True,
            env=environment(RANK=str(rank), WORLD_SIZE="2", LOCAL_RANK=str(rank), LOCAL_WORLD_SIZE="2",
                            MASTER_ADDR="127.0.0.1", MASTER_PORT=port),
        )
        for rank in (0, 1)
    ]  # fmt: skip
    for process in ranks:
        said, _ = process.communicate(timeout=240)
        assert process.returncode == 0, said
    first, second = read_json(tmp_path / "out" / "record.json")["time"]["per_rank"]
    assert second["steps"]["data"] > 8 * 0.25
    assert first["steps"]["waiting"] > 8 * 0.25 / 2
    assert first["steps"]["waiting"] > 2 * second["steps"]["waiting"]


def test_an_interrupted_run_tells_the_times_of_the_first_rank(train: Train, tmp_path: Path) -> None:
    output = tmp_path / "stopped"
    script = (
        "import os, signal, sys\n"
        "from fleetune.train import loop\n"
        "add_up = loop.add_up\n"
        "def stopping(run, own):\n"
        "    if run.state.step == 2: os.kill(os.getpid(), signal.SIGTERM)\n"
        "    return add_up(run, own)\n"
        "loop.add_up = stopping\n"
        "from fleetune.cli.main import main\n"
        "main(sys.argv[1:])\n"
    )
    finished = train("done", max_steps=1)  # for its settings
    settings = {**read_json(finished / "record.json")["config"], "output_dir": str(output), "max_steps": 50}
    (tmp_path / "run.json").write_text(json.dumps({k: v for k, v in settings.items() if v is not None}))
    result = subprocess.run(
        [sys.executable, "-c", script, "train", "--config", str(tmp_path / "run.json")], capture_output=True, text=True,
        timeout=240, env=environment(), check=False,
    )  # fmt: skip
    assert result.returncode == 128 + 15, result.stdout + result.stderr
    record = read_json(output / "record.json")
    (figures,) = record["time"]["per_rank"]
    assert (record["status"], record["time"]["num_steps"]) == ("interrupted", record["step"])
    assert total(figures) == pytest.approx(figures["wall_s"], rel=SHARE)
    assert figures["around"]["checkpoints"] > 0


def test_a_tracker_that_does_not_work_is_said_by_one_rank_and_ends_no_run(
    tiny_model: Path, tiny_data: TinyData, cache_dir: Path, tmp_path: Path
) -> None:
    """2 ranks."""
    pytest.importorskip("mlflow", reason="the package mlflow is not installed")
    output = tmp_path / "out"
    result = fleetune(
        "train", "--model", tiny_model, "--train_file", tiny_data.train, "--do_eval", "false", "--cache_dir", cache_dir,
        "--output_dir", output, "--processes", 2, "--threads", 1, "--max_steps", 2, "--report_to", "mlflow,tensorboard",
        "--logging_steps", 1, "--save_strategy", "no", MLFLOW_TRACKING_URI="nonsense://nowhere",
    )  # fmt: skip
    said = [line for line in result.stdout.splitlines() if "--report_to" in line]
    assert len(said) == 1
    assert said[0].startswith("--report_to mlflow: ")
    assert said[0].endswith("; the run goes on without it")
    assert read_json(output / "record.json")["status"] == "finished"
    assert len(list((output / "runs").iterdir())) == 1
