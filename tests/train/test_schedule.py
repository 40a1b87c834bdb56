"""The learning rate of every shape against `transformers.get_scheduler`, and by hand."""

from __future__ import annotations

import math
from typing import get_args, get_type_hints

import pytest
import torch
from transformers import get_scheduler

from fleetune.config import RunConfig
from fleetune.train.schedule import Schedule

SHAPES = get_args(get_type_hints(RunConfig)["lr_scheduler_type"])
PEAK = 3e-4


def reference(name: str, warmup_steps: int, total_steps: int) -> list[float]:
    """The rates that transformers' trainer uses for updates 0, 1 ... total_steps - 1."""
    optimizer = torch.optim.SGD([torch.nn.Parameter(torch.zeros(1))], lr=PEAK)
    scheduler = get_scheduler(name, optimizer, num_warmup_steps=warmup_steps, num_training_steps=total_steps)
    rates = [optimizer.param_groups[0]["lr"]]
    for _ in range(total_steps - 1):
        optimizer.step()
        scheduler.step()
        rates.append(optimizer.param_groups[0]["lr"])
    return rates


@pytest.mark.parametrize(("warmup_steps", "total_steps"), [(0, 1), (0, 10), (1, 10), (3, 17), (10, 10), (15, 10)])
@pytest.mark.parametrize("name", SHAPES)
def test_every_shape_is_that_of_transformers(name: str, warmup_steps: int, total_steps: int) -> None:
    schedule = Schedule(name=name, peak=PEAK, warmup_steps=warmup_steps, total_steps=total_steps)
    found = [schedule.at(step) for step in range(total_steps)]
    assert found == pytest.approx(reference(name, warmup_steps, total_steps), rel=1e-12, abs=1e-20)


# By hand, for a peak of 1, 2 steps of warm-up and 10 in all: steps 0, 1, 2, 6 and 10 (the warm-up is a straight line;
# from step 2 on a share of 0, 1/2 and 1 of the other 8 steps is done).
@pytest.mark.parametrize(
    ("name", "expected"),
    [
        ("linear", [0, 0.5, 1, 0.5, 0]),
        ("cosine", [0, 0.5, 1, 0.5, 0]),
        ("constant", [1, 1, 1, 1, 1]),
        ("constant_with_warmup", [0, 0.5, 1, 1, 1]),
        ("polynomial", [0, 0.5, 1, (1 + 1e-7) / 2, 1e-7]),
        ("inverse_sqrt", [0, 0.5, 1, math.sqrt(2 / 6), math.sqrt(2 / 10)]),
    ],
)
def test_by_hand(name: str, expected: list[float]) -> None:
    schedule = Schedule(name=name, peak=1.0, warmup_steps=2, total_steps=10)
    assert [schedule.at(step) for step in (0, 1, 2, 6, 10)] == pytest.approx(expected, abs=1e-15)


def test_cosine_falls_slowly_first() -> None:
    schedule = Schedule(name="cosine", peak=1.0, warmup_steps=0, total_steps=3)
    assert schedule.at(1) == pytest.approx(0.75)  # (1 + cos 60 degrees) / 2


@pytest.mark.parametrize("name", ["linear", "cosine", "polynomial"])
def test_the_rate_stays_at_its_end_after_the_last_step(name: str) -> None:
    schedule = Schedule(name=name, peak=1.0, warmup_steps=2, total_steps=10)
    assert schedule.at(25) == schedule.at(10)
