"""The encoder over a flat batch: every layer works on the tokens of all sequences at once, and on no padding.

The Hugging Face module keeps owning its parameters; this forward reads them, so `state_dict` and `save_pretrained`
stay the model's own. It computes what the module's forward computes for each sequence alone.

Shape suffixes: T tokens of the batch, B sequences, D hidden width, F feed-forward width, C labels,
R rows in work (T, or B in the last layer).
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from fleetune.data.batches import PackedBatch
from fleetune.model.attention import flat_attention
from fleetune.model.dropout import dropout
from fleetune.model.families import Family, LayerNames, part


@dataclass(frozen=True, kw_only=True)
class LayerParts:
    """The modules of one encoder layer."""

    query: nn.Linear
    key: nn.Linear
    value: nn.Linear
    attention_output: nn.Linear
    attention_norm: nn.LayerNorm
    up: nn.Linear
    activation: nn.Module
    down: nn.Linear
    output_norm: nn.LayerNorm

    @classmethod
    def of(cls, layer: nn.Module, names: LayerNames) -> LayerParts:
        return cls(**{field: part(layer, getattr(names, field)) for field in cls.__dataclass_fields__})


@dataclass(frozen=True, kw_only=True)
class EncoderParts:
    """The modules of an encoder, and the options that its arithmetic depends on.

    A plain object beside the model, not a module of its own: the model stays the one owner of its parameters.
    """

    embeddings: Any
    projection: nn.Linear | None
    layers: tuple[LayerParts, ...]
    num_heads: int
    hidden_dropout: float
    attention_dropout: float

    @classmethod
    def of(cls, model: Any, family: Family) -> EncoderParts:
        backbone, options = part(model, family.backbone), family.options
        return cls(
            embeddings=backbone.embeddings,
            projection=backbone._modules.get(family.embedding_projection),
            layers=tuple(LayerParts.of(layer, family.layer) for layer in part(backbone, family.layers)),
            num_heads=getattr(model.config, options.num_heads),
            hidden_dropout=getattr(model.config, options.hidden_dropout),
            attention_dropout=getattr(model.config, options.attention_dropout),
        )


class FlatClassifier(nn.Module):
    """A Hugging Face sequence-classification model whose forward takes a `PackedBatch`.

    Args:
        model: The model; its parameters are shared, not copied.
        family: The row of the table that describes it.
    """

    def __init__(self, model: Any, family: Family) -> None:
        super().__init__()
        self.model = model
        self._family = family
        self._parts = EncoderParts.of(model, family)

    def forward(self, batch: PackedBatch) -> Tensor:
        """Logits of every sequence, float32 (B, C)."""
        x_TD = self._embed(batch)
        for layer in self._parts.layers[:-1]:
            x_TD = self._layer(layer, x_TD, x_TD, batch)
        # The head reads the first tokens only, so the last layer computes its queries and all that follows for these.
        first_BD = self._layer(self._parts.layers[-1], x_TD[batch.first_token], x_TD, batch)
        return self._family.head(self.model, first_BD)

    def _embed(self, batch: PackedBatch) -> Tensor:
        tables = self._parts.embeddings
        positions = batch.position_ids
        if self._family.positions_follow_padding:
            positions = positions + (tables.padding_idx + 1)
        x_TD = tables.word_embeddings(batch.token_ids)
        if "token_type_embeddings" in tables._modules:
            types = batch.type_ids if batch.type_ids is not None else torch.zeros_like(batch.token_ids)
            x_TD = x_TD + tables.token_type_embeddings(types)
        x_TD = tables.LayerNorm(x_TD + tables.position_embeddings(positions))
        x_TD = dropout(x_TD, self._parts.hidden_dropout, self.training)
        return x_TD if self._parts.projection is None else self._parts.projection(x_TD)

    def _layer(self, layer: LayerParts, x_RD: Tensor, x_TD: Tensor, batch: PackedBatch) -> Tensor:
        """One layer for the rows `x_RD`, which attend to the tokens `x_TD` (post-norm, as in BERT)."""
        rate = self._parts.attention_dropout if self.training else 0.0
        attended_RD = flat_attention(
            layer.query(x_RD), layer.key(x_TD), layer.value(x_TD), batch.lengths, self._parts.num_heads, rate
        )
        x_RD = self._add_and_norm(layer.attention_output(attended_RD), x_RD, layer.attention_norm)
        return self._add_and_norm(layer.down(layer.activation(layer.up(x_RD))), x_RD, layer.output_norm)

    def _add_and_norm(self, new_RD: Tensor, residual_RD: Tensor, norm: nn.LayerNorm) -> Tensor:
        normed: Tensor = norm(dropout(new_RD, self._parts.hidden_dropout, self.training) + residual_RD)
        return normed
