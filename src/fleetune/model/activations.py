"""Which fused kernel stands for an activation module of transformers."""

from __future__ import annotations

from torch import Tensor, nn
from transformers.activations import FastGELUActivation, GELUActivation, GELUTanh, NewGELUActivation

from fleetune.kernels.activation import ERF, TANH, geglu, gelu, gelu_linear
from fleetune.kernels.linear import linear

_KINDS: dict[type[nn.Module], int] = {
    nn.GELU: ERF,
    GELUActivation: ERF,
    NewGELUActivation: TANH,
    FastGELUActivation: TANH,
    GELUTanh: TANH,
}


def gelu_kind(activation: nn.Module) -> int | None:
    """Which GELU an activation is; None for another function."""
    kind = _KINDS.get(type(activation))
    return TANH if kind is not None and getattr(activation, "approximate", "none") == "tanh" else kind


def activated(x_RF: Tensor, activation: nn.Module) -> Tensor:
    """The activation of the input, through the fused kernel where there is one."""
    kind = gelu_kind(activation)
    y_RF: Tensor = activation(x_RF) if kind is None else gelu(x_RF, kind)
    return y_RF


def activated_linear(x_RF: Tensor, activation: nn.Module, layer: nn.Linear) -> Tensor:
    """The layer's result for the activated input, through the fused kernel where there is one for the activation."""
    kind = gelu_kind(activation)
    return linear(activation(x_RF), layer) if kind is None else gelu_linear(x_RF, layer, kind)


def gated(x_RG: Tensor, activation: nn.Module) -> Tensor:
    """The activation of the first half of the columns times the second (Shazeer 2020): (R, 2 F) to (R, F)."""
    kind = gelu_kind(activation)
    if kind is not None:
        return geglu(x_RG, kind)
    first_RF, second_RF = x_RG.chunk(2, dim=1)
    y_RF: Tensor = activation(first_RF) * second_RF
    return y_RF
