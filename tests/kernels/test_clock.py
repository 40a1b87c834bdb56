"""What the compiled operations count of themselves: stays of each kind, and times that lie in the time around them."""

from __future__ import annotations

import itertools
import time
from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn

from fleetune.kernels import clock
from fleetune.kernels.activation import gelu
from fleetune.kernels.attention import Sequences, self_attention
from fleetune.kernels.contest import torch_wins
from fleetune.kernels.layer import LayerSettings, encoder_layer
from fleetune.kernels.library import load_kernels, using_reference
from fleetune.kernels.linear import linear
from fleetune.kernels.random import NO_DROPOUT

WIDTH, HEADS, LENGTHS = 16, 2, (3, 5)


@pytest.fixture(autouse=True)
def _compiled() -> None:
    if not load_kernels().compiled:
        pytest.skip("the kernels are not compiled here")
    torch_wins()  # the first to ask measures, with many products


def counted(work: Callable[[], object]) -> dict[str, int]:
    """Stays of each kind in some work; none takes longer than all of it."""
    before, began = clock.kernel_times(), time.perf_counter_ns()
    work()
    wall, after = time.perf_counter_ns() - began, clock.kernel_times()
    calls = {kind: after.calls[kind] - before.calls[kind] for kind in clock.KINDS}
    ns = {kind: after.ns[kind] - before.ns[kind] for kind in clock.KINDS}
    assert sum(ns.values()) <= wall
    assert all((ns[kind] > 0) == (calls[kind] > 0) for kind in clock.KINDS)
    return calls


def rows(requires_grad: bool = True) -> Tensor:
    return torch.randn(sum(LENGTHS), WIDTH, requires_grad=requires_grad)


def sequences() -> Sequences:
    cu = torch.tensor([0, 3, 8])
    return Sequences(cu_q=cu, cu_k=cu, num_heads=HEADS, scale=0.3)


def a_layer() -> Callable[[Tensor], Tensor]:
    linears = [nn.Linear(WIDTH, WIDTH) for _ in range(4)] + [nn.Linear(WIDTH, 32), nn.Linear(32, WIDTH)]
    norms = nn.LayerNorm(WIDTH), nn.LayerNorm(WIDTH)
    settings = LayerSettings(
        sequences=sequences(), eps=(1e-5, 1e-5), kind=0, dropouts=(NO_DROPOUT, NO_DROPOUT, NO_DROPOUT)
    )
    return lambda x: encoder_layer(x, linears, norms, settings)


def test_a_linear_layer_is_a_product_forward_and_two_and_a_sum_backward() -> None:
    x, layer = rows(), nn.Linear(WIDTH, WIDTH)
    assert counted(lambda: linear(x, layer)) == {"products": 1, "attention": 0, "kernels": 0}
    y = linear(x, layer)
    assert counted(lambda: y.backward(torch.ones_like(y))) == {"products": 2, "attention": 0, "kernels": 1}


def test_products_by_torch_are_counted_too() -> None:
    x, layer = rows().to(torch.bfloat16), nn.Linear(WIDTH, WIDTH)
    assert counted(lambda: linear(x, layer)) == {"products": 1, "attention": 0, "kernels": 0}


def test_attention_forward_and_backward() -> None:
    qkv = torch.randn(8, 3 * WIDTH, requires_grad=True)
    assert counted(lambda: self_attention(qkv, sequences(), NO_DROPOUT).sum().backward()) == {
        "products": 0, "attention": 2, "kernels": 0,
    }  # fmt: skip


def test_other_kernels() -> None:
    assert counted(lambda: gelu(rows()).sum().backward()) == {"products": 0, "attention": 0, "kernels": 2}


def test_a_layer_in_one_operation_is_divided() -> None:
    """Queries, keys and values as one, what follows attention, up and down: 4 products, twice as many backward."""
    layer, x = a_layer(), rows()
    assert counted(lambda: layer(x)) == {"products": 4, "attention": 1, "kernels": 1}
    assert counted(layer(x).sum().backward) == {"products": 8, "attention": 1, "kernels": 1}


def test_an_operation_that_fails_is_left() -> None:
    with pytest.raises(RuntimeError, match="do not fit"):
        torch.ops.fleetune.product(torch.ones(2, 3), torch.ones(2, 3))
    before = clock.kernel_times().ns
    time.sleep(0.05)
    assert clock.kernel_times().ns == before
    assert counted(lambda: gelu(rows(requires_grad=False)))["kernels"] == 1


def test_plain_pytorch_counts_nothing() -> None:
    with using_reference():
        x, layer = rows(), nn.Linear(WIDTH, WIDTH)
        assert set(counted(lambda: linear(x, layer).sum().backward()).values()) == {0}


def test_spans_are_kept_while_they_are_wanted() -> None:
    layer, x = a_layer(), rows(requires_grad=False)
    layer(x)
    clock.keep_spans(True)
    try:
        began = time.perf_counter_ns()
        layer(x)
        ended = time.perf_counter_ns()
    finally:
        clock.keep_spans(False)
    layer(x)
    spans = clock.take_spans()
    assert [name for name, _, _ in spans if name != "kernels"] == ["products", "attention", *["products"] * 3]
    assert spans == sorted(spans, key=lambda span: span[1])
    assert began <= spans[0][1]
    assert spans[-1][2] <= ended
    assert all(one[2] <= other[1] for one, other in itertools.pairwise(spans))
    assert clock.take_spans() == []


def test_the_cost_of_a_stay_is_that_of_looking_at_the_clock() -> None:
    """Two looks and a few additions: a claim of speed is in benchmarks/, here it is only asked that it can be told."""
    assert clock.stay_ns(1000) > 0
