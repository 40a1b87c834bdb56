"""The output folder of a run: whose it is, what may be written into it, and the finished model in it."""

from __future__ import annotations

import fcntl
import os
import shutil
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from fleetune.cluster.outputs import LOG_FOLDER
from fleetune.config import RunConfig
from fleetune.errors import OutputError
from fleetune.files import disk_errors
from fleetune.hub.card import CARD, is_ours
from fleetune.report.record import RECORD_FILE, RunRecord, read_record
from fleetune.trackers import tensorboard
from fleetune.train.checkpoint import clear_leftovers, list_checkpoints, step_of

LOCK_FILE = ".lock"

PLAN_SETTINGS = (
    "processes", "per_device_train_batch_size", "gradient_accumulation_steps", "learning_rate", "scale_lr",
    "num_train_epochs", "max_steps", "warmup_steps", "warmup_ratio", "lr_scheduler_type",
)  # fmt: skip
"""Settings that act on the weights through the plan alone: they may change as long as `PLAN_NUMBERS` do not."""

NEUTRAL_SETTINGS = frozenset({
    *PLAN_SETTINGS, "output_dir", "overwrite_output_dir", "resume_from_checkpoint", "threads", "ddp_timeout",
    "hosts", "hostfile", "launcher", "num_hosts", "network", "port_range", "timeout_s", "cache_dir",
    "overwrite_cache", "report_to", "profile", "logging_steps", "save_strategy", "save_steps", "save_total_limit",
    "do_eval", "do_predict", "test_file", "max_predict_samples", "per_device_eval_batch_size", "eval_strategy",
    "eval_steps", "n_best_size", "max_answer_length", "null_score_diff_threshold", "base_model", "lora_merge",
    "gradient_checkpointing", "early_stopping_patience", "early_stopping_threshold", "push_to_hub", "hub_model_id",
    "hub_private_repo",
})  # fmt: skip
"""Settings that may change when a run goes on: they do not touch the weights, or do so through `PLAN_NUMBERS`."""

PLAN_NUMBERS = (
    "dtype",
    "global_batch_size",
    "learning_rate",
    "lr_scheduler",
    "warmup_steps",
    "total_steps",
    "num_examples",
)
"""Numbers of the plan that must be equal for a run to go on."""


@dataclass(frozen=True, kw_only=True)
class Occupant:
    """What an output folder holds."""

    kind: str
    """"empty", "foreign" (files of something else), "abandoned" (saved nothing), "unfinished" or "finished"."""
    record: RunRecord | None = None
    last_checkpoint: Path | None = None


def look_into(folder: Path) -> Occupant:
    """Find out what an output folder holds."""
    names = {p.name for p in folder.iterdir()} - {LOCK_FILE, LOG_FOLDER} if folder.is_dir() else set()
    if not names:
        return Occupant(kind="empty")
    record = read_record(folder)
    if record is None:
        return Occupant(kind="foreign")
    checkpoints = list_checkpoints(folder)
    kind = "finished" if record.status == "finished" else "unfinished" if checkpoints else "abandoned"
    return Occupant(kind=kind, record=record, last_checkpoint=checkpoints[0] if checkpoints else None)


def check_occupied(config: RunConfig) -> Occupant:
    """Check, before any work, that a run may write into its output folder.

    Returns:
        What the folder holds.

    Raises:
        OutputError: It holds something that must not be overwritten; says how to go on.
    """
    folder = config.output_dir
    assert folder is not None
    if folder.exists() and not folder.is_dir():
        raise OutputError(f"--output_dir {folder}: a file of that name is in the way")
    occupant = look_into(folder)
    if not config.overwrite_output_dir:
        _refuse_occupied(config, folder, occupant)
    elif occupant.kind == "foreign" and (found := list_checkpoints(folder)):
        raise OutputError(
            f"--output_dir {folder}: the folder holds {found[0].name} of another program, which would be mixed up with "
            "this run's: choose another folder, or move it away"
        )
    return occupant


def claim(config: RunConfig) -> Occupant:
    """Check that a run may write into its output folder, and make the folder.

    Raises:
        OutputError: It holds something that must not be overwritten, or cannot be made.
    """
    occupant = check_occupied(config)
    assert config.output_dir is not None
    with disk_errors(config.output_dir):
        config.output_dir.mkdir(parents=True, exist_ok=True)
    return occupant


def _refuse_occupied(config: RunConfig, folder: Path, occupant: Occupant) -> None:
    place = f"--output_dir {folder}: the folder"
    if occupant.kind == "foreign":
        raise OutputError(
            f"{place} is not empty and holds no run of fleetune: choose another, or give --overwrite_output_dir to "
            "write into it"
        )
    if occupant.kind == "finished":
        raise OutputError(f"{place} holds a finished run: choose another, or give --overwrite_output_dir to replace it")
    if occupant.kind == "unfinished" and config.resume_from_checkpoint is None:
        assert occupant.record is not None
        raise OutputError(f"{place} {_offer(occupant, occupant.record, kept_settings(config))}")


