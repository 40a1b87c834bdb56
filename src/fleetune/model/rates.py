"""The dropouts of an encoder, as its own modules have them at this moment."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from torch import nn

from fleetune.model.draws import Place, Site
from fleetune.model.families import Family, part


def dropouts(backbone: Any, family: Family) -> Iterator[tuple[Place, nn.Module | None, nn.Module]]:
    """Every dropout of the encoder: its place, its module, and the module that says whether this is training."""
    names = family.layer
    yield (0, Site.EMBEDDINGS), backbone.embeddings.dropout, backbone.embeddings.dropout
    for number, layer in enumerate(part(backbone, family.layers), start=1):
        # The probabilities are dropped by a function, at the rate of the module, when the module around it is training.
        around = part(layer, names.attention_dropout.rpartition(".")[0])
        yield (number, Site.ATTENTION), part(layer, names.attention_dropout), around
        name = names.attention_output_dropout
        module = None if name is None else part(layer, name)
        yield (number, Site.ATTENTION_OUTPUT), module, layer if module is None else module
        output = part(layer, names.output_dropout)
        yield (number, Site.OUTPUT), output, output


def dropout_rates(backbone: Any, family: Family) -> dict[Place, float]:
    """The rate of every dropout of the encoder, as its own forward would use it now."""
    return {
        place: module.p if isinstance(module, nn.Dropout) and says.training else 0.0
        for place, module, says in dropouts(backbone, family)
    }
