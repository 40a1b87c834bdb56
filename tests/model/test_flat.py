"""The flat forward computes what transformers' own padded forward computes, and the same gradients."""

from __future__ import annotations

import pytest
import torch
import transformers
from torch import Tensor, nn
from torch.nn.utils.rnn import pad_sequence

from fleetune.data.batches import PackedBatch
from fleetune.model.families import FAMILIES, find_family
from fleetune.model.flat import FlatClassifier
from fleetune.model.padded import PaddedClassifier

VOCABULARY, LENGTHS = 50, (7, 1, 12, 3)

SMALL = {
    "vocab_size": VOCABULARY, "hidden_size": 24, "num_hidden_layers": 3, "num_attention_heads": 4,
    "intermediate_size": 40, "max_position_embeddings": 32, "hidden_dropout_prob": 0.0,
    "attention_probs_dropout_prob": 0.0, "num_labels": 3, "pad_token_id": 1,
}  # fmt: skip
SMALL_DISTILBERT = {
    "vocab_size": VOCABULARY, "dim": 24, "n_layers": 3, "n_heads": 4, "hidden_dim": 40, "max_position_embeddings": 32,
    "dropout": 0.0, "attention_dropout": 0.0, "seq_classif_dropout": 0.0, "num_labels": 3, "pad_token_id": 1,
}  # fmt: skip

MODELS = {
    "bert": lambda: transformers.BertForSequenceClassification(transformers.BertConfig(**SMALL)),
    "bert-relu": lambda: transformers.BertForSequenceClassification(
        transformers.BertConfig(**SMALL, hidden_act="relu")
    ),
    "bert-tanh-gelu": lambda: transformers.BertForSequenceClassification(
        transformers.BertConfig(**SMALL, hidden_act="gelu_new")
    ),
    "roberta": lambda: transformers.RobertaForSequenceClassification(transformers.RobertaConfig(**SMALL)),
    "xlm-roberta": lambda: transformers.XLMRobertaForSequenceClassification(transformers.XLMRobertaConfig(**SMALL)),
    "camembert": lambda: transformers.CamembertForSequenceClassification(transformers.CamembertConfig(**SMALL)),
    "electra": lambda: transformers.ElectraForSequenceClassification(
        transformers.ElectraConfig(**SMALL, embedding_size=24)
    ),
    "electra-narrow": lambda: transformers.ElectraForSequenceClassification(
        transformers.ElectraConfig(**SMALL, embedding_size=16)
    ),
    "distilbert": lambda: transformers.DistilBertForSequenceClassification(
        transformers.DistilBertConfig(**SMALL_DISTILBERT)
    ),
}


def make_batch(lengths: tuple[int, ...], num_types: int) -> PackedBatch:
    generator = torch.Generator().manual_seed(1)
    total = sum(lengths)
    return PackedBatch(
        token_ids=torch.randint(2, VOCABULARY, (total,), generator=generator),
        type_ids=torch.randint(0, num_types, (total,), generator=generator) if num_types else None,
        position_ids=torch.cat([torch.arange(n) for n in (*lengths, 0)]),
        lengths=lengths,
        labels=torch.randint(0, 3, (len(lengths),), generator=generator),
        example_ids=torch.arange(len(lengths)),
    )


def padded_logits(model: nn.Module, batch: PackedBatch) -> Tensor:
    """The Hugging Face forward on the same sequences, padded with the pad token and masked."""

    def pad(values: Tensor, fill: int) -> Tensor:
        return pad_sequence(list(values.split(list(batch.lengths))), batch_first=True, padding_value=fill)

    inputs = {"input_ids": pad(batch.token_ids, 1), "attention_mask": pad(torch.ones_like(batch.token_ids), 0)}
    if batch.type_ids is not None:
        inputs["token_type_ids"] = pad(batch.type_ids, 0)
    logits: Tensor = model(**inputs).logits
    return logits


def gradients(model: nn.Module, logits: Tensor, batch: PackedBatch) -> dict[str, Tensor]:
    model.zero_grad()
    assert batch.labels is not None
    nn.functional.cross_entropy(logits, batch.labels).backward()
    return {n: p.grad.clone() for n, p in model.named_parameters() if p.grad is not None}


def num_types(model: nn.Module) -> int:
    return {"bert": 2, "electra": 2}.get(model.config.model_type, 0)


