"""The plan of a run: batches, steps, warm-up and learning rate, worked out by hand."""

from __future__ import annotations

import math

import pytest
from transformers import TrainingArguments

from fleetune.config import RunConfig
from fleetune.train.plan import TrainPlan, make_plan


def plan(config: RunConfig, *, processes: int = 1, num_examples: int = 100, unpadded: bool = True) -> TrainPlan:
    return make_plan(
        config, processes=processes, threads=3, num_examples=num_examples, num_tokens=54_321, longest=77,
        unpadded=unpadded, dtype="float32", kernels="compiled",
    )  # fmt: skip


@pytest.mark.parametrize(
    ("processes", "batch", "accumulation", "num_examples", "global_batch", "steps_per_epoch"),
    [
        (1, 16, 1, 3668, 16, 230),  # MRPC: 229 batches of 16 and one of 4
        (4, 8, 2, 3668, 64, 58),  # 57 x 64 = 3648, one more for the other 20
        (2, 16, 1, 64, 32, 2),  # divides
        (3, 5, 7, 1, 105, 1),  # fewer examples than a batch
        (1, 1, 1, 9, 1, 9),
    ],
)
def test_batches_and_steps(
    processes: int, batch: int, accumulation: int, num_examples: int, global_batch: int, steps_per_epoch: int
) -> None:
    config = RunConfig(
        per_device_train_batch_size=batch, gradient_accumulation_steps=accumulation, num_train_epochs=3
    )  # fmt: skip
    found = plan(config, processes=processes, num_examples=num_examples)
    assert found.global_batch_size == global_batch
    assert found.steps_per_epoch == steps_per_epoch
    assert found.total_steps == 3 * steps_per_epoch
    assert found.epochs == 3
    assert (found.processes, found.threads, found.micro_batch_size, found.accumulation) == (
        processes, 3, batch, accumulation,
    )  # fmt: skip


# 100 examples in batches of 16 are 7 steps an epoch.
@pytest.mark.parametrize(("epochs", "steps"), [(0.01, 1), (0.5, 4), (1, 7), (1.5, 11), (2, 14), (2.2, 16)])
def test_a_fraction_of_an_epoch_is_rounded_up_to_a_step(epochs: float, steps: int) -> None:
    found = plan(RunConfig(num_train_epochs=epochs))
    assert found.total_steps == steps
    assert found.epochs == pytest.approx(steps / 7)


@pytest.mark.parametrize("max_steps", [1, 7, 50])
def test_max_steps_comes_before_epochs(max_steps: int) -> None:
    found = plan(RunConfig(max_steps=max_steps, num_train_epochs=2))
    assert found.total_steps == max_steps
    assert found.epochs == pytest.approx(max_steps / 7)


# Goyal et al. 2017: k times the batch, k times the learning rate. sqrt keeps the variance of an update instead.
@pytest.mark.parametrize(
    ("policy", "processes", "rate"),
    [
        ("linear", 1, 2e-5),
        ("linear", 4, 8e-5),
        ("linear", 6, 1.2e-4),
        ("sqrt", 1, 2e-5),
        ("sqrt", 4, 4e-5),
        ("sqrt", 2, 2e-5 * 1.4142135623730951),
        ("none", 4, 2e-5),
    ],
)
def test_the_learning_rate_grows_by_policy(policy: str, processes: int, rate: float) -> None:
    found = plan(RunConfig(learning_rate=2e-5, scale_lr=policy), processes=processes)  # type: ignore[arg-type]
    assert found.learning_rate == pytest.approx(rate, rel=1e-12)
    assert found.base_learning_rate == 2e-5
    assert found.schedule.at(0) == pytest.approx(rate, rel=1e-12)


def test_linear_is_the_default_and_accumulation_does_not_count() -> None:
    found = plan(RunConfig(learning_rate=1e-4, gradient_accumulation_steps=8), processes=2)
    assert found.learning_rate == pytest.approx(2e-4, rel=1e-12)


@pytest.mark.parametrize(
    ("warmup_steps", "warmup_ratio", "expected"),
    [(0, 0.0, 0), (5, 0.0, 5), (0, 0.1, 3), (0, 0.5, 11), (5, 0.5, 5), (0, 1.0, 21), (90, 0.0, 90)],
)
def test_warmup_as_steps_or_share(warmup_steps: int, warmup_ratio: float, expected: int) -> None:
    # 7 steps an epoch, 21 in all: a tenth is 2.1, so 3; a half is 10.5, so 11
    found = plan(RunConfig(warmup_steps=warmup_steps, warmup_ratio=warmup_ratio))
    assert found.warmup_steps == expected
    assert found.schedule.warmup_steps == expected


@pytest.mark.parametrize("steps", [1, 9, 100, 690])
@pytest.mark.parametrize("ratio", [0.06, 0.07, 0.1, 1 / 3])
def test_the_share_is_rounded_as_transformers_rounds_it(steps: int, ratio: float) -> None:
    ours = plan(RunConfig(max_steps=steps, warmup_ratio=ratio)).warmup_steps
    # transformers 5 takes the share as a warmup_steps below 1
    assert ours == TrainingArguments(warmup_steps=ratio, use_cpu=True, report_to="none").get_warmup_steps(steps)


def test_constant_has_no_warmup_and_the_plan_says_so() -> None:
    found = plan(RunConfig(lr_scheduler_type="constant", warmup_steps=5))
    assert found.warmup_steps == 0
    assert [found.schedule.at(step) for step in range(3)] == [2e-5] * 3
    assert "constant, no warm-up" in found.lines()[2 + 1]


def test_lines_tell_the_global_batch_and_how_the_rate_came_about() -> None:
    config = RunConfig(per_device_train_batch_size=8, gradient_accumulation_steps=2, warmup_steps=4)
    assert plan(config, processes=4, num_examples=12_345).lines() == [
        "ranks          4 processes x 3 threads",
        "data           12,345 examples, 54,321 tokens, longest 77",
        "global batch   64 examples = 4 processes x 8 x 2 accumulation steps",
        "learning rate  2e-05 x 4 (--scale_lr linear, 4 processes) = 8e-05, linear, 4 warm-up steps",
        "steps          579 (3 epochs of 193)",
        "arithmetic     float32, kernels: compiled",
        "batches        flat, no padding",
    ]


@pytest.mark.parametrize(
    ("policy", "told"),
    [
        ("sqrt", "2e-05 x 1.41421 (--scale_lr sqrt, 2 processes) = 2.82843e-05"),
        ("none", "2e-05 x 1 (--scale_lr none, 2 processes) = 2e-05"),
    ],
)
def test_the_told_product_is_true_for_every_policy(policy: str, told: str) -> None:
    lines = plan(RunConfig(scale_lr=policy), processes=2).lines()  # type: ignore[arg-type]
    assert f"learning rate  {told}" in "\n".join(lines)


def test_one_process_needs_no_product_and_padding_is_admitted() -> None:
    lines = "\n".join(plan(RunConfig(), unpadded=False).lines())
    assert "learning rate  2e-05, linear, no warm-up" in lines
    assert "padded to the longest" in lines


def test_the_dictionary_holds_the_global_batch_too() -> None:
    found = plan(RunConfig(), processes=2).to_dict()
    assert found["global_batch_size"] == 32
    assert found["total_steps"] == math.ceil(100 / 32) * 3
    assert found["num_tokens"] == 54_321
