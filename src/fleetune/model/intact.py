"""Whether an encoder still is what transformers made: only then may another forward stand for its modules' own.

Adapters, quantization, hooks and patches change what a model computes by changing its modules. They are looked for at
every call, in a walk over the modules that takes well under a millisecond.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
from torch import nn

from fleetune.model.families import Family, part
from fleetune.model.parts import EncoderParts
from fleetune.model.rates import dropouts

_ATTENTION = ("eager", "sdpa")
"""Implementations of attention that compute what ours does, by transformers' names."""
_IDLE = {
    ("transformers.utils.output_capturing", "output_capturing_hook"),
    ("transformers.modeling_utils", "make_inputs_require_grads"),
}
"""Hooks, by module and name, that transformers leaves behind: once it was asked for hidden states, which it then reads
only in calls that ask for them; and with gradient checkpointing, whose older kind needs inputs that have gradients."""
_STOCK = ("torch.nn.modules.", "transformers.models.", "transformers.activations")


def find_problem(backbone: Any, family: Family, parts: EncoderParts) -> str | None:
    """Why the flat forward would not compute what the encoder as it is now does; None if it would."""
    config = backbone.config
    if getattr(config, "is_decoder", False) or getattr(config, "is_causal", False):
        return "its config makes it a decoder"
    if config._attn_implementation not in _ATTENTION:
        return f"its attention is {config._attn_implementation!r}, not one of {', '.join(_ATTENTION)}"
    if torch.nn.modules.module._has_any_global_hook():
        return "there are hooks of all modules"
    for root in (backbone._modules.get(name) for name in family.replaced):
        for module in () if root is None else root.modules():
            problem = _problem_of_module(module) or _problem_of_weights(module)
            if problem is not None:
                return problem
    return _problem_of_parts(backbone, family, parts)


def is_stock(module: nn.Module) -> bool:
    """Whether its class is one of transformers or torch."""
    return type(module).__module__.startswith(_STOCK)


def is_untouched(module: nn.Module) -> bool:
    """Whether nobody looks at what goes through the module, or has changed it."""
    if module._forward_pre_hooks or module._backward_hooks or module._backward_pre_hooks or "forward" in vars(module):
        return False
    return not module._forward_hooks or all(map(_is_idle, module._forward_hooks.values()))


def _is_idle(hook: Any) -> bool:
    return (getattr(hook, "__module__", ""), getattr(hook, "__name__", "")) in _IDLE


def _problem_of_module(module: nn.Module) -> str | None:
    if not is_stock(module):
        return f"{type(module).__module__}.{type(module).__name__} is none of its own modules"
    return None if is_untouched(module) else f"a {type(module).__name__} of it has hooks or another forward"


def _problem_of_weights(module: nn.Module) -> str | None:
    for parameter in module._parameters.values():
        if parameter is None:
            continue
        if type(parameter) is not nn.Parameter or not parameter.is_cpu:
            return f"weights of a {type(module).__name__} are not plain parameters on the CPU"
        if parameter.dtype != torch.float32:
            return (f"its weights are {parameter.dtype}; to compute in bfloat16, keep them in float32 and call "
                    "fleetune.optimize(model, dtype=torch.bfloat16)")  # fmt: skip
    return None


def _problem_of_parts(backbone: Any, family: Family, parts: EncoderParts) -> str | None:
    """What is wrong with a part that is a module of torch, but perhaps not the right one."""
    if not all(map(_is_plain_table, _tables(family, parts))):
        return "an embedding was replaced, or has options"
    if any(type(linear) is not nn.Linear for linear in _linears(parts)):
        return "a linear layer was replaced"
    if not all(map(_is_plain_norm, _norms(family, parts))):
        return "a norm was replaced"
    if not all(isinstance(layer.activation, nn.Module) for layer in parts.layers):
        return "an activation is not a module"
    drops = [module for _, module, _ in dropouts(backbone, family)]
    return None if all(map(_is_plain_dropout, drops)) else "a dropout was replaced, or drops everything"


def _tables(family: Family, parts: EncoderParts) -> list[Any]:
    names, tables = family.embeddings, parts.embeddings._modules
    found = [tables[name] for name in (names.words, names.types, names.positions) if name in tables]
    return found if parts.distance_bias is None else [*found, parts.distance_bias.table]


def _linears(parts: EncoderParts) -> Iterator[nn.Module]:
    for layer in parts.layers:
        yield from layer.linears
    if parts.projection is not None:
        yield parts.projection


def _norms(family: Family, parts: EncoderParts) -> Iterator[Any]:
    yield part(parts.embeddings, family.embeddings.norm)
    for layer in parts.layers:
        if not (family.norms_first and type(layer.attention_norm) is nn.Identity):
            yield layer.attention_norm
        yield layer.output_norm
    if parts.final_norm is not None:
        yield parts.final_norm


def _is_plain_table(table: Any) -> bool:
    return type(table) is nn.Embedding and table.max_norm is None and not table.scale_grad_by_freq


def _is_plain_norm(norm: Any) -> bool:
    return type(norm) is nn.LayerNorm and norm.weight is not None


def _is_plain_dropout(dropout: Any) -> bool:
    """Whether it is a dropout of torch's, or what stands in the place of one: a rate, or nothing."""
    if isinstance(dropout, (int, float)):
        return dropout < 1.0
    return type(dropout) is nn.Identity or (type(dropout) is nn.Dropout and dropout.p < 1.0)
