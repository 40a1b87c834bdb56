"""Every raw op of the compiled kernels, in plain PyTorch: what their results must be, and what runs without them.

Names, arguments and results are those of `torch.ops.fleetune`. No op here is known to autograd: forward and backward
are told apart. Storage is float32 or bfloat16 (float64 too, for numerical gradients); arithmetic is float32, or
float64 where the storage is, and results are rounded to their storage once, at the end. Weights, their gradients and
statistics of rows are never bfloat16.

Every op with dropout takes `rate`, in [0, 1); `site_key`, the bits of the key as a signed integer; and `row_keys_R`,
int64, one key a row (None if the rate is 0). See `fleetune.kernels.random`.

Shape suffixes: R rows in work, T tokens (rows of keys and values), D hidden width, F feed-forward width, h heads,
d width of a head, m half of it, P distances of a bias, B sequences, Q query tokens and L key tokens of one sequence,
V rows of a table, U of them with a gradient, M x K and K x N matrices.
"""

from __future__ import annotations

import functools
import itertools
from collections.abc import Iterator, Sequence

import torch
from torch import Tensor
from torch.nn import functional as F

from fleetune.kernels.random import keep_mask, keep_masks, keep_scale

_GELU = {0: "none", 1: "tanh"}
"""What `kind` counts: the exact function with erf, and its approximation with tanh, by PyTorch's names."""


