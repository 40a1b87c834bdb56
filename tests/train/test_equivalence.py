"""However a global batch is shared out over processes and micro-batches, the same model is trained, dropout on.

Tolerances: float32 sums in another order; see docs/numerics.md.
"""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
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
