"""The output folder: whose it is, who may write into it, and what a new run removes."""

from __future__ import annotations

import errno
import fcntl
import os
import shutil
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from fleetune.config import RunConfig
from fleetune.errors import OutputError
from fleetune.files import write_files
from fleetune.report.record import RunRecord, Status
from fleetune.train.checkpoint import checkpoint_folder, write_checkpoint
from fleetune.train.output import (
    LOCK_FILE,
    NEUTRAL_SETTINGS,
    PLAN_NUMBERS,
    check_room,
    claim,
    clear_earlier_run,
    differences,
    lock,
    look_into,
    plan_differences,
)
from tests.conftest import environment


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    return tmp_path / "out"


def config_of(folder: Path, **settings: Any) -> RunConfig:
    return RunConfig(**{"task": "mrpc", "model": "bert", "output_dir": folder, "seed": 1} | settings)


def leave_run(folder: Path, status: Status, *steps: int, **settings: Any) -> None:
    """What an earlier run left: its record, and a checkpoint of each step."""
    config = config_of(folder, **settings)
    RunRecord(config=config.to_dict(), status=status, plan={"total_steps": 90}).write(folder)
    for step in steps:
        write_checkpoint(checkpoint_folder(folder, step), lambda f: (f / "w").write_text("w") and None)


def refusal(config: RunConfig) -> str:
    before = {p: p.is_file() and p.read_bytes() for p in config.output_dir.rglob("*")} if config.output_dir else {}
    with pytest.raises(OutputError) as caught:
        claim(config)
    assert config.output_dir is not None
    assert {p: p.is_file() and p.read_bytes() for p in config.output_dir.rglob("*")} == before  # nothing was touched
    return str(caught.value).removeprefix(f"--output_dir {config.output_dir}: the folder ")


def names(folder: Path) -> list[str]:
    return sorted(p.name for p in folder.iterdir())


# claim


def test_a_new_or_empty_folder_is_made_and_taken(folder: Path) -> None:
    deep = folder / "a" / "b"
    assert claim(config_of(deep)).kind == "empty"
    assert deep.is_dir()
    assert claim(config_of(deep)).kind == "empty"
    (deep / LOCK_FILE).write_text("")  # of a run that was killed before it wrote anything
    assert claim(config_of(deep)).kind == "empty"


def test_a_file_in_the_way(folder: Path) -> None:
    folder.write_text("")
    with pytest.raises(OutputError, match=f"--output_dir {folder}: a file of that name is in the way"):
        claim(config_of(folder))
    with pytest.raises(OutputError, match=f"{folder}/sub cannot be written"):
        claim(config_of(folder / "sub"))


@pytest.mark.parametrize("name", ["thesis.tex", ".hidden", "record.json"])
def test_files_of_something_else_are_refused(folder: Path, name: str) -> None:
    folder.mkdir()
    (folder / name).write_text("no record of ours")
    words = "is not empty and holds no run of fleetune: choose another, or give --overwrite_output_dir"
    assert refusal(config_of(folder)).startswith(words)
    assert claim(config_of(folder, overwrite_output_dir=True)).kind == "foreign"
    assert names(folder) == [name]


def test_checkpoints_of_another_program_are_never_mixed_with_ours(folder: Path) -> None:
    (folder / "checkpoint-500").mkdir(parents=True)
    assert refusal(config_of(folder)).startswith("is not empty and holds no run of fleetune")
    words = refusal(config_of(folder, overwrite_output_dir=True))
    assert words.startswith("holds checkpoint-500 of another program")


def test_a_finished_run_is_refused(folder: Path) -> None:
    leave_run(folder, "finished", 90)
    assert refusal(config_of(folder)).startswith("holds a finished run: choose another, or give --overwrite_output_dir")
    found = claim(config_of(folder, overwrite_output_dir=True))
    assert found.kind == "finished"
    assert found.last_checkpoint == folder / "checkpoint-90"


@pytest.mark.parametrize("status", ["running", "interrupted", "failed"])
def test_an_unfinished_run_of_the_same_settings_is_offered(folder: Path, status: Status) -> None:
    leave_run(folder, status, 9, 30)
    offer = (
        "holds an unfinished run, saved at step 30 of 90: give --resume_from_checkpoint to go on, or "
        "give --overwrite_output_dir to start anew"
    )
    assert refusal(config_of(folder, logging_steps=1)) == offer
    assert refusal(config_of(folder, processes=4, max_steps=20)) == (
        f"{offer}. Going on needs the same plan, and these differ:"
        "\n  --processes was None, is 4\n  --max_steps was None, is 20"
    )
    found = claim(config_of(folder, resume_from_checkpoint="auto"))
    assert found.kind == "unfinished"
    assert found.record is not None
    assert found.record.status == status


