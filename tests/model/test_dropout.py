"""The cheap dropout mask has the right rate, no structure, and the same elements in forward and backward."""

from __future__ import annotations

import pytest
import torch
from scipy import stats

from fleetune.model.dropout import dropout, random_mask


@pytest.mark.parametrize("rate", [0.05, 0.1, 0.5, 0.9])
def test_the_share_of_dropped_elements_is_the_rate(rate: float) -> None:
    torch.manual_seed(0)
    kept, scale = random_mask((1000, 1003), rate)
    dropped = kept.numel() - int(kept.sum())
    levels = round(rate * 65536)
    assert scale == pytest.approx(65536 / (65536 - levels))
    assert stats.binomtest(dropped, kept.numel(), levels / 65536).pvalue > 1e-4


def test_neighbours_are_independent() -> None:
    """Four masks come from one 64-bit draw: no two of them, nor those of neighbouring draws, may be correlated."""
    torch.manual_seed(0)
    kept = random_mask((4_000_000,), 0.1)[0].double()
    for lag in (1, 2, 3, 4, 5, 8, 64):
        correlation = torch.corrcoef(torch.stack([kept[:-lag], kept[lag:]]))[0, 1].item()
        assert abs(correlation) < 5 / len(kept) ** 0.5  # five standard errors


def test_every_lane_has_the_rate() -> None:
    torch.manual_seed(0)
    lanes = random_mask((1_000_000, 4), 0.1)[0].sum(dim=0).tolist()
    assert all(stats.binomtest(int(n), 1_000_000, 1 - 6554 / 65536).pvalue > 1e-4 for n in lanes)


def test_backward_drops_the_same_elements_with_the_same_scale() -> None:
    torch.manual_seed(0)
    x = torch.ones(101, 7, requires_grad=True)
    y = dropout(x, 0.3, training=True)
    y.sum().backward()
    assert torch.equal(x.grad, y.detach())
    assert y.detach().unique().tolist() == [0.0, pytest.approx(1 / (1 - round(0.3 * 65536) / 65536))]


def test_no_dropout_returns_the_input_itself() -> None:
    x = torch.randn(3, 4)
    assert dropout(x, 0.1, training=False) is x
    assert dropout(x, 0.0, training=True) is x


def test_a_rate_of_one_drops_everything() -> None:
    assert not dropout(torch.ones(5), 1.0, training=True).any()


def test_the_seed_decides_the_mask() -> None:
    torch.manual_seed(5)
    first = random_mask((33, 3), 0.1)[0]
    torch.manual_seed(5)
    assert torch.equal(first, random_mask((33, 3), 0.1)[0])
    assert not torch.equal(first, random_mask((33, 3), 0.1)[0])
