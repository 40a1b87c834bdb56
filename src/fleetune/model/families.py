"""Model families as data: where a Hugging Face module keeps the parts that the flat forward needs.

A row names attributes; dotted names reach inside. Families of the same shape differ in these names and in a few
options, so one forward serves them all. A model without a row goes through its own, padded forward.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial
from operator import attrgetter
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn
from torch.nn.functional import gelu, relu

from fleetune.model.draws import Site
from fleetune.model.options import modernbert_problem, problem_of_config
from fleetune.model.places import DistanceBias, Reach, Rotation

if TYPE_CHECKING:
    from transformers import PreTrainedModel

Drop = Callable[[Tensor, nn.Dropout, Site], Tensor]
"""(x (B, D), the model's dropout module, which dropout of the head it is) -> x, dropped out in training."""


@dataclass(frozen=True, kw_only=True)
class EmbeddingNames:
    """Attributes of the module `embeddings`."""

    words: str = "word_embeddings"
    types: str = "token_type_embeddings"
    """Left out where the module has no such table, as the next one."""
    positions: str = "position_embeddings"
    norm: str = "LayerNorm"
    dropout: str = "dropout"


@dataclass(frozen=True, kw_only=True)
class LayerNames:
    """Attributes of one encoder layer."""

    qkv: tuple[str, ...]
    """Linear layers of queries, keys and values, or the one that gives all of them."""
    attention_output: str
    attention_norm: str
    """Behind attention, or before it where norms come first; then it may be an `nn.Identity`."""
    up: str
    activation: str
    down: str
    output_norm: str
    """Behind the feed-forward, or before it."""
    attention_dropout: str
    """Dropout module of the probabilities of attention, or its rate."""
    attention_dropout_is_called: bool = False
    """Whether forward calls that module, which then says itself whether this is training, or takes its rate alone."""
    attention_output_dropout: str | None
    """Dropout module of what `attention_output` gives; None where the layer has none."""
    feed_forward_dropout: str | None = None
    """The same of what `down` is given."""
    output_dropout: str | None
    """The same of what `down` gives."""


def plain_token_head(model: Any, x_TD: Tensor, drop: Drop) -> Tensor:
    """A linear layer for every token, with dropout before it where the model has one."""
    parts = model._modules
    if "dropout" in parts:
        x_TD = drop(x_TD, parts["dropout"], Site.HEAD)
    reader: nn.Linear = parts["qa_outputs"] if "qa_outputs" in parts else parts["classifier"]
    logits: Tensor = reader(x_TD)
    return logits


@dataclass(frozen=True, kw_only=True)
class Family:
    """One row of the table: a `model_type` of transformers and the places of its parts."""

    model_type: str
    backbone: str
    """Attribute of the classification model that holds the encoder without its head."""
    embeddings: EmbeddingNames = EmbeddingNames()
    layers: Callable[[Any], tuple[nn.Module, ...]]
    """Encoder -> its layers in the order in which they are computed; one may be there more than once."""
    layer: LayerNames
    replaced: tuple[str, ...]
    """Modules of the encoder whose own forward is not called: nobody may have changed anything in them."""
    head: Callable[[Any, Tensor, Drop], Tensor]
    """(classification model, what is read of the last hidden state (B, D), dropout) -> logits (B, C)."""
    token_head: Callable[[Any, Tensor, Drop], Tensor] = plain_token_head
    """(model for tags of words or answers, last hidden state of all tokens (T, D), dropout) -> logits (T, C)."""
    num_heads: str = "num_attention_heads"
    """Option of the model's config that counts the heads."""
    positions_follow_padding: bool = False
    """Positions count from the padding token's id + 1, as in fairseq."""
    embedding_projection: str | None = None
    """Linear layer from a narrower embedding to the hidden width, where the model has one."""
    norms_first: bool = False
    """Norms are before attention and feed-forward, not behind them (Xiong et al. 2020)."""
    final_norm: str | None = None
    """Behind the last layer."""
    gated: bool = False
    """`up` gives two halves: the activation of the first, times the second, is what `down` is given (Shazeer 2020)."""
    reaches: Callable[[Any], tuple[Reach, ...]] | None = None
    """Encoder -> what attention knows of places, for each of `layers`; None: nothing."""
    distance_bias: Callable[[Any], DistanceBias] | None = None
    """Encoder -> a bias of the scores in all layers."""
    first_token_reader: str | None = "classifier"
    """Module of the classification model that is given the hidden state and reads the first token; None where the
    model's own forward takes that out of it."""
    reads_mean: Callable[[Any], bool] = lambda config: False
    """Config -> whether the head of a classification model reads the mean of all tokens, not the first one."""
    output: str = "BaseModelOutputWithPoolingAndCrossAttentions"
    """What the encoder returns, of `transformers.modeling_outputs`."""
    pooled: Callable[[Any, Tensor], Tensor | None] | None = None
    """(encoder, hidden state (B, L, D)) -> its pooled output, where it has one."""
    problem_of_config: Callable[[Any], str | None] = lambda config: None
    """Config -> an option that the flat forward does not know, and what of it; None: it knows all of them."""


def part(module: Any, name: str) -> Any:
    """The attribute of a dotted name."""
    return attrgetter(name)(module)


def _bert_head(model: Any, first_BD: Tensor, drop: Drop) -> Tensor:
    pooled_BD = model.bert.pooler(first_BD.unsqueeze(1))
    logits: Tensor = model.classifier(drop(pooled_BD, model.dropout, Site.HEAD))
    return logits


def _dense_head(model: Any, first_BD: Tensor, drop: Drop, activation: Callable[[Tensor], Tensor]) -> Tensor:
    head = model.classifier
    dense_BD = activation(head.dense(drop(first_BD, head.dropout, Site.HEAD_INPUT)))
    logits: Tensor = head.out_proj(drop(dense_BD, head.dropout, Site.HEAD))
    return logits


def _distilbert_head(model: Any, first_BD: Tensor, drop: Drop) -> Tensor:
    dense_BD = relu(model.pre_classifier(first_BD))
    logits: Tensor = model.classifier(drop(dense_BD, model.dropout, Site.HEAD))
    return logits


def _albert_head(model: Any, first_BD: Tensor, drop: Drop) -> Tensor:
    pooled_BD = model.albert.pooler_activation(model.albert.pooler(first_BD))
    logits: Tensor = model.classifier(drop(pooled_BD, model.dropout, Site.HEAD))
    return logits


def _modernbert_head(model: Any, read_BD: Tensor, drop: Drop) -> Tensor:
    logits: Tensor = model.classifier(drop(model.head(read_BD), model.drop, Site.HEAD))
    return logits


def _pooler(backbone: Any, hidden_BLD: Tensor) -> Tensor | None:
    return None if backbone.pooler is None else backbone.pooler(hidden_BLD)


def _albert_pooler(backbone: Any, hidden_BLD: Tensor) -> Tensor | None:
    return None if backbone.pooler is None else backbone.pooler_activation(backbone.pooler(hidden_BLD[:, 0]))


def _all_of(name: str) -> Callable[[Any], tuple[nn.Module, ...]]:
    return lambda backbone: tuple(part(backbone, name))


def _albert_layers(backbone: Any) -> tuple[nn.Module, ...]:
    """Groups of layers, each of them several times over (Lan et al. 2020), as the model's own forward counts them."""
    config, groups = backbone.config, backbone.encoder.albert_layer_groups
    per_group = config.num_hidden_layers / config.num_hidden_groups
    order = [groups[int(i / per_group)] for i in range(config.num_hidden_layers)]
    return tuple(layer for group in order for layer in group.albert_layers)


def _modernbert_reaches(backbone: Any) -> tuple[Reach, ...]:
    """Local and global attention, each with rotations of its own."""
    rope, window = backbone.rotary_emb, backbone.config.local_attention // 2
    rotations = {
        kind: Rotation(
            frequencies_m=getattr(rope, f"{kind}_inv_freq"), factor=getattr(rope, f"{kind}_attention_scaling")
        )
        for kind in rope.layer_types
    }
    return tuple(
        Reach(window=window if kind == "sliding_attention" else 0, rotation=rotations[kind])
        for kind in (layer.attention_type for layer in backbone.layers)
    )


def _mpnet_bias(backbone: Any) -> DistanceBias:
    encoder = backbone.encoder
    return DistanceBias(table=encoder.relative_attention_bias, bucket_of=encoder.relative_position_bucket)


_BERT_LAYER = LayerNames(
    qkv=("attention.self.query", "attention.self.key", "attention.self.value"),
    attention_output="attention.output.dense",
    attention_norm="attention.output.LayerNorm",
    up="intermediate.dense",
    activation="intermediate.intermediate_act_fn",
    down="output.dense",
    output_norm="output.LayerNorm",
    attention_dropout="attention.self.dropout",
    attention_output_dropout="attention.output.dropout",
    output_dropout="output.dropout",
)
_DISTILBERT_LAYER = LayerNames(
    qkv=("attention.q_lin", "attention.k_lin", "attention.v_lin"),
    attention_output="attention.out_lin",
    attention_norm="sa_layer_norm",
    up="ffn.lin1",
    activation="ffn.activation",
    down="ffn.lin2",
    output_norm="output_layer_norm",
    attention_dropout="attention.dropout",
    attention_output_dropout=None,
    output_dropout="ffn.dropout",
)
_ALBERT_LAYER = LayerNames(
    qkv=("attention.query", "attention.key", "attention.value"),
    attention_output="attention.dense",
    attention_norm="attention.LayerNorm",
    up="ffn",
    activation="activation",
    down="ffn_output",
    output_norm="full_layer_layer_norm",
    attention_dropout="attention.attention_dropout",
    attention_output_dropout="attention.output_dropout",
    output_dropout=None,  # the layer has such a module, which its forward does not call
)
_MPNET_LAYER = replace(
    _BERT_LAYER,
    qkv=("attention.attn.q", "attention.attn.k", "attention.attn.v"),
    attention_output="attention.attn.o",
    attention_norm="attention.LayerNorm",
    attention_dropout="attention.attn.dropout",
    attention_dropout_is_called=True,
    attention_output_dropout="attention.dropout",
)
_MODERNBERT_LAYER = LayerNames(
    qkv=("attn.Wqkv",),
    attention_output="attn.Wo",
    attention_norm="attn_norm",
    up="mlp.Wi",
    activation="mlp.act",
    down="mlp.Wo",
    output_norm="mlp_norm",
    attention_dropout="attn.attention_dropout",
    attention_output_dropout="attn.out_drop",
    feed_forward_dropout="mlp.drop",
    output_dropout=None,
)

_BERT = Family(model_type="bert", backbone="bert", layers=_all_of("encoder.layer"), layer=_BERT_LAYER,
               replaced=("embeddings", "encoder"), head=_bert_head, first_token_reader="bert.pooler",
               pooled=_pooler)  # fmt: skip
_ROBERTA = replace(_BERT, model_type="roberta", backbone="roberta", positions_follow_padding=True,
                   head=partial(_dense_head, activation=torch.tanh), first_token_reader="classifier")  # fmt: skip
_ELECTRA = replace(_BERT, model_type="electra", backbone="electra", head=partial(_dense_head, activation=gelu),
                   replaced=("embeddings", "embeddings_project", "encoder"), first_token_reader="classifier",
                   embedding_projection="embeddings_project", output="BaseModelOutputWithPastAndCrossAttentions",
                   pooled=None)  # fmt: skip
_DISTILBERT = Family(model_type="distilbert", backbone="distilbert", layers=_all_of("transformer.layer"),
                     layer=_DISTILBERT_LAYER, replaced=("embeddings", "transformer"), head=_distilbert_head,
                     num_heads="n_heads", first_token_reader=None, output="BaseModelOutput")  # fmt: skip
_ALBERT = Family(model_type="albert", backbone="albert", layers=_albert_layers, layer=_ALBERT_LAYER,
                 replaced=("embeddings", "encoder"), head=_albert_head, first_token_reader=None,
                 embedding_projection="encoder.embedding_hidden_mapping_in", output="BaseModelOutputWithPooling",
                 pooled=_albert_pooler)  # fmt: skip
_MPNET = replace(_ROBERTA, model_type="mpnet", backbone="mpnet", layer=_MPNET_LAYER, distance_bias=_mpnet_bias,
                 output="BaseModelOutputWithPooling")  # fmt: skip
_MODERNBERT = Family(model_type="modernbert", backbone="model", layers=_all_of("layers"), layer=_MODERNBERT_LAYER,
                     embeddings=EmbeddingNames(words="tok_embeddings", norm="norm", dropout="drop"),
                     replaced=("embeddings", "layers", "final_norm", "rotary_emb"), head=_modernbert_head,
                     token_head=_modernbert_head,
                     norms_first=True, final_norm="final_norm", gated=True, reaches=_modernbert_reaches,
                     first_token_reader=None, reads_mean=lambda config: config.classifier_pooling == "mean",
                     output="BaseModelOutput", problem_of_config=modernbert_problem)  # fmt: skip

HEADED = ("ForSequenceClassification", "ForTokenClassification", "ForQuestionAnswering")
"""How the names of models end whose heads are known here."""

FAMILIES = {
    family.model_type: family
    for family in (
        _BERT,
        _ROBERTA,
        replace(_ROBERTA, model_type="xlm-roberta"),
        replace(_ROBERTA, model_type="camembert"),
        _ELECTRA,
        _DISTILBERT,
        _ALBERT,
        _MPNET,
        _MODERNBERT,
    )
}
"""`model_type` -> row. MiniLM's checkpoints are of the types bert, roberta and xlm-roberta."""


def find_family(model: Any) -> Family | None:
    """The row of a model with a head, or None when the flat forward would not compute what the model does."""
    return None if why_padded(model) is not None else FAMILIES[model.config.model_type]


def why_padded(model: Any) -> str | None:
    """Why the flat forward would not compute what a model with a head does; None if it would."""
    if not type(model).__name__.endswith(HEADED):
        return f"only models {', '.join(HEADED)} have an unpadded forward"
    return problem_of(model.config)


def problem_of(config: Any) -> str | None:
    """Why no row of the table describes a model of this config; None if one does."""
    family = FAMILIES.get(config.model_type)
    if family is None:
        return f"the flat forward knows no {config.model_type}, but {', '.join(FAMILIES)}"
    return problem_of_config(config) or family.problem_of_config(config)


def find_backbone(model: PreTrainedModel) -> tuple[Any, Family] | None:
    """The encoder in a model with any head or none, and its row; None when it is not one of `FAMILIES`.

    Its forward must be that of transformers itself: neither a subclass nor anybody else has put another in its place.
    """
    from transformers import MODEL_MAPPING

    backbone = model.base_model
    stock = MODEL_MAPPING.get(type(model.config), None)
    if problem_of(model.config) is not None or stock is None or type(backbone).forward is not stock.forward:
        return None
    return backbone, FAMILIES[model.config.model_type]
