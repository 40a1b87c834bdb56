"""The encoder over a flat batch: every layer works on the tokens of all sequences at once, and on no padding.

The Hugging Face module keeps owning its parameters; this forward reads them, so `state_dict` and `save_pretrained`
stay the model's own. It computes what the module's forward computes for each sequence alone.

Shape suffixes: T tokens of the batch, B sequences, D hidden width, E width of one wide head, F feed-forward width,
C labels, h heads, d width of a head.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from fleetune.data.batches import PackedBatch
from fleetune.kernels.attention import Sequences, attention, rotate, self_attention
from fleetune.kernels.dropout import dropout_rows
from fleetune.kernels.embedding import embed
from fleetune.kernels.layer import LayerSettings, encoder_layer
from fleetune.kernels.linear import lay_together, linear
from fleetune.kernels.low_rank import low_rank_linear
from fleetune.kernels.norm import add_norm, add_then_norm
from fleetune.kernels.random import NO_DROPOUT, Dropout, row_keys
from fleetune.model.activations import activated, activated_linear, gated, gelu_kind
from fleetune.model.adapter import Adapter
from fleetune.model.draws import NO_DRAWS, Draws, Site, drawn_seed
from fleetune.model.families import Family, part
from fleetune.model.parts import EncoderParts, LayerParts
from fleetune.model.places import Scene
from fleetune.model.rates import dropout_rates

_WIDE = 16
"""A wide head is a multiple of this many columns, so that rows begin at a cache line."""


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
        self.adapter: Adapter | None = None
        """Low-rank updates of the layers' linear ones."""
        self.recomputes = False
        """Whether a layer is computed again in backward, in place of being kept."""
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
            lay_together(*layer.qkv)

    def tokens(self, batch: PackedBatch, draws: Draws, attended: Tensor | None = None) -> Tensor:
        """The last hidden state of all tokens (T, D), in the encoder's dtype.

        Args:
            batch: The tokens.
            draws: Of dropout.
            attended: Whether each token is attended to, bool (T), at least one of every sequence; None: all are.
        """
        return self._normed(self._below(self.num_layers, self._scene(batch, attended), draws))

    def first_tokens(self, batch: PackedBatch, draws: Draws) -> Tensor:
        """The last hidden state of each sequence's first token (B, D): all that a sequence-level head reads."""
        scene = self._scene(batch, None)
        x_TD = self._below(self.num_layers - 1, scene, draws)
        return self._normed(self._run(self.num_layers, partial(self._last_layer, scene=scene, draws=draws), x_TD))

    def _scene(self, batch: PackedBatch, attended: Tensor | None) -> Scene:
        """Told of stage 0, whose parameters are read here."""
        self.before_stage(0)
        parts, bias = self._parts, None
        if parts.distance_bias is not None:
            bias = parts.distance_bias.of(max(batch.lengths, default=1), parts.head_width**-0.5)
        return Scene.of(batch, attended, bias, parts.reaches)

    def _below(self, num_layers: int, scene: Scene, draws: Draws) -> Tensor:
        """The hidden state after some layers (T, D)."""
        x_TD = self._embed(scene.batch, draws)
        for number in range(1, num_layers + 1):
            x_TD = self._run(number, partial(self._layer, number, scene=scene, draws=draws), x_TD)
        return x_TD

    def _run(self, number: int, layer: Any, x_TD: Tensor) -> Tensor:
        """Layer `number`, from 1; computed again in backward where the model was told so."""
        self.before_stage(number)
        module = self._parts.modules[number - 1]
        again = self.recomputes or getattr(module, "gradient_checkpointing", False)
        if again and module.training and torch.is_grad_enabled():
            return checkpoint(layer, x_TD, use_reentrant=False, preserve_rng_state=False)  # type: ignore[no-any-return]
        return layer(x_TD)  # type: ignore[no-any-return]

    def _sequences(self, cu_q: Tensor, cu_k: Tensor, num_heads: int, window: int = 0) -> Sequences:
        return Sequences(cu_q=cu_q, cu_k=cu_k, num_heads=num_heads, scale=self._parts.head_width**-0.5, window=window)

    def _embed(self, batch: PackedBatch, draws: Draws) -> Tensor:
        parts, names = self._parts, self._parts.family.embeddings
        tables = parts.embeddings._modules
        lookups = [(tables[names.words], batch.token_ids)]
        if names.types in tables:
            types = batch.type_ids if batch.type_ids is not None else torch.zeros_like(batch.token_ids)
            lookups.append((tables[names.types], types))
        if names.positions in tables:
            lookups.append((tables[names.positions], batch.position_ids + parts.position_offset))
        x_TD = embed(lookups, tables[names.norm], draws.at(0, Site.EMBEDDINGS), self.dtype)
        return x_TD if parts.projection is None else linear(x_TD, parts.projection)

    def _layer(self, number: int, x_TD: Tensor, *, scene: Scene, draws: Draws) -> Tensor:
        """A layer for all tokens, of which some (`scene.keys`) are attended to."""
        if self._is_one_operation(number, x_TD, scene):
            return self._whole_layer(number, x_TD, scene, draws)
        dropout = draws.at(number, Site.ATTENTION)
        qkv, bias = self._qkv(number, x_TD, scene, draws), scene.bias
        sequences = self._sequences(
            scene.batch.boundaries, scene.cu_k, self._parts.num_heads, self._parts.reaches[number - 1].window
        )
        if scene.keys is None and bias is None:
            attended_TD = self_attention(qkv, sequences, dropout)
        else:
            q_TD, k_TD, v_TD = qkv.chunk(3, dim=1)
            if scene.keys is not None:
                k_TD, v_TD = k_TD[scene.keys], v_TD[scene.keys]
            attended_TD = attention(q_TD, k_TD, v_TD, sequences, dropout, bias)
        return self._after_attention(number, attended_TD, x_TD, draws, None)

    def _is_one_operation(self, number: int, x_TD: Tensor, scene: Scene) -> bool:
        parts = self._parts
        if scene.keys is not None or parts.family.norms_first or parts.knows_places(number):
            return False
        layer = parts.layers[number - 1]
        return not self._is_updated(*layer.linears) and layer.is_one_operation(x_TD)

    def _is_updated(self, *linears: nn.Linear) -> bool:
        """Whether one of the layers has a low-rank update."""
        return self.adapter is not None and any(self.adapter.of(layer) is not None for layer in linears)

    def _linear(self, x_RI: Tensor, *layers: nn.Linear, dropout: Dropout) -> Tensor:
        """Linear layers with their updates, if they have any; the dropout is of what the updates read."""
        if self.adapter is None or not self._is_updated(*layers):
            return linear(x_RI, *layers)
        return low_rank_linear(x_RI, layers, [self.adapter.of(layer) for layer in layers], dropout)

    def _whole_layer(self, number: int, x_TD: Tensor, scene: Scene, draws: Draws) -> Tensor:
        """A layer in one operation: the same arithmetic as in its parts, without the calls between them."""
        layer, kind = self._parts.layers[number - 1], gelu_kind(self._parts.layers[number - 1].activation)
        norms = layer.attention_norm, layer.output_norm
        assert kind is not None
        assert isinstance(norms[0], nn.LayerNorm)
        dropouts = [draws.at(number, site) for site in (Site.ATTENTION, Site.ATTENTION_OUTPUT, Site.OUTPUT)]
        settings = LayerSettings(
            sequences=self._sequences(scene.batch.boundaries, scene.cu_k, self._parts.num_heads),
            eps=(norms[0].eps, norms[1].eps), kind=kind, dropouts=(dropouts[0], dropouts[1], dropouts[2]),
        )  # fmt: skip
        return encoder_layer(x_TD, layer.linears, (norms[0], norms[1]), settings)

    def _qkv(self, number: int, x_TD: Tensor, scene: Scene, draws: Draws) -> Tensor:
        """Queries, keys and values of all tokens, side by side (T, 3 D)."""
        layer, rotation = self._parts.layers[number - 1], self._parts.reaches[number - 1].rotation
        if self._parts.family.norms_first:
            x_TD = _normed(x_TD, layer.attention_norm)
        qkv = self._linear(x_TD, *layer.qkv, dropout=draws.at(number, Site.LORA_QKV))
        return qkv if rotation is None else rotate(qkv, *scene.turns[rotation], 2 * self._parts.num_heads)

    def _last_layer(self, x_TD: Tensor, *, scene: Scene, draws: Draws) -> Tensor:
        """The last layer for the first tokens only (B, D)."""
        number, first = self.num_layers, scene.batch.first_token
        first_BD, parts = x_TD[first], self._parts
        if parts.family.norms_first or parts.knows_places(number) or self._is_updated(*parts.layers[number - 1].qkv):
            attended_BD = self._attend_first_by_keys(number, x_TD, scene, draws)
        else:
            attended_BD = self._attend_first(number, first_BD, x_TD, scene.batch, draws)
        return self._after_attention(number, attended_BD, first_BD, draws, first)

    def _attend_first_by_keys(self, number: int, x_TD: Tensor, scene: Scene, draws: Draws) -> Tensor:
        """Attention of one query a sequence."""
        first = scene.batch.first_token
        q_TD, k_TD, v_TD = self._qkv(number, x_TD, scene, draws).chunk(3, dim=1)
        sequences = self._sequences(
            torch.arange(len(scene.batch) + 1),
            scene.cu_k,
            self._parts.num_heads,
            self._parts.reaches[number - 1].window,
        )
        dropout = draws.at(number, Site.ATTENTION, first)
        return attention(q_TD[first], k_TD, v_TD, sequences, dropout, scene.bias)

    def _attend_first(self, number: int, first_BD: Tensor, x_TD: Tensor, batch: PackedBatch, draws: Draws) -> Tensor:
        """Attention of one query a sequence, without keys or values of any token.

        q . (W_k x + b_k) = (W_k' q) . x + b_k . q, and sum p (W_v x + b_v) = W_v (sum p x) + b_v sum p: with a column
        of ones behind x, each head of each sequence is one row that attends to the hidden states themselves. Two
        products with the weights for B rows stand in for two of T rows.
        """
        num_heads, (query, key, value) = self._parts.num_heads, self._parts.layers[number - 1].qkv
        q_hBd = _by_head(linear(first_BD, query), num_heads)
        x_TE = _with_ones(x_TD)
        keys_hdE, values_hdE = (_with_bias(m, x_TE).unflatten(0, (num_heads, -1)) for m in (key, value))
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
        lora_dropout = draws.at(number, Site.LORA_ATTENTION_OUTPUT, rows)
        output = self._linear(attended, layer.attention_output, dropout=lora_dropout)
        dropout = draws.at(number, Site.ATTENTION_OUTPUT, rows)
        last_dropout = draws.at(number, Site.OUTPUT, rows)
        if self._parts.family.norms_first:
            normed, x = add_then_norm(output, residual, layer.output_norm, dropout)
            return x + dropout_rows(self._feed_forward(number, normed, draws, rows), last_dropout)
        assert isinstance(layer.attention_norm, nn.LayerNorm)
        x = add_norm(output, residual, layer.attention_norm, dropout)
        return add_norm(self._feed_forward(number, x, draws, rows), x, layer.output_norm, last_dropout)

    def _feed_forward(self, number: int, x: Tensor, draws: Draws, rows: Tensor | None) -> Tensor:
        layer = self._parts.layers[number - 1]
        up = self._linear(x, layer.up, dropout=draws.at(number, Site.LORA_UP, rows))
        if not self._parts.family.gated and not self._is_updated(layer.down):
            return activated_linear(up, layer.activation, layer.down)
        middle = (gated if self._parts.family.gated else activated)(up, layer.activation)
        middle = dropout_rows(middle, draws.at(number, Site.FEED_FORWARD, rows))
        return self._linear(middle, layer.down, dropout=draws.at(number, Site.LORA_DOWN, rows))

    def _normed(self, x: Tensor) -> Tensor:
        """What is behind the last layer; its parameters are of the last layer's stage."""
        return x if self._parts.final_norm is None else _normed(x, self._parts.final_norm)