@pytest.mark.parametrize("name", MODELS)
@pytest.mark.parametrize("training", [False, True])
def test_flat_forward_and_gradients_equal_the_padded_ones(name: str, training: bool) -> None:
    torch.manual_seed(0)
    model = MODELS[name]().train(training)
    for parameter in model.parameters():  # initial biases are 0 and norms 1: make every parameter matter
        parameter.data.add_(torch.randn_like(parameter) * 0.1)
    family = find_family(model)
    assert family is not None
    flat = FlatClassifier(model, family).train(training)
    batch = make_batch(LENGTHS, num_types(model))
    expected, found = padded_logits(model, batch), flat(batch)
    torch.testing.assert_close(found, expected, rtol=1e-5, atol=1e-5)
    expected_gradients = gradients(model, padded_logits(model, batch), batch)
    found_gradients = gradients(model, flat(batch), batch)
    assert found_gradients.keys() == expected_gradients.keys()
    for key, gradient in expected_gradients.items():
        torch.testing.assert_close(
            found_gradients[key], gradient, rtol=1e-4, atol=1e-6, msg=lambda m, k=key: f"{k}: {m}"
        )


def test_every_family_has_a_test() -> None:
    assert {name.split("-")[0] for name in FAMILIES} <= {name.split("-")[0] for name in MODELS}
    assert set(FAMILIES) <= set(MODELS)


def test_the_parameters_are_the_models_own() -> None:
    model = MODELS["bert"]()
    family = find_family(model)
    assert family is not None
    flat = FlatClassifier(model, family)
    assert {n.removeprefix("model."): p for n, p in flat.named_parameters()} == dict(model.named_parameters())
    assert set(flat.state_dict()) == {f"model.{name}" for name in model.state_dict()}


def test_sequences_do_not_see_each_other() -> None:
    torch.manual_seed(0)
    model = MODELS["bert"]().eval()
    flat = FlatClassifier(model, FAMILIES["bert"]).eval()
    batch = make_batch(LENGTHS, 2)
    together = flat(batch)
    start = 0
    for i, length in enumerate(LENGTHS):
        alone = PackedBatch(
            token_ids=batch.token_ids[start : start + length],
            type_ids=batch.type_ids[start : start + length],
            position_ids=torch.arange(length),
            lengths=(length,),
            labels=None,
            example_ids=torch.zeros(1, dtype=torch.int64),
        )
        torch.testing.assert_close(flat(alone)[0], together[i], rtol=1e-5, atol=1e-6)
        start += length


@pytest.mark.parametrize("name", ["bert", "roberta", "distilbert", "electra-narrow"])
@pytest.mark.parametrize("kind", ["flat", "padded"])
def test_an_empty_batch_gives_no_logits_and_zero_gradients(name: str, kind: str) -> None:
    model = MODELS[name]().train()
    module = FlatClassifier(model, find_family(model)) if kind == "flat" else PaddedClassifier(model, 1)
    logits = module(make_batch((), num_types(model)))
    assert logits.shape == (0, 3)
    nn.functional.cross_entropy(logits, torch.empty(0, dtype=torch.int64), reduction="sum").backward()
    assert all(p.grad is not None and not p.grad.any() for p in model.parameters())


def test_padded_classifier_equals_the_models_own_forward() -> None:
    torch.manual_seed(0)
    model = MODELS["bert"]().eval()
    batch = make_batch(LENGTHS, 2)
    assert torch.equal(PaddedClassifier(model, 1).eval()(batch), padded_logits(model, batch))


@pytest.mark.parametrize("changes", [{"is_decoder": True}, {"is_decoder": True, "add_cross_attention": True}])
def test_options_that_change_the_arithmetic_go_through_the_models_own_forward(changes: dict[str, bool]) -> None:
    model = transformers.BertForSequenceClassification(transformers.BertConfig(**SMALL, **changes))
    assert find_family(model) is None


def test_an_unknown_architecture_has_no_family() -> None:
    config = transformers.AlbertConfig(vocab_size=50, embedding_size=8, hidden_size=16, num_attention_heads=2, intermediate_size=32)  # fmt: skip  # noqa: E501
    assert find_family(transformers.AlbertForSequenceClassification(config)) is None


def test_dropout_is_drawn_in_training_only() -> None:
    options = {**SMALL, "hidden_dropout_prob": 0.5, "attention_probs_dropout_prob": 0.5}
    model = transformers.BertForSequenceClassification(transformers.BertConfig(**options))
    flat, batch = FlatClassifier(model, FAMILIES["bert"]), make_batch(LENGTHS, 2)
    flat.eval()
    assert torch.equal(flat(batch), flat(batch))
    flat.train()
    torch.manual_seed(3)
    first = flat(batch)
    assert not torch.equal(first, flat(batch))
    torch.manual_seed(3)
    assert torch.equal(first, flat(batch))
