"""Which fused kernel stands for an activation module of transformers."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

from torch import Tensor, nn
from transformers.activations import FastGELUActivation, GELUActivation, GELUTanh, NewGELUActivation

from fleetune.kernels.activation import ERF, TANH, gelu

_KINDS: dict[type[nn.Module], int] = {
    nn.GELU: ERF,
    GELUActivation: ERF,
    NewGELUActivation: TANH,
    FastGELUActivation: TANH,
    GELUTanh: TANH,
}


def fused_activation(module: nn.Module) -> Callable[[Tensor], Tensor]:
    """The kernel that computes what the module does, or the module itself."""
    kind = _KINDS.get(type(module))
    if kind == ERF and getattr(module, "approximate", "none") == "tanh":
        kind = TANH
    return module if kind is None else partial(gelu, kind=kind)
