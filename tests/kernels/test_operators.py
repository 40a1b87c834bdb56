"""The compiled ops against the plain ones in float64, and what they do with wrong arguments."""

from __future__ import annotations

import functools
import inspect
import itertools
import math
import typing
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
import torch
from torch import Tensor

from fleetune.kernels import reference
from fleetune.kernels.library import load_kernels
from fleetune.kernels.random import as_int64, row_keys, site_key

SITE = as_int64(site_key(42, 1, 2, 3))
LENGTHS = [0, 1, 2, 31, 32, 0, 33, 128, 300]
F32, BF16 = torch.float32, torch.bfloat16
FORWARD, BACKWARD = 2e-6, 1e-5
"""Error of an output and of a gradient in float32, relative to the largest value."""
BOTH = pytest.mark.parametrize("dtype", [F32, BF16], ids=["float32", "bfloat16"])
RATES = pytest.mark.parametrize("rate", [0.0, 0.1, 0.5])


@pytest.fixture(scope="module")
def compiled() -> Any:
    kernels = load_kernels()
    if not kernels.compiled:
        pytest.skip(f"no compiled kernels: {kernels.reason}")
    return torch.ops.fleetune


@pytest.fixture(autouse=True)
def _same_draws_every_time() -> None:
    torch.manual_seed(0)


def cu(lengths: Sequence[int]) -> Tensor:
    return torch.tensor([0, *itertools.accumulate(lengths)])


