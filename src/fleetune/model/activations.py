"""Which fused kernel stands for an activation module of transformers."""

from __future__ import annotations

from torch import Tensor, nn
from transformers.activations import FastGELUActivation, GELUActivation, GELUTanh, NewGELUActivation

from fleetune.kernels.activation import ERF, TANH, gelu_linear
from fleetune.kernels.linear import linear

_KINDS: dict[type[nn.Module], int] = {
    nn.GELU: ERF,
    GELUActivation: ERF,
    NewGELUActivation: TANH,
    FastGELUActivation: TANH,
    GELUTanh: TANH,
}


def activated_linear(x_RF: Tensor, activation: nn.Module, layer: nn.Linear) -> Tensor:
    """The layer's result for the activated input, through the fused kernel where there is one for the activation."""
    kind = _KINDS.get(type(activation))
    if kind is None:
        return linear(activation(x_RF), layer)
    return gelu_linear(x_RF, layer, TANH if getattr(activation, "approximate", "none") == "tanh" else kind)
