"""The encoder over a flat batch: every layer works on the tokens of all sequences at once, and on no padding.

The Hugging Face module keeps owning its parameters; this forward reads them, so `state_dict` and `save_pretrained`
stay the model's own. It computes what the module's forward computes for each sequence alone.

Shape suffixes: T tokens of the batch, B sequences, D hidden width, E width of one wide head, F feed-forward width,
C labels, h heads, d width of a head.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from fleetune.data.batches import PackedBatch
from fleetune.kernels.attention import Sequences, attention, self_attention
from fleetune.kernels.dropout import dropout_rows
from fleetune.kernels.embedding import embed
from fleetune.kernels.layer import LayerSettings, encoder_layer
from fleetune.kernels.linear import lay_together, linear
from fleetune.kernels.norm import add_norm
from fleetune.kernels.random import row_keys
from fleetune.model.activations import activated_linear, gelu_kind
from fleetune.model.draws import NO_DRAWS, Draws, Site, drawn_seed
from fleetune.model.families import Family, LayerNames, part
from fleetune.model.rates import dropout_rates

_WIDE = 16
"""A wide head is a multiple of this many columns, so that rows begin at a cache line."""


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
        """The parts.

        Raises:
            AttributeError: The layer lacks one.
        """
        return cls(**{field: part(layer, getattr(names, field)) for field in cls.__dataclass_fields__})

    @property
    def linears(self) -> tuple[nn.Linear, ...]:
        """In the order of forward."""
        return self.query, self.key, self.value, self.attention_output, self.up, self.down

    def is_one_operation(self, x_TD: Tensor) -> bool:
        """Whether the layer can be computed as one: with GELU and all biases, and every gradient wanted, or none."""
        modules = *self.linears, self.attention_norm, self.output_norm
        parameters = [p for module in modules for p in (module.weight, module.bias)]
        if gelu_kind(self.activation) is None or any(p is None for p in parameters):
            return False
        return not torch.is_grad_enabled() or (x_TD.requires_grad and all(p.requires_grad for p in parameters))


@dataclass(frozen=True, kw_only=True)
class EncoderParts:
    """The modules of an encoder, and the options that its arithmetic depends on.

    A plain object beside the model, not a module of its own: the model stays the one owner of its parameters.
    """

    embeddings: Any
    projection: nn.Linear | None
    modules: tuple[nn.Module, ...]
    """The layers as the model has them: they know whether they are to be computed again in backward."""
    layers: tuple[LayerParts, ...]
    num_heads: int
    position_offset: int
    """Added to positions, where they count from the padding token's id + 1."""

    @classmethod
    def of(cls, backbone: Any, family: Family) -> EncoderParts:
        """The parts.

        Raises:
            AttributeError: The encoder lacks one.
        """
        modules = tuple(part(backbone, family.layers))
        return cls(
            embeddings=backbone.embeddings,
            projection=backbone._modules.get(family.embedding_projection),
            modules=modules,
            layers=tuple(LayerParts.of(layer, family.layer) for layer in modules),
            num_heads=getattr(backbone.config, family.num_heads),
            position_offset=backbone.embeddings.padding_idx + 1 if family.positions_follow_padding else 0,
        )


