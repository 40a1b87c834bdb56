"""Self-attention over a flat batch: each sequence attends to itself, and no score of a padding token is computed.

Shape suffixes: T tokens of the batch, D hidden width, h heads, d width of a head, L tokens of one sequence,
B sequences, Q query tokens of one sequence (L, or 1 where only the first token's result is wanted).
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from fleetune.model.dropout import random_mask


def flat_attention(
    query_RD: Tensor, key_TD: Tensor, value_TD: Tensor, lengths: Sequence[int], num_heads: int, rate: float
) -> Tensor:
    """softmax(q k' / sqrt(d)) v for every sequence and head (Vaswani et al. 2017, section 3.2.1).

    Args:
        query_RD: Queries, float (T, D), or (B, D) for the first token of every sequence only.
        key_TD: Keys, float (T, D).
        value_TD: Values, float (T, D).
        lengths: Tokens of each sequence; they add up to T.
        num_heads: Heads; D is a multiple of it.
        rate: Dropout of the attention probabilities; 0 outside training.

    Returns:
        The attended values, with the shape of `query_RD`.
    """
    first_only = query_RD.shape[0] != key_TD.shape[0]
    query_lengths = [1] * len(lengths) if first_only else list(lengths)
    result: Tensor = _FlatAttention.apply(query_RD, key_TD, value_TD, query_lengths, list(lengths), num_heads, rate)  # type: ignore[no-untyped-call]
    return result


class _FlatAttention(torch.autograd.Function):
    """One autograd node for all sequences: a graph of nodes per sequence costs as much as its arithmetic."""

    @staticmethod
    def forward(ctx: Any, query_RD: Tensor, key_TD: Tensor, value_TD: Tensor, query_lengths: list[int],
                lengths: list[int], num_heads: int, rate: float) -> Tensor:  # fmt: skip
        scale = (query_RD.shape[1] // num_heads) ** -0.5
        out_RD = torch.empty_like(query_RD)
        probs, masks = [], []
        parts = _heads_of(query_lengths, lengths, num_heads, (query_RD, out_RD), (key_TD, value_TD))
        for (q_hQd, out_hQd), (k_hLd, v_hLd) in parts:
            p_hQL = torch.softmax(torch.bmm(q_hQd, k_hLd.transpose(1, 2)).mul_(scale), dim=-1)
            probs.append(p_hQL)
            if rate > 0.0:
                kept, ctx.keep_scale = random_mask(p_hQL.shape, rate)
                masks.append(kept)
                p_hQL = torch.mul(p_hQL, kept).mul_(ctx.keep_scale)
            out_hQd.copy_(torch.bmm(p_hQL, v_hLd))
        ctx.save_for_backward(query_RD, key_TD, value_TD, *probs, *masks)
        ctx.layout = query_lengths, lengths, num_heads, scale
        return out_RD

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        query_RD, key_TD, value_TD, *saved = ctx.saved_tensors
        query_lengths, lengths, num_heads, scale = ctx.layout
        probs, masks = saved[: len(lengths)], saved[len(lengths) :]
        dq_RD, dk_TD, dv_TD = (torch.empty_like(x) for x in (query_RD, key_TD, value_TD))
        parts = _heads_of(query_lengths, lengths, num_heads,
                          (query_RD, grads[0].contiguous(), dq_RD), (key_TD, value_TD, dk_TD, dv_TD))  # fmt: skip
        for i, ((q_hQd, dout_hQd, dq_hQd), (k_hLd, v_hLd, dk_hLd, dv_hLd)) in enumerate(parts):
            p_hQL = probs[i]
            dp_hQL = torch.bmm(dout_hQd, v_hLd.transpose(1, 2))
            used_hQL = p_hQL
            if masks:
                dp_hQL.mul_(masks[i]).mul_(ctx.keep_scale)
                used_hQL = torch.mul(p_hQL, masks[i]).mul_(ctx.keep_scale)
            dv_hLd.copy_(torch.bmm(used_hQL.transpose(1, 2), dout_hQd))
            ds_hQL = torch._softmax_backward_data(dp_hQL, p_hQL, -1, p_hQL.dtype).mul_(scale)
            dq_hQd.copy_(torch.bmm(ds_hQL, k_hLd))
            dk_hLd.copy_(torch.bmm(ds_hQL.transpose(1, 2), q_hQd))
        return dq_RD, dk_TD, dv_TD, None, None, None, None


def _heads_of(query_lengths: list[int], lengths: list[int], num_heads: int, by_query: tuple[Tensor, ...],
              by_token: tuple[Tensor, ...]) -> Any:  # fmt: skip
    """Per sequence, views (heads, tokens, head width) of tensors laid out by query and of those laid out by token."""
    sides = [
        [x.view(x.shape[0], num_heads, x.shape[1] // num_heads).transpose(0, 1).split(sizes, dim=1) for x in tensors]
        for tensors, sizes in ((by_query, query_lengths), (by_token, lengths))
    ]
    return zip(zip(*sides[0], strict=True), zip(*sides[1], strict=True), strict=True)
