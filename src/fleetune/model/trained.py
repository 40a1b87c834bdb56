"""What of a model learns: what is frozen, low-rank updates in place of weights, and how fast each stage learns."""

from __future__ import annotations

import warnings
from collections.abc import Iterable

import torch
from torch import nn

from fleetune.config import RunConfig
from fleetune.config.tuning import Frozen, parse_frozen
from fleetune.errors import ConfigError
from fleetune.model.adapter import LoraSettings, make_adapter
from fleetune.model.flat import FlatClassifier
from fleetune.model.load import Classifier
from fleetune.model.parts import EncoderParts


def choose_trained(classifier: Classifier, config: RunConfig) -> list[str]:
    """Freeze what is not to learn, add low-rank updates, and have layers computed again in backward, as asked for.

    Args:
        classifier: It is changed; all of its parameters learn so far.
        config: The settings; the seed decides what updates begin with.

    Returns:
        A line for each thing that was done.

    Raises:
        ConfigError: The model cannot do so, with the setting's name.
    """
    lines = []
    if config.lora_r is not None:
        torch.manual_seed(config.seed)
        lines.append(_add_adapter(_flat(classifier, "--lora_r"), LoraSettings.of(config)))
    elif config.freeze is not None:
        module = _flat(classifier, "--freeze")
        freeze(module.parts, parse_frozen(config.freeze))
    if lines or config.freeze is not None:
        lines.append(_counts(classifier.module.parameters()))
    if config.gradient_checkpointing:
        _recompute(classifier)
    return lines


def _flat(classifier: Classifier, flag: str) -> FlatClassifier:
    """The module, whose encoder's parts are known."""
    if not isinstance(classifier.module, FlatClassifier):
        kind = classifier.hugging_face.config.model_type
        raise ConfigError(f"{flag}: the parts of a {kind} are not known here: it has no unpadded forward")
    return classifier.module


def freeze(parts: EncoderParts, frozen: Frozen) -> None:
    """Let parts of an encoder not learn.

    Raises:
        ConfigError: There are fewer layers, or these share their weights with others.
    """
    embeddings, *layers = parts.stages
    if frozen.num_layers > len(layers):
        raise ConfigError(f"--freeze layers:{frozen.num_layers}: the encoder has {len(layers)} layers")
    lower, upper = set(parts.modules[: frozen.num_layers]), set(parts.modules[frozen.num_layers :])
    if lower & upper:
        raise ConfigError(f"--freeze layers:{frozen.num_layers}: the lowest layers share their weights with others: "
                          f"{_num_shared(parts)} must be frozen together")  # fmt: skip
    for module in (*(embeddings if frozen.embeddings else ()), *lower):
        module.requires_grad_(False)


def _num_shared(parts: EncoderParts) -> str:
    """Up to which layers weights are shared with none above them."""
    last_use = {module: number for number, module in enumerate(parts.modules, start=1)}
    ends, reach = [], 0
    for number, module in enumerate(parts.modules, start=1):
        reach = max(reach, last_use[module])
        if reach == number:
            ends.append(str(number))
    return " or ".join(ends) + " layers"


def _add_adapter(module: FlatClassifier, settings: LoraSettings) -> str:
    """Freeze the encoder, and give it low-rank updates."""
    adapter = make_adapter(module.model, module.parts, settings)
    head = set(module.stages[-1])
    for parameter in module.parameters():
        parameter.requires_grad_(parameter in head)
    module.adapt(adapter)
    names = sorted({name.rpartition(".")[2] for name in adapter.by_name()})
    return f"low-rank updates of {len(adapter.by_name())} linear layers: {', '.join(names)}"


def _counts(parameters: Iterable[nn.Parameter]) -> str:
    """How many numbers learn."""
    sizes = {p: p.numel() for p in parameters}
    trained, total = sum(n for p, n in sizes.items() if p.requires_grad), sum(sizes.values())
    return f"{trained:,} of {total:,} parameters learn ({trained / total:.2%})"


def _recompute(classifier: Classifier) -> None:
    """Have each layer computed again in backward."""
    if isinstance(classifier.module, FlatClassifier):
        classifier.module.recompute_layers()
        return
    model = classifier.hugging_face
    if not model.supports_gradient_checkpointing:
        raise ConfigError(f"--gradient_checkpointing: {type(model).__name__} of transformers cannot do so")
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", FutureWarning)  # the name of transformers 5, which goes in 6
        model.gradient_checkpointing_enable({"use_reentrant": False})


def learning_rates(classifier: Classifier, decay: float) -> dict[nn.Parameter, float]:
    """Factor of the learning rate of each parameter: 1 for the head, less by `decay` from each stage to the one below.

    That is layer-wise decay (Howard and Ruder 2018; Clark et al. 2020).

    Raises:
        ConfigError: The stages are not known, or layers share their weights.
    """
    if decay == 1.0:
        return {}
    module = _flat(classifier, "--layerwise_lr_decay")
    if len(set(module.parts.modules)) < len(module.parts.modules):
        raise ConfigError(f"--layerwise_lr_decay {decay:g}: the layers of a {module.model.config.model_type} share "
                          "their weights: they have one learning rate")  # fmt: skip
    stages = module.stages
    return {p: decay ** (len(stages) - 1 - number) for number, stage in enumerate(stages) for p in stage}
