"""The plain ops against PyTorch's own, and their gradients against those that autograd finds for a plain formula.

These ops are what the compiled ones are compared with, so each is compared here with something written otherwise.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Sequence

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from fleetune.kernels import reference
from fleetune.kernels.random import as_int64, keep_mask, keep_scale, row_keys, site_key

HEADS, WIDTH = 3, 12
SITE = as_int64(site_key(42, 1, 2, 3))
EXACT = {"rtol": 1e-11, "atol": 1e-12}


@pytest.fixture(autouse=True)
def _same_draws_every_time() -> None:
    torch.manual_seed(0)


def draw(*shape: int, dtype: torch.dtype = torch.float64, grad: bool = False) -> Tensor:
    return torch.randn(*shape, dtype=dtype, requires_grad=grad)


def keys_of(num_rows: int) -> Tensor:
    return row_keys(torch.full((num_rows,), 7), torch.arange(num_rows))


def cu(lengths: Sequence[int]) -> Tensor:
    return torch.tensor([0, *itertools.accumulate(lengths)])


def assert_gradients(found: Sequence[Tensor], out: Tensor, inputs: Sequence[Tensor], dout: Tensor) -> None:
    for f, e in zip(found, torch.autograd.grad(out, inputs, dout), strict=True):
        torch.testing.assert_close(f, e, **EXACT)


# Attention

LENGTHS = {
    "usual": ([5, 1, 9], [5, 1, 9]),
    "one token each": ([1, 1, 1], [1, 1, 1]),
    "some empty": ([0, 4, 0, 0, 33, 0], [0, 4, 0, 0, 33, 0]),
    "first token's query only": ([1, 1, 1, 1], [5, 1, 40, 2]),
    "no sequence": ([], []),
    "keys without a query": ([2, 0, 3], [2, 4, 3]),
}


def plain_attention(
    q: Tensor, k: Tensor, v: Tensor, lengths: tuple[list[int], list[int]], scale: float, window: int, rate: float,
    keys: Tensor,
) -> Tensor:  # fmt: skip
    """One head of one sequence after the other, each from its formula."""
    rows = []
    for (q0, q1), (k0, k1) in zip(*(itertools.pairwise(cu(side).tolist()) for side in lengths), strict=True):
        heads = []
        for head in range(HEADS):
            columns = slice(head * WIDTH // HEADS, (head + 1) * WIDTH // HEADS)
            scores = q[q0:q1, columns] @ k[k0:k1, columns].T * scale
            if window:
                near = torch.ones_like(scores).triu(-window) * torch.ones_like(scores).tril(window)
                scores = torch.where(near > 0, scores, -math.inf)
            probs = torch.exp(scores) / torch.exp(scores).sum(dim=1, keepdim=True)
            if rate > 0:
                probs = probs * keep_mask(keys[q0:q1], SITE, k1 - k0, rate, head) * keep_scale(rate)
            heads.append(probs @ v[k0:k1, columns])
        rows.append(torch.cat(heads, dim=1))
    return torch.cat(rows) if rows else q


@pytest.mark.parametrize("rate", [0.0, 0.3])
@pytest.mark.parametrize("window", [0, 1, 3, 100])
@pytest.mark.parametrize("case", LENGTHS)
def test_attention_equals_its_formula_with_its_gradients(case: str, window: int, rate: float) -> None:
    lengths = LENGTHS[case]
    num_queries, num_keys = map(sum, lengths)
    q, k, v = (draw(rows, WIDTH, grad=True) for rows in (num_queries, num_keys, num_keys))
    keys = keys_of(num_queries)
    layout = cu(lengths[0]), cu(lengths[1]), HEADS, 0.7, window, rate, SITE, keys if rate else None
    expected = plain_attention(q, k, v, lengths, 0.7, window, rate, keys)
    with torch.no_grad():
        out, lse = reference.attention_forward(q, k, v, *layout)
    torch.testing.assert_close(out, expected.detach(), **EXACT)
    if not num_queries:
        return
    dout = draw(num_queries, WIDTH)
    with torch.no_grad():
        found = reference.attention_backward(dout, q, k, v, lse, *layout)
    assert_gradients(found, expected, (q, k, v), dout)


@pytest.mark.parametrize(("window", "rate"), [(0, 0.0), (0, 0.3), (2, 0.3)])
@pytest.mark.parametrize("case", [name for name in LENGTHS if name != "no sequence"])
def test_a_bias_of_distances_is_added_to_the_products(case: str, window: int, rate: float) -> None:
    """As one more column of queries and keys would add it: key j is the unit vector e_j, query i holds its biases."""
    lengths = LENGTHS[case]
    num_queries, num_keys = map(sum, lengths)
    longest = max(*lengths[0], *lengths[1])
    q, k, v = (draw(rows, WIDTH, grad=True) for rows in (num_queries, num_keys, num_keys))
    bias, keys = draw(HEADS, 2 * longest + 3, grad=True), keys_of(num_queries)
    layout = cu(lengths[0]), cu(lengths[1]), HEADS, 0.7, window, rate, SITE, keys if rate else None
    expected = biased_by_columns(q, k, v, bias, lengths, window, rate, keys)
    with torch.no_grad():
        out, lse = reference.biased_attention_forward(q, k, v, bias, *layout)
        torch.testing.assert_close(out, expected.detach(), **EXACT)
        dout = draw(num_queries, WIDTH)
        found = reference.biased_attention_backward(dout, q, k, v, bias, lse, *layout)
    assert_gradients(found, expected, (q, k, v, bias), dout)


def biased_by_columns(
    q: Tensor, k: Tensor, v: Tensor, bias: Tensor, lengths: tuple[list[int], list[int]], window: int, rate: float,
    keys: Tensor,
) -> Tensor:  # fmt: skip
    """One head of one sequence after the other, each from its formula."""
    rows = []
    for (q0, q1), (k0, k1) in zip(*(itertools.pairwise(cu(side).tolist()) for side in lengths), strict=True):
        heads = []
        for head in range(HEADS):
            columns = slice(head * WIDTH // HEADS, (head + 1) * WIDTH // HEADS)
            of_pairs = [[bias[head, bias.shape[1] // 2 + j - i] for j in range(k1 - k0)] for i in range(q1 - q0)]
            biases = torch.stack([torch.stack(row) for row in of_pairs]) if of_pairs else q.new_zeros(0, k1 - k0)
            wide_q = torch.cat([q[q0:q1, columns], biases], dim=1)
            wide_k = torch.cat([k[k0:k1, columns], torch.eye(k1 - k0, dtype=k.dtype)], dim=1)
            scores = wide_q @ wide_k.T * 0.7
            if window:
                near = torch.ones_like(scores).triu(-window) * torch.ones_like(scores).tril(window)
                scores = torch.where(near > 0, scores, -math.inf)
            probs = torch.softmax(scores, dim=1)
            if rate > 0:
                probs = probs * keep_mask(keys[q0:q1], SITE, k1 - k0, rate, head) * keep_scale(rate)
            heads.append(probs @ v[k0:k1, columns])
        rows.append(torch.cat(heads, dim=1))
    return torch.cat(rows)


@pytest.mark.parametrize("num_distances", [6, 9, 10])
def test_a_bias_of_too_few_distances_is_refused(num_distances: int) -> None:
    x, ends = draw(6, WIDTH), cu([6])
    with pytest.raises(ValueError, match=f"a bias of {num_distances} distances; 11 or more, odd, are needed"):
        reference.biased_attention_forward(x, x, x, draw(HEADS, num_distances), ends, ends, HEADS, 1.0, 0, 0.0, 0, None)


def test_rotation_is_a_product_of_complex_numbers() -> None:
    """Columns j and m + j of a head are a real and an imaginary part; what is behind the heads stays."""
    x, angles = draw(7, 2 * 6 + 5), draw(7, 3)
    found = reference.rotate(x, angles.cos(), angles.sin(), 2)
    for head in (slice(0, 6), slice(6, 12)):
        real, imaginary = x[:, head].chunk(2, dim=1)
        turned = torch.complex(real, imaginary) * torch.exp(1j * angles)
        torch.testing.assert_close(found[:, head], torch.cat([turned.real, turned.imag], dim=1), **EXACT)
    assert torch.equal(found[:, 12:], x[:, 12:])


@pytest.mark.parametrize("case", LENGTHS)
def test_attention_equals_that_of_torch(case: str) -> None:
    lengths = LENGTHS[case]
    q, k, v = draw(sum(lengths[0]), WIDTH), draw(sum(lengths[1]), WIDTH), draw(sum(lengths[1]), WIDTH)
    scale = (WIDTH / HEADS) ** -0.5
    out, lse = reference.attention_forward(q, k, v, cu(lengths[0]), cu(lengths[1]), HEADS, scale, 0, 0.0, 0, None)
    assert lse.shape == (len(q), HEADS)
    for (q0, q1), (k0, k1) in zip(*(itertools.pairwise(cu(side).tolist()) for side in lengths), strict=True):
        parts = (x.reshape(-1, HEADS, WIDTH // HEADS).transpose(0, 1) for x in (q[q0:q1], k[k0:k1], v[k0:k1]))
        expected = F.scaled_dot_product_attention(*parts).transpose(0, 1).reshape(-1, WIDTH)
        torch.testing.assert_close(out[q0:q1], expected, **EXACT)


def test_lse_is_of_the_scaled_scores() -> None:
    q, k, v = (draw(6, WIDTH) for _ in range(3))
    _, lse = reference.attention_forward(q, k, v, cu([6]), cu([6]), HEADS, 0.25, 0, 0.0, 0, None)
    scores = 0.25 * torch.einsum("qhd,khd->qhk", q.view(6, HEADS, -1), k.view(6, HEADS, -1))
    torch.testing.assert_close(lse, torch.logsumexp(scores, dim=-1), **EXACT)


def test_attention_of_columns_of_a_wider_tensor() -> None:
    wide, lengths = draw(15, 3 * WIDTH), cu([5, 1, 9])
    slices, copies = wide.split(WIDTH, dim=1), [x.contiguous() for x in wide.split(WIDTH, dim=1)]
    layout = lengths, lengths, HEADS, 0.5, 0, 0.2, SITE, keys_of(15)
    results = [reference.attention_forward(*x, *layout) for x in (slices, copies)]
    gradients = [reference.attention_backward(wide[:, :WIDTH], *x, results[0][1], *layout) for x in (slices, copies)]
    for found, expected in ((results[0], results[1]), (gradients[0], gradients[1])):
        assert all(torch.equal(f, e) for f, e in zip(found, expected, strict=True))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_attention_rounds_to_its_storage_only_at_the_end(dtype: torch.dtype) -> None:
    q, k, v, dout = (draw(15, WIDTH, dtype=dtype) * (i + 1) for i in range(4))
    layout = cu([5, 1, 9]), cu([5, 1, 9]), HEADS, 0.5, 0, 0.2, SITE, keys_of(15)
    found = reference.attention_forward(q, k, v, *layout)
    expected = reference.attention_forward(q.double(), k.double(), v.double(), *layout)
    assert [x.dtype for x in found] == [dtype, torch.float32]
    grads = reference.attention_backward(dout, q, k, v, found[1], *layout)
    exact = reference.attention_backward(dout.double(), q.double(), k.double(), v.double(), expected[1], *layout)
    precision = 2**-8 if dtype == torch.bfloat16 else 1e-5
    for f, e in zip((*found, *grads), (*expected, *exact), strict=True):
        torch.testing.assert_close(f.double(), e, rtol=precision, atol=1e-5)
    assert [x.dtype for x in grads] == [dtype] * 3


@pytest.mark.parametrize(
    ("cu_q", "cu_k", "message"),
    [
        ([0, 4], [0, 4], "cu_q is"),
        ([0, 5], [0, 4], "cu_k is"),
        ([1, 5], [0, 5], "cu_q is"),
        ([0, 3, 2, 5], [0, 3, 3, 5], "cu_q is"),
        ([0, 2, 5], [0, 5], "2 sequences"),
        ([], [], "cu_q is"),
    ],
)
def test_a_wrong_layout_is_refused(cu_q: list[int], cu_k: list[int], message: str) -> None:
    q, k, v = (draw(5, WIDTH) for _ in range(3))
    ends = torch.tensor(cu_q, dtype=torch.int64), torch.tensor(cu_k, dtype=torch.int64)
    with pytest.raises(ValueError, match=message):
        reference.attention_forward(q, k, v, *ends, HEADS, 1.0, 0, 0.0, 0, None)


@pytest.mark.parametrize("keys", [None, keys_of(4)], ids=["none", "too few"])
def test_dropout_without_a_key_for_every_row_is_refused(keys: Tensor | None) -> None:
    x, ends = draw(5, WIDTH), cu([5])
    with pytest.raises(ValueError, match="give one a row"):
        reference.attention_forward(x, x, x, ends, ends, HEADS, 1.0, 0, 0.1, SITE, keys)
    with pytest.raises(ValueError, match="give one a row"):
        reference.dropout_rows(x, 0.1, SITE, keys)
    with pytest.raises(ValueError, match="give one a row"):
        reference.add_norm_forward(x, None, x[0], None, 1e-5, 0.1, SITE, keys)


# Norm and dropout


@pytest.mark.parametrize("rate", [0.0, 0.3])
@pytest.mark.parametrize("with_bias", [True, False])
@pytest.mark.parametrize("with_residual", [True, False])
@pytest.mark.parametrize("shape", [(7, WIDTH), (1, 1), (0, 5)])
def test_add_norm_equals_its_formula_with_its_gradients(
    shape: tuple[int, int], with_residual: bool, with_bias: bool, rate: float
) -> None:
    num_rows, width = shape
    new, residual, dy = draw(*shape, grad=True), draw(*shape, grad=True), draw(*shape)
    weight, bias = draw(width, grad=True), draw(width, grad=True)
    keys = keys_of(num_rows)
    factor = keep_mask(keys, SITE, width, rate).double() * keep_scale(rate)
    total = new * factor + (residual if with_residual else 0 * residual)
    expected = F.layer_norm(total, (width,), weight, bias if with_bias else 0 * bias, 1e-5)
    dropout = rate, SITE, keys if rate else None
    with torch.no_grad():
        y, summed, mean, rstd = reference.add_norm_forward(
            new, residual if with_residual else None, weight, bias if with_bias else None, 1e-5, *dropout
        )
        found = reference.add_norm_backward(dy, summed, weight, mean, rstd, *dropout)
    torch.testing.assert_close(y, expected.detach(), **EXACT)
    torch.testing.assert_close(summed, total.detach(), **EXACT)
    torch.testing.assert_close(mean, total.detach().mean(dim=1), **EXACT)
    torch.testing.assert_close(rstd, ((total.detach() - mean[:, None]).square().mean(dim=1) + 1e-5) ** -0.5, **EXACT)
    inputs = [(0, new), (2, weight)] + [(1, residual)] * with_residual + [(3, bias)] * with_bias
    assert_gradients([found[i] for i, _ in inputs], expected, [x for _, x in inputs], dy)


def test_add_norm_changes_none_of_its_inputs() -> None:
    new, residual, weight = draw(3, 8), draw(3, 8), draw(8)
    copies = new.clone(), residual.clone(), weight.clone()
    for r in (residual, None):
        _, summed, _, _ = reference.add_norm_forward(new, r, weight, weight, 1e-5, 0.0, 0, None)
        summed.zero_()
    assert all(torch.equal(a, b) for a, b in zip((new, residual, weight), copies, strict=True))


def test_add_norm_of_bfloat16_keeps_statistics_and_weights_in_float32() -> None:
    new, residual = draw(5, 64, dtype=torch.bfloat16), draw(5, 64, dtype=torch.bfloat16)
    weight, bias = draw(64, dtype=torch.float32), draw(64, dtype=torch.float32)
    y, summed, mean, rstd = reference.add_norm_forward(new, residual, weight, bias, 1e-5, 0.1, SITE, keys_of(5))
    grads = reference.add_norm_backward(new, summed, weight, mean, rstd, 0.1, SITE, keys_of(5))
    low, high = torch.bfloat16, torch.float32
    assert [x.dtype for x in (y, summed, mean, rstd)] == [low, low, high, high]
    assert [x.dtype for x in grads] == [low, low, high, high]


@pytest.mark.parametrize("rate", [0.0, 0.3])
@pytest.mark.parametrize("num_tables", [1, 3])
def test_embed_equals_its_formula_with_its_gradients(num_tables: int, rate: float) -> None:
    tables, ids = [draw(5 + i, WIDTH, grad=True) for i in range(num_tables)], [torch.randint(5, (9,))] * num_tables
    weight, bias, dy, keys = draw(WIDTH, grad=True), draw(WIDTH, grad=True), draw(9, WIDTH), keys_of(9)
    total = torch.stack([F.embedding(i, t) for t, i in zip(tables, ids, strict=True)]).sum(dim=0)
    factor = keep_mask(keys, SITE, WIDTH, rate).double() * keep_scale(rate)
    expected = F.layer_norm(total, (WIDTH,), weight, bias, 1e-5) * factor
    dropout = rate, SITE, keys if rate else None
    with torch.no_grad():
        y, summed, mean, rstd = reference.embed_forward(tables, ids, weight, bias, 1e-5, False, *dropout)
        found = reference.embed_backward(dy, summed, weight, mean, rstd, *dropout)
        rounded = reference.embed_forward(tables, ids, weight, bias, 1e-5, True, *dropout)
    torch.testing.assert_close(y, expected.detach(), **EXACT)
    torch.testing.assert_close(summed, total.detach(), **EXACT)
    assert_gradients(found, expected, (total, weight, bias), dy)
    assert torch.equal(rounded[0], y.bfloat16())
    assert torch.equal(rounded[1], summed)


def test_an_id_outside_of_its_table_is_refused() -> None:
    for wrong in (-1, 5):
        with pytest.raises(IndexError):
            reference.embed_forward(
                [draw(5, 4)], [torch.tensor([0, wrong])], draw(4), draw(4), 1e-5, False, 0.0, 0, None
            )


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64])
def test_dropout_zeroes_what_the_mask_says_and_scales_the_rest(dtype: torch.dtype) -> None:
    x, keys = draw(9, 50, dtype=dtype), keys_of(9)
    found = reference.dropout_rows(x, 0.1, SITE, keys)
    kept = keep_mask(keys, SITE, 50, 0.1)
    assert found.dtype == dtype
    assert torch.equal(found == 0, ~kept)
    torch.testing.assert_close(found[kept].double(), x[kept].double() * keep_scale(0.1), rtol=2**-8, atol=0)
    assert torch.equal(reference.dropout_rows(x, 0.0, 0, None), x)


def test_dropped_infinities_are_zero() -> None:
    found = reference.dropout_rows(torch.full((4, 64), math.inf), 0.5, SITE, keys_of(4))
    assert torch.equal(found == 0, ~keep_mask(keys_of(4), SITE, 64, 0.5))


# Activations


@pytest.mark.parametrize(("kind", "name"), [(0, "none"), (1, "tanh")])
def test_gelu_equals_that_of_torch_with_its_gradient(kind: int, name: str) -> None:
    x, dy = (3 * draw(5, 14)).requires_grad_(), draw(14, 5).T
    expected = F.gelu(x, approximate=name)
    torch.testing.assert_close(reference.gelu_forward(x.detach(), kind), expected.detach(), **EXACT)
    assert_gradients([reference.gelu_backward(dy, x.detach(), kind)], expected, [x], dy)


@pytest.mark.parametrize(("kind", "name"), [(0, "none"), (1, "tanh")])
def test_geglu_gates_the_second_half_by_the_first(kind: int, name: str) -> None:
    x, dy = (3 * draw(5, 14)).requires_grad_(), draw(5, 7)
    expected = F.gelu(x[:, :7], approximate=name) * x[:, 7:]
    torch.testing.assert_close(reference.geglu_forward(x.detach(), kind), expected.detach(), **EXACT)
    assert_gradients([reference.geglu_backward(dy, x.detach(), kind)], expected, [x], dy)


@pytest.mark.parametrize("kind", [0, 1])
def test_activations_of_bfloat16_round_once(kind: int) -> None:
    x, dy = 3 * draw(50, 14, dtype=torch.bfloat16), draw(50, 7, dtype=torch.bfloat16)
    exact, dexact = x.double(), dy.double()
    for found, expected in (
        (reference.gelu_forward(x, kind), reference.gelu_forward(exact, kind)),
        (reference.gelu_backward(x, x, kind), reference.gelu_backward(exact, exact, kind)),
        (reference.geglu_forward(x, kind), reference.geglu_forward(exact, kind)),
        (reference.geglu_backward(dy, x, kind), reference.geglu_backward(dexact, exact, kind)),
    ):
        assert found.dtype == torch.bfloat16
        torch.testing.assert_close(found.double(), expected, rtol=2**-8, atol=1e-5)


# Sums and products


def test_row_sums_are_the_gradient_of_an_embedding() -> None:
    table = nn.Embedding(10, WIDTH, dtype=torch.float64)
    ids, grad = torch.tensor([3, 9, 3, 0, 3, 9]), draw(6, WIDTH)
    table(ids).backward(grad)
    rows, values = reference.row_sums(ids, grad, 10)
    assert rows.tolist() == [0, 3, 9]
    dense = torch.zeros(10, WIDTH, dtype=torch.float64).index_copy(0, rows, values)
    torch.testing.assert_close(dense, table.weight.grad, **EXACT)


def test_row_sums_of_nothing() -> None:
    rows, values = reference.row_sums(torch.zeros(0, dtype=torch.int64), draw(0, 4, dtype=torch.float32), 10)
    assert (rows.shape, rows.dtype, values.shape) == ((0,), torch.int64, (0, 4))


def test_row_sums_of_bfloat16_add_in_float32() -> None:
    """A thousand times 1 is 1000 only in more bits than bfloat16 has."""
    _, values = reference.row_sums(torch.zeros(1000, dtype=torch.int64), torch.ones(1000, 2).bfloat16(), 1)
    assert values.dtype == torch.float32
    assert values.tolist() == [[1000.0, 1000.0]]
    assert reference.column_sums(torch.ones(1000, 2).bfloat16()).tolist() == [1000.0, 1000.0]


@pytest.mark.parametrize("ids", [[0, 10], [-1, 3], [0, 1, 2]])
def test_ids_outside_of_the_table_or_without_a_gradient_are_refused(ids: list[int]) -> None:
    with pytest.raises(ValueError, match="row_sums"):
        reference.row_sums(torch.tensor(ids), draw(2, 3), 10)


def test_column_sums_are_the_gradient_of_a_bias() -> None:
    x = draw(40, 7, dtype=torch.float32)
    found = reference.column_sums(x)
    assert found.dtype == torch.float32
    torch.testing.assert_close(found.double(), x.double().sum(dim=0), rtol=1e-5, atol=1e-5)


def test_product_takes_transposed_matrices_and_a_bias() -> None:
    a, b, bias = draw(5, 4), draw(4, 3), draw(3)
    torch.testing.assert_close(reference.product(a, b, None), a @ b, **EXACT)
    torch.testing.assert_close(reference.product(b.T, a.T, None), (a @ b).T, **EXACT)
    torch.testing.assert_close(reference.product(a, b, bias), a @ b + bias, **EXACT)
    assert reference.product(a.bfloat16(), b.bfloat16(), bias.float()).dtype == torch.float32


def test_squared_norm_is_what_clipping_clips_by() -> None:
    parameters = [nn.Parameter(torch.zeros(n, dtype=torch.float64)) for n in (1, 7, 300)]
    for p in parameters:
        p.grad = draw(len(p))
    found = reference.squared_norm([p.grad for p in parameters])
    norm = nn.utils.clip_grad_norm_(parameters, 1e9)
    assert found.dtype == torch.float64
    torch.testing.assert_close(found, norm.square(), **EXACT)
    assert reference.squared_norm([]) == 0
    big = torch.full((1000,), 1e30)  # whose squares are beyond float32
    torch.testing.assert_close(
        reference.squared_norm([big]), torch.tensor(1e63, dtype=torch.float64), rtol=1e-6, atol=0
    )


# AdamW

LR, BETAS, EPS = 1e-2, (0.9, 0.98), 1e-8


def optimizer_of(parameters: list[nn.Parameter], weight_decay: float) -> torch.optim.AdamW:
    return torch.optim.AdamW(parameters, lr=LR, betas=BETAS, eps=EPS, weight_decay=weight_decay, fused=True)


@pytest.mark.parametrize("grad_scale", [1.0, 0.25])
@pytest.mark.parametrize("weight_decay", [0.0, 0.1])
def test_adamw_equals_that_of_torch(weight_decay: float, grad_scale: float) -> None:
    shapes = [(7, 5), (1,), (33,), (0,)]
    params = [draw(*s, dtype=torch.float32) for s in shapes]
    means, squares = [torch.zeros(s) for s in shapes], [torch.zeros(s) for s in shapes]
    expected = [nn.Parameter(p.clone()) for p in params]
    optimizer = optimizer_of(expected, weight_decay)
    for step in range(1, 6):
        grads = [draw(*s, dtype=torch.float32) for s in shapes]
        copies = [g.clone() for g in grads]
        for p, g in zip(expected, grads, strict=True):
            p.grad = g * grad_scale
        optimizer.step()
        reference.adamw_(params, grads, means, squares, LR, *BETAS, EPS, weight_decay, step, grad_scale)
        assert all(torch.equal(g, c) for g, c in zip(grads, copies, strict=True))
    torch.testing.assert_close(params, [p.detach() for p in expected], rtol=1e-6, atol=1e-7)
    states = [optimizer.state[p] for p in expected]
    torch.testing.assert_close(means, [s["exp_avg"] for s in states], rtol=1e-6, atol=1e-7)
    torch.testing.assert_close(squares, [s["exp_avg_sq"] for s in states], rtol=1e-6, atol=1e-7)


def test_adamw_counts_steps_from_one() -> None:
    with pytest.raises(ValueError, match="the first update is step 1"):
        reference.adamw_([], [], [], [], LR, *BETAS, EPS, 0.0, 0, 1.0)
    reference.adamw_([], [], [], [], LR, *BETAS, EPS, 0.0, 1, 1.0)


TOUCHED = [[2, 5], [5], [], [0, 2, 9], [9], [9]]
"""Rows with a gradient, step by step: row 0 once and never again, row 5 twice, rows 1, 3, 4, 6, 7, 8 never."""


@pytest.mark.parametrize("grad_scale", [1.0, 0.25])
@pytest.mark.parametrize("weight_decay", [0.0, 0.1])
def test_adamw_of_rows_equals_that_of_the_whole_table(weight_decay: float, grad_scale: float) -> None:
    param, mean, square = draw(10, 5, dtype=torch.float32), torch.zeros(10, 5), torch.zeros(10, 5)
    seen = torch.zeros(10, dtype=torch.bool)
    expected = nn.Parameter(param.clone())
    optimizer = optimizer_of([expected], weight_decay)
    for step, touched in enumerate(TOUCHED, start=1):
        rows, values = torch.tensor(touched, dtype=torch.int64), draw(len(touched), 5, dtype=torch.float32)
        expected.grad = torch.zeros(10, 5).index_copy(0, rows, values * grad_scale)
        optimizer.step()
        reference.adamw_rows_(param, rows, values, mean, square, seen, LR, *BETAS, EPS, weight_decay, step, grad_scale)
        assert seen.nonzero().squeeze(1).tolist() == sorted(set().union(*TOUCHED[:step]))
    state = optimizer.state[expected]
    torch.testing.assert_close(param, expected.detach(), rtol=1e-6, atol=1e-7)
    torch.testing.assert_close(mean, state["exp_avg"], rtol=1e-6, atol=1e-7)
    torch.testing.assert_close(square, state["exp_avg_sq"], rtol=1e-6, atol=1e-7)
