"""Attention over sequences that lie one after the other, without padding.

Shape suffixes: R query rows, T tokens (rows of keys and values), D width of all heads, B sequences, h heads, m half the
width of a head, P distances of a bias.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.autograd import Function
from torch.autograd.function import once_differentiable

from fleetune.kernels.library import raw_ops
from fleetune.kernels.random import Dropout


@dataclass(frozen=True, kw_only=True)
class Sequences:
    """Where the sequences lie, and how they are attended to."""

    cu_q: Tensor
    """Prefix sums of their query rows, int64 (B + 1), beginning with 0."""
    cu_k: Tensor
    """Prefix sums of their tokens, int64 (B + 1)."""
    num_heads: int
    """D is a multiple of it."""
    scale: float
    """Factor of the scores."""
    window: int = 0
    """Keys up to this many tokens from a query are attended to; 0: all keys."""

    @property
    def arguments(self) -> tuple[Any, ...]:
        """As the raw operations take them."""
        return self.cu_q, self.cu_k, self.num_heads, self.scale, self.window


class _Attention(Function):
    @staticmethod
    def forward(ctx: Any, q_RD: Tensor, k_TD: Tensor, v_TD: Tensor, sequences: Sequences, dropout: Dropout) -> Tensor:
        out_RD: Tensor
        out_RD, lse_Rh = raw_ops().attention_forward(q_RD, k_TD, v_TD, *sequences.arguments, *dropout.arguments)
        ctx.save_for_backward(q_RD, k_TD, v_TD, lse_Rh)
        ctx.sequences, ctx.dropout = sequences, dropout
        return out_RD

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, dout_RD: Tensor) -> tuple[Tensor | None, ...]:
        q_RD, k_TD, v_TD, lse_Rh = ctx.saved_tensors
        grads = raw_ops().attention_backward(
            dout_RD, q_RD, k_TD, v_TD, lse_Rh, *ctx.sequences.arguments, *ctx.dropout.arguments
        )
        return *grads, None, None


class _BiasedAttention(Function):
    """The same with a bias for every distance."""

    @staticmethod
    def forward(ctx: Any, q_RD: Tensor, k_TD: Tensor, v_TD: Tensor, bias_hP: Tensor, sequences: Sequences,
                dropout: Dropout) -> Tensor:  # fmt: skip
        out_RD: Tensor
        out_RD, lse_Rh = raw_ops().biased_attention_forward(
            q_RD, k_TD, v_TD, bias_hP, *sequences.arguments, *dropout.arguments
        )
        ctx.save_for_backward(q_RD, k_TD, v_TD, bias_hP, lse_Rh)
        ctx.sequences, ctx.dropout = sequences, dropout
        return out_RD

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, dout_RD: Tensor) -> tuple[Tensor | None, ...]:
        grads = raw_ops().biased_attention_backward(
            dout_RD, *ctx.saved_tensors, *ctx.sequences.arguments, *ctx.dropout.arguments
        )
        return *grads, None, None


class _Rotate(Function):
    """Turned back in backward."""

    @staticmethod
    def forward(ctx: Any, x_RN: Tensor, cos_Rm: Tensor, sin_Rm: Tensor, num_heads: int) -> Tensor:
        ctx.save_for_backward(cos_Rm, sin_Rm)
        ctx.num_heads = num_heads
        y_RN: Tensor = raw_ops().rotate(x_RN, cos_Rm, sin_Rm, num_heads)
        return y_RN

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, dy_RN: Tensor) -> tuple[Tensor | None, ...]:
        cos_Rm, sin_Rm = ctx.saved_tensors
        return raw_ops().rotate(dy_RN, cos_Rm, -sin_Rm, ctx.num_heads), None, None, None


class _SelfAttention(Function):
    """The same for queries, keys and values side by side, as one product gives them and wants their gradients."""

    @staticmethod
    def forward(ctx: Any, qkv_TE: Tensor, sequences: Sequences, dropout: Dropout) -> Tensor:
        out_TD: Tensor
        out_TD, lse_Th = raw_ops().attention_forward(*qkv_TE.chunk(3, dim=1), *sequences.arguments, *dropout.arguments)
        ctx.save_for_backward(qkv_TE, lse_Th)
        ctx.sequences, ctx.dropout = sequences, dropout
        return out_TD

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, dout_TD: Tensor) -> tuple[Tensor | None, ...]:
        qkv_TE, lse_Th = ctx.saved_tensors
        grads = raw_ops().attention_backward(
            dout_TD, *qkv_TE.chunk(3, dim=1), lse_Th, *ctx.sequences.arguments, *ctx.dropout.arguments
        )
        return _side_by_side(grads), None, None


def _side_by_side(grads: tuple[Tensor, Tensor, Tensor]) -> Tensor:
    """The three gradients as one matrix; the compiled operation has put them so."""
    dq_TD = grads[0]
    num_rows, width = dq_TD.shape
    if dq_TD.stride() == (3 * width, 1):
        return dq_TD.as_strided((num_rows, 3 * width), (3 * width, 1))
    return torch.cat(grads, dim=1)


def attention(q_RD: Tensor, k_TD: Tensor, v_TD: Tensor, sequences: Sequences, dropout: Dropout,
              bias_hP: Tensor | None = None) -> Tensor:  # fmt: skip
    """softmax(scale (q k' + bias)) v for every sequence and head (Vaswani et al. 2017, section 3.2.1).

    Args:
        q_RD: Queries (R, D), float32 or bfloat16, contiguous in D.
        k_TD: Keys (T, D).
        v_TD: Values (T, D).
        sequences: Where they lie.
        dropout: Of the probabilities; its rows are the queries.
        bias_hP: Float32 (h, P), P odd and at least 2 L - 1 for the longest sequence: column P // 2 + j - i is added to
            the product of query i and key j of a sequence (Raffel et al. 2020, section 2.1). None: nothing.

    Returns:
        The attended values (R, D).
    """
    out_RD: Tensor
    if bias_hP is not None:
        out_RD = _BiasedAttention.apply(q_RD, k_TD, v_TD, bias_hP, sequences, dropout)  # type: ignore[no-untyped-call]
        return out_RD
    out_RD = _Attention.apply(q_RD, k_TD, v_TD, sequences, dropout)  # type: ignore[no-untyped-call]
    return out_RD


def self_attention(qkv_TE: Tensor, sequences: Sequences, dropout: Dropout) -> Tensor:
    """`attention` of queries, keys and values that are the columns of one matrix (T, 3 D)."""
    out_TD: Tensor = _SelfAttention.apply(qkv_TE, sequences, dropout)  # type: ignore[no-untyped-call]
    return out_TD


def rotate(x_RN: Tensor, cos_Rm: Tensor, sin_Rm: Tensor, num_heads: int) -> Tensor:
    """Rotary embedding of the first heads of every row (Su et al. 2021, section 3.4.2); what is behind them stays.

    Args:
        x_RN: Heads of 2 m columns each and whatever else is in a row, float32 or bfloat16.
        cos_Rm: Of the angle that columns j and m + j of a row's heads are turned by, float32.
        sin_Rm: Likewise.
        num_heads: How many heads are turned.
    """
    y_RN: Tensor = _Rotate.apply(x_RN, cos_Rm, sin_Rm, num_heads)  # type: ignore[no-untyped-call]
    return y_RN
