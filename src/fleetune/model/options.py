"""Options of Hugging Face configs that change a model's arithmetic, and that the flat forward does not know.

Whatever is not named here is either computed, or has no part in the arithmetic on a CPU.
"""

from __future__ import annotations

from typing import Any

_DECODER = ("is_decoder", "add_cross_attention", "is_causal")
_ACTIVATIONS = ("hidden_act", "hidden_activation", "activation")
"""What configs call the activation of the feed-forward."""
_WITH_PARAMETERS = ("prelu", "xielu")
"""Activations that learn: their parameters are float32 whatever the hidden states are."""
_REACHES = ("full_attention", "sliding_attention")
_CHANGING_ROTATIONS = ("dynamic", "longrope")
"""Kinds of rotary embeddings whose frequencies change with the longest sequence of a batch."""


def problem_of_config(config: Any) -> str | None:
    """The option of any model that is not known, with its value and what it means; None: all are known."""
    options = config.to_dict()
    for name in _DECODER:
        if options.get(name):
            return f"{name}={options[name]} makes it a decoder"
    if options.get("position_embedding_type", "absolute") not in ("absolute", None):
        return f"position_embedding_type={options['position_embedding_type']!r}: only 'absolute' is computed"
    for name in _ACTIVATIONS:
        if options.get(name) in _WITH_PARAMETERS:
            return f"{name}={options[name]!r}: an activation with parameters of its own"
    return None


def modernbert_problem(config: Any) -> str | None:
    """The same for options that only ModernBERT has."""
    unknown = sorted(set(config.layer_types) - set(_REACHES))
    if unknown:
        return f"layer_types={unknown}: only {' and '.join(_REACHES)} are computed"
    if "sliding_attention" in config.layer_types and config.local_attention < 2:
        return f"local_attention={config.local_attention}: a window of the token alone"
    for kind in sorted(set(config.layer_types)):
        rope = config.rope_parameters[kind]["rope_type"]
        if rope in _CHANGING_ROTATIONS:
            return f"rope_type={rope!r} of {kind}: its frequencies change with the length of a batch"
    return None