def keys_of(num_rows: int) -> Tensor:
    return row_keys(torch.arange(num_rows) // 50, torch.arange(num_rows) % 50)


def exact(x: Any) -> Any:
    """The argument in float64, if it is floating-point."""
    if isinstance(x, list):
        return [exact(y) for y in x]
    return x.double() if isinstance(x, Tensor) and x.is_floating_point() else x


def assert_near(found: Tensor, expected: Tensor, limit: float, dtype: torch.dtype, scale: Tensor | None = None) -> None:
    """Within `limit` of the scale, which is the largest expected value if not given, and one rounding to the storage.

    Where large numbers cancel, the scale is theirs.
    """
    assert (found.dtype, found.shape) == (dtype, expected.shape)
    if found.numel():
        largest = (expected if scale is None else scale).abs().max()
        rounding = 2**-8 * expected.abs() if dtype == BF16 else 0.0
        error = ((found.double() - expected).abs() - rounding).max()
        assert error <= limit * largest + 1e-30, f"an error of {error} where the scale is {largest}"


def check(op: Any, name: str, arguments: Sequence[Any], limit: float, dtypes: Sequence[torch.dtype]) -> tuple[Any, ...]:
    """Compare all results of an op with those of the plain one in float64, which are returned."""
    found, expected = op(*arguments), getattr(reference, name)(*map(exact, arguments))
    single = isinstance(found, Tensor)
    results: tuple[Any, ...] = (expected,) if single else tuple(expected)
    for f, e, dtype in zip((found,) if single else found, results, dtypes, strict=True):
        assert_near(f, e, limit, dtype)
    return results


WAITING = {"count_up_", "wait_for_count"}
"""Ops that compute nothing: ranks wait for each other with them, and do not where there are no compiled ones."""
COUNTING = {"kernel_clock", "keep_spans", "take_spans", "stay_ns"}
"""Ops that tell how long the compiled ones took."""


def test_every_compiled_op_has_a_plain_one_with_as_many_arguments(compiled: Any) -> None:
    names = [n.split("::")[1] for n in torch._C._dispatch_get_all_op_names() if n.startswith("fleetune::")]
    plain = {n: f for n, f in inspect.getmembers(reference, inspect.isfunction) if f.__module__ == reference.__name__}
    names = sorted(set(names) - WAITING - COUNTING)
    assert names == sorted(n for n in plain if not n.startswith("_"))
    for name in names:
        schema = getattr(compiled, name).default._schema
        assert len(schema.arguments) == len(inspect.signature(plain[name]).parameters), name
        assert len(schema.returns) == _num_results(plain[name]), name


def _num_results(function: Callable[..., Any]) -> int:
    told = typing.get_type_hints(function)["return"]
    return 0 if told is type(None) else len(typing.get_args(told)) or 1


# Products by torch


@BOTH
def test_products_by_torch_round_the_weights_for_it(compiled: Any, dtype: torch.dtype) -> None:
    a, b, bias = torch.randn(9, 24).to(dtype), torch.randn(24, 17), torch.randn(17)
    assert torch.equal(compiled.product_by_torch(a, b, None), a @ b.to(dtype))
    assert torch.equal(compiled.product_by_torch(a, b, bias), torch.addmm(bias.to(dtype), a, b.to(dtype)))
    assert torch.equal(reference.product_by_torch(a, b, bias), torch.addmm(bias.to(dtype), a, b.to(dtype)))


# Attention


@pytest.mark.parametrize(("window", "rate"), [(0, 0.0), (0, 0.1), (0, 0.5), (1, 0.1), (16, 0.0), (16, 0.1)])
@BOTH
@pytest.mark.parametrize("head_width", [1, 7, 8, 12, 32, 64, 80])
def test_attention(compiled: Any, head_width: int, window: int, dtype: torch.dtype, rate: float) -> None:
    num_tokens, width = sum(LENGTHS), 2 * head_width
    q, k, v = torch.randn(num_tokens, 3 * width).to(dtype).split(width, dim=1)
    dout, ends = torch.randn(num_tokens, width).to(dtype), cu(LENGTHS)
    layout = ends, ends, 2, head_width**-0.5, window, rate, SITE, keys_of(num_tokens) if rate else None
    compare_attention(compiled, dout, (q, k, v), layout)


def compare_attention(
    compiled: Any, dout: Tensor, qkv: Sequence[Tensor], layout: tuple[Any, ...], limit: float = FORWARD
) -> None:
    dtype = dout.dtype
    _, lse = check(compiled.attention_forward, "attention_forward", (*qkv, *layout), limit, (dtype, F32))
    backward = (dout, *qkv, lse.float(), *layout)
    check(compiled.attention_backward, "attention_backward", backward, BACKWARD, [dtype] * 3)


@pytest.mark.parametrize(("window", "rate"), [(0, 0.0), (0, 0.1), (16, 0.1)])
@BOTH
@pytest.mark.parametrize("head_width", [7, 32])
def test_attention_with_a_bias(compiled: Any, head_width: int, window: int, dtype: torch.dtype, rate: float) -> None:
    """Of more distances than there are; the longest sequence is worked through in blocks of queries."""
    lengths = [*LENGTHS, 700]
    num_tokens, width, ends = sum(lengths), 2 * head_width, cu(lengths)
    qkv = torch.randn(num_tokens, 3 * width).to(dtype).split(width, dim=1)
    layout = ends, ends, 2, head_width**-0.5, window, rate, SITE, keys_of(num_tokens) if rate else None
    compare_biased(compiled, qkv, torch.randn(2, 2 * 700 + 5), layout)


@BOTH
def test_attention_with_a_bias_of_other_numbers_of_queries_than_of_keys(compiled: Any, dtype: torch.dtype) -> None:
    for queries, keys in (([1, 1, 1], [9, 1, 40]), ([30, 4, 0], [7, 4, 3])):
        q, k, v = (torch.randn(n, 24).to(dtype) for n in (sum(queries), sum(keys), sum(keys)))
        layout = cu(queries), cu(keys), 3, 0.3, 0, 0.1, SITE, keys_of(len(q))
        compare_biased(compiled, (q, k, v), torch.randn(3, 2 * max(*queries, *keys) - 1), layout)


def compare_biased(compiled: Any, qkv: Sequence[Tensor], bias: Tensor, layout: tuple[Any, ...]) -> None:
    dout, dtype = torch.randn_like(qkv[0]), qkv[0].dtype
    name = "biased_attention_forward"
    _, lse = check(compiled.biased_attention_forward, name, (*qkv, bias, *layout), 3 * FORWARD, (dtype, F32))
    backward, name = (dout, *qkv, bias, lse.float(), *layout), "biased_attention_backward"
    check(compiled.biased_attention_backward, name, backward, 3 * BACKWARD, [dtype] * 3 + [F32])


def test_a_bias_of_zero_changes_no_bit(compiled: Any) -> None:
    q, k, v = torch.randn(sum(LENGTHS), 72).split(24, dim=1)
    bias, layout = (
        torch.zeros(3, 2 * max(LENGTHS) + 1),
        (cu(LENGTHS), cu(LENGTHS), 3, 0.3, 0, 0.1, SITE, keys_of(len(q))),
    )
    out, lse = compiled.attention_forward(q, k, v, *layout)
    assert all(map(torch.equal, compiled.biased_attention_forward(q, k, v, bias, *layout), (out, lse)))
    grads = compiled.attention_backward(q, q, k, v, lse, *layout)
    found = compiled.biased_attention_backward(q, q, k, v, bias, lse, *layout)
    assert all(torch.equal(f, g) for f, g in zip(found, grads, strict=False))


@BOTH
@pytest.mark.parametrize(("num_heads", "half", "behind"), [(1, 1, 0), (3, 7, 5), (24, 32, 768)])
def test_rotate(compiled: Any, num_heads: int, half: int, behind: int, dtype: torch.dtype) -> None:
    x, angles = torch.randn(50, 2 * half * num_heads + behind).to(dtype), torch.randn(50, half)
    check(compiled.rotate, "rotate", (x, angles.cos(), angles.sin(), num_heads), FORWARD, [dtype])


@RATES
@BOTH
@pytest.mark.parametrize("num_heads", [1, 3])
def test_attention_of_the_first_tokens_only(compiled: Any, num_heads: int, dtype: torch.dtype, rate: float) -> None:
    lengths = [n for n in LENGTHS if n]
    q, dout = (torch.randn(len(lengths), 24).to(dtype) for _ in range(2))
    k, v = (torch.randn(sum(lengths), 24).to(dtype) for _ in range(2))
    keys = keys_of(len(lengths)) if rate else None
    layout = cu([1] * len(lengths)), cu(lengths), num_heads, 0.3, 0, rate, SITE, keys
    compare_attention(compiled, dout, (q, k, v), layout)


def test_attention_with_other_numbers_of_queries_than_of_keys(compiled: Any) -> None:
    """Also none of them: their keys have gradients of zero."""
    queries, keys = [3, 0, 33, 100, 1], [7, 5, 40, 200, 1]
    q, dout = torch.randn(sum(queries), 24), torch.randn(sum(queries), 24)
    k, v = torch.randn(sum(keys), 24), torch.randn(sum(keys), 24)
    for window in (0, 4):
        compare_attention(compiled, dout, (q, k, v),
                          (cu(queries), cu(keys), 3, 0.3, window, 0.1, SITE, keys_of(len(q))))  # fmt: skip


@BOTH
def test_attention_of_one_long_sequence(compiled: Any, dtype: torch.dtype) -> None:
    """Its queries are worked through in blocks. Sums of 1,500 in four partial ones round more than shorter sums."""
    q, k, v, dout = (torch.randn(1500, 8).to(dtype) for _ in range(4))
    for window in (0, 16, 700):
        compare_attention(compiled, dout, (q, k, v),
                          (cu([1500]), cu([1500]), 1, 0.3, window, 0.1, SITE, keys_of(1500)), 3 * FORWARD)  # fmt: skip


@pytest.mark.parametrize("lengths", [[], [0], [0, 0, 0]])
def test_attention_of_nothing(compiled: Any, lengths: list[int]) -> None:
    x, ends = torch.zeros(0, 12), cu(lengths)
    layout = ends, ends, 3, 1.0, 0, 0.1, SITE, keys_of(0)
    out, lse = compiled.attention_forward(x, x, x, *layout)
    assert (out.shape, lse.shape) == ((0, 12), (0, 3))
    assert [g.shape for g in compiled.attention_backward(x, x, x, x, lse, *layout)] == [(0, 12)] * 3


@pytest.mark.parametrize("size", [30.0, 1e4])
def test_large_scores_do_not_overflow(compiled: Any, size: float) -> None:
    q, k, v = (torch.randn(60, 16) * s for s in (size, 1.0, 1.0))
    ends = cu([20, 40])
    out, lse = compiled.attention_forward(q, k, v, ends, ends, 2, 1.0, 0, 0.0, 0, None)
    expected = reference.attention_forward(q.double(), k.double(), v.double(), ends, ends, 2, 1.0, 0, 0.0, 0, None)
    precision = 1e-6 * size  # of a score; an exponential passes it on
    torch.testing.assert_close(out.double(), expected[0], rtol=0, atol=10 * precision)
    torch.testing.assert_close(lse.double(), expected[1], rtol=1e-6, atol=0)


def test_attention_reads_its_own_columns_and_sequences_only(compiled: Any) -> None:
    """All around them is NaN."""
    wide = torch.full((90, 100), math.nan)
    wide[10:80, 20:80] = torch.randn(70, 60)
    q, k, v = wide[10:80, 20:80].split(20, dim=1)
    layout = cu([33, 37]), cu([33, 37]), 2, 0.3, 0, 0.1, SITE, keys_of(70)
    compare_attention(compiled, q, (q, k, v), layout)
    k[:33] = v[:33] = math.nan
    out, _ = compiled.attention_forward(q, k, v, *layout)
    assert out[:33].isnan().all()
    assert out[33:].isfinite().all()


# Rows

SHAPES = pytest.mark.parametrize("width", [1, 5, 16, 100, 384, 768])
ROWS = pytest.mark.parametrize("num_rows", [0, 1, 7, 843])


@RATES
@BOTH
@SHAPES
@ROWS
def test_add_norm(compiled: Any, num_rows: int, width: int, dtype: torch.dtype, rate: float) -> None:
    new, residual, dy = (torch.randn(num_rows, width).to(dtype) for _ in range(3))
    weight, bias = torch.randn(width), torch.randn(width)
    dropout = rate, SITE, keys_of(num_rows) if rate else None
    few = [(residual, None), (None, bias), (None, None)] if num_rows < 100 else []
    for r, b in (*few, (residual, bias)):
        y, total, mean, rstd = compiled.add_norm_forward(new, r, weight, b, 1e-5, *dropout)
        expected = reference.dropout_rows(new.double(), *dropout)
        assert_near(total, expected if r is None else expected + r, FORWARD, dtype)
        check_norm((y, total, mean, rstd), weight, b, dtype)
    found = compiled.add_norm_backward(dy, total, weight, mean, rstd, *dropout)
    results = reference.add_norm_backward(*map(exact, (dy, total, weight, mean, rstd)), *dropout)
    scale = largest(dy) * largest(weight) * largest(rstd)
    for f, e, kind, size in zip(found, results, (dtype, dtype, F32, F32), (scale, scale, None, None), strict=True):
        assert_near(f, e, BACKWARD, kind, size)


def largest(x: Tensor) -> Tensor:
    return x.double().abs().max() if x.numel() else torch.zeros(())


def check_norm(found: Sequence[Tensor], weight: Tensor, bias: Tensor | None, dtype: torch.dtype) -> None:
    """A norm, its mean and deviation are those of the sum as it was stored."""
    y, total, mean, rstd = found
    arguments = map(exact, (total, None, weight, bias))
    expected, _, expected_mean, expected_rstd = reference.add_norm_forward(*arguments, 1e-5, 0.0, 0, None)
    assert_near(y, expected, FORWARD, dtype)
    assert_near(mean, expected_mean, FORWARD, F32, total)
    assert_near(rstd, expected_rstd, FORWARD, F32)


@BOTH
def test_add_norm_of_rows_far_from_zero(compiled: Any, dtype: torch.dtype) -> None:
    """A variance that is computed as a difference of squares would be lost."""
    new, residual = (torch.randn(9, 384) + 300).to(dtype), torch.randn(9, 384).to(dtype)
    y, total, _, rstd = compiled.add_norm_forward(new, residual, torch.ones(384), None, 1e-12, 0.0, 0, None)
    expected = reference.add_norm_forward(total.double(), None, torch.ones(384), None, 1e-12, 0.0, 0, None)
    torch.testing.assert_close(y.double(), expected[0], rtol=2**-8 if dtype == BF16 else 0, atol=1e-4)
    torch.testing.assert_close(rstd.double(), expected[3], rtol=1e-4, atol=0)


@RATES
@BOTH
@SHAPES
@ROWS
def test_dropout_rows(compiled: Any, num_rows: int, width: int, dtype: torch.dtype, rate: float) -> None:
    x, keys = torch.randn(num_rows, width).to(dtype), keys_of(num_rows) if rate else None
    check(compiled.dropout_rows, "dropout_rows", (x, rate, SITE, keys), FORWARD, [dtype])
    zeros = reference.dropout_rows(x, rate, SITE, keys) == 0
    assert torch.equal(compiled.dropout_rows(x, rate, SITE, keys) == 0, zeros)


def test_dropout_does_not_change_its_input(compiled: Any) -> None:
    x = torch.randn(5, 40)
    copy = x.clone()
    compiled.dropout_rows(x, 0.0, SITE, None).zero_()
    compiled.dropout_rows(x, 0.5, SITE, keys_of(5)).zero_()
    assert torch.equal(x, copy)


def test_a_rate_below_its_smallest_step_drops_nothing(compiled: Any) -> None:
    x = torch.randn(300, 384)
    assert torch.equal(compiled.dropout_rows(x, 1e-9, SITE, keys_of(300)), x)


@pytest.mark.parametrize("kind", [0, 1], ids=["erf", "tanh"])
@BOTH
@SHAPES
@ROWS
def test_activations(compiled: Any, num_rows: int, width: int, dtype: torch.dtype, kind: int) -> None:
    x, dy = (3 * torch.randn(num_rows, 2 * width)).to(dtype), torch.randn(num_rows, 2 * width).to(dtype)
    half = dy[:, :width].contiguous()
    check(compiled.gelu_forward, "gelu_forward", (x, kind), FORWARD, [dtype])
    check(compiled.gelu_backward, "gelu_backward", (dy, x, kind), BACKWARD, [dtype])
    check(compiled.geglu_forward, "geglu_forward", (x, kind), FORWARD, [dtype])
    check(compiled.geglu_backward, "geglu_backward", (half, x, kind), BACKWARD, [dtype])


@pytest.mark.parametrize("kind", [0, 1], ids=["erf", "tanh"])
def test_gelu_far_from_zero(compiled: Any, kind: int) -> None:
    x = torch.tensor([[-1e12, -100.0, -20.0, -0.0, 0.0, 1e-30, 20.0, 100.0, 1e12]])
    found = compiled.gelu_forward(x, kind)
    torch.testing.assert_close(found, torch.where(x > 0, x, 0.0), rtol=1e-6, atol=1e-30)
    slope = compiled.gelu_backward(torch.ones_like(x), x, kind)
    torch.testing.assert_close(slope, torch.tensor([[0.0, 0, 0, 0.5, 0.5, 0.5, 1, 1, 1]]), rtol=1e-6, atol=1e-30)


@RATES
@BOTH
@SHAPES
def test_embed(compiled: Any, width: int, dtype: torch.dtype, rate: float) -> None:
    for num_rows in (0, 1, 7, 300):
        tables = [torch.randn(n, width) for n in (50, 20, 2)]
        ids = [torch.randint(len(t), (num_rows,)) for t in tables]
        dropout = rate, SITE, keys_of(num_rows) if rate else None
        weight, bias = torch.randn(width), torch.randn(width)
        arguments = tables, ids, weight, bias, 1e-5, dtype == BF16, *dropout
        y, total, mean, rstd = compiled.embed_forward(*arguments)
        expected = reference.embed_forward(*map(exact, arguments[:5]), False, *dropout)
        for f, e, kind, size in zip((y, total, mean, rstd), expected, (dtype, F32, F32, F32),
                                    (None, None, total, None), strict=True):  # fmt: skip
            assert_near(f, e, FORWARD, kind, size)
        dy = torch.randn(num_rows, width).to(dtype)
        found = compiled.embed_backward(dy, total, weight, mean, rstd, *dropout)
        expected = reference.embed_backward(*map(exact, (dy, total, weight, mean, rstd)), *dropout)
        sizes = 2 * largest(dy) * largest(weight) * largest(rstd), None, None
        for f, e, size in zip(found, expected, sizes, strict=True):
            assert_near(f, e, BACKWARD, F32, size)


@BOTH
@SHAPES
@ROWS
def test_sums(compiled: Any, num_rows: int, width: int, dtype: torch.dtype) -> None:
    x, ids = torch.randn(num_rows, width).to(dtype), torch.randint(100, (num_rows,))
    check(compiled.column_sums, "column_sums", [x], BACKWARD, [F32])
    rows, values = compiled.row_sums(ids, x, 100)
    expected = reference.row_sums(ids, x.double(), 100)
    assert torch.equal(rows, expected[0])
    assert_near(values, expected[1], BACKWARD, F32)


def test_sums_of_columns_of_a_wider_tensor(compiled: Any) -> None:
    wide = torch.randn(70, 60)
    torch.testing.assert_close(compiled.column_sums(wide[:, 20:40]), wide[:, 20:40].sum(dim=0))


# Products

PRODUCTS = [(0, 5, 3), (3, 0, 5), (4, 3, 0), (1, 1, 1), (1, 384, 1), (13, 7, 5), (100, 33, 47), (843, 384, 1152)]


@pytest.mark.parametrize("with_bias", [False, True])
@pytest.mark.parametrize(("m", "k", "n"), PRODUCTS)
def test_product(compiled: Any, m: int, k: int, n: int, with_bias: bool) -> None:
    a, b, bias = torch.randn(m, k), torch.randn(k, n), torch.randn(n) if with_bias else None
    exact = a.double() @ b.double() + (bias.double() if bias is not None else 0)
    for lhs, rhs in itertools.product((a, a.T.contiguous().T), (b, b.T.contiguous().T)):
        assert_product(compiled.product(lhs, rhs, bias), exact, k)


def assert_product(found: Tensor, exact: Tensor, depth: int) -> None:
    assert (found.dtype, found.shape) == (F32, exact.shape)
    if found.numel():
        scale = 10.0  # at most, the product of two draws
        assert (found.double() - exact).abs().max() <= 1e-6 * math.sqrt(max(depth, 1)) * scale


def test_product_of_any_strides(compiled: Any) -> None:
    a, b = torch.randn(80, 90)[::3, ::2], torch.randn(1, 50).expand(45, 50)
    assert_product(compiled.product(a, b, None), a.double() @ b.double(), 45)
    assert_product(compiled.product(b.T, a.T, None), b.double().T @ a.double().T, 45)


# The optimizer

ADAMW = 1e-2, 0.9, 0.999, 1e-8


def test_squared_norm(compiled: Any) -> None:
    tensors = [torch.randn(n) for n in (0, 1, 7, 16385, 40000)]
    check(compiled.squared_norm, "squared_norm", [tensors], 1e-6, [torch.float64])
    small = [torch.full((1000,), 1e-15)]
    check(compiled.squared_norm, "squared_norm", [small], 1e-6, [torch.float64])


@pytest.mark.parametrize("grad_scale", [1.0, 0.25])
@pytest.mark.parametrize("weight_decay", [0.0, 0.1])
def test_adamw(compiled: Any, weight_decay: float, grad_scale: float) -> None:
    shapes = [(7, 5), (1,), (20000,), (0,)]
    found = [[torch.randn(s) for s in shapes], [torch.zeros(s) for s in shapes], [torch.zeros(s) for s in shapes]]
    expected = [[x.clone() for x in xs] for xs in found]
    for step in range(1, 6):
        grads = [torch.randn(s) for s in shapes]
        copies = [g.clone() for g in grads]
        for ops, (params, means, squares) in ((compiled, found), (reference, expected)):
            ops.adamw_(params, grads, means, squares, *ADAMW, weight_decay, step, grad_scale)
        assert all(torch.equal(g, c) for g, c in zip(grads, copies, strict=True))
    for f, e in zip(found, expected, strict=True):
        torch.testing.assert_close(f, e, rtol=2e-6, atol=2e-7)


@pytest.mark.parametrize("grad_scale", [1.0, 0.25])
@pytest.mark.parametrize("weight_decay", [0.0, 0.1])
@pytest.mark.parametrize("width", [1, 5, 384])
def test_adamw_of_rows(compiled: Any, width: int, weight_decay: float, grad_scale: float) -> None:
    """Row 3 has a gradient once and never again, and many rows never."""
    found = [torch.randn(50, width), torch.zeros(50, width), torch.zeros(50, width)]
    expected = [x.clone() for x in found]
    seen = [torch.zeros(50, dtype=torch.bool) for _ in range(2)]
    for step, touched in enumerate([[3, 5], [5, 49], [], [0, 5, 7, 9], [9]], start=1):
        rows, values = torch.tensor(touched, dtype=torch.int64), torch.randn(len(touched), width)
        for ops, (param, mean, square), marks in ((compiled, found, seen[0]), (reference, expected, seen[1])):
            settings = *ADAMW, weight_decay, step, grad_scale
            ops.adamw_rows_(param, rows, values, mean, square, marks, *settings)
        assert torch.equal(seen[0], seen[1])
    for f, e in zip(found, expected, strict=True):
        torch.testing.assert_close(f, e, rtol=2e-6, atol=2e-7)


# Bits


@functools.cache
def calls(dtype: torch.dtype) -> dict[str, tuple[Any, ...]]:
    """Arguments of calls that are large enough to be shared by threads."""
    x, y, z = (torch.randn(843, 384).to(dtype) for _ in range(3))
    ends, keys, weight = cu([*LENGTHS, 316]), keys_of(843), torch.randn(384)
    layout = ends, ends, 12, 0.2, 0, 0.1, SITE, keys
    lse = reference.attention_forward(x, y, z, *layout)[1]
    mean, rstd = torch.randn(843), torch.rand(843)
    return {
        "attention_forward": (x, y, z, *layout),
        "attention_backward": (x, x, y, z, lse, *layout),
        "biased_attention_backward": (x, x, y, z, torch.randn(12, 701), lse, *layout),
        "rotate": (x, torch.randn(843, 16), torch.randn(843, 16), 8),
        "add_norm_forward": (x, y, weight, weight, 1e-5, 0.1, SITE, keys),
        "add_norm_backward": (x, y, weight, mean, rstd, 0.1, SITE, keys),
        "dropout_rows": (x, 0.1, SITE, keys),
        "gelu_forward": (x, 0),
        "gelu_backward": (x, y, 0),
        "geglu_forward": (x, 1),
        "geglu_backward": (x[:, :192], y, 1),
        "row_sums": (torch.randint(100, (843,)), x, 100),
        "column_sums": (x,),
        "product": (x.float(), y.float().T, None),
        "squared_norm": ([x.float(), y.float()],),
    }


@BOTH
@pytest.mark.parametrize(
    "name",
    [
        "attention_forward",
        "attention_backward",
        "biased_attention_backward",
        "rotate",
        "add_norm_forward",
        "add_norm_backward",
        "dropout_rows",
        "gelu_forward",
        "gelu_backward",
        "geglu_forward",
        "geglu_backward",
        "row_sums",
        "column_sums",
        "product",
        "squared_norm",
    ],
)
def test_the_bits_are_the_same_every_time_and_with_any_number_of_threads(
    compiled: Any, name: str, dtype: torch.dtype
) -> None:
    num_threads = torch.get_num_threads()
    results = []
    try:
        for threads in (1, 2, 1, 2):
            torch.set_num_threads(threads)
            result = getattr(compiled, name)(*calls(dtype)[name])
            results.append([result] if isinstance(result, Tensor) else list(result))
    finally:
        torch.set_num_threads(num_threads)
    for other in results[1:]:
        assert all(torch.equal(a, b) for a, b in zip(results[0], other, strict=True))


def test_a_sequence_has_the_same_bits_in_any_company(compiled: Any) -> None:
    """The keys go with the tokens, and so do the masks: one process and several get the same."""
    q, k, v = torch.randn(sum(LENGTHS), 72).split(24, dim=1)
    keys, ends = keys_of(len(q)), cu(LENGTHS)
    layout = 3, 0.3, 0, 0.1, SITE
    out, lse = compiled.attention_forward(q, k, v, ends, ends, *layout, keys)
    grads = compiled.attention_backward(q, q, k, v, lse, ends, ends, *layout, keys)
    for start, end in itertools.pairwise(ends.tolist()):
        span, alone = slice(start, end), cu([end - start])
        parts = q[span], k[span], v[span]
        found = compiled.attention_forward(*parts, alone, alone, *layout, keys[span])
        assert torch.equal(found[0], out[span])
        found = compiled.attention_backward(q[span], *parts, lse[span], alone, alone, *layout, keys[span])
        assert all(torch.equal(f, g[span]) for f, g in zip(found, grads, strict=True))


# Wrong calls

X = torch.randn(5, 12)
ENDS, KEYS = cu([2, 3]), keys_of(5)
W, IDS, M, LSE = torch.ones(12), torch.tensor([0, 1, 2, 3, 3]), torch.ones(5), torch.zeros(5, 3)
NONE = 0.0, 0, None
TABLE = torch.zeros(4, 12)
BIAS, ANGLES = torch.zeros(3, 5), torch.ones(5, 2)


def attend(ops: Any, q: Any = X, k: Any = X, v: Any = X, cu_q: Any = ENDS, cu_k: Any = ENDS, heads: Any = 3,
           window: Any = 0, dropout: Any = NONE) -> None:  # fmt: skip
    ops.attention_forward(q, k, v, cu_q, cu_k, heads, 1.0, window, *dropout)


def attend_biased(ops: Any, bias: Any = BIAS) -> None:
    ops.biased_attention_forward(X, X, X, bias, ENDS, ENDS, 3, 1.0, 0, *NONE)


def turn(ops: Any, cos: Any = ANGLES, sin: Any = ANGLES, heads: int = 3) -> None:
    ops.rotate(X, cos, sin, heads)


def attend_backward(ops: Any, dout: Any = X, q: Any = X, lse: Any = LSE, cu_q: Any = ENDS, heads: int = 3) -> None:
    ops.attention_backward(dout, q, q, q, lse, cu_q, cu_q, heads, 1.0, 0, *NONE)


def add_norm(ops: Any, new: Any = X, residual: Any = X, weight: Any = W, bias: Any = W, dropout: Any = NONE) -> None:
    ops.add_norm_forward(new, residual, weight, bias, 1e-5, *dropout)


def add_norm_backward(ops: Any, dy: Any = X, total: Any = X, weight: Any = W, mean: Any = M, rstd: Any = M) -> None:
    ops.add_norm_backward(dy, total, weight, mean, rstd, *NONE)


def embed(ops: Any, tables: Any = (TABLE,), ids: Any = (IDS,), weight: Any = W) -> None:
    ops.embed_forward(list(tables), list(ids), weight, W, 1e-5, False, *NONE)


def adamw(ops: Any, params: Any = (X,), grads: Any = (X,), means: Any = (X,), squares: Any = (X,)) -> None:
    copies = [[x.clone() if x.is_contiguous() else x for x in xs] for xs in (params, grads, means, squares)]
    ops.adamw_(*copies, *ADAMW, 0.0, 1, 1.0)


def adamw_rows(ops: Any, rows: Any = (1, 3), values: Any = X[:2], seen: Any = M > 2, mean: Any = X) -> None:
    ids = rows if isinstance(rows, Tensor) else torch.tensor(rows)
    ops.adamw_rows_(X.clone(), ids, values, mean.clone(), X.clone(), seen.clone(), *ADAMW, 0.0, 1, 1.0)


GOOD_CALLS = [attend, attend_biased, turn, attend_backward, add_norm, add_norm_backward, embed, adamw, adamw_rows]

BAD_CALLS: dict[str, Callable[[Any], Any]] = {
    "queries of float64": lambda ops: attend(ops, X.double(), X.double(), X.double()),
    "keys of another type": lambda ops: attend(ops, k=X.bfloat16()),
    "values of another type": lambda ops: attend(ops, v=X.bfloat16()),
    "queries of integers": lambda ops: attend(ops, X.int(), X.int(), X.int()),
    "a bias of an even width": lambda ops: attend_biased(ops, torch.zeros(3, 6)),
    "a bias of too few distances": lambda ops: attend_biased(ops, torch.zeros(3, 3)),
    "a bias of other heads": lambda ops: attend_biased(ops, torch.zeros(2, 5)),
    "angles of fewer rows": lambda ops: turn(ops, torch.ones(4, 2)),
    "sines of another width": lambda ops: turn(ops, sin=torch.ones(5, 1)),
    "more heads than columns": lambda ops: turn(ops, heads=4),
    "queries of one dimension": lambda ops: attend(ops, q=X[0]),
    "queries of three dimensions": lambda ops: attend(ops, q=X[None]),
    "narrower keys": lambda ops: attend(ops, k=X[:, :6]),
    "wider values": lambda ops: attend(ops, v=torch.zeros(5, 24)),
    "fewer values than keys": lambda ops: attend(ops, v=X[:4]),
    "columns that are not next to each other": lambda ops: attend(ops, q=torch.zeros(5, 24)[:, ::2]),
    "transposed queries": lambda ops: attend(ops, q=torch.zeros(12, 5).T),
    "cu_q before the end of the queries": lambda ops: attend(ops, cu_q=cu([2, 2])),
    "cu_q beyond the queries": lambda ops: attend(ops, cu_q=cu([2, 30])),
    "cu_k before the end of the keys": lambda ops: attend(ops, cu_k=cu([2, 2])),
    "cu_k beyond the keys": lambda ops: attend(ops, cu_k=cu([2, 4])),
    "cu that starts late": lambda ops: attend(ops, cu_q=torch.tensor([1, 2, 5]), cu_k=torch.tensor([1, 2, 5])),
    "cu that decreases": lambda ops: attend(ops, cu_q=torch.tensor([0, 9, 5]), cu_k=torch.tensor([0, 9, 5])),
    "cu that is negative inside": lambda ops: attend(ops, cu_k=torch.tensor([0, -3, 5])),
    "cu of different numbers of sequences": lambda ops: attend(ops, cu_k=cu([1, 2, 2])),
    "cu of int32": lambda ops: attend(ops, cu_q=ENDS.int(), cu_k=ENDS.int()),
    "cu without an element": lambda ops: attend(ops, cu_q=ENDS[:0], cu_k=ENDS[:0]),
    "cu of two dimensions": lambda ops: attend(ops, cu_q=ENDS[None], cu_k=ENDS[None]),
    "queries without keys": lambda ops: attend(ops, cu_k=cu([0, 5])),
    "heads that do not divide the width": lambda ops: attend(ops, heads=5),
    "no head": lambda ops: attend(ops, heads=0),
    "a negative number of heads": lambda ops: attend(ops, heads=-3),
    "a negative window": lambda ops: attend(ops, window=-1),
    "no keys for dropout": lambda ops: attend(ops, dropout=(0.1, SITE, None)),
    "too few keys for dropout": lambda ops: attend(ops, dropout=(0.1, SITE, KEYS[:4])),
    "too many keys for dropout": lambda ops: attend(ops, dropout=(0.1, SITE, keys_of(6))),
    "keys for dropout of int32": lambda ops: attend(ops, dropout=(0.1, SITE, KEYS.int())),
    "a rate of 1": lambda ops: attend(ops, dropout=(1.0, SITE, KEYS)),
    "a negative rate": lambda ops: attend(ops, dropout=(-0.1, SITE, KEYS)),
    "a rate that is no number": lambda ops: attend(ops, dropout=(math.nan, SITE, KEYS)),
    "queries on no device": lambda ops: attend(ops, q=X.to("meta")),
    "an output gradient of another type": lambda ops: attend_backward(ops, dout=X.bfloat16()),
    "fewer output gradients": lambda ops: attend_backward(ops, dout=X[:4]),
    "lse of other heads": lambda ops: attend_backward(ops, heads=4),
    "lse of fewer rows": lambda ops: attend_backward(ops, lse=LSE[:4]),
    "lse of float64": lambda ops: attend_backward(ops, lse=LSE.double()),
    "backward with cu beyond the rows": lambda ops: attend_backward(ops, cu_q=cu([2, 30])),
    "norm of float64": lambda ops: add_norm(ops, X.double(), X.double()),
    "norm of three dimensions": lambda ops: add_norm(ops, X[None], X[None]),
    "a residual of another shape": lambda ops: add_norm(ops, residual=X[:4]),
    "a residual of another type": lambda ops: add_norm(ops, residual=X.bfloat16()),
    "a weight of bfloat16": lambda ops: add_norm(ops, weight=W.bfloat16()),
    "a shorter weight": lambda ops: add_norm(ops, weight=W[:11]),
    "a weight that is not contiguous": lambda ops: add_norm(ops, weight=torch.ones(24)[::2]),
    "a longer bias": lambda ops: add_norm(ops, bias=torch.ones(13)),
    "norm without keys for dropout": lambda ops: add_norm(ops, dropout=(0.1, SITE, None)),
    "norm with too few keys for dropout": lambda ops: add_norm(ops, dropout=(0.1, SITE, KEYS[:1])),
    "a gradient of another type than the sum": lambda ops: add_norm_backward(ops, dy=X.bfloat16()),
    "fewer gradients than sums": lambda ops: add_norm_backward(ops, dy=X[:4]),
    "means of fewer rows": lambda ops: add_norm_backward(ops, mean=M[:4]),
    "deviations of bfloat16": lambda ops: add_norm_backward(ops, rstd=M.bfloat16()),
    "a shorter weight in backward": lambda ops: add_norm_backward(ops, weight=W[:3]),
    "no table": lambda ops: embed(ops, (), ()),
    "a table without ids": lambda ops: embed(ops, (TABLE, TABLE)),
    "a narrower table": lambda ops: embed(ops, (TABLE[:, :3].contiguous(),)),
    "a table of bfloat16": lambda ops: embed(ops, (TABLE.bfloat16(),)),
    "an id beyond the table": lambda ops: embed(ops, ids=(IDS + 1,)),
    "a negative id": lambda ops: embed(ops, ids=(IDS - 1,)),
    "ids of int32": lambda ops: embed(ops, ids=(IDS.int(),)),
    "fewer ids in one table": lambda ops: embed(ops, (TABLE, TABLE), (IDS, IDS[:4])),
    "dropout of float64": lambda ops: ops.dropout_rows(X.double(), *NONE),
    "dropout without keys": lambda ops: ops.dropout_rows(X, 0.5, SITE, None),
    "dropout with too few keys": lambda ops: ops.dropout_rows(X, 0.5, SITE, KEYS[:4]),
    "dropout of one dimension": lambda ops: ops.dropout_rows(X[0], 0.5, SITE, KEYS),
    "gelu of float64": lambda ops: ops.gelu_forward(X.double(), 0),
    "gelu of no kind": lambda ops: ops.gelu_forward(X, 2),
    "gelu with a shorter gradient": lambda ops: ops.gelu_backward(X[:4], X, 0),
    "gelu with a gradient of another type": lambda ops: ops.gelu_backward(X.bfloat16(), X, 0),
    "geglu of an odd width": lambda ops: ops.geglu_forward(X[:, :11], 0),
    "geglu of no kind": lambda ops: ops.geglu_forward(X, -1),
    "geglu with too wide a gradient": lambda ops: ops.geglu_backward(X, X, 0),
    "row_sums with an id beyond the table": lambda ops: ops.row_sums(IDS, X, 3),
    "row_sums with a negative id": lambda ops: ops.row_sums(IDS - 1, X, 5),
    "row_sums with fewer ids": lambda ops: ops.row_sums(IDS[:4], X, 5),
    "row_sums with more ids": lambda ops: ops.row_sums(torch.zeros(6, dtype=torch.int64), X, 5),
    "row_sums with ids of int32": lambda ops: ops.row_sums(IDS.int(), X, 5),
    "row_sums of float64": lambda ops: ops.row_sums(IDS, X.double(), 5),
    "row_sums of one dimension": lambda ops: ops.row_sums(IDS, M, 5),
    "column_sums of float64": lambda ops: ops.column_sums(X.double()),
    "column_sums of one dimension": lambda ops: ops.column_sums(M),
    "product of matrices that do not fit": lambda ops: ops.product(X, X, None),
    "product of float64": lambda ops: ops.product(X.double(), X.double().T, None),
    "product of two types": lambda ops: ops.product(X, X.double().T, None),
    "product of a vector": lambda ops: ops.product(X, W, None),
    "product with a shorter bias": lambda ops: ops.product(X, X.T, W[:4]),
    "product with a bias of float64": lambda ops: ops.product(X, X.T, M.double()),
    "squared_norm of float64": lambda ops: ops.squared_norm([X.double()]),
    "adamw with fewer gradients": lambda ops: adamw(ops, grads=()),
    "adamw with a gradient of another shape": lambda ops: adamw(ops, grads=(X[:4],)),
    "adamw with a gradient of bfloat16": lambda ops: adamw(ops, grads=(X.bfloat16(),)),
    "adamw of bfloat16": lambda ops: adamw(ops, *[[X.bfloat16()]] * 4),
    "adamw of a parameter that is not contiguous": lambda ops: adamw(ops, params=(torch.zeros(12, 5).T,)),
    "adamw with a smaller mean": lambda ops: adamw(ops, means=(X[:2],)),
    "adamw with a smaller square": lambda ops: adamw(ops, squares=(X[:2],)),
    "adamw_rows with a row beyond the table": lambda ops: adamw_rows(ops, rows=(1, 5)),
    "adamw_rows with a negative row": lambda ops: adamw_rows(ops, rows=(-1, 3)),
    "adamw_rows with fewer values": lambda ops: adamw_rows(ops, values=X[:1]),
    "adamw_rows with narrower values": lambda ops: adamw_rows(ops, values=X[:2, :6].contiguous()),
    "adamw_rows with rows of int32": lambda ops: adamw_rows(ops, rows=torch.tensor([1, 3]).int()),
    "adamw_rows with fewer marks": lambda ops: adamw_rows(ops, seen=M[:4] > 2),
    "adamw_rows with marks that are numbers": lambda ops: adamw_rows(ops, seen=M),
    "adamw_rows with a smaller mean": lambda ops: adamw_rows(ops, mean=X[:3]),
}


@pytest.mark.parametrize("call", GOOD_CALLS)
def test_the_calls_that_are_made_wrong_below_are_right(compiled: Any, call: Callable[[Any], None]) -> None:
    call(compiled)
    call(reference)


@pytest.mark.parametrize("what", BAD_CALLS)
def test_a_wrong_call_is_an_error(compiled: Any, what: str) -> None:
    with pytest.raises((RuntimeError, ValueError, IndexError)):
        BAD_CALLS[what](compiled)


# Gradients between ranks


@BOTH
@pytest.mark.parametrize(("num_parts", "count"), [(1, 1), (2, 1023), (3, 1024), (4, 5000)])
def test_sum_of_parts(compiled: Any, num_parts: int, count: int, dtype: torch.dtype) -> None:
    """From rows that are further apart than they are long, too."""
    wide = torch.randn(num_parts, count + 7).to(dtype)
    for parts in (wide[:, :count], wide[:, :count].contiguous()):
        out, expected = torch.full((count,), math.nan), torch.full((count,), math.nan)
        squares = compiled.sum_parts_(parts, out)
        reference.sum_parts_(parts, expected)
        assert torch.equal(out, expected)  # the same additions in the same order
        assert squares == pytest.approx(expected.double().square().sum().item(), rel=1e-6)


def test_rounding_with_feedback_loses_nothing(compiled: Any) -> None:
    """What is sent and what is left add up to what was to be sent, exactly; the rest is below half a unit."""
    residuals = torch.zeros(2, 3001)
    for _ in range(5):
        x = torch.randn(3001) * torch.logspace(-20, 10, 3001)
        wanted = (x + residuals[0]).clone()
        sent = torch.empty(2, 3001, dtype=torch.bfloat16)
        compiled.round_with_feedback_(x, residuals[0], sent[0])
        reference.round_with_feedback_(x, residuals[1], sent[1])
        assert torch.equal(sent[0], sent[1])
        assert torch.equal(residuals[0], residuals[1])
        assert torch.equal(sent[0].float() + residuals[0], wanted)
        assert torch.equal(sent[0], wanted.to(torch.bfloat16))


def test_waiting_for_a_count(compiled: Any) -> None:
    """A thread that waits wakes when the count is high enough, or when its time is over."""
    counters = torch.zeros(4, dtype=torch.int32)
    assert not compiled.wait_for_count(counters, 2, 1, 0.01)
    with ThreadPoolExecutor(1) as other:
        woken = other.submit(compiled.wait_for_count, counters, 2, 3, 60.0)
        for value in (1, 2):
            compiled.count_up_(counters, 2, value)
            assert not woken.done()
        compiled.count_up_(counters, 2, 3)
        assert woken.result(timeout=30)
    assert counters.tolist() == [0, 0, 3, 0]
    with pytest.raises(RuntimeError, match="counter 4 of 4"):
        compiled.count_up_(counters, 4, 1)