def _normed(x: Tensor, norm: nn.LayerNorm | nn.Identity) -> Tensor:
    return add_norm(x, None, norm, NO_DROPOUT) if isinstance(norm, nn.LayerNorm) else x


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


def _means(x_TD: Tensor, batch: PackedBatch) -> Tensor:
    """The mean over the tokens of each sequence (B, D)."""
    lengths_B = batch.boundaries.diff()
    sequence_T = torch.repeat_interleave(torch.arange(len(batch)), lengths_B)
    sums_BD = x_TD.new_zeros(len(batch), x_TD.shape[1]).index_add(0, sequence_T, x_TD)
    return sums_BD / lengths_B.unsqueeze(1)


class FlatClassifier(nn.Module):
    """A Hugging Face model with a head whose forward takes a `PackedBatch`.

    Args:
        model: The model; its parameters are shared, not copied.
        family: The row of the table that describes it.
        reads_all_tokens: Whether its head reads all tokens, or the first of each sequence.

    The encoder computes in float32 unless `compute_in` says otherwise; the head always does.
    """

    def __init__(self, model: Any, family: Family, *, reads_all_tokens: bool = False) -> None:
        super().__init__()
        self._reads_all_tokens = reads_all_tokens
        self.model = model
        self._family = family
        self._encoder = FlatEncoder(part(model, family.backbone), family)
        self._encoder.lay_together()
        self._step: tuple[int, int] | None = None
        self.adapter: Adapter | None = None

    def adapt(self, adapter: Adapter) -> None:
        """Let the encoder compute with low-rank updates, whose parameters become this module's own."""
        self.adapter = self._encoder.adapter = adapter

    def recompute_layers(self) -> None:
        """Compute each layer again in backward, in place of keeping what is in it."""
        self._encoder.recomputes = True

    @property
    def parts(self) -> EncoderParts:
        """The modules of the encoder."""
        return self._encoder.parts

    def compute_in(self, dtype: torch.dtype) -> None:
        """Change what the encoder computes in."""
        self._encoder.dtype = dtype

    fills_with = None
    """Id of the token that a batch is filled up with: it is not."""

    @property
    def stages(self) -> list[list[nn.Parameter]]:
        """The parameters in the order in which forward comes to them: embeddings, each layer, the head.

        One that is used more than once is of the stage that uses it first.
        """
        seen: set[nn.Parameter] = set()
        stages = []
        updates = [self._updates_of(layer) for layer in self.parts.layers]
        for modules, own in zip((*self.parts.stages, [self.model]), ([], *updates, []), strict=True):
            stage = [*(p for module in modules for p in module.parameters()), *own]
            stages.append([p for p in dict.fromkeys(stage) if p not in seen])
            seen.update(stage)
        return stages

    def _updates_of(self, layer: LayerParts) -> list[nn.Parameter]:
        """The parameters of a layer's low-rank updates."""
        found = [] if self.adapter is None else [self.adapter.of(module) for module in layer.linears]
        return [p for update in found if update is not None for p in (update.down, update.up)]

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
        """Logits of every sequence, float32 (B, C), or of every token (T, C)."""
        draws = self._draws(batch)
        x_RD, rows = self._what_the_head_reads(batch, draws)

        def drop(x_RD: Tensor, dropout: nn.Dropout, site: Site) -> Tensor:
            head = self._encoder.num_layers + 1, site
            rates = {head: dropout.p if dropout.training else 0.0}
            return dropout_rows(x_RD, replace(draws, rates=rates).at(*head, rows))

        self._encoder.before_stage(self._encoder.num_layers + 1)
        read = self._family.token_head if self._reads_all_tokens else self._family.head
        logits_RC: Tensor = read(self.model, x_RD, drop)
        return logits_RC

    def _what_the_head_reads(self, batch: PackedBatch, draws: Draws) -> tuple[Tensor, Tensor | None]:
        """A row of float32 for each logit row, and the token that each stands for; None where all tokens do."""
        if self._reads_all_tokens:
            return self._encoder.tokens(batch, draws).float(), None
        if self._family.reads_mean(self.model.config):
            return _means(self._encoder.tokens(batch, draws).float(), batch), batch.first_token
        return self._encoder.first_tokens(batch, draws).float(), batch.first_token

    def _draws(self, batch: PackedBatch) -> Draws:
        if not self.training:
            return NO_DRAWS
        seed, step = self._step or (drawn_seed(), 0)
        examples_T = torch.repeat_interleave(batch.example_ids, batch.boundaries.diff())
        rates = dropout_rates(part(self.model, self._family.backbone), self._family)
        if self.adapter is not None:
            rates |= self.adapter.dropout_rates(self._encoder.num_layers)
        return Draws(seed=seed, step=step, token_keys=row_keys(examples_T, batch.position_ids), rates=rates)
