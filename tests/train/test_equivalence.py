"""However a global batch is shared out over processes and micro-batches, the same model is trained, dropout on.

Tolerances: float32 sums in another order; see docs/numerics.md.
"""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch
import transformers
from safetensors.numpy import load_file

from tests.conftest import Train, losses_of, make_tiny_model, read_json

pytestmark = pytest.mark.slow

SPLITS = {
    "2 x 16": {"processes": 2, "per_device_train_batch_size": 16},
    "4 x 8": {"processes": 4, "per_device_train_batch_size": 8},
    "1 x 8, accumulated 4 times": {"per_device_train_batch_size": 8, "gradient_accumulation_steps": 4},
    "2 x 4, accumulated 4 times": {"processes": 2, "per_device_train_batch_size": 4, "gradient_accumulation_steps": 4},
}


def weights_of(output: Path) -> dict[str, np.ndarray]:
    return load_file(output / "model.safetensors")


@pytest.mark.parametrize("has_dropout", [False, True])
def test_n_processes_equal_one(
    train: Train, tiny_model: Path, tiny_model_with_dropout: Path, has_dropout: bool
) -> None:
    """90 examples in batches of 32: the last global batch of 26 leaves ranks with unequal shares."""
    model = tiny_model_with_dropout if has_dropout else tiny_model
    one = train("one", model=model, per_device_train_batch_size=32)
    assert len(losses_of(one)) == 6
    for name, settings in SPLITS.items():
        other = train(name, model=model, **settings)
        np.testing.assert_allclose(losses_of(other), losses_of(one), rtol=2e-5, err_msg=name)
        for key, expected in weights_of(one).items():
            np.testing.assert_allclose(weights_of(other)[key], expected, rtol=1e-3, atol=2e-5, err_msg=f"{name}: {key}")


def test_three_processes_equal_one(train: Train, tiny_model_with_dropout: Path) -> None:
    """90 examples in batches of 33: the last global batch of 24."""
    one = train("one", model=tiny_model_with_dropout, per_device_train_batch_size=33)
    three = train("three", model=tiny_model_with_dropout, per_device_train_batch_size=11, processes=3)
    np.testing.assert_allclose(losses_of(three), losses_of(one), rtol=2e-5)
    for key, expected in weights_of(one).items():
        np.testing.assert_allclose(weights_of(three)[key], expected, rtol=1e-3, atol=2e-5, err_msg=key)


OTHER_SHAPES = {
    "albert": (transformers.AlbertConfig, transformers.AlbertModel,
               {"embedding_size": 12, "hidden_act": "gelu_new", "num_hidden_layers": 3, "num_hidden_groups": 2,
                "inner_group_num": 2}),
    "mpnet": (transformers.MPNetConfig, transformers.MPNetModel, {"num_hidden_layers": 2}),
    "modernbert": (transformers.ModernBertConfig, transformers.ModernBertModel,
                   {"num_hidden_layers": 3, "local_attention": 6, "embedding_dropout": 0.1, "attention_dropout": 0.1,
                    "mlp_dropout": 0.1, "classifier_pooling": "mean"}),
}  # fmt: skip
"""Shared layers, a bias that all layers share, norms that come first."""


@pytest.mark.parametrize("name", OTHER_SHAPES)
def test_encoders_of_other_shapes_train_the_same_on_two_processes(
    train: Train, tiny_model: Path, tmp_path: Path, name: str
) -> None:
    """A layer that is used several times is of the stage that uses it first: its gradient is whole when it is sent."""
    make_config, make_model, options = OTHER_SHAPES[name]
    tokenizer = transformers.AutoTokenizer.from_pretrained(tiny_model)
    tokenizer.save_pretrained(tmp_path / "model")
    sizes = {"vocab_size": len(tokenizer), "hidden_size": 24, "num_attention_heads": 2, "intermediate_size": 32,
             "max_position_embeddings": 64, "pad_token_id": tokenizer.pad_token_id, "hidden_dropout_prob": 0.1,
             "attention_probs_dropout_prob": 0.1}  # fmt: skip
    if name == "modernbert":
        del sizes["hidden_dropout_prob"], sizes["attention_probs_dropout_prob"]
        sizes |= dict.fromkeys(("bos_token_id", "eos_token_id", "cls_token_id", "sep_token_id"), 1)
    torch.manual_seed(0)
    make_model(make_config(**sizes, **options)).save_pretrained(tmp_path / "model")
    settings = {"model": tmp_path / "model", "max_steps": 4}
    one = train("one", per_device_train_batch_size=32, **settings)
    two = train("two", per_device_train_batch_size=16, processes=2, **settings)
    assert read_json(two / "record.json")["plan"]["unpadded"] is True
    np.testing.assert_allclose(losses_of(two), losses_of(one), rtol=2e-5)
    for key, expected in weights_of(one).items():
        np.testing.assert_allclose(weights_of(two)[key], expected, rtol=1e-3, atol=2e-5, err_msg=key)


def test_a_model_without_a_flat_forward_trains_the_same_on_two_processes(
    train: Train, tmp_path_factory: pytest.TempPathFactory
) -> None:
    """Relative attention: no flat forward, and still a gradient of touched rows."""
    model = make_tiny_model(tmp_path_factory.mktemp("padded") / "model", position_embedding_type="relative_key")
    one = train("one", model=model, per_device_train_batch_size=32)
    two = train("two", model=model, per_device_train_batch_size=16, processes=2)
    assert read_json(two / "record.json")["plan"]["unpadded"] is False
    np.testing.assert_allclose(losses_of(two), losses_of(one), rtol=2e-5)


def test_dropout_is_drawn_anew_in_every_step_and_for_every_seed(train: Train, tiny_model_with_dropout: Path) -> None:
    """At a learning rate of nothing the losses of the same batch differ by dropout alone."""
    still = {"model": tiny_model_with_dropout, "learning_rate": 1e-12, "max_train_samples": 32, "num_train_epochs": 3,
             "per_device_train_batch_size": 32}  # fmt: skip
    first, second, third = losses_of(train("one", **still))
    assert len({first, second, third}) == 3
    assert losses_of(train("other", seed=7, **still))[0] != first


def test_more_ranks_than_examples_in_the_last_batch(train: Train, tmp_path: Path) -> None:
    """Three examples in batches of 2: the last global batch leaves one of two ranks with nothing."""
    one = train("one", per_device_train_batch_size=2, max_train_samples=3)
    two = train("two", processes=2, per_device_train_batch_size=1, max_train_samples=3)
    np.testing.assert_allclose(losses_of(two), losses_of(one), rtol=2e-5)


def test_predictions_do_not_depend_on_the_number_of_processes(train: Train) -> None:
    """25 examples on 3 ranks, and then on more ranks than there are batches."""
    one = train("one", max_steps=2)
    for processes in (3, 4):
        many = train(
            f"{processes}", processes=processes, per_device_train_batch_size=16, max_steps=2, learning_rate=1e-12
        )
        again = train(f"{processes}-one", max_steps=2, learning_rate=1e-12)
        assert (many / "predictions_validation.jsonl").read_text() == (
            again / "predictions_validation.jsonl"
        ).read_text()
    assert read_json(one / "eval_results.json")["eval_samples"] == 25
