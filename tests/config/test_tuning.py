"""What is frozen and how classes weigh, as they are written; and settings that cannot be together."""

from __future__ import annotations

from typing import Any

import pytest

from fleetune.config import RunConfig
from fleetune.config.tuning import Frozen, objective_problem, parse_class_weights, parse_frozen
from fleetune.errors import ConfigError


def _config(**settings: Any) -> RunConfig:
    return RunConfig(**settings)


def test_what_is_frozen() -> None:
    assert parse_frozen(None) == Frozen()
    assert parse_frozen(("embeddings",)) == Frozen(embeddings=True)
    assert parse_frozen(_config(freeze="embeddings, layers:4").freeze) == Frozen(embeddings=True, num_layers=4)


def test_class_weights() -> None:
    assert parse_class_weights(None) is None
    assert parse_class_weights(("balanced",)) == "balanced"
    assert parse_class_weights(_config(class_weights="0.5,2,0").class_weights) == (0.5, 2.0, 0.0)


@pytest.mark.parametrize(
    ("settings", "problem"),
    [
        ({"freeze": "layers"}, "--freeze layers: 'layers' is neither `embeddings` nor `layers:N`"),
        ({"freeze": "layers:0"}, "'layers:0' is neither"),
        ({"freeze": "layers:2,layers:3"}, "layers are counted twice"),
        ({"class_weights": "some"}, "--class_weights some: `balanced` is expected, or a number for each label"),
        ({"class_weights": "1,-1"}, "weights are numbers from 0 on"),
        ({"class_weights": "0,0"}, "not all of them 0"),
        ({"class_weights": "1,nan"}, "weights are numbers from 0 on"),
        ({"lora_alpha": 16}, "--lora_alpha 16.0: there is no adapter without --lora_r"),
        ({"lora_dropout": 0.1, "lora_merge": True}, "--lora_dropout 0.1, --lora_merge True: there is no adapter"),
        ({"lora_r": 8, "freeze": "embeddings"}, "--lora_r 8 freezes all of the encoder, --freeze embeddings a part"),
        ({"lora_r": 0}, "--lora_r 0: a value at least 1 is expected"),
        ({"early_stopping_threshold": 0.1}, "--early_stopping_threshold 0.1 needs --early_stopping_patience"),
        ({"early_stopping_patience": 2, "eval_strategy": "no"}, "--early_stopping_patience needs evaluations"),
        ({"early_stopping_patience": 2, "do_eval": False}, "--early_stopping_patience needs evaluations"),
        ({"label_smoothing_factor": 1.0}, "--label_smoothing_factor 1.0: a value below 1 is expected"),
        ({"layerwise_lr_decay": 0.0}, "--layerwise_lr_decay 0.0: a value above 0 is expected"),
    ],
    ids=str,
)
def test_what_cannot_be_is_refused_by_name(settings: dict[str, Any], problem: str) -> None:
    with pytest.raises(ConfigError) as error:
        RunConfig(**settings)
    assert problem in str(error.value)


def test_losses_of_kinds_of_task() -> None:
    smoothed = RunConfig(label_smoothing_factor=0.1)
    assert objective_problem(smoothed, "classification") is None
    assert objective_problem(smoothed, "token_classification") is None
    assert objective_problem(RunConfig(), "regression") is None
    told = objective_problem(smoothed, "regression")
    assert told is not None
    assert told.startswith("--label_smoothing_factor 0.1: for classification and token_classification")
