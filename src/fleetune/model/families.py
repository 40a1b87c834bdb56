"""Model families as data: where a Hugging Face module keeps the parts that the flat forward needs.

A row names attributes; dotted names reach inside. Families of the same shape differ in these names and in a few
options, so one forward serves them all. A model without a row goes through its own, padded forward.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from operator import attrgetter
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn
from torch.nn.functional import gelu, relu

from fleetune.model.draws import Site

if TYPE_CHECKING:
    from transformers import PreTrainedModel

Drop = Callable[[Tensor, nn.Dropout, Site], Tensor]
"""(x (B, D), the model's dropout module, which dropout of the head it is) -> x, dropped out in training."""


@dataclass(frozen=True, kw_only=True)
class LayerNames:
    """Attributes of one encoder layer."""

    query: str
    key: str
    value: str
    attention_output: str
    attention_norm: str
    up: str
    activation: str
    down: str
    output_norm: str
    attention_dropout: str
    """Dropout module of the probabilities of attention."""
    attention_output_dropout: str | None
    """Dropout module of what `attention_output` gives; None where the layer has none."""
    output_dropout: str
    """Dropout module of what `down` gives."""


@dataclass(frozen=True, kw_only=True)
class Family:
    """One row of the table: a `model_type` of transformers and the places of its parts."""

    model_type: str
    backbone: str
    """Attribute of the classification model that holds the encoder without its head."""
    layers: str
    layer: LayerNames
    head: Callable[[Any, Tensor, Drop], Tensor]
    """(classification model, last hidden state of the first tokens (B, D), dropout) -> logits (B, C)."""
    num_heads: str = "num_attention_heads"
    """Option of the model's config that counts the heads."""
    positions_follow_padding: bool = False
    """Positions count from the padding token's id + 1, as in fairseq."""
    embedding_projection: str | None = None
    """Linear layer from a narrower embedding to the hidden width, where the model has one."""
    first_token_reader: str | None = "classifier"
    """Module of the classification model that is given the hidden state and reads the first token; None where the
    model's own forward takes that out of it."""


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


_BERT_LAYER = LayerNames(
    query="attention.self.query",
    key="attention.self.key",
    value="attention.self.value",
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
    query="attention.q_lin",
    key="attention.k_lin",
    value="attention.v_lin",
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


def _roberta(model_type: str) -> Family:
    return Family(model_type=model_type, backbone="roberta", layers="encoder.layer", layer=_BERT_LAYER,
                  head=partial(_dense_head, activation=torch.tanh), positions_follow_padding=True)  # fmt: skip


_ELECTRA = Family(model_type="electra", backbone="electra", layers="encoder.layer", layer=_BERT_LAYER,
                  head=partial(_dense_head, activation=gelu), embedding_projection="embeddings_project")  # fmt: skip
_DISTILBERT = Family(model_type="distilbert", backbone="distilbert", layers="transformer.layer",
                     layer=_DISTILBERT_LAYER, head=_distilbert_head, num_heads="n_heads",
                     first_token_reader=None)  # fmt: skip
_BERT = Family(model_type="bert", backbone="bert", layers="encoder.layer", layer=_BERT_LAYER, head=_bert_head,
               first_token_reader="bert.pooler")  # fmt: skip

FAMILIES = {
    family.model_type: family
    for family in (
        _BERT,
        _roberta("roberta"),
        _roberta("xlm-roberta"),
        _roberta("camembert"),
        _ELECTRA,
        _DISTILBERT,
    )
}
"""`model_type` -> row."""


def find_family(model: Any) -> Family | None:
    """The row of a classification model, or None when the flat forward would not compute what the model does."""
    if not type(model).__name__.endswith("ForSequenceClassification"):
        return None
    return _family_of(model.config)


def find_backbone(model: PreTrainedModel) -> tuple[Any, Family] | None:
    """The encoder in a model with any head or none, and its row; None when it is not one of `FAMILIES`.

    Its forward must be that of transformers itself: neither a subclass nor anybody else has put another in its place.
    """
    from transformers import MODEL_MAPPING

    family, backbone = _family_of(model.config), model.base_model
    stock = MODEL_MAPPING.get(type(model.config), None)
    if family is None or stock is None or type(backbone).forward is not stock.forward:
        return None
    return backbone, family


def _family_of(config: Any) -> Family | None:
    """The row of a config, unless it has options that change the arithmetic."""
    family = FAMILIES.get(config.model_type)
    options = config.to_dict()
    unusual = options.get("is_decoder") or options.get("add_cross_attention")
    relative = options.get("position_embedding_type", "absolute") not in ("absolute", None)
    return None if unusual or relative else family
