"""`Adapter`: low-rank updates (LoRA) of an encoder's linear layers, beside the model and not in it.

The Hugging Face model stays as it is, frozen: the flat forward adds the updates where it computes a layer.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from fleetune.config import RunConfig
from fleetune.config.values import nearest
from fleetune.errors import ConfigError
from fleetune.kernels.low_rank import LowRankUpdate
from fleetune.model.draws import Place, Site
from fleetune.model.parts import EncoderParts

DEFAULT_ALPHA = 8.0
"""As in peft."""
ALL_LINEAR = "all-linear"
_SITES = (Site.LORA_QKV, Site.LORA_ATTENTION_OUTPUT, Site.LORA_UP, Site.LORA_DOWN)


@dataclass(frozen=True, kw_only=True)
class LoraSettings:
    """What low-rank updates are like, by peft's names."""

    r: int
    alpha: float
    dropout: float
    target_modules: tuple[str, ...] | None
    """Ends of names, `all-linear`, or None: queries and values (Hu et al. 2021)."""

    @classmethod
    def of(cls, config: RunConfig) -> LoraSettings:
        """Those of a run that asks for them."""
        assert config.lora_r is not None
        alpha = DEFAULT_ALPHA if config.lora_alpha is None else config.lora_alpha
        return cls(r=config.lora_r, alpha=alpha, dropout=config.lora_dropout, target_modules=config.lora_target_modules)


class Adapter(nn.Module):
    """Low-rank updates of some linear layers of a model.

    Args:
        layers: The layers, by their names in the model.
        settings: Of all updates. Their first factors are drawn by torch's generator as those of `nn.Linear` are, in the
            order of the layers; the second ones are 0, so that nothing is changed at first.
    """

    def __init__(self, layers: Mapping[str, nn.Linear], settings: LoraSettings) -> None:
        super().__init__()
        self.settings = settings
        self.lora_A = nn.ParameterList()
        self.lora_B = nn.ParameterList()
        self._layers = dict(layers)
        self._updates: dict[nn.Module, LowRankUpdate] = {}
        for layer in layers.values():
            down_rI = nn.Parameter(torch.empty(settings.r, layer.in_features))
            up_or = nn.Parameter(torch.zeros(layer.out_features, settings.r))
            nn.init.kaiming_uniform_(down_rI, a=math.sqrt(5))
            self.lora_A.append(down_rI)
            self.lora_B.append(up_or)
            self._updates[layer] = LowRankUpdate(down=down_rI, up=up_or, scale=settings.alpha / settings.r)

    def of(self, layer: nn.Module) -> LowRankUpdate | None:
        """The update of a layer, if it has one."""
        return self._updates.get(layer)

    def by_name(self) -> dict[str, LowRankUpdate]:
        """The updates by the names of their layers in the model."""
        return {name: self._updates[layer] for name, layer in self._layers.items()}

    def dropout_rates(self, num_layers: int) -> dict[Place, float]:
        """The rates of dropout of what updates read, in training."""
        if not self.training or self.settings.dropout == 0.0:
            return {}
        return {(number, site): self.settings.dropout for number in range(1, num_layers + 1) for site in _SITES}

    @torch.no_grad()
    def merged_weights(self) -> dict[str, Tensor]:
        """The weights of the layers with their updates added, by the weights' names in the model."""
        return {
            f"{name}.weight": self._layers[name].weight + update.scale * (update.up @ update.down)
            for name, update in self.by_name().items()
        }


def make_adapter(model: Any, parts: EncoderParts, settings: LoraSettings) -> Adapter:
    """New updates of the layers that the settings mean.

    Args:
        model: The model with its head.
        parts: Of its encoder.
        settings: Name the layers.

    Raises:
        ConfigError: A name is that of no linear layer of the encoder; names those there are.
    """
    names = {module: name for name, module in model.named_modules()}
    linears = {names[module]: module for layer in parts.layers for module in layer.linears}
    chosen = _chosen(parts, names, linears, settings.target_modules)
    return Adapter({name: linears[name] for name in linears if name in chosen}, settings)


def _chosen(
    parts: EncoderParts, names: Mapping[nn.Module, str], linears: Iterable[str], targets: tuple[str, ...] | None
) -> set[str]:
    """Names of the layers that are meant."""
    if targets is None:
        return {names[module] for layer in parts.layers for module in _queries_and_values(layer.qkv)}
    if targets == (ALL_LINEAR,):
        return set(linears)
    chosen: set[str] = set()
    for target in targets:
        found = {name for name in linears if ends_with(name, target)}
        if not found:
            known = endings(parts)
            raise ConfigError(
                f"--lora_target_modules {target}: no linear layer of the encoder's layers is called so; there are "
                f"{', '.join(known)}, or {ALL_LINEAR} alone{nearest(target, known)}"
            )
        chosen |= found
    return chosen


def _queries_and_values(qkv: tuple[nn.Linear, ...]) -> tuple[nn.Linear, ...]:
    """Or the one layer that gives keys, too."""
    return (qkv[0], qkv[-1]) if len(qkv) > 1 else qkv


def endings(parts: EncoderParts) -> list[str]:
    """What the linear layers of a layer are called in it."""
    names = parts.family.layer
    return [*names.qkv, names.attention_output, names.up, names.down]


def ends_with(name: str, target: str) -> bool:
    """Whether a module's name is a target, or ends with it, as peft reads lists of targets."""
    return name == target or name.endswith(f".{target}")
