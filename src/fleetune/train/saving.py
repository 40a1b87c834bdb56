"""Checkpoints of a run: what goes into one, when, and how a run goes on from it."""

from __future__ import annotations

import contextlib
import json
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file

from fleetune.config import RunConfig
from fleetune.errors import CheckpointError, ModelError
from fleetune.files import write_json
from fleetune.model.adapter_files import read_adapter, restore
from fleetune.model.load import save_model
from fleetune.train.checkpoint import (
    checkpoint_folder,
    list_checkpoints,
    named_checkpoint,
    newest_intact,
    prune_checkpoints,
    verify_checkpoint,
    write_checkpoint,
)
from fleetune.train.output import differences, kept_settings, plan_differences
from fleetune.train.plan import TrainPlan
from fleetune.train.run import TrainingRun
from fleetune.train.state import TrainState

OPTIMIZER_FILE, RUN_STATE_FILE, TRAINER_STATE_FILE = "optimizer.safetensors", "run_state.json", "trainer_state.json"


def save_checkpoint(run: TrainingRun) -> None:
    """Write the checkpoint of the current step on the first rank while the others wait, and remove old ones."""
    output_dir = run.config.output_dir
    assert output_dir is not None
    run.updates.settle()

    def save() -> None:
        with run.record.phase("checkpoints"):
            write_checkpoint(checkpoint_folder(output_dir, run.state.step), lambda folder: _write(run, folder))
            best = run.state.best_step
            prune_checkpoints(
                output_dir, run.config.save_total_limit, None if best is None else checkpoint_folder(output_dir, best)
            )

    with run.clocks.during("checkpoints"):
        run.ranks.on_first(save)


def _write(run: TrainingRun, folder: Path) -> None:
    save_model(run.classifier, run.tokenizer, folder, base=str(kept_settings(run.config)["model"]))
    save_file(run.optimizer.state_tensors(), folder / OPTIMIZER_FILE)
    write_json(folder / RUN_STATE_FILE, {
        "state": run.state.to_dict(),
        "plan": run.plan.to_dict(),
        "config": kept_settings(run.config),
        "random_numbers": "drawn anew for each micro-batch from (seed, step, micro-batch, rank)",
    })  # fmt: skip
    write_json(folder / TRAINER_STATE_FILE, trainer_state(run.state, run.plan, run.config))


def trainer_state(state: TrainState, plan: TrainPlan, config: RunConfig) -> dict[str, Any]:
    """The state in the layout that `transformers.TrainerState.load_from_json` reads."""
    output_dir = config.output_dir
    best = (
        None if state.best_step is None or output_dir is None else str(checkpoint_folder(output_dir, state.best_step))
    )
    return {
        "best_global_step": state.best_step,
        "best_metric": state.best_metric,
        "best_model_checkpoint": best,
        "epoch": state.step / plan.steps_per_epoch,
        "global_step": state.step,
        "log_history": state.log_history,
        "max_steps": plan.total_steps,
        "num_train_epochs": plan.epochs,
        "train_batch_size": plan.micro_batch_size,
        **_callbacks(state, config),
    }


def _callbacks(state: TrainState, config: RunConfig) -> dict[str, Any]:
    """What transformers' `EarlyStoppingCallback` would go on with, where a run stops early."""
    if config.early_stopping_patience is None:
        return {}
    return {"stateful_callbacks": {"EarlyStoppingCallback": {
        "args": {"early_stopping_patience": config.early_stopping_patience,
                 "early_stopping_threshold": config.early_stopping_threshold},
        "attributes": {"early_stopping_patience_counter": state.num_stale},
    }}}  # fmt: skip


def resume(run: TrainingRun) -> None:
    """Go on from a checkpoint where the settings ask for it: every rank has the same weights and state afterwards.

    Raises:
        CheckpointError: The checkpoint is torn, or of a run with other settings; lists the differences.
    """
    if run.config.resume_from_checkpoint is None:
        return
    found = run.ranks.on_first(lambda: _read_into(run))
    if found is None:
        run.terminal.say("no checkpoint yet: starting from the beginning")
        return
    for name, value in found.items():
        setattr(run.state, name, value)
    run.ranks.broadcast(p.data for p in run.classifier.owner.parameters())
    run.ranks.broadcast(run.optimizer.state_tensors().values())
    run.record.resumed_at_step = run.state.step


