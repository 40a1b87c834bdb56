"""What is frozen has no gradients and costs no products; stages learn at their rates; recomputed layers are exact."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import transformers
from torch import Tensor, nn

from fleetune.config import RunConfig
from fleetune.errors import ConfigError
from fleetune.kernels import activation
from fleetune.kernels import linear as linear_module
from fleetune.kernels.library import raw_ops
from fleetune.model.families import FAMILIES, find_family
from fleetune.model.flat import FlatClassifier
from fleetune.model.load import Classifier
from fleetune.model.trained import choose_trained, learning_rates
from tests.model.test_adapter import batch_for, model_of
from tests.model.test_flat import LENGTHS, padded_logits
from tests.model.test_heads import CONFIGS

DROPOUT: dict[str, Any] = {"hidden_dropout_prob": 0.2, "attention_probs_dropout_prob": 0.2}
FROM_ONE = [name for name in CONFIGS if name != "albert"]


@pytest.fixture(autouse=True)
def _same_draws_every_time() -> None:
    torch.manual_seed(0)


def classifier_of(model: Any) -> Classifier:
    family = find_family(model)
    assert family is not None
    return Classifier(module=FlatClassifier(model, family).train(), labels=None, notices=())


def gradients(model: nn.Module, logits: Tensor) -> dict[str, Tensor]:
    model.zero_grad()
    logits.square().sum().backward()
    return {name: p.grad.clone() for name, p in model.named_parameters() if p.grad is not None}


@pytest.mark.parametrize("frozen", ["embeddings", "layers:2", "embeddings,layers:1", "embeddings,layers:3"])
@pytest.mark.parametrize("name", FROM_ONE)
def test_gradients_of_the_others_equal_those_of_transformers(name: str, frozen: str) -> None:
    model = model_of(name)
    classifier, batch = classifier_of(model), batch_for(model)
    lines = choose_trained(classifier, RunConfig(freeze=tuple(frozen.split(","))))
    stuck = {key for key, p in model.named_parameters() if not p.requires_grad}
    stages = classifier.module.stages
    count = int(frozen[-1]) if frozen[-1].isdecimal() else 0
    expected_stuck = [p for stage in stages[1 : count + 1] for p in stage]
    expected_stuck += stages[0] if "embeddings" in frozen else []
    final_norm = [key for key in stuck if "final_norm" in key]
    assert not final_norm, "it is behind the layers"
    assert stuck == {key for key, p in model.named_parameters() if any(p is q for q in expected_stuck)} - {
        key for key, _ in model.named_parameters() if "final_norm" in key
    }
    assert len(lines) == 1
    found = gradients(model, classifier.module(batch))
    expected = gradients(model, padded_logits(model, batch))
    assert found.keys() == expected.keys()
    assert not found.keys() & stuck
    largest = max(float(grad.abs().max()) for grad in expected.values())
    for key, grad in expected.items():
        torch.testing.assert_close(found[key], grad, rtol=1e-4, atol=1e-5 * largest, msg=lambda m, k=key: f"{k}: {m}")


def test_every_family_has_a_test() -> None:
    assert set(FAMILIES) == {*FROM_ONE, "albert"}


def test_shared_layers_are_frozen_together() -> None:
    config = CONFIGS["albert"]({"num_labels": 3, "num_hidden_layers": 4, "num_hidden_groups": 2})
    model = transformers.AlbertForSequenceClassification(config)
    with pytest.raises(
        ConfigError, match="--freeze layers:1: the lowest layers share their weights with others: 2 or 4"
    ):
        choose_trained(classifier_of(model), RunConfig(freeze=("layers:1",)))
    choose_trained(classifier_of(model), RunConfig(freeze=("layers:2",)))
    groups = model.albert.encoder.albert_layer_groups
    assert [any(p.requires_grad for p in group.parameters()) for group in groups] == [False, True]
    with pytest.raises(ConfigError, match=r"--layerwise_lr_decay 0.9: the layers of a albert share"):
        learning_rates(classifier_of(model), 0.9)


def test_more_layers_than_there_are_is_refused() -> None:
    with pytest.raises(ConfigError, match="--freeze layers:4: the encoder has 3 layers"):
        choose_trained(classifier_of(model_of("bert")), RunConfig(freeze=("layers:4",)))


class Counted:
    """The raw operations, with the calls of each by name."""

    def __init__(self) -> None:
        self.real, self.calls = raw_ops(), list[str]()

    def __getattr__(self, name: str) -> Any:
        self.calls.append(name)
        return getattr(self.real, name)


def test_nothing_is_computed_below_the_lowest_layer_that_learns(monkeypatch: pytest.MonkeyPatch) -> None:
    """3 layers, the lower 2 and the embeddings frozen: backward is that of the last layer's first tokens alone."""
    model = model_of("bert")
    classifier, batch = classifier_of(model), batch_for(model)
    choose_trained(classifier, RunConfig(freeze=("embeddings", "layers:2")))
    counted = Counted()
    for module in ("attention", "embedding", "layer", "linear", "norm", "activation"):
        monkeypatch.setattr(f"fleetune.kernels.{module}.raw_ops", lambda: counted)
    logits = classifier.module(batch)
    forward = list(counted.calls)
    assert forward.count("layer_forward") == 2, "frozen layers are computed in one operation"
    counted.calls.clear()
    logits.sum().backward()
    assert not {"layer_backward", "embed_backward", "row_sums"} & set(counted.calls)
    assert counted.calls.count("add_norm_backward") == 2


