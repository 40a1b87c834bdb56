"""The modules that the flat forward computes with, found by the names that a row of the table of families gives."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from fleetune.model.activations import gelu_kind
from fleetune.model.families import Family, LayerNames, part
from fleetune.model.places import EVERYWHERE, DistanceBias, Reach


@dataclass(frozen=True, kw_only=True)
class LayerParts:
    """The modules of one encoder layer."""

    qkv: tuple[nn.Linear, ...]
    """Of queries, keys and values, or the one that gives all of them."""
    attention_output: nn.Linear
    attention_norm: nn.LayerNorm | nn.Identity
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
        others = {field: part(layer, getattr(names, field)) for field in cls.__dataclass_fields__ if field != "qkv"}
        return cls(qkv=tuple(part(layer, name) for name in names.qkv), **others)

    @property
    def linears(self) -> tuple[nn.Linear, ...]:
        """In the order of forward."""
        return *self.qkv, self.attention_output, self.up, self.down

    def is_one_operation(self, x_TD: Tensor) -> bool:
        """Whether the layer can be computed as one: with GELU and all biases, and all gradients wanted, or none.

        It is one with its norms behind, and whose attention knows of no places.
        """
        modules = *self.linears, self.attention_norm, self.output_norm
        parameters = [p for module in modules for p in (module.weight, module.bias)]
        if gelu_kind(self.activation) is None or any(p is None for p in parameters):
            return False
        wants = [x_TD.requires_grad, *(p.requires_grad for p in parameters)]
        return not torch.is_grad_enabled() or all(wants) or not any(wants)


@dataclass(frozen=True, kw_only=True)
class EncoderParts:
    """The modules of an encoder, and the options that its arithmetic depends on.

    A plain object beside the model, not a module of its own: the model stays the one owner of its parameters.
    """

    family: Family
    embeddings: Any
    projection: nn.Linear | None
    modules: tuple[nn.Module, ...]
    """The layers as the model has them: they know whether they are to be computed again in backward."""
    layers: tuple[LayerParts, ...]
    reaches: tuple[Reach, ...]
    """What each layer's attention knows of places."""
    distance_bias: DistanceBias | None
    final_norm: nn.LayerNorm | None
    num_heads: int
    position_offset: int
    """Added to positions, where they count from the padding token's id + 1."""

    @classmethod
    def of(cls, backbone: Any, family: Family) -> EncoderParts:
        """The parts.

        Raises:
            AttributeError: The encoder lacks one.
        """
        modules = family.layers(backbone)
        return cls(
            family=family,
            embeddings=backbone.embeddings,
            projection=_projection(backbone, family),
            modules=modules,
            layers=tuple(LayerParts.of(layer, family.layer) for layer in modules),
            reaches=(EVERYWHERE,) * len(modules) if family.reaches is None else family.reaches(backbone),
            distance_bias=None if family.distance_bias is None else family.distance_bias(backbone),
            final_norm=None if family.final_norm is None else part(backbone, family.final_norm),
            num_heads=getattr(backbone.config, family.num_heads),
            position_offset=backbone.embeddings.padding_idx + 1 if family.positions_follow_padding else 0,
        )

    @property
    def head_width(self) -> int:
        return self.layers[0].attention_output.in_features // self.num_heads

    def knows_places(self, number: int) -> bool:
        """Whether what a token attends to in layer `number`, from 1, depends on where it and the others are."""
        return self.distance_bias is not None or self.reaches[number - 1] != EVERYWHERE

    @property
    def has_windows(self) -> bool:
        """Whether a layer's attention is local."""
        return any(reach.window for reach in self.reaches)

    @property
    def counts_tokens(self) -> bool:
        """Whether attention counts how many tokens are in between: none of a sequence may be left out."""
        return self.distance_bias is not None or self.has_windows

    @property
    def stages(self) -> list[list[nn.Module]]:
        """The modules in the order in which forward comes to them: embeddings, and each layer."""
        bias = None if self.distance_bias is None else self.distance_bias.table
        before = [module for module in (self.embeddings, self.projection, bias) if module is not None]
        after = [] if self.final_norm is None else [self.final_norm]
        *others, last = ([module] for module in self.modules)
        return [before, *others, last + after]


def _projection(backbone: Any, family: Family) -> Any:
    """The layer behind narrower embeddings; None where there is none, or they are not narrower."""
    around, _, name = (family.embedding_projection or "").rpartition(".")
    return backbone.get_submodule(around)._modules.get(name)