def earlier_dtype(config: RunConfig) -> str | None:
    """What the run computed in that the settings go on with; None where they go on with none, or it does not say."""
    wanted = config.resume_from_checkpoint
    if wanted is None:
        return None
    assert config.output_dir is not None
    for folder in list_checkpoints(config.output_dir) if wanted == "auto" else [Path(wanted).expanduser()]:
        with contextlib.suppress(OSError, ValueError, TypeError, KeyError):  # torn: `resume` says so
            return str(json.loads((folder / RUN_STATE_FILE).read_text())["plan"]["dtype"])
    return None


def _read_into(run: TrainingRun) -> dict[str, Any] | None:
    """Fill the first rank's weights and optimizer from the checkpoint; its state, or None without a checkpoint."""
    folder = _chosen(run)
    if folder is None:
        return None
    told = json.loads((folder / RUN_STATE_FILE).read_text())
    changed = differences(told["config"], kept_settings(run.config))
    changed += plan_differences(told["plan"], run.plan.to_dict())
    if changed:
        raise CheckpointError(f"{folder}: the checkpoint is of a run with other settings:\n  " + "\n  ".join(changed))
    if told["plan"]["processes"] != run.plan.processes or told["plan"]["threads"] != run.plan.threads:
        run.terminal.say("the checkpoint was made by other ranks or threads: the run goes on, not bit for bit the same")
    load_weights(run, folder)
    saved = load_file(folder / OPTIMIZER_FILE)
    own = run.optimizer.state_tensors()
    if saved.keys() != own.keys():
        raise CheckpointError(f"{folder}: {OPTIMIZER_FILE} is of another model")
    for name, tensor in own.items():
        tensor.copy_(saved[name])
    run.terminal.say(f"going on from {folder} at step {told['state']['step']} of {run.plan.total_steps}")
    state: dict[str, Any] = told["state"]
    return state


def _chosen(run: TrainingRun) -> Path | None:
    wanted, output_dir = run.config.resume_from_checkpoint, run.config.output_dir
    assert wanted is not None
    assert output_dir is not None
    if wanted == "auto":
        folder = newest_intact(output_dir, run.terminal.say)
        if folder is None and list_checkpoints(output_dir):
            raise CheckpointError(f"{output_dir}: no checkpoint is whole; give --overwrite_output_dir to start anew")
        return folder
    folder = named_checkpoint(wanted)
    verify_checkpoint(folder)
    return folder


def load_weights(run: TrainingRun, folder: Path) -> None:
    """Overwrite this rank's weights with those of a checkpoint.

    Raises:
        CheckpointError: The file is of another model.
    """
    if run.classifier.adapter is not None:
        _load_adapter(run, folder)
        return
    own = run.classifier.hugging_face.state_dict()
    saved = load_file(folder / "model.safetensors")
    if saved.keys() != own.keys() or any(saved[n].shape != own[n].shape for n in own):
        raise CheckpointError(f"{folder}: the weights are of another model")
    with torch.no_grad():
        for name, tensor in own.items():
            tensor.copy_(saved[name])


def _load_adapter(run: TrainingRun, folder: Path) -> None:
    """Overwrite this rank's low-rank updates and head with those of a checkpoint."""
    adapter = run.classifier.adapter
    assert adapter is not None
    try:
        restore(adapter, run.classifier.hugging_face, read_adapter(folder))
    except ModelError as error:
        raise CheckpointError(f"the checkpoint cannot be gone on with: {error}") from error


def _checkpoint_of(config: RunConfig, step: int) -> Path:
    """The checkpoint of an earlier step: of this run's, or beside the one of another folder that it went on from.

    Raises:
        CheckpointError: It is in neither.
    """
    assert config.output_dir is not None
    folders = [config.output_dir]
    if config.resume_from_checkpoint not in (None, "auto"):
        folders.append(Path(str(config.resume_from_checkpoint)).expanduser().absolute().parent)
    found = next((f for folder in folders if (f := checkpoint_folder(folder, step)).is_dir()), None)
    if found is None:
        places = " or ".join(map(str, folders))
        raise CheckpointError(f"the best evaluation is that of step {step}, whose checkpoint is not in {places}")
    return found


def load_best(run: TrainingRun) -> int:
    """Give every rank the weights of the best evaluation.

    Returns:
        The step they are of.
    """
    best = run.state.best_step
    if best is None or best == run.state.step:
        return run.state.step
    run.ranks.on_first(lambda: load_weights(run, _checkpoint_of(run.config, best)))
    run.ranks.broadcast(p.data for p in run.classifier.owner.parameters())
    return best