def attention_forward(
    q_RD: Tensor, k_TD: Tensor, v_TD: Tensor, cu_q: Tensor, cu_k: Tensor, num_heads: int, scale: float, window: int,
    rate: float, site_key: int, row_keys_R: Tensor | None,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    """dropout(softmax(scale q k')) v for every sequence and head (Vaswani et al. 2017, section 3.2.1).

    A probability's row, for dropout, is its query token; its column is the index of the key token in its sequence.

    Args:
        q_RD: Queries (R, D).
        k_TD: Keys (T, D).
        v_TD: Values (T, D).
        cu_q: Where the sequences' queries start and the last one's end, int64 (B + 1).
        cu_k: The same of keys and values.
        num_heads: Heads; D is a multiple of it.
        scale: Factor of the scores.
        window: 0, or how far from a query, in tokens on either side, the keys that it attends to may be: query i of a
            sequence is at the place of its key i.
        rate: See the top of this file, as for `site_key` and `row_keys_R`.

    Returns:
        The attended values (R, D), and the logarithm of the sum of the exponentials of the scores, float32 (R, h).
    """
    return _attend((q_RD, k_TD, v_TD), None, (cu_q, cu_k), num_heads, scale, window, rate, site_key, row_keys_R)


def biased_attention_forward(
    q_RD: Tensor, k_TD: Tensor, v_TD: Tensor, bias_hP: Tensor, cu_q: Tensor, cu_k: Tensor, num_heads: int, scale: float,
    window: int, rate: float, site_key: int, row_keys_R: Tensor | None,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    """dropout(softmax(scale (q k' + bias))) v: `attention_forward` with a bias for every distance.

    Args:
        q_RD: As for `attention_forward`, like all arguments but the bias.
        bias_hP: Float32 (h, P), P odd and at least 2 L - 1 for the longest sequence: column P // 2 + j - i is added to
            the product of query i and key j of a sequence.
    """
    return _attend((q_RD, k_TD, v_TD), bias_hP, (cu_q, cu_k), num_heads, scale, window, rate, site_key, row_keys_R)


def _attend(
    qkv: tuple[Tensor, Tensor, Tensor], bias_hP: Tensor | None, ends: tuple[Tensor, Tensor], num_heads: int,
    scale: float, window: int, rate: float, site_key: int, row_keys_R: Tensor | None,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    q_RD, k_TD, v_TD = qkv
    _check_rows("attention", len(q_RD), rate, row_keys_R)
    dtype = _arithmetic(q_RD)
    out_RD = torch.zeros(q_RD.shape, dtype=q_RD.dtype)
    lse_Rh = torch.zeros(len(q_RD), num_heads, dtype=dtype)
    for queries, keys in _sequences(*ends, len(q_RD), len(k_TD)):
        q_hQd, k_hLd, v_hLd = (_heads(x, num_heads) for x in (q_RD[queries], k_TD[keys], v_TD[keys]))
        s_hQL = _scores(q_hQd, k_hLd, scale, window, bias_hP)
        lse_hQ = torch.logsumexp(s_hQL, dim=-1)
        p_hQL = s_hQL.sub_(lse_hQ.unsqueeze(-1)).exp_()
        if rate > 0.0:
            p_hQL.mul_(_attention_factors(row_keys_R, queries, site_key, s_hQL, rate))
        out_RD[queries] = _join(torch.bmm(p_hQL, v_hLd), out_RD.dtype)
        lse_Rh[queries] = lse_hQ.t()
    return out_RD, lse_Rh


def attention_backward(
    dout_RD: Tensor, q_RD: Tensor, k_TD: Tensor, v_TD: Tensor, lse_Rh: Tensor, cu_q: Tensor, cu_k: Tensor,
    num_heads: int, scale: float, window: int, rate: float, site_key: int, row_keys_R: Tensor | None,
) -> tuple[Tensor, Tensor, Tensor]:  # fmt: skip
    """The gradients of `attention_forward`, which gave `lse_Rh`.

    Probabilities and masks are computed again. So is the sum, over a row, of probabilities times their gradients:
    its shorter form with the output (Dao et al. 2022, FlashAttention, appendix B) is as coarse as that is rounded.

    Returns:
        The gradients of queries (R, D), keys (T, D) and values (T, D).
    """
    return _attend_backward(dout_RD, (q_RD, k_TD, v_TD), None, lse_Rh, (cu_q, cu_k), num_heads, scale, window, rate,
                            site_key, row_keys_R)[:3]  # fmt: skip


def biased_attention_backward(
    dout_RD: Tensor, q_RD: Tensor, k_TD: Tensor, v_TD: Tensor, bias_hP: Tensor, lse_Rh: Tensor, cu_q: Tensor,
    cu_k: Tensor, num_heads: int, scale: float, window: int, rate: float, site_key: int, row_keys_R: Tensor | None,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:  # fmt: skip
    """The gradients of `biased_attention_forward`: those that `attention_backward` gives, and the bias's (h, P)."""
    return _attend_backward(dout_RD, (q_RD, k_TD, v_TD), bias_hP, lse_Rh, (cu_q, cu_k), num_heads, scale, window, rate,
                            site_key, row_keys_R)  # fmt: skip


def _attend_backward(
    dout_RD: Tensor, qkv: tuple[Tensor, Tensor, Tensor], bias_hP: Tensor | None, lse_Rh: Tensor,
    ends: tuple[Tensor, Tensor], num_heads: int, scale: float, window: int, rate: float, site_key: int,
    row_keys_R: Tensor | None,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:  # fmt: skip
    q_RD, k_TD, v_TD = qkv
    _check_rows("attention", len(q_RD), rate, row_keys_R)
    dq_RD, dk_TD, dv_TD = (torch.zeros(x.shape, dtype=x.dtype) for x in (q_RD, k_TD, v_TD))
    dbias_hP = torch.zeros(0, 0) if bias_hP is None else torch.zeros_like(bias_hP)
    for queries, keys in _sequences(*ends, len(q_RD), len(k_TD)):
        q_hQd, dout_hQd = (_heads(x[queries], num_heads) for x in (q_RD, dout_RD))
        k_hLd, v_hLd = (_heads(x[keys], num_heads) for x in (k_TD, v_TD))
        p_hQL = _scores(q_hQd, k_hLd, scale, window, bias_hP).sub_(lse_Rh[queries].t().unsqueeze(-1)).exp_()
        dp_hQL = torch.bmm(dout_hQd, v_hLd.transpose(1, 2))
        used_hQL = p_hQL
        if rate > 0.0:
            factors_hQL = _attention_factors(row_keys_R, queries, site_key, p_hQL, rate)
            used_hQL = p_hQL * factors_hQL
            dp_hQL.mul_(factors_hQL)
        ds_hQL = torch._softmax_backward_data(dp_hQL, p_hQL, -1, p_hQL.dtype).mul_(scale)
        dq_RD[queries] = _join(torch.bmm(ds_hQL, k_hLd), q_RD.dtype)
        dk_TD[keys] = _join(torch.bmm(ds_hQL.transpose(1, 2), q_hQd), k_TD.dtype)
        dv_TD[keys] = _join(torch.bmm(used_hQL.transpose(1, 2), dout_hQd), v_TD.dtype)
        if bias_hP is not None:
            columns_QL = _distances(ds_hQL.shape[1], ds_hQL.shape[2], bias_hP.shape[1])
            dbias_hP.index_add_(1, columns_QL.flatten(), ds_hQL.flatten(1))
    return dq_RD, dk_TD, dv_TD, dbias_hP


def rotate(x_RN: Tensor, cos_Rm: Tensor, sin_Rm: Tensor, num_heads: int) -> Tensor:
    """Rotary embedding of the first heads of every row; the columns behind them stay (Su et al. 2021, section 3.4.2).

    Column j of a head, and column m + j, are a point that is turned by the angle j of the row. Its gradient is itself,
    with the opposite angles.

    Args:
        x_RN: Heads of 2 m columns each, and whatever else is in a row.
        cos_Rm: Of the angles, float32.
        sin_Rm: Likewise.
        num_heads: How many heads are turned.
    """
    half = cos_Rm.shape[1]
    turned_RK, rest = x_RN.split([2 * half * num_heads, x_RN.shape[1] - 2 * half * num_heads], dim=1)
    a, b = turned_RK.to(_arithmetic(x_RN)).unflatten(1, (num_heads, 2, half)).unbind(2)
    cos, sin = cos_Rm.unsqueeze(1), sin_Rm.unsqueeze(1)
    turned = torch.stack([a * cos - b * sin, b * cos + a * sin], dim=2).flatten(1)
    return torch.cat([turned.to(x_RN.dtype), rest], dim=1)


def add_norm_forward(
    new_RD: Tensor, residual_RD: Tensor | None, weight_D: Tensor, bias_D: Tensor | None, eps: float, rate: float,
    site_key: int, row_keys_R: Tensor | None,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:  # fmt: skip
    """LayerNorm(dropout(new) + residual) (Ba, Kiros and Hinton 2016), with the biased variance.

    Args:
        new_RD: What is dropped out.
        residual_RD: What is added, or None.
        weight_D: The norm's weight, float32.
        bias_D: The norm's bias, float32, or None.
        eps: Added to the variance.
        rate: See the top of this file, as for `site_key` and `row_keys_R`.

    Returns:
        The normed rows (R, D); the sum that was normed (R, D); its mean and the reciprocal of its standard deviation,
        float32 (R). The norm is that of the sum after it was rounded to its storage, as backward sees it.
    """
    sum_RD = _drop(new_RD, rate, site_key, row_keys_R)
    if residual_RD is not None:
        sum_RD += residual_RD
    rounded_RD = sum_RD.to(new_RD.dtype)
    y_RD, mean_R, rstd_R = _norm(rounded_RD.to(sum_RD.dtype), weight_D, bias_D, eps)
    return y_RD.to(new_RD.dtype), rounded_RD, mean_R, rstd_R


def add_norm_backward(
    dy_RD: Tensor, sum_RD: Tensor, weight_D: Tensor, mean_R: Tensor, rstd_R: Tensor, rate: float, site_key: int,
    row_keys_R: Tensor | None,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:  # fmt: skip
    """The gradients of `add_norm_forward`, which gave `sum_RD`, `mean_R` and `rstd_R`.

    Returns:
        The gradients of `new` (R, D), of the residual (R, D; the same tensor if the rate is 0), of weight and of bias
        (float32, D).
    """
    dsum_RD, dweight_D, dbias_D = _norm_backward(dy_RD.to(_arithmetic(dy_RD)), sum_RD, weight_D, mean_R, rstd_R)
    dresidual_RD = dsum_RD.to(dy_RD.dtype)
    dnew_RD = dresidual_RD if rate == 0.0 else _drop(dsum_RD, rate, site_key, row_keys_R).to(dy_RD.dtype)
    return dnew_RD, dresidual_RD, dweight_D, dbias_D


def embed_forward(
    tables: list[Tensor], ids: list[Tensor], weight_D: Tensor, bias_D: Tensor, eps: float, as_bfloat16: bool,
    rate: float, site_key: int, row_keys_R: Tensor | None,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:  # fmt: skip
    """dropout(LayerNorm(sum of one row of every table)): the first layer of an encoder.

    Args:
        tables: Tables of embeddings, float32 (rows, D).
        ids: For each table the row of every token, int64 (R).
        weight_D: The norm's weight, float32.
        bias_D: The norm's bias, float32.
        eps: Added to the variance.
        as_bfloat16: Whether the result is bfloat16, not float32.
        rate: See the top of this file, as for `site_key` and `row_keys_R`.

    Returns:
        The result (R, D); the sum that was normed, its mean and the reciprocal of its standard deviation, float32
        (R, D), (R) and (R).

    Raises:
        IndexError: If an id is no row of its table.
    """
    sum_RD = functools.reduce(torch.add, (t.index_select(0, i) for t, i in zip(tables, ids, strict=True)))
    y_RD, mean_R, rstd_R = _norm(sum_RD, weight_D, bias_D, eps)
    y_RD = _drop(y_RD, rate, site_key, row_keys_R)
    return y_RD.to(torch.bfloat16) if as_bfloat16 else y_RD, sum_RD, mean_R, rstd_R


def embed_backward(
    dy_RD: Tensor, sum_RD: Tensor, weight_D: Tensor, mean_R: Tensor, rstd_R: Tensor, rate: float, site_key: int,
    row_keys_R: Tensor | None,
) -> tuple[Tensor, Tensor, Tensor]:  # fmt: skip
    """The gradients of `embed_forward`, which gave `sum_RD`, `mean_R` and `rstd_R`.

    Returns:
        The gradients of the sum (R, D), of weight and of bias (D), all float32. Each table's is made of the sum's by
        `row_sums`.
    """
    return _norm_backward(_drop(dy_RD, rate, site_key, row_keys_R), sum_RD, weight_D, mean_R, rstd_R)


def dropout_rows(x_RD: Tensor, rate: float, site_key: int, row_keys_R: Tensor | None) -> Tensor:
    """`x_RD` with a share `rate` of its elements zeroed and the others scaled up. Its gradient is itself, of dy."""
    return _drop(x_RD, rate, site_key, row_keys_R).to(x_RD.dtype)


def gelu_forward(x_RF: Tensor, kind: int) -> Tensor:
    """x times the normal distribution function of x (Hendrycks and Gimpel 2016).

    Args:
        x_RF: Any shape.
        kind: 0 with erf, 1 with the approximation by tanh.
    """
    return F.gelu(x_RF.to(_arithmetic(x_RF)), approximate=_GELU[kind]).to(x_RF.dtype)


def gelu_backward(dy_RF: Tensor, x_RF: Tensor, kind: int) -> Tensor:
    """The gradient of `gelu_forward`."""
    dtype = _arithmetic(x_RF)
    return _gelu_gradient(dy_RF.to(dtype), x_RF.to(dtype), kind).to(x_RF.dtype)


def gelu_again(dy_RF: Tensor, x_RF: Tensor, kind: int) -> tuple[Tensor, Tensor]:
    """`gelu_backward`, and what `gelu_forward` gave."""
    return gelu_backward(dy_RF, x_RF, kind), gelu_forward(x_RF, kind)


def geglu_forward(x_RG: Tensor, kind: int) -> Tensor:
    """gelu of the first half of the columns times the second half (Shazeer 2020): (R, 2 F) to (R, F)."""
    gate_RF, value_RF = x_RG.to(_arithmetic(x_RG)).chunk(2, dim=-1)
    return F.gelu(gate_RF, approximate=_GELU[kind]).mul_(value_RF).to(x_RG.dtype)


def geglu_backward(dy_RF: Tensor, x_RG: Tensor, kind: int) -> Tensor:
    """The gradient of `geglu_forward` (R, 2 F)."""
    dtype = _arithmetic(x_RG)
    dy = dy_RF.to(dtype)
    gate_RF, value_RF = x_RG.to(dtype).chunk(2, dim=-1)
    dgate_RF = _gelu_gradient(dy * value_RF, gate_RF, kind)
    return torch.cat([dgate_RF, dy * F.gelu(gate_RF, approximate=_GELU[kind])], dim=-1).to(x_RG.dtype)


def layer_forward(
    x_TD: Tensor, weights: Sequence[Tensor], cu: Tensor, num_heads: int, scale: float, eps: Sequence[float], kind: int,
    rates: Sequence[float], site_keys: Sequence[int], row_keys_T: Tensor | None, by_torch: bool,
) -> list[Tensor]:  # fmt: skip
    """A layer of an encoder with its norms behind (Vaswani et al. 2017, figure 1, left), GELU in the middle.

    Args:
        x_TD: Its input.
        weights: Weight and bias of queries, keys and values (one below the other); of what follows attention; of its
            norm; of up; of down; of the last norm: 12 tensors.
        cu: Prefix sums of the sequences' tokens.
        num_heads: D is a multiple of it.
        scale: Factor of the scores.
        eps: Of the two norms.
        kind: Of GELU.
        rates: Of dropout: of attention's probabilities, of what follows attention, of the layer's end.
        site_keys: Of the same.
        row_keys_T: One a token.
        by_torch: Whether torch's products are taken; the result is the same but for rounding.

    Returns:
        The result (T, D), and what `layer_backward` needs: queries, keys and values; attention's statistics and result;
        sum, mean and 1 / deviation of the first norm; its result; up's result; the three of the second norm.
    """
    qkv_w, qkv_b, output_w, output_b, norm1_w, norm1_b, up_w, up_b, down_w, down_b, norm2_w, norm2_b = weights
    qkv = _either_product(x_TD, qkv_w.t(), qkv_b)
    q, k, v = qkv.chunk(3, dim=1)
    attended, lse = attention_forward(q, k, v, cu, cu, num_heads, scale, 0, rates[0], site_keys[0], row_keys_T)
    middle, *norm1 = add_norm_forward(_either_product(attended, output_w.t(), output_b), x_TD, norm1_w, norm1_b, eps[0],
                                      rates[1], site_keys[1], row_keys_T)  # fmt: skip
    up = _either_product(middle, up_w.t(), up_b)
    y, *norm2 = add_norm_forward(_either_product(gelu_forward(up, kind), down_w.t(), down_b), middle, norm2_w, norm2_b,
                                 eps[1], rates[2], site_keys[2], row_keys_T)  # fmt: skip
    return [y, qkv, lse, attended, *norm1, middle, up, *norm2]


def layer_backward(
    dy_TD: Tensor, x_TD: Tensor, weights: Sequence[Tensor], kept: Sequence[Tensor], cu: Tensor, num_heads: int,
    scale: float, kind: int, rates: Sequence[float], site_keys: Sequence[int], row_keys_T: Tensor | None,
    by_torch: bool,
) -> list[Tensor]:  # fmt: skip
    """The gradients of `layer_forward`: of the input, and of the 12 weights in float32."""
    qkv_w, _, output_w, _, norm1_w, _, up_w, _, down_w, _, norm2_w, _ = weights
    qkv, lse, attended, sum1, mean1, rstd1, middle, up, sum2, mean2, rstd2 = kept
    ddown, dmiddle, *dnorm2 = add_norm_backward(dy_TD, sum2, norm2_w, mean2, rstd2, rates[2], site_keys[2], row_keys_T)
    dup, activated = gelu_again(_either_product(ddown, down_w), up, kind)
    dmiddle = dmiddle + _either_product(dup, up_w)
    doutput, dx, *dnorm1 = add_norm_backward(dmiddle, sum1, norm1_w, mean1, rstd1, rates[1], site_keys[1], row_keys_T)
    dattended = _either_product(doutput, output_w)
    q, k, v = qkv.chunk(3, dim=1)
    dparts = attention_backward(
        dattended, q, k, v, lse, cu, cu, num_heads, scale, 0, rates[0], site_keys[0], row_keys_T
    )
    dqkv = torch.cat(dparts, dim=1)
    dx = dx + _either_product(dqkv, qkv_w)
    return [
        dx,
        *_linear_gradients(dqkv, x_TD),
        *_linear_gradients(doutput, attended),
        *dnorm1,
        *_linear_gradients(dup, middle),
        *_linear_gradients(ddown, activated),
        *dnorm2,
    ]


def row_sums(ids_T: Tensor, grad_TD: Tensor, num_rows: int) -> tuple[Tensor, Tensor]:
    """The gradient of a table of embeddings, as the rows that have one.

    Args:
        ids_T: Row of the table that each token took, int64 (T).
        grad_TD: The gradient of what it took (T, D).
        num_rows: Rows of the table.

    Returns:
        The rows, int64 (U), each once and ascending; and the sums of their gradients, float32 (U, D).

    Raises:
        ValueError: If an id is not in [0, num_rows).
    """
    if len(ids_T) != len(grad_TD):
        raise ValueError(f"row_sums: {len(ids_T)} ids, and {len(grad_TD)} rows of gradients; give one an id")
    rows_U, places_T = torch.unique(ids_T, return_inverse=True)
    if len(rows_U) and not 0 <= int(rows_U[0]) <= int(rows_U[-1]) < num_rows:
        raise ValueError(f"row_sums: ids from {int(rows_U[0])} to {int(rows_U[-1])} in a table of {num_rows} rows")
    dtype = _arithmetic(grad_TD)
    values_UD = torch.zeros(len(rows_U), grad_TD.shape[1], dtype=dtype)
    return rows_U, values_UD.index_add_(0, places_T, grad_TD.to(dtype))


def column_sums(x_RN: Tensor) -> Tensor:
    """The sum of every column, float32 (N)."""
    return x_RN.sum(dim=0, dtype=_arithmetic(x_RN))


def product(a_MK: Tensor, b_KN: Tensor, bias_N: Tensor | None) -> Tensor:
    """a b, plus the bias in every row if there is one: float32 (M, N)."""
    a, b = (x.to(_arithmetic(x)) for x in (a_MK, b_KN))
    return torch.mm(a, b) if bias_N is None else torch.addmm(bias_N.to(a.dtype), a, b)


def product_by_torch(a_MK: Tensor, b_KN: Tensor, bias_N: Tensor | None) -> Tensor:
    """a b, plus the bias in every row if there is one: (M, N) in the type of `a`, for which the others are rounded."""
    b = b_KN.to(a_MK.dtype)
    return torch.mm(a_MK, b) if bias_N is None else torch.addmm(bias_N.to(a_MK.dtype), a_MK, b)


def squared_norm(tensors: list[Tensor]) -> Tensor:
    """The sum of the squares of all elements, a float64 scalar."""
    total = torch.zeros((), dtype=torch.float64)
    for tensor in tensors:
        total += torch.linalg.vector_norm(tensor, dtype=torch.float64).square()
    return total


def adamw_(
    params: list[Tensor], grads: list[Tensor], exp_avgs: list[Tensor], exp_avg_sqs: list[Tensor], lr: float,
    beta1: float, beta2: float, eps: float, weight_decay: float, step: int, grad_scale: float,
) -> None:  # fmt: skip
    """One update of `torch.optim.AdamW` (Loshchilov and Hutter 2019), in place.

    Args:
        params: Parameters, float32.
        grads: Their gradients; not changed.
        exp_avgs: Running means of the gradients, changed with the parameters.
        exp_avg_sqs: Running means of their squares, likewise.
        lr: Learning rate.
        beta1: Decay of the first mean.
        beta2: Decay of the second.
        eps: Added to the root of the second mean.
        weight_decay: Times the learning rate, the share of a parameter that is taken off.
        step: Number of this update, from 1.
        grad_scale: Every gradient is multiplied by it first.
    """
    if step < 1:
        raise ValueError(f"adamw_: the step is {step}; the first update is step 1")
    if not params:
        return
    scaled = grads if grad_scale == 1.0 else torch._foreach_mul(grads, grad_scale)
    steps = [torch.tensor(float(step)) for _ in params]
    torch._fused_adamw_(params, list(scaled), exp_avgs, exp_avg_sqs, [], steps, lr=lr, beta1=beta1, beta2=beta2,
                        weight_decay=weight_decay, eps=eps, amsgrad=False, maximize=False)  # fmt: skip


def adamw_rows_(
    param_VD: Tensor, rows_U: Tensor, values_UD: Tensor, exp_avg_VD: Tensor, exp_avg_sq_VD: Tensor, seen_V: Tensor,
    lr: float, beta1: float, beta2: float, eps: float, weight_decay: float, step: int, grad_scale: float,
) -> None:  # fmt: skip
    """`adamw_` of a table whose gradient is zero in all but some rows.

    Rows that never had a gradient have no running means: only the weight decay changes them.

    Args:
        param_VD: The table.
        rows_U: Rows with a gradient, int64, ascending, each once.
        values_UD: Their gradients.
        exp_avg_VD: As for `adamw_`, like the arguments not listed.
        exp_avg_sq_VD: As for `adamw_`.
        seen_V: Which rows ever had a gradient, bool; updated in place.
    """
    seen_V[rows_U] = True
    seen_rows = seen_V.nonzero().squeeze(1)
    param, exp_avg, exp_avg_sq = (x[seen_rows] for x in (param_VD, exp_avg_VD, exp_avg_sq_VD))
    grad = torch.zeros_like(param)
    grad[torch.searchsorted(seen_rows, rows_U)] = values_UD
    adamw_([param], [grad], [exp_avg], [exp_avg_sq], lr, beta1, beta2, eps, weight_decay, step, grad_scale)
    param_VD.mul_(1.0 - lr * weight_decay)
    for whole, updated in ((param_VD, param), (exp_avg_VD, exp_avg), (exp_avg_sq_VD, exp_avg_sq)):
        whole[seen_rows] = updated


def round_with_feedback_(x: Tensor, residual: Tensor, out: Tensor) -> None:
    """Round for the wire, and keep what rounding lost for the next time (Seide et al. 2014).

    Args:
        x: float32.
        residual: float32, of the same shape; added before rounding, then what is left after it.
        out: bfloat16, of the same shape: the rounded sum.
    """
    residual += x
    out.copy_(residual)
    residual -= out


def sum_parts_(parts_PN: Tensor, out_N: Tensor) -> float:
    """out = the sum of the rows of float32 or bfloat16, from the first to the last, in float32.

    Returns:
        The sum of the squares of out.
    """
    out_N.copy_(parts_PN[0])
    for part_N in parts_PN[1:]:
        out_N += part_N
    return float(out_N.double().square().sum())


def _either_product(a_MK: Tensor, b_KN: Tensor, bias_N: Tensor | None = None) -> Tensor:
    """A product in the type of `a`, for which the weights are rounded."""
    return product(a_MK, b_KN.to(a_MK.dtype), None if bias_N is None else bias_N.to(a_MK.dtype)).to(a_MK.dtype)


def _linear_gradients(dy_TN: Tensor, x_TK: Tensor) -> tuple[Tensor, Tensor]:
    weight = _either_product(dy_TN.t(), x_TK)
    return weight.to(_arithmetic(weight)), column_sums(dy_TN)


def _arithmetic(x: Tensor) -> torch.dtype:
    return torch.float64 if x.dtype == torch.float64 else torch.float32


def _norm(sum_RD: Tensor, weight_D: Tensor, bias_D: Tensor | None, eps: float) -> tuple[Tensor, Tensor, Tensor]:
    mean_R1 = sum_RD.mean(dim=-1, keepdim=True)
    centred_RD = sum_RD - mean_R1
    rstd_R1 = torch.rsqrt(centred_RD.square().mean(dim=-1, keepdim=True) + eps)
    y_RD = centred_RD.mul_(rstd_R1).mul_(weight_D)
    if bias_D is not None:
        y_RD.add_(bias_D)
    return y_RD, mean_R1.squeeze(-1), rstd_R1.squeeze(-1)


def _norm_backward(
    dy_RD: Tensor, sum_RD: Tensor, weight_D: Tensor, mean_R: Tensor, rstd_R: Tensor
) -> tuple[Tensor, Tensor, Tensor]:
    """The gradients of the norm's input, weight and bias."""
    normed_RD = (sum_RD.to(dy_RD.dtype) - mean_R.unsqueeze(-1)) * rstd_R.unsqueeze(-1)
    dnormed_RD = dy_RD * weight_D
    dsum_RD = dnormed_RD - dnormed_RD.mean(dim=-1, keepdim=True)
    dsum_RD -= normed_RD * (dnormed_RD * normed_RD).mean(dim=-1, keepdim=True)
    dsum_RD *= rstd_R.unsqueeze(-1)
    return dsum_RD, (dy_RD * normed_RD).sum(dim=0), dy_RD.sum(dim=0)


def _gelu_gradient(dy_RF: Tensor, x_RF: Tensor, kind: int) -> Tensor:
    dx_RF: Tensor = torch.ops.aten.gelu_backward(dy_RF, x_RF, approximate=_GELU[kind])
    return dx_RF


def _check_rows(op: str, num_rows: int, rate: float, row_keys_R: Tensor | None) -> None:
    if rate > 0.0 and (row_keys_R is None or len(row_keys_R) != num_rows):
        given = "no keys" if row_keys_R is None else f"{len(row_keys_R)} keys"
        raise ValueError(f"{op}: dropout at the rate {rate} of {num_rows} rows, and {given}; give one a row")


def _drop(x_RD: Tensor, rate: float, site_key: int, row_keys_R: Tensor | None) -> Tensor:
    """Dropout of rows, as a new tensor of the type that is calculated in."""
    _check_rows("dropout", len(x_RD), rate, row_keys_R)
    x = x_RD.to(_arithmetic(x_RD), copy=True)
    if rate == 0.0 or row_keys_R is None:
        return x
    kept_RD = keep_mask(row_keys_R, site_key, x.shape[1], rate)
    return x.mul_(keep_scale(rate)).masked_fill_(~kept_RD, 0.0)


def _sequences(cu_q: Tensor, cu_k: Tensor, num_queries: int, num_keys: int) -> Iterator[tuple[slice, slice]]:
    """The rows of queries and of keys of every sequence that has queries."""
    sides = []
    for name, cu, num_rows in (("cu_q", cu_q, num_queries), ("cu_k", cu_k, num_keys)):
        ends: list[int] = cu.tolist()
        if not ends or ends[0] != 0 or ends[-1] != num_rows or ends != sorted(ends):
            raise ValueError(f"attention: {name} is {_told(ends)}; it must ascend from 0 to the {num_rows} rows")
        sides.append([slice(start, end) for start, end in itertools.pairwise(ends)])
    if len(sides[0]) != len(sides[1]):
        raise ValueError(f"attention: cu_q has {len(sides[0])} sequences, cu_k has {len(sides[1])}; they must agree")
    return ((q, k) for q, k in zip(*sides, strict=True) if q.stop > q.start)


def _told(numbers: Sequence[int]) -> str:
    return str(numbers) if len(numbers) < 10 else f"[{', '.join(map(str, numbers[:4]))}, ..., {numbers[-1]}]"


def _heads(x_ND: Tensor, num_heads: int) -> Tensor:
    """(tokens, D) as (h, tokens, d), in the type that is calculated in."""
    num_tokens, width = x_ND.shape
    return x_ND.to(_arithmetic(x_ND)).view(num_tokens, num_heads, width // num_heads).transpose(0, 1)


def _join(x_hNd: Tensor, dtype: torch.dtype) -> Tensor:
    """The inverse of `_heads`."""
    return x_hNd.transpose(0, 1).flatten(1).to(dtype)


def _distances(num_queries: int, num_keys: int, num_distances: int) -> Tensor:
    """The column of a bias for every query and key of a sequence (Q, L)."""
    most = max(num_queries, num_keys) - 1
    if num_distances % 2 == 0 or num_distances // 2 < most:
        raise ValueError(f"attention: a bias of {num_distances} distances; {2 * most + 1} or more, odd, are needed")
    return torch.arange(num_keys) - torch.arange(num_queries)[:, None] + num_distances // 2


def _scores(q_hQd: Tensor, k_hLd: Tensor, scale: float, window: int, bias_hP: Tensor | None) -> Tensor:
    """The scaled scores (h, Q, L), minus infinity outside the window."""
    s_hQL = torch.bmm(q_hQd, k_hLd.transpose(1, 2))
    num_queries, num_keys = s_hQL.shape[1:]
    if bias_hP is not None:
        s_hQL += bias_hP[:, _distances(num_queries, num_keys, bias_hP.shape[1])]
    s_hQL.mul_(scale)
    if window > 0:
        distances_QL = torch.arange(num_queries)[:, None] - torch.arange(num_keys)
        s_hQL.masked_fill_(distances_QL.abs() > window, float("-inf"))
    return s_hQL


def _attention_factors(
    row_keys_R: Tensor | None, queries: slice, site_key: int, like_hQL: Tensor, rate: float
) -> Tensor:
    """What dropout multiplies the probabilities of a sequence with: 0 or the factor of kept elements (h, Q, L)."""
    assert row_keys_R is not None
    num_heads, _, num_keys = like_hQL.shape
    kept_hQL = keep_masks(row_keys_R[queries], site_key, num_keys, rate, num_heads)
    return kept_hQL.to(like_hQL.dtype).mul_(keep_scale(rate))
