"""The dropouts of an encoder, as its own modules have them at this moment."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from torch import nn

from fleetune.model.draws import Place, Site
from fleetune.model.families import Family, part


def dropouts(backbone: Any, family: Family) -> Iterator[tuple[Place, Any, nn.Module]]:
    """Every dropout of the encoder: its place, its module or rate, and what says whether this is training."""
    names = family.layer
    embeddings = part(backbone.embeddings, family.embeddings.dropout)
    yield (0, Site.EMBEDDINGS), embeddings, embeddings
    for number, layer in enumerate(family.layers(backbone), start=1):
        probabilities = part(layer, names.attention_dropout)
        around = part(layer, names.attention_dropout.rpartition(".")[0])
        yield (number, Site.ATTENTION), probabilities, probabilities if names.attention_dropout_is_called else around
        for site, name in (
            (Site.ATTENTION_OUTPUT, names.attention_output_dropout),
            (Site.FEED_FORWARD, names.feed_forward_dropout),
            (Site.OUTPUT, names.output_dropout),
        ):
            if name is not None:
                module = part(layer, name)
                yield (number, site), module, module


def dropout_rates(backbone: Any, family: Family) -> dict[Place, float]:
    """The rate of every dropout of the encoder, as its own forward would use it now."""
    return {place: _rate_of(dropout) if says.training else 0.0 for place, dropout, says in dropouts(backbone, family)}


def _rate_of(dropout: Any) -> float:
    """Of a module, or of what its place has in the stead of one: the rate itself, or an `nn.Identity`."""
    if isinstance(dropout, nn.Dropout):
        return dropout.p
    return float(dropout) if isinstance(dropout, (int, float)) else 0.0
