"""Flat attention against torch's own attention, one sequence at a time, and against numerical gradients."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention

from fleetune.model.attention import flat_attention

LENGTHS = [5, 1, 9]
HEADS, WIDTH = 3, 12


def draw(rows: int) -> Tensor:
    return torch.randn(rows, WIDTH, dtype=torch.float64, requires_grad=True)


def reference(query: Tensor, key: Tensor, value: Tensor, first_only: bool) -> Tensor:
    """softmax(q k' / sqrt(d)) v by torch, for each sequence alone."""
    parts, start = [], 0
    for i, length in enumerate(LENGTHS):
        span = slice(start, start + length)
        rows = query[i : i + 1] if first_only else query[span]
        q, k, v = (x.reshape(-1, HEADS, WIDTH // HEADS).transpose(0, 1) for x in (rows, key[span], value[span]))
        parts.append(scaled_dot_product_attention(q, k, v).transpose(0, 1).reshape(-1, WIDTH))
        start += length
    return torch.cat(parts)


@pytest.mark.parametrize("first_only", [False, True])
def test_equals_torch_attention_with_its_gradients(first_only: bool) -> None:
    torch.manual_seed(0)
    inputs = draw(len(LENGTHS) if first_only else sum(LENGTHS)), draw(sum(LENGTHS)), draw(sum(LENGTHS))
    weights = torch.randn_like(inputs[0])
    found = flat_attention(*inputs, LENGTHS, HEADS, 0.0)
    expected = reference(*inputs, first_only)
    torch.testing.assert_close(found, expected, rtol=1e-12, atol=1e-12)
    found_gradients = torch.autograd.grad((found * weights).sum(), inputs)
    expected_gradients = torch.autograd.grad((expected * weights).sum(), inputs)
    for f, e in zip(found_gradients, expected_gradients, strict=True):
        torch.testing.assert_close(f, e, rtol=1e-10, atol=1e-12)


@pytest.mark.parametrize("rate", [0.0, 0.3])
def test_gradients_equal_numerical_ones_also_with_dropout(rate: float) -> None:
    torch.manual_seed(0)
    inputs = tuple(draw(sum(LENGTHS)) for _ in range(3))

    def attend(query: Tensor, key: Tensor, value: Tensor) -> Tensor:
        torch.manual_seed(7)  # the same mask in every evaluation
        return flat_attention(query, key, value, LENGTHS, HEADS, rate)

    assert torch.autograd.gradcheck(attend, inputs)


def test_one_token_attends_to_itself() -> None:
    value = torch.randn(1, WIDTH)
    found = flat_attention(torch.randn(1, WIDTH), torch.randn(1, WIDTH), value, [1], HEADS, 0.0)
    torch.testing.assert_close(found, value)


def test_dropout_drops_probabilities_at_its_rate_and_keeps_the_mean() -> None:
    torch.manual_seed(0)
    length = 64
    query = key = torch.zeros(length, WIDTH)  # all probabilities are 1/length
    value = torch.ones(length, WIDTH)
    means = [flat_attention(query, key, value, [length], HEADS, 0.25).mean().item() for _ in range(200)]
    # 200 x 64 x 3 rows of 64 probabilities: the standard error of the mean is sqrt(.25/.75/(200*64*3*64)) = 3.7e-4.
    assert abs(sum(means) / len(means) - 1.0) < 5 * 3.7e-4