def test_no_gradient_of_a_frozen_weight_is_computed_on_the_way_down(monkeypatch: pytest.MonkeyPatch) -> None:
    """The embeddings learn, the layers above do not: products for what goes down, none for weights."""
    model = model_of("distilbert")
    classifier, batch = classifier_of(model), batch_for(model)
    choose_trained(classifier, RunConfig(freeze=("layers:2",)))
    logits = classifier.module(batch)
    shapes: list[tuple[int, int]] = []
    real = linear_module.product

    def product(a: Tensor, b: Tensor, bias: Tensor | None = None) -> Tensor:
        shapes.append((a.shape[1], b.shape[1]))
        return real(a, b, bias)

    monkeypatch.setattr(linear_module, "product", product)
    monkeypatch.setattr(activation, "product", product)
    logits.sum().backward()
    tokens = sum(LENGTHS)
    assert [shape for shape in shapes if shape[0] == tokens] == [], "a product over tokens is a weight's gradient"
    assert len([shape for shape in shapes if shape[0] != len(LENGTHS)]) >= 4 * 2
    assert model.distilbert.embeddings.word_embeddings.weight.grad is not None


def test_stages_learn_at_their_own_rates() -> None:
    """Head 1, layers 3 to 1: 0.5, 0.25, 0.125, embeddings 0.0625."""
    model = model_of("bert")
    classifier = classifier_of(model)
    rates = learning_rates(classifier, 0.5)
    told = {name: rates[p] for name, p in model.named_parameters()}
    assert told["classifier.weight"] == told["bert.pooler.dense.bias"] == 1.0
    for number, rate in ((2, 0.5), (1, 0.25), (0, 0.125)):
        assert {r for name, r in told.items() if f"layer.{number}." in name} == {rate}
    assert {r for name, r in told.items() if "embeddings" in name} == {0.0625}
    assert learning_rates(classifier, 1.0) == {}


@pytest.mark.parametrize("name", ["bert", "albert", "mpnet", "modernbert", "bert-lora"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_recomputed_layers_give_the_same_gradients_bit_for_bit(name: str, dtype: torch.dtype) -> None:
    changes = DROPOUT if "modern" not in name else {"attention_dropout": 0.2, "mlp_dropout": 0.2}
    model = model_of(name.removesuffix("-lora"), **changes)
    found = {}
    for again in (False, True):
        torch.manual_seed(0)
        classifier = classifier_of(model)
        classifier.module.compute_in(dtype)
        lora: dict[str, Any] = {"lora_r": 2, "lora_dropout": 0.3} if name.endswith("lora") else {}
        choose_trained(classifier, RunConfig(gradient_checkpointing=again, **lora))
        classifier.module.begin_micro_batch(7, 3, micro_batch=0, rank=0)
        found[again] = gradients(classifier.module, classifier.module(batch_for(model)))
    assert found[True].keys() == found[False].keys()
    assert all(torch.equal(found[True][key], grad) for key, grad in found[False].items())


def test_recomputed_layers_keep_their_inputs_alone() -> None:
    """What autograd packs away in forward, in numbers."""
    model = model_of("bert", **DROPOUT)
    sizes: dict[bool, int] = {}
    batch = batch_for(model)
    for again in (False, True):
        classifier, kept = classifier_of(model), dict[int, int]()
        choose_trained(classifier, RunConfig(gradient_checkpointing=again))

        def pack(x: Tensor, kept: dict[int, int] = kept) -> Tensor:
            if not isinstance(x, nn.Parameter):
                kept[x.data_ptr()] = x.numel()
            return x

        with torch.autograd.graph.saved_tensors_hooks(pack, lambda x: x):
            classifier.module(batch)
        sizes[again] = sum(kept.values())
    assert sizes[True] < sizes[False] / 3
