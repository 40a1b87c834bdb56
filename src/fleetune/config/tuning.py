"""Settings that say what of a model learns and what its loss is: two small grammars, and what cannot be together."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Literal

if TYPE_CHECKING:
    from fleetune.config.run import RunConfig

WITH_CLASSES = ("classification", "token_classification")
"""Kinds of task whose label is one class: only these can be smoothed and weighted."""
_LORA_SETTINGS = ("lora_alpha", "lora_dropout", "lora_target_modules", "lora_merge")


@dataclass(frozen=True, kw_only=True)
class Frozen:
    """What does not learn."""

    embeddings: bool = False
    num_layers: int = 0
    """So many layers, the lowest ones."""


def parse_frozen(words: tuple[str, ...] | None) -> Frozen:
    """The value of `--freeze`.

    Raises:
        ValueError: Says what is expected.
    """
    embeddings, counts = False, []
    for word in words or ():
        name, _, count = word.partition(":")
        if word == "embeddings":
            embeddings = True
        elif name == "layers" and count.isdecimal() and int(count) > 0:
            counts.append(int(count))
        else:
            raise ValueError(f"{word!r} is neither `embeddings` nor `layers:N`, N being how many of the lowest layers")
    if len(counts) > 1:
        raise ValueError("layers are counted twice: give one layers:N")
    return Frozen(embeddings=embeddings, num_layers=sum(counts))


def parse_class_weights(words: tuple[str, ...] | None) -> tuple[float, ...] | Literal["balanced"] | None:
    """The value of `--class_weights`: weights in the order of the task's labels, or that they are to be worked out.

    Raises:
        ValueError: Says what is expected.
    """
    if words is None:
        return None
    if words == ("balanced",):
        return "balanced"
    try:
        weights = tuple(float(word) for word in words)
    except ValueError:
        raise ValueError("`balanced` is expected, or a number for each label, separated by commas") from None
    if not all(math.isfinite(weight) and weight >= 0 for weight in weights) or not any(weights):
        raise ValueError("weights are numbers from 0 on, not all of them 0")
    return weights


def objective_problem(config: RunConfig, problem: str) -> str | None:
    """Why a kind of task has no such loss as the settings ask for; None if it has."""
    asked = []
    if config.label_smoothing_factor > 0.0:
        asked.append(f"--label_smoothing_factor {config.label_smoothing_factor:g}")
    if config.class_weights is not None:
        asked.append(f"--class_weights {','.join(config.class_weights)}")
    if not asked or problem in WITH_CLASSES:
        return None
    kinds = " and ".join(WITH_CLASSES)
    return f"{', '.join(asked)}: for {kinds}; the labels of {problem} are not classes of which one is right"


def tuning_problems(config: RunConfig) -> list[str]:
    """Values that cannot be read, and settings that are fine alone but not together."""
    return [
        *_unreadable("freeze", config.freeze, parse_frozen),
        *_unreadable("class_weights", config.class_weights, parse_class_weights),
        *_lora_problems(config),
        *_early_stopping_problems(config),
    ]


def _unreadable(name: str, words: tuple[str, ...] | None, parse: Callable[[tuple[str, ...] | None], Any]) -> list[str]:
    try:
        parse(words)
    except ValueError as error:
        return [f"--{name} {','.join(words or ())}: {error}"]
    return []


def _lora_problems(config: RunConfig) -> list[str]:
    if config.lora_r is None:
        given = [f"--{name} {getattr(config, name)}" for name in _LORA_SETTINGS if getattr(config, name)]
        return [f"{', '.join(given)}: there is no adapter without --lora_r, for example --lora_r 8"] if given else []
    if config.freeze is not None:
        frozen = ",".join(config.freeze)
        return [f"--lora_r {config.lora_r} freezes all of the encoder, --freeze {frozen} a part: give one of the two"]
    return []


def _early_stopping_problems(config: RunConfig) -> list[str]:
    if config.early_stopping_patience is None:
        threshold = config.early_stopping_threshold
        return [f"--early_stopping_threshold {threshold:g} needs --early_stopping_patience"] if threshold else []
    if not config.do_eval or config.eval_strategy == "no":
        return ["--early_stopping_patience needs evaluations during training: set --eval_strategy to epoch or steps"]
    return []
