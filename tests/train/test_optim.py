"""The update equals torch's AdamW after torch's clipping, for dense gradients and for those of some rows."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from fleetune.config import RunConfig
from fleetune.train.optim import AdamW
from fleetune.train.updates import OwnGradients, Updates

SETTINGS = {"learning_rate": 3e-3, "adam_beta1": 0.8, "adam_beta2": 0.95, "adam_epsilon": 1e-7}


class Words(nn.Module):
    def __init__(self, *, sparse: bool) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.table = nn.Embedding(50, 8, sparse=sparse)
        self.norm = nn.LayerNorm(8)
        self.head = nn.Linear(8, 3)
        self.frozen = nn.Linear(2, 2).requires_grad_(False)

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        return self.head(self.norm(self.table(ids)))


def torch_optimizer(model: Words, weight_decay: float) -> torch.optim.AdamW:
    decayed = [model.table.weight, model.head.weight]
    spared = [model.norm.weight, model.norm.bias, model.head.bias]
    groups = [{"params": decayed, "weight_decay": weight_decay}, {"params": spared, "weight_decay": 0.0}]
    return torch.optim.AdamW(groups, lr=1.0, betas=(0.8, 0.95), eps=1e-7, fused=True)


def update(model: Words, optimizer: AdamW, learning_rate: float, max_grad_norm: float) -> float:
    """One update of a single rank; the norm of the gradients."""
    updates = Updates(optimizer, OwnGradients(list(model.parameters())))
    return updates.begin(learning_rate, updates.squared_norm(), max_grad_norm)


@pytest.mark.parametrize("sparse", [False, True])
@pytest.mark.parametrize("weight_decay", [0.0, 0.1])
@pytest.mark.parametrize("max_grad_norm", [0.0, 0.5, 1e9])
def test_updates_equal_those_of_torch(sparse: bool, weight_decay: float, max_grad_norm: float) -> None:
    ours, theirs = Words(sparse=sparse), Words(sparse=False)
    optimizer = AdamW(ours, RunConfig(**SETTINGS, weight_decay=weight_decay))
    reference = torch_optimizer(theirs, weight_decay)
    for step in range(6):
        ids = torch.randint(0, 20 + step, (2, 7), generator=torch.Generator().manual_seed(step))
        for model in (ours, theirs):
            for part in ids:  # two micro-batches
                model(part).square().sum().backward()
        limit = max_grad_norm if max_grad_norm > 0 else float("inf")
        expected_norm = torch.nn.utils.clip_grad_norm_(list(theirs.parameters()), limit)
        for group in reference.param_groups:
            group["lr"] = 1e-3 * (step + 1)
        reference.step()
        reference.zero_grad()
        norm = update(ours, optimizer, 1e-3 * (step + 1), max_grad_norm)
        assert norm == pytest.approx(expected_norm.item(), rel=1e-5)
        for (name, found), expected in zip(ours.named_parameters(), theirs.parameters(), strict=True):
            assert found.grad is None
            torch.testing.assert_close(found, expected, rtol=1e-5, atol=1e-6, msg=lambda m, n=name: f"{n}: {m}")


def test_rows_without_a_gradient_yet_are_left_alone_bit_for_bit() -> None:
    model = Words(sparse=True)
    before = model.table.weight.detach().clone()
    model(torch.tensor([3, 7])).square().sum().backward()
    update(model, AdamW(model, RunConfig(**SETTINGS)), 1e-2, 1.0)
    changed = (model.table.weight != before).any(dim=1).nonzero().squeeze(1)
    assert changed.tolist() == [3, 7]


def test_a_restored_state_goes_on_as_the_saved_one_would_have() -> None:
    """Also the table's rows that had a gradient once, and none in the step after the restart."""
    model = Words(sparse=True)
    optimizer = AdamW(model, RunConfig(**SETTINGS))

    def step(to: Words, by: AdamW, ids: list[int]) -> None:
        to(torch.tensor(ids)).square().sum().backward()
        update(to, by, 1e-2, 1.0)

    step(model, optimizer, [3, 7])
    copy = Words(sparse=True)
    copy.load_state_dict(model.state_dict())
    restored = AdamW(copy, RunConfig(**SETTINGS))
    for name, tensor in restored.state_tensors().items():
        tensor.copy_(optimizer.state_tensors()[name])
    step(model, optimizer, [1])
    step(copy, restored, [1])
    for found, expected in zip(copy.parameters(), model.parameters(), strict=True):
        assert torch.equal(found, expected)


def test_the_state_is_named_by_parameter() -> None:
    names = set(AdamW(Words(sparse=False), RunConfig()).state_tensors())
    parameters = ("table.weight", "norm.weight", "norm.bias", "head.weight", "head.bias")
    assert names == {"step"} | {f"{p}/{what}" for p in parameters for what in ("exp_avg", "exp_avg_sq")}
