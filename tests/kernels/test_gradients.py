"""The kernels as autograd knows them: numerical gradients in float64, compiled against plain PyTorch in float32."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn

from fleetune.kernels import linear as linear_module
from fleetune.kernels.activation import ERF, TANH, geglu, gelu, gelu_linear
from fleetune.kernels.attention import Sequences, attention, rotate, self_attention
from fleetune.kernels.dropout import dropout_rows
from fleetune.kernels.embedding import embed
from fleetune.kernels.library import using_reference
from fleetune.kernels.linear import lay_together, lies_together, linear
from fleetune.kernels.norm import add_norm, add_then_norm
from fleetune.kernels.random import NO_DROPOUT, Dropout, row_keys

LENGTHS = (3, 1, 5)
CU = torch.tensor([0, 3, 4, 9])
NUM_TOKENS, WIDTH = sum(LENGTHS), 8


@pytest.fixture(autouse=True)
def _same_draws_every_time() -> None:
    torch.manual_seed(0)


def dropout(num_rows: int = NUM_TOKENS, rate: float = 0.4) -> Dropout:
    keys = row_keys(torch.full((num_rows,), 3), torch.arange(num_rows))
    return Dropout(rate=rate, site_key=99, row_keys=keys)


def rows(count: int = NUM_TOKENS, width: int = WIDTH, dtype: torch.dtype = torch.float64) -> Tensor:
    return torch.randn(count, width, dtype=dtype, requires_grad=True)


SEQUENCES = Sequences(cu_q=CU, cu_k=CU, num_heads=2, scale=0.5)
ANGLES = torch.arange(2.0 * NUM_TOKENS).view(NUM_TOKENS, 2) / 5
FIRST = Sequences(cu_q=torch.arange(4), cu_k=CU, num_heads=2, scale=0.5)

FUNCTIONS: dict[str, tuple[Callable[..., Tensor], list[tuple[int, int]]]] = {
    "attention": (lambda q, k, v: attention(q, k, v, SEQUENCES, dropout()), [(NUM_TOKENS, WIDTH)] * 3),
    "attention of first tokens": (
        lambda q, k, v: attention(q, k, v, FIRST, dropout(3)), [(3, WIDTH), (NUM_TOKENS, WIDTH), (NUM_TOKENS, WIDTH)],
    ),
    "attention, keys as values": (lambda q, k: attention(q, k, k, SEQUENCES, NO_DROPOUT), [(NUM_TOKENS, WIDTH)] * 2),
    "self-attention": (lambda x: self_attention(x, SEQUENCES, dropout()), [(NUM_TOKENS, 3 * WIDTH)]),
    "windowed": (
        lambda x: self_attention(x, Sequences(cu_q=CU, cu_k=CU, num_heads=2, scale=0.5, window=1), dropout()),
        [(NUM_TOKENS, 3 * WIDTH)],
    ),
    "biased": (
        lambda q, k, v, bias: attention(q, k, v, SEQUENCES, dropout(), bias), [*[(NUM_TOKENS, WIDTH)] * 3, (2, 11)],
    ),
    "biased attention of first tokens": (
        lambda q, k, v, bias: attention(q, k, v, FIRST, dropout(3), bias),
        [(3, WIDTH), (NUM_TOKENS, WIDTH), (NUM_TOKENS, WIDTH), (2, 9)],
    ),
    "rotation": (lambda x: rotate(x, ANGLES.cos(), ANGLES.sin(), 4), [(NUM_TOKENS, 3 * WIDTH)]),
    "gelu": (lambda x: gelu(x, ERF), [(NUM_TOKENS, WIDTH)]),
    "gelu by tanh": (lambda x: gelu(x, TANH), [(NUM_TOKENS, WIDTH)]),
    "geglu": (lambda x: geglu(x, ERF), [(NUM_TOKENS, 2 * WIDTH)]),
    "dropout": (lambda x: dropout_rows(x, dropout()), [(NUM_TOKENS, WIDTH)]),
}  # fmt: skip


@pytest.mark.parametrize("name", FUNCTIONS)
def test_gradients_equal_numerical_ones(name: str) -> None:
    function, shapes = FUNCTIONS[name]
    with using_reference():
        assert torch.autograd.gradcheck(function, [rows(*shape) for shape in shapes])


@pytest.mark.parametrize("name", FUNCTIONS)
def test_compiled_and_plain_give_the_same(name: str) -> None:
    function, shapes = FUNCTIONS[name]
    inputs = [rows(*shape, dtype=torch.float32) for shape in shapes]
    results = []
    for plain in (False, True):
        if plain:
            with using_reference():
                out = function(*inputs)
                grads = torch.autograd.grad(out.square().sum(), inputs)
        else:
            out = function(*inputs)
            grads = torch.autograd.grad(out.square().sum(), inputs)
        results.append((out, *grads))
    for found, expected in zip(*results, strict=True):
        torch.testing.assert_close(found, expected, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("has_bias", [True, False])
@pytest.mark.parametrize("has_residual", [True, False])
def test_add_norm_equals_its_formula(has_bias: bool, has_residual: bool) -> None:
    norm = nn.LayerNorm(WIDTH, eps=1e-6, bias=has_bias)
    nn.init.normal_(norm.weight)
    x, residual = rows(dtype=torch.float32), rows(dtype=torch.float32)
    found = add_norm(x, residual if has_residual else None, norm, dropout())
    expected = norm(dropout_rows(x, dropout()) + (residual if has_residual else 0.0))
    torch.testing.assert_close(found, expected, rtol=1e-5, atol=1e-6)
    wanted = [x, *norm.parameters(), *([residual] if has_residual else [])]
    dy = torch.randn_like(found)
    for f, e in zip(torch.autograd.grad(found, wanted, dy), torch.autograd.grad(expected, wanted, dy), strict=True):
        torch.testing.assert_close(f, e, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("has_bias", [True, False])
@pytest.mark.parametrize("rate", [0.0, 0.4])
def test_add_then_norm_equals_its_formula(has_bias: bool, rate: float) -> None:
    """Both results have gradients of their own."""
    norm = nn.LayerNorm(WIDTH, eps=1e-6, bias=has_bias)
    nn.init.normal_(norm.weight)
    x, residual = rows(dtype=torch.float32), rows(dtype=torch.float32)
    found = add_then_norm(x, residual, norm, dropout(rate=rate))
    total = dropout_rows(x, dropout(rate=rate)) + residual
    expected = norm(total), total
    wanted, dy = [x, *norm.parameters(), residual], [torch.randn_like(x), torch.randn_like(x)]
    for f, e in zip(found, expected, strict=True):
        torch.testing.assert_close(f, e, rtol=1e-5, atol=1e-6)
    grads = (torch.autograd.grad(results, wanted, dy) for results in (found, expected))
    for f, e in zip(*grads, strict=True):
        torch.testing.assert_close(f, e, rtol=1e-4, atol=1e-5)


def test_embed_without_the_norms_bias() -> None:
    words, norm = nn.Embedding(20, WIDTH), nn.LayerNorm(WIDTH, bias=False)
    ids = torch.tensor([4, 4, 0, 19, 7, 4, 7, 1, 2])
    found, expected = embed([(words, ids)], norm, NO_DROPOUT), norm(words(ids))
    torch.testing.assert_close(found, expected, rtol=1e-5, atol=1e-6)
    wanted, dy = [words.weight, norm.weight], torch.randn_like(found)
    for f, e in zip(torch.autograd.grad(found, wanted, dy), torch.autograd.grad(expected, wanted, dy), strict=True):
        torch.testing.assert_close(f, e, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("sparse", [False, True])
def test_embed_equals_its_formula(sparse: bool) -> None:
    words, places = nn.Embedding(20, WIDTH, sparse=sparse, padding_idx=2), nn.Embedding(6, WIDTH, padding_idx=1)
    norm = nn.LayerNorm(WIDTH)
    ids, positions = torch.tensor([4, 4, 0, 19, 7, 4, 7, 1, 2]), torch.tensor([0, 1, 2, 0, 0, 1, 2, 3, 4])
    found = embed([(words, ids), (places, positions)], norm, dropout())
    expected = dropout_rows(norm(words(ids) + places(positions)), dropout())
    torch.testing.assert_close(found, expected, rtol=1e-5, atol=1e-6)
    wanted, dy = [words.weight, places.weight, *norm.parameters()], torch.randn_like(found)
    found_gradients = torch.autograd.grad(found, wanted, dy)
    assert found_gradients[0].is_sparse == sparse
    if sparse:
        assert found_gradients[0].is_coalesced()
        assert found_gradients[0].indices().squeeze(0).tolist() == [0, 1, 4, 7, 19]  # the padding row has none
    for f, e in zip(found_gradients, torch.autograd.grad(expected, wanted, dy), strict=True):
        torch.testing.assert_close(f.to_dense(), e.to_dense(), rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("kind", [ERF, TANH])
def test_gelu_linear_equals_the_two_of_them(kind: int) -> None:
    layer, x = nn.Linear(WIDTH, 5), rows(dtype=torch.float32)
    found, expected = gelu_linear(x, layer, kind), layer(gelu(x, kind))
    torch.testing.assert_close(found, expected, rtol=1e-5, atol=1e-6)
    dy, wanted = torch.randn_like(found), [x, layer.weight, layer.bias]
    found_gradients = torch.autograd.grad(found, wanted, dy, retain_graph=True)
    for f, e in zip(found_gradients, torch.autograd.grad(expected, wanted, dy), strict=True):
        torch.testing.assert_close(f, e, rtol=1e-5, atol=1e-5)
    (alone,) = torch.autograd.grad(gelu_linear(x.detach(), layer, kind), [layer.weight], dy)
    torch.testing.assert_close(alone, torch.autograd.grad(found, [layer.weight], dy)[0], rtol=0, atol=0)


def test_embed_computes_no_gradient_of_frozen_tables() -> None:
    words, norm = nn.Embedding(20, WIDTH), nn.LayerNorm(WIDTH)
    words.weight.requires_grad_(False)
    embed([(words, torch.tensor([1, 2]))], norm, NO_DROPOUT).sum().backward()
    assert words.weight.grad is None
    assert norm.weight.grad is not None


def test_an_id_outside_its_table_is_an_error() -> None:
    with pytest.raises(IndexError, match="20"):
        embed([(nn.Embedding(20, WIDTH), torch.tensor([1, 20]))], nn.LayerNorm(WIDTH), NO_DROPOUT)


@pytest.mark.parametrize("together", [False, True])
@pytest.mark.parametrize("has_bias", [False, True])
def test_linear_equals_torchs_of_each_layer(together: bool, has_bias: bool) -> None:
    layers = [nn.Linear(WIDTH, out, bias=has_bias) for out in (5, 7, 2)]
    before = [p.detach().clone() for layer in layers for p in layer.parameters()]
    if together:
        lay_together(*layers)
        assert lies_together([layer.weight for layer in layers])
    assert all(torch.equal(p, b) for p, b in zip((p for m in layers for p in m.parameters()), before, strict=True))
    x = rows(dtype=torch.float32)
    found, expected = linear(x, *layers), torch.cat([layer(x) for layer in layers], dim=1)
    torch.testing.assert_close(found, expected, rtol=1e-5, atol=1e-6)
    wanted, dy = [x, *(p for layer in layers for p in layer.parameters())], torch.randn_like(found)
    for f, e in zip(torch.autograd.grad(found, wanted, dy), torch.autograd.grad(expected, wanted, dy), strict=True):
        torch.testing.assert_close(f, e, rtol=1e-5, atol=1e-5)


def test_weights_that_lie_together_are_not_copied(monkeypatch: pytest.MonkeyPatch) -> None:
    layers = [nn.Linear(WIDTH, WIDTH) for _ in range(3)]
    lay_together(*layers)

    def copied(*args: object) -> Tensor:
        raise AssertionError("a copy was made")

    monkeypatch.setattr(linear_module.torch, "cat", copied)
    linear(rows(dtype=torch.float32), *layers)
    layers[1].weight.data = layers[1].weight.data.clone()
    with pytest.raises(AssertionError, match="a copy"):
        linear(rows(dtype=torch.float32), *layers)


def test_a_weight_that_was_moved_is_still_the_one_that_counts() -> None:
    layers = [nn.Linear(WIDTH, WIDTH) for _ in range(3)]
    lay_together(*layers)
    layers[1].weight.data = torch.zeros(WIDTH, WIDTH)
    x = rows(dtype=torch.float32)
    torch.testing.assert_close(linear(x, *layers), torch.cat([m(x) for m in layers], dim=1), rtol=1e-5, atol=1e-6)


def test_layers_of_which_only_some_have_a_bias_are_refused() -> None:
    with pytest.raises(ValueError, match="bias"):
        linear(rows(dtype=torch.float32), nn.Linear(WIDTH, 3), nn.Linear(WIDTH, 3, bias=False))
