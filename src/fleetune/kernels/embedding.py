"""Embeddings: rows of several tables added up, LayerNorm and dropout, in one pass."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd import Function
from torch.autograd.function import once_differentiable

from fleetune.kernels.library import raw_ops
from fleetune.kernels.random import Dropout


class _Embed(Function):
    @staticmethod
    def forward(ctx: Any, ids: Sequence[Tensor], modules: Sequence[nn.Embedding], dtype: torch.dtype, eps: float,
                dropout: Dropout, weight_D: Tensor, bias_D: Tensor, *tables: Tensor) -> Tensor:  # fmt: skip
        y_TD: Tensor
        y_TD, sum_TD, mean_T, rstd_T = raw_ops().embed_forward(
            list(tables), list(ids), weight_D, bias_D, eps, dtype == torch.bfloat16, *dropout.arguments
        )
        ctx.save_for_backward(sum_TD, weight_D, mean_T, rstd_T)
        ctx.ids, ctx.modules, ctx.dropout = ids, modules, dropout
        return y_TD

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, dy_TD: Tensor) -> tuple[Tensor | None, ...]:
        wants = ctx.needs_input_grad[5:]
        dsum_TD, *dnorm = raw_ops().embed_backward(dy_TD, *ctx.saved_tensors, *ctx.dropout.arguments)
        grads = [
            table_gradient(ids, dsum_TD, module) if wanted else None
            for ids, module, wanted in zip(ctx.ids, ctx.modules, wants[2:], strict=True)
        ]
        return None, None, None, None, None, *(g if w else None for g, w in zip(dnorm, wants, strict=False)), *grads


def table_gradient(ids_T: Tensor, grad_TD: Tensor, module: nn.Embedding) -> Tensor:
    """The gradient of a table whose rows `ids_T` were taken: float32, of the table's shape; its padding row has none.

    Args:
        ids_T: Rows, int64 (T).
        grad_TD: Gradient of what was taken.
        module: The table. If it is told to have sparse gradients, only the rows that were touched are given, as a
            coalesced COO tensor with one sparse dimension, in place of the whole table, most of which is zero.
    """
    rows_U, sums_UD = raw_ops().row_sums(ids_T, grad_TD, module.num_embeddings)
    if module.padding_idx is not None:
        learns = rows_U != module.padding_idx
        rows_U, sums_UD = rows_U[learns], sums_UD[learns]
    shape = (module.num_embeddings, module.embedding_dim)
    if module.sparse:
        return torch.sparse_coo_tensor(rows_U.unsqueeze(0), sums_UD, shape, is_coalesced=True, check_invariants=False)
    grad = torch.zeros(shape)
    grad[rows_U] = sums_UD
    return grad


def embed(lookups: Sequence[tuple[nn.Embedding, Tensor]], norm: nn.LayerNorm, dropout: Dropout,
          dtype: torch.dtype = torch.float32) -> Tensor:  # fmt: skip
    """dropout(LayerNorm(sum of one row of every table)): the first layer of an encoder.

    Args:
        lookups: Tables, float32 (rows, D), and the row of every token in them, int64 (T). A table that is told to have
            sparse gradients (`nn.Embedding.sparse`) gets them.
        norm: Over D.
        dropout: Of the result.
        dtype: Of the result: float32 or bfloat16.

    Returns:
        (T, D).

    Raises:
        IndexError: An id is outside its table.
    """
    tables, ids = zip(*lookups, strict=True)
    bias = torch.zeros_like(norm.weight) if norm.bias is None else norm.bias
    y_TD: Tensor = _Embed.apply(ids, tables, dtype, norm.eps, dropout, norm.weight, bias,
                                *(t.weight for t in tables))  # type: ignore[no-untyped-call]  # fmt: skip
    return y_TD