@pytest.mark.parametrize("seed", [42, 7])
def test_a_run_that_saved_nothing_is_in_nobodys_way(folder: Path, seed: int) -> None:
    leave_run(folder, "failed")
    assert claim(config_of(folder, seed=seed)).kind == "abandoned"


def test_an_unfinished_run_of_other_settings_is_refused_with_the_differences(folder: Path) -> None:
    leave_run(folder, "interrupted", 30)
    words = refusal(config_of(folder, seed=2, weight_decay=0.1, model="roberta", num_train_epochs=9))
    assert words == (
        "holds an unfinished run with other settings:\n  --model was 'bert', is 'roberta'\n"
        "  --weight_decay was 0.0, is 0.1\n  --seed was 1, is 2\n"
        "Choose another, or give --overwrite_output_dir to start anew"
    )


def test_differences_leave_out_what_does_not_touch_the_weights() -> None:
    before = config_of(Path("a")).to_dict()
    changed = {"output_dir": "b", "processes": 3, "threads": 2, "save_steps": 5, "logging_steps": 3, "do_eval": False}
    assert differences(before, before | changed) == []
    assert differences(before, before | {"adam_beta1": 0.8}) == ["--adam_beta1 was 0.9, is 0.8"]
    assert differences({}, {"seed": 1}) == ["--seed was None, is 1"]  # a record of an older version


def test_every_setting_that_changes_the_weights_is_looked_at() -> None:
    """By name, so that a new setting has to be thought about: it is compared unless it is listed as neutral."""
    compared = set(RunConfig().to_dict()) - NEUTRAL_SETTINGS
    assert {"seed", "weight_decay", "max_grad_norm", "adam_beta1", "adam_beta2", "adam_epsilon"} <= compared
    assert {"model", "task", "train_file", "max_seq_length", "max_train_samples", "text_column_names"} <= compared
    assert set(RunConfig().to_dict()) >= NEUTRAL_SETTINGS


@pytest.mark.parametrize("name", PLAN_NUMBERS)
def test_numbers_of_the_plan_that_make_another_run(name: str) -> None:
    plan = {n: 1 for n in PLAN_NUMBERS} | {"threads": 3}
    assert plan_differences(plan, plan | {"threads": 5}) == []
    assert plan_differences(plan, plan | {name: 2}) == [f"{name} was 1, is 2"]


def test_look_into_nothing(folder: Path) -> None:
    assert look_into(folder).kind == "empty"


# lock

HOLDER = """
import pathlib, sys, time
from fleetune.train.output import lock
release = lock(pathlib.Path(sys.argv[1]))
print("locked", flush=True)
sys.stdin.readline()
release()
print("released", flush=True)
sys.stdin.readline()
"""


@pytest.fixture
def holder(folder: Path) -> Iterator[subprocess.Popen[str]]:
    """Another process that holds the folder."""
    folder.mkdir()
    command = [sys.executable, "-c", HOLDER, str(folder)]
    process = subprocess.Popen(
        command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, env=environment()
    )  # fmt: skip
    assert process.stdout is not None
    assert process.stdout.readline() == "locked\n"
    yield process
    process.kill()
    process.communicate()


def test_a_second_process_is_kept_out_until_the_first_releases(folder: Path, holder: subprocess.Popen[str]) -> None:
    for _ in range(2):
        with pytest.raises(OutputError, match=f"--output_dir {folder}: another run is writing into it"):
            lock(folder)
    assert holder.stdin is not None
    assert holder.stdout is not None
    holder.stdin.write("\n")
    holder.stdin.flush()
    assert holder.stdout.readline() == "released\n"
    assert names(folder) == []
    lock(folder)()
    assert names(folder) == []


def test_a_killed_process_holds_nothing(folder: Path, holder: subprocess.Popen[str]) -> None:
    os.kill(holder.pid, signal.SIGKILL)
    holder.wait(timeout=10)
    assert names(folder) == [LOCK_FILE]  # the file stays, the lock does not
    assert look_into(folder).kind == "empty"
    lock(folder)()