class FlatEncoder:
    """A Hugging Face encoder without its head, over flat batches.

    Args:
        backbone: The encoder; its parameters are shared, not copied.
        family: The row of the table that describes it.
        dtype: What it computes in: float32, or bfloat16 with float32 sums. Parameters stay float32.
    """

    def __init__(self, backbone: Any, family: Family, dtype: torch.dtype = torch.float32) -> None:
        self._parts = EncoderParts.of(backbone, family)
        self.dtype = dtype
        self.before_stage: Callable[[int], None] = lambda stage: None
        """Told before the embeddings (0), each layer (from 1) and what comes after them are computed."""

    @property
    def num_layers(self) -> int:
        return len(self._parts.layers)

    @property
    def parts(self) -> EncoderParts:
        """The modules that it computes with."""
        return self._parts

    def lay_together(self) -> None:
        """Move the weights of each layer's query, key and value into one piece of memory: one product computes all."""
        for layer in self._parts.layers:
            lay_together(layer.query, layer.key, layer.value)

    def tokens(self, batch: PackedBatch, draws: Draws, attended: Tensor | None = None) -> Tensor:
        """The last hidden state of all tokens (T, D), in the encoder's dtype.

        Args:
            batch: The tokens.
            draws: Of dropout.
            attended: Whether each token is attended to, bool (T), at least one of every sequence; None: all are.
        """
        return self._below(self.num_layers, batch, draws, attended)

    def first_tokens(self, batch: PackedBatch, draws: Draws) -> Tensor:
        """The last hidden state of each sequence's first token (B, D): all that a sequence-level head reads."""
        x_TD = self._below(self.num_layers - 1, batch, draws)
        return self._run(self.num_layers, partial(self._last_layer, batch=batch, draws=draws), x_TD)

    def _below(self, num_layers: int, batch: PackedBatch, draws: Draws, attended: Tensor | None = None) -> Tensor:
        """The hidden state after some layers (T, D)."""
        cu_q, keys = batch.boundaries, None
        cu_k = cu_q
        if attended is not None:
            keys = attended.nonzero().squeeze(1)
            cu_k = nn.functional.pad(attended.cumsum(0), (1, 0))[cu_q]
        sequences = self._sequences(cu_q, cu_k, self._parts.num_heads)
        self.before_stage(0)
        x_TD = self._embed(batch, draws)
        for number in range(1, num_layers + 1):
            layer = partial(self._layer, number, sequences=sequences, keys=keys, draws=draws)
            x_TD = self._run(number, layer, x_TD)
        return x_TD

    def _run(self, number: int, layer: Any, x_TD: Tensor) -> Tensor:
        """Layer `number`, from 1; computed again in backward where the model was told so."""
        self.before_stage(number)
        module = self._parts.modules[number - 1]
        if module.training and getattr(module, "gradient_checkpointing", False) and torch.is_grad_enabled():
            return checkpoint(layer, x_TD, use_reentrant=False, preserve_rng_state=False)  # type: ignore[no-any-return]
        return layer(x_TD)  # type: ignore[no-any-return]

    def _sequences(self, cu_q: Tensor, cu_k: Tensor, num_heads: int) -> Sequences:
        width = self._parts.layers[0].query.out_features // self._parts.num_heads
        return Sequences(cu_q=cu_q, cu_k=cu_k, num_heads=num_heads, scale=width**-0.5)

    def _embed(self, batch: PackedBatch, draws: Draws) -> Tensor:
        tables, parts = self._parts.embeddings, self._parts
        lookups = [(tables.word_embeddings, batch.token_ids)]
        if "token_type_embeddings" in tables._modules:
            types = batch.type_ids if batch.type_ids is not None else torch.zeros_like(batch.token_ids)
            lookups.append((tables.token_type_embeddings, types))
        lookups.append((tables.position_embeddings, batch.position_ids + parts.position_offset))
        x_TD = embed(lookups, tables.LayerNorm, draws.at(0, Site.EMBEDDINGS), self.dtype)
        return x_TD if parts.projection is None else linear(x_TD, parts.projection)

    def _layer(self, number: int, x_TD: Tensor, *, sequences: Sequences, keys: Tensor | None,
               draws: Draws) -> Tensor:  # fmt: skip
        """A layer for all tokens (post-norm, as in BERT), of which some (`keys`; None: all) are attended to."""
        layer = self._parts.layers[number - 1]
        if keys is None and layer.is_one_operation(x_TD):
            return self._whole_layer(number, x_TD, sequences, draws)
        qkv = linear(x_TD, layer.query, layer.key, layer.value)
        dropout = draws.at(number, Site.ATTENTION)
        if keys is None:
            attended_TD = self_attention(qkv, sequences, dropout)
        else:
            q_TD, k_TD, v_TD = qkv.chunk(3, dim=1)
            attended_TD = attention(q_TD, k_TD[keys], v_TD[keys], sequences, dropout)
        return self._after_attention(number, attended_TD, x_TD, draws, None)

    def _whole_layer(self, number: int, x_TD: Tensor, sequences: Sequences, draws: Draws) -> Tensor:
        """A layer in one operation: the same arithmetic as in its parts, without the calls between them."""
        layer, kind = self._parts.layers[number - 1], gelu_kind(self._parts.layers[number - 1].activation)
        assert kind is not None
        dropouts = [draws.at(number, site) for site in (Site.ATTENTION, Site.ATTENTION_OUTPUT, Site.OUTPUT)]
        settings = LayerSettings(
            sequences=sequences, eps=(layer.attention_norm.eps, layer.output_norm.eps), kind=kind,
            dropouts=(dropouts[0], dropouts[1], dropouts[2]),
        )  # fmt: skip
        return encoder_layer(x_TD, layer.linears, (layer.attention_norm, layer.output_norm), settings)

    def _last_layer(self, x_TD: Tensor, *, batch: PackedBatch, draws: Draws) -> Tensor:
        """The last layer for the first tokens only (B, D)."""
        number, layer = self.num_layers, self._parts.layers[-1]
        first_BD = x_TD[batch.first_token]
        attended_BD = self._attend_first(number, layer, first_BD, x_TD, batch, draws)
        return self._after_attention(number, attended_BD, first_BD, draws, batch.first_token)

    def _attend_first(self, number: int, layer: LayerParts, first_BD: Tensor, x_TD: Tensor, batch: PackedBatch,
                      draws: Draws) -> Tensor:  # fmt: skip
        """Attention of one query a sequence, without keys or values of any token.

        q . (W_k x + b_k) = (W_k' q) . x + b_k . q, and sum p (W_v x + b_v) = W_v (sum p x) + b_v sum p: with a column
        of ones behind x, each head of each sequence is one row that attends to the hidden states themselves. Two
        products with the weights for B rows stand in for two of T rows.
        """
        num_heads = self._parts.num_heads
        q_hBd = _by_head(linear(first_BD, layer.query), num_heads)
        x_TE = _with_ones(x_TD)
        keys_hdE, values_hdE = (_with_bias(m, x_TE).unflatten(0, (num_heads, -1)) for m in (layer.key, layer.value))
        rows = torch.bmm(q_hBd, keys_hdE).transpose(0, 1).flatten(0, 1)
        heads_cu = torch.arange(len(batch) + 1) * num_heads
        dropout = draws.at_heads_of(number, Site.ATTENTION, batch.first_token, num_heads)
        mixed = attention(rows, x_TE, x_TE, self._sequences(heads_cu, batch.boundaries, 1), dropout)
        mixed_hBE = mixed.unflatten(0, (-1, num_heads)).transpose(0, 1)
        attended_BD: Tensor = torch.bmm(mixed_hBE, values_hdE.transpose(1, 2)).transpose(0, 1).flatten(1)
        return attended_BD

    def _after_attention(self, number: int, attended: Tensor, residual: Tensor, draws: Draws,
                         rows: Tensor | None) -> Tensor:  # fmt: skip
        """The rest of a layer, for the rows that it is wanted for (None: all)."""
        layer = self._parts.layers[number - 1]
        output = linear(attended, layer.attention_output)
        x = add_norm(output, residual, layer.attention_norm, draws.at(number, Site.ATTENTION_OUTPUT, rows))
        output = activated_linear(linear(x, layer.up), layer.activation, layer.down)
        return add_norm(output, x, layer.output_norm, draws.at(number, Site.OUTPUT, rows))