def _offer(occupant: Occupant, record: RunRecord, now: dict[str, Any]) -> str:
    """How to go on with an unfinished run, or why that is not possible."""
    anew = "give --overwrite_output_dir to start anew"
    changed = differences(record.config, now)
    if changed:
        return "holds an unfinished run with other settings:" + _listed(changed) + f"\nChoose another, or {anew}"
    assert occupant.last_checkpoint is not None
    step, total = step_of(occupant.last_checkpoint), record.plan.get("total_steps", "?")
    told = (
        f"holds an unfinished run, saved at step {step} of {total}: give --resume_from_checkpoint to go on, or {anew}"
    )
    planned = differences(record.config, now, PLAN_SETTINGS)
    return told + (f". Going on needs the same plan, and these differ:{_listed(planned)}" if planned else "")


def _listed(lines: list[str]) -> str:
    return "".join(f"\n  {line}" for line in lines)


def kept_settings(config: RunConfig) -> dict[str, Any]:
    """The settings as a record keeps them: with paths that hold from any folder."""
    settings = config.to_dict()
    paths = {name for name in settings if isinstance(getattr(config, name), Path)}
    local = {name for name in ("model", "tokenizer_name") if settings[name] and Path(settings[name]).exists()}
    return settings | {name: str(Path(settings[name]).absolute()) for name in paths | local}


def differences(before: dict[str, Any], now: dict[str, Any], names: Iterable[str] | None = None) -> list[str]:
    """Settings that would make another run, one line each; or, of the named settings, those that changed."""
    chosen = [name for name in now if name not in NEUTRAL_SETTINGS] if names is None else names
    return [
        f"--{name} was {before.get(name)!r}, is {now.get(name)!r}"
        for name in chosen
        if before.get(name) != now.get(name)
    ]


def plan_differences(before: dict[str, Any], now: dict[str, Any]) -> list[str]:
    """Numbers of the plan that would make another run, one line each."""
    return [f"{name} was {before.get(name)}, is {now[name]}" for name in PLAN_NUMBERS if before.get(name) != now[name]]


def lock(folder: Path) -> Callable[[], None]:
    """Keep other runs out of a folder until the returned function is called or the process ends.

    Raises:
        OutputError: Another run is writing there.
    """
    with disk_errors(folder):
        descriptor = os.open(folder / LOCK_FILE, os.O_RDWR | os.O_CREAT, 0o644)
    try:
        with disk_errors(folder / LOCK_FILE):
            is_ours = _take(descriptor, folder / LOCK_FILE)
        if not is_ours:
            raise OutputError(f"--output_dir {folder}: another run is writing into it")
    except OutputError:
        os.close(descriptor)
        raise

    def release() -> None:
        (folder / LOCK_FILE).unlink(missing_ok=True)
        os.close(descriptor)

    return release


def _take(descriptor: int, path: Path) -> bool:
    """Whether the lock could be had: nobody holds it, and the file is not one that its last holder just removed."""
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    return path.exists() and os.path.samestat(os.fstat(descriptor), path.stat())


def clear_earlier_run(folder: Path) -> None:
    """Remove what an earlier run would leave beside a new one and mislead a reader: checkpoints, logs, results.

    Files of something else stay, and all of a folder that holds no run.
    """
    if read_record(folder) is None:
        return
    for checkpoint in list_checkpoints(folder):
        shutil.rmtree(checkpoint)
    clear_leftovers(folder)
    logs = f"{tensorboard.FOLDER}/events.out.tfevents.*"
    results = [f"{name}_results.json" for name in ("train", "eval", "all")]
    of_kinds = ("predictions.txt", "eval_*predictions.json", "predict_*predictions.json", "*_null_odds.json")
    of_all = ("trace_rank_*.json", "predictions_*.jsonl", "predict_results_*.txt")
    if (card := folder / CARD).is_file() and is_ours(card.read_text(encoding="utf-8", errors="replace")):
        card.unlink()
    for pattern in (logs, *results, "trainer_state.json", *of_all, *of_kinds, RECORD_FILE):
        for path in folder.glob(pattern):
            path.unlink()


def check_room(folder: Path, model_bytes: int, num_checkpoints: int, moment_bytes: int | None = None) -> None:
    """Refuse to start a run whose checkpoints and model will not fit on the disk.

    Args:
        folder: The output folder.
        model_bytes: Size of the weights that are written.
        num_checkpoints: How many checkpoints lie there at the same time, the one being written too.
        moment_bytes: Size of AdamW's two moments; None: twice that of the weights.

    Raises:
        OutputError: Says how much is needed and how much is there.
    """
    needed = model_bytes + num_checkpoints * (model_bytes + (2 * model_bytes if moment_bytes is None else moment_bytes))
    free = shutil.disk_usage(folder).free
    if free < needed:
        raise OutputError(
            f"--output_dir {folder}: the disk has {free / 1e6:,.0f} MB free, the model and {num_checkpoints} "
            f"checkpoints need {needed / 1e6:,.0f} MB: free some room, lower --save_total_limit, or give "
            "--save_strategy no"
        )