def test_a_lock_on_a_file_that_was_just_removed_does_not_count(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A holder releases between our opening the file and our locking it: the file we hold is in the folder no more."""
    folder.mkdir()
    release = lock(folder)
    flock = fcntl.flock

    def late(descriptor: int, operation: int) -> None:
        release()
        flock(descriptor, operation)

    monkeypatch.setattr(fcntl, "flock", late)
    with pytest.raises(OutputError, match="another run is writing into it"):
        lock(folder)
    monkeypatch.undo()
    lock(folder)()


def test_a_file_system_without_locks_is_not_taken_for_another_run(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder.mkdir()

    def refuse(descriptor: int, operation: int) -> None:
        raise OSError(errno.ENOLCK, "No locks available")

    monkeypatch.setattr(fcntl, "flock", refuse)
    before = len(os.listdir("/proc/self/fd"))
    with pytest.raises(OutputError, match=r"\.lock cannot be written: .*No locks available"):
        lock(folder)
    assert len(os.listdir("/proc/self/fd")) == before


# files


def write_two(folder: Path) -> None:
    (folder / "a.json").write_text("new a")
    (folder / "b.json").write_text("new b")


def test_files_move_into_place_together(folder: Path) -> None:
    folder.mkdir()
    (folder / "a.json").write_text("old a")
    (folder / "other").write_text("other")
    (folder / ".final.writing").mkdir()  # of a run that was killed
    (folder / ".final.writing" / "stale.json").write_text("")
    write_files(folder, write_two)
    assert {p.name: p.read_text() for p in folder.iterdir()} == {
        "a.json": "new a", "b.json": "new b", "other": "other",
    }  # fmt: skip


@pytest.mark.parametrize(
    ("error", "raised"),
    [
        (RuntimeError("a mistake"), RuntimeError),
        (KeyboardInterrupt(), KeyboardInterrupt),
        (OSError(errno.ENOSPC, "No space left on device"), OutputError),
    ],
)
def test_a_failed_write_changes_nothing(folder: Path, error: BaseException, raised: type[BaseException]) -> None:
    folder.mkdir()
    (folder / "a.json").write_text("old a")

    def write(unfinished: Path) -> None:
        write_two(unfinished)
        raise error

    with pytest.raises(raised):
        write_files(folder, write)
    assert {p.name: p.read_text() for p in folder.iterdir()} == {"a.json": "old a"}


OURS = (
    "train_results.json", "eval_results.json", "all_results.json", "trainer_state.json", "record.json",
    "predictions_validation.jsonl", "predictions_test_mismatched.jsonl", "predict_results_mrpc.txt",
)  # fmt: skip
THEIRS = ("notes.txt", "benchmark_results.json", "predictions.csv", "model.safetensors", "events.out.tfevents.1")


def test_a_new_run_removes_what_the_earlier_one_left_and_nothing_else(folder: Path) -> None:
    leave_run(folder, "finished", 10, 20)
    for name in (*OURS[:4], *OURS[5:], *THEIRS):
        (folder / name).write_text("x")
    (folder / "runs" / "May01_host").mkdir(parents=True)
    (folder / "runs" / "events.out.tfevents.123.host.1.0").write_text("ours")
    (folder / "runs" / "May01_host" / "events.out.tfevents.5").write_text("of another program")
    (folder / ".checkpoint-30.writing").mkdir()
    (folder / "checkpoint-old").mkdir()
    clear_earlier_run(folder)
    assert names(folder) == sorted([*THEIRS, "checkpoint-old", "runs"])
    assert names(folder / "runs") == ["May01_host"]
    assert names(folder / "runs" / "May01_host") == ["events.out.tfevents.5"]


def test_a_folder_without_a_run_is_left_as_it_is(folder: Path) -> None:
    folder.mkdir()
    for name in (*(n for n in OURS if n != "record.json"), *THEIRS):
        (folder / name).write_text("x")
    (folder / "checkpoint-5").mkdir()
    before = names(folder)
    clear_earlier_run(folder)
    assert names(folder) == before


# room


@pytest.fixture
def free(monkeypatch: pytest.MonkeyPatch) -> Callable[[int], None]:
    """Sets how many bytes the disk has free."""

    def set_free(count: int) -> None:
        usage = type(shutil.disk_usage("/"))
        monkeypatch.setattr(shutil, "disk_usage", lambda path: usage(10**12, 10**12 - count, count))

    return set_free


# 100 MB of weights: 100 for the model, and for each checkpoint 100 and twice that for AdamW's moments.
@pytest.mark.parametrize(("num_checkpoints", "needed_mb"), [(0, 100), (1, 400), (3, 1000)])
def test_room_is_needed_for_the_model_and_all_checkpoints(
    tmp_path: Path, free: Callable[[int], None], num_checkpoints: int, needed_mb: int
) -> None:
    free(needed_mb * 10**6)
    check_room(tmp_path, 100 * 10**6, num_checkpoints)
    free(needed_mb * 10**6 - 1)
    words = f"the model and {num_checkpoints} checkpoints need {needed_mb:,} MB: free some room"
    with pytest.raises(OutputError, match=words):
        check_room(tmp_path, 100 * 10**6, num_checkpoints)