def _by_head(x_BD: Tensor, num_heads: int) -> Tensor:
    """(B, D) as (h, B, d)."""
    x_hBd: Tensor = x_BD.unflatten(1, (num_heads, -1)).transpose(0, 1)
    return x_hBd


def _with_ones(x_TD: Tensor) -> Tensor:
    """x with a column of ones behind it, and zeros up to the next multiple of `_WIDE` columns (T, E)."""
    num_rows, width = x_TD.shape
    behind = x_TD.new_zeros(num_rows, _WIDE - width % _WIDE)
    behind[:, 0] = 1.0
    return torch.cat([x_TD, behind], dim=1)


def _with_bias(linear_layer: nn.Linear, x_TE: Tensor) -> Tensor:
    """The matrix that maps `_with_ones(x)` to what the layer maps x to (D, E), in the type of x."""
    weight_DD, bias_D = linear_layer.weight, linear_layer.bias
    behind = weight_DD.new_zeros(len(weight_DD), x_TE.shape[1] - weight_DD.shape[1] - 1)
    ones = weight_DD.new_zeros(len(weight_DD), 1) if bias_D is None else bias_D.unsqueeze(1)
    return torch.cat([weight_DD, ones, behind], dim=1).to(x_TE.dtype)


class FlatClassifier(nn.Module):
    """A Hugging Face sequence-classification model whose forward takes a `PackedBatch`.

    Args:
        model: The model; its parameters are shared, not copied.
        family: The row of the table that describes it.

    The encoder computes in float32 unless `compute_in` says otherwise; the head always does.
    """

    def __init__(self, model: Any, family: Family) -> None:
        super().__init__()
        self.model = model
        self._family = family
        self._encoder = FlatEncoder(part(model, family.backbone), family)
        self._encoder.lay_together()
        self._step: tuple[int, int] | None = None

    def compute_in(self, dtype: torch.dtype) -> None:
        """Change what the encoder computes in."""
        self._encoder.dtype = dtype

    fills_with = None
    """Id of the token that a batch is filled up with: it is not."""

    @property
    def stages(self) -> list[list[nn.Parameter]]:
        """The parameters in the order in which forward comes to them: embeddings, each layer, the head."""
        seen: set[nn.Parameter] = set()
        stages = []
        parts = self._encoder.parts
        before = [parts.embeddings, *([parts.projection] if parts.projection is not None else [])]
        for modules in (before, *([layer] for layer in parts.modules), [self.model]):
            stage = [p for module in modules for p in module.parameters() if p not in seen]
            seen.update(stage)
            stages.append(stage)
        return stages

    def before_stage(self, tell: Callable[[int], None]) -> None:
        """Have `tell` called with the number of each stage before forward comes to it."""
        self._encoder.before_stage = tell

    @property
    def word_embeddings(self) -> nn.Embedding:
        """The table of the model's words."""
        table: nn.Embedding = self.model.get_input_embeddings()
        return table

    def begin_micro_batch(self, seed: int, step: int, *, micro_batch: int, rank: int) -> None:
        """Make the dropout masks of the next forward a function of seed, step and example, whoever draws them."""
        self._step = seed, step

    def forward(self, batch: PackedBatch) -> Tensor:
        """Logits of every sequence, float32 (B, C)."""
        draws = self._draws(batch)
        first_BD = self._encoder.first_tokens(batch, draws).float()

        def drop(x_BD: Tensor, dropout: nn.Dropout, site: Site) -> Tensor:
            head = self._encoder.num_layers + 1, site
            rates = {head: dropout.p if dropout.training else 0.0}
            return dropout_rows(x_BD, replace(draws, rates=rates).at(*head, batch.first_token))

        self._encoder.before_stage(self._encoder.num_layers + 1)
        logits_BC: Tensor = self._family.head(self.model, first_BD, drop)
        return logits_BC

    def _draws(self, batch: PackedBatch) -> Draws:
        if not self.training:
            return NO_DRAWS
        seed, step = self._step or (drawn_seed(), 0)
        examples_T = torch.repeat_interleave(batch.example_ids, batch.boundaries.diff())
        rates = dropout_rates(part(self.model, self._family.backbone), self._family)
        return Draws(seed=seed, step=step, token_keys=row_keys(examples_T, batch.position_ids), rates=rates)
