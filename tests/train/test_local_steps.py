"""Local steps (post-local SGD) equal a simulation of their ranks in one process, with torch's optimizer."""

from __future__ import annotations

import dataclasses
from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors.numpy import load_file
from torch import nn

from fleetune import RunConfig
from fleetune.comm.ranks import Ranks
from fleetune.data.batches import pack
from fleetune.errors import ConfigError
from fleetune.model.losses import LOSSES
from fleetune.report.record import RunRecord
from fleetune.report.terminal import PlainTerminal
from fleetune.train.program import prepare
from fleetune.train.run import TrainingRun, make_batches
from tests.conftest import TinyData, Train

RANKS, EVERY, WARM_UP, STEPS, CLIP = 2, 3, 2, 9, 0.5
AVERAGED = (4, 7, 8)
"""Steps after which the ranks' weights are averaged: every third after the first two, and the last."""
SETTINGS = {"max_steps": STEPS, "warmup_steps": WARM_UP, "max_grad_norm": CLIP, "per_device_train_batch_size": 8,
            "eval_strategy": "no", "save_strategy": "no", "do_eval": "false"}  # fmt: skip


def one_rank(settings: dict[str, object], rank: int) -> TrainingRun:
    """A run with a model of its own, whose batches are shared with the other ranks."""
    config = RunConfig(**{**settings, "output_dir": Path("unused")})
    run = prepare(config, Ranks(None, None), 1, RunRecord(config=config.to_dict()), PlainTerminal())
    run.plan = dataclasses.replace(run.plan, processes=RANKS, total_steps=STEPS)
    run.batches = make_batches(run.train_table, run.plan, config.seed, run.classifier.hidden_size)
    return run


def backward(run: TrainingRun, step: int, rank: int, scale: float) -> None:
    """The gradients of a rank's part of the global batch."""
    (examples,) = run.batches.micro_batches(step, rank)
    batch = pack(run.train_table, examples)
    run.classifier.module.word_embeddings.sparse = False
    run.classifier.module.begin_micro_batch(run.config.seed, step, micro_batch=0, rank=rank)
    assert batch.labels is not None
    loss = LOSSES[run.task.problem](run.classifier.module(batch), batch.labels)
    (loss * scale / len(run.batches.examples_of(step))).backward()


def add_up_gradients(models: list[nn.Module]) -> None:
    for parameters in zip(*(m.parameters() for m in models), strict=True):
        grads = [p.grad for p in parameters if p.grad is not None]
        for parameter in parameters if grads else ():
            parameter.grad = torch.stack(grads).sum(dim=0)


def average_weights(models: list[nn.Module]) -> None:
    for parameters in zip(*(m.parameters() for m in models), strict=True):
        mean = torch.stack([p.data for p in parameters]).mean(dim=0)
        for parameter in parameters:
            parameter.data = mean.clone()


def test_local_steps_equal_a_simulation(
    train: Train, tiny_model_with_dropout: Path, tiny_data: TinyData, cache_dir: Path
) -> None:
    """2 ranks: 2 steps together, 3 alone, averaged, 3 alone, averaged, 1 alone, averaged at the end."""
    settings = {"model": tiny_model_with_dropout, "train_file": tiny_data.train, "cache_dir": cache_dir,
                "learning_rate": 1e-3, "scale_lr": "none", "threads": 1, "report_to": "none", **SETTINGS}  # fmt: skip
    output = train("local", processes=RANKS, local_steps=EVERY, **(settings | {"validation_file": None}))
    runs = [one_rank(settings, rank) for rank in range(RANKS)]
    models: list[nn.Module] = [run.classifier.hugging_face for run in runs]
    optimizers = [torch.optim.AdamW(m.parameters(), weight_decay=0.0, fused=True) for m in models]
    for step in range(STEPS):
        for rank, run in enumerate(runs):
            backward(run, step, rank, 1.0 if step < WARM_UP else RANKS)
        if step < WARM_UP:
            add_up_gradients(models)
        for model, optimizer in zip(models, optimizers, strict=True):
            nn.utils.clip_grad_norm_(model.parameters(), CLIP)
            optimizer.param_groups[0]["lr"] = runs[0].plan.schedule.at(step)
            optimizer.step()
            optimizer.zero_grad()
        if step in AVERAGED:
            average_weights(models)
    found = load_file(output / "model.safetensors")
    for name, expected in models[0].state_dict().items():
        np.testing.assert_allclose(found[name], expected.numpy(), rtol=1e-3, atol=2e-5, err_msg=name)


def test_ranks_that_average_cannot_round() -> None:
    with pytest.raises(ConfigError, match="--local_steps 4 averages weights, which --grad_dtype bfloat16 would round"):
        RunConfig(local_steps=4, grad_dtype="bfloat16")
