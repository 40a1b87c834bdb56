"""The flat forward computes what transformers' own padded forward computes, and the same gradients."""

from __future__ import annotations

import contextlib
from pathlib import Path

import pytest
import torch
import transformers
from torch import Tensor, nn
from torch.nn.utils.rnn import pad_sequence

from fleetune.data.batches import PackedBatch
from fleetune.kernels import linear as linear_module
from fleetune.kernels import reference
from fleetune.kernels.library import using_reference
from fleetune.kernels.linear import joined, lies_together
from fleetune.model.draws import Site
from fleetune.model.families import FAMILIES, find_family, why_padded
from fleetune.model.flat import FlatClassifier, FlatEncoder
from fleetune.model.padded import PaddedClassifier
from fleetune.model.parts import LayerParts
from fleetune.model.rates import dropout_rates

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
    config = transformers.DebertaV2Config(
        vocab_size=50, hidden_size=16, num_hidden_layers=1, num_attention_heads=2, intermediate_size=32
    )
    model = transformers.DebertaV2ForSequenceClassification(config)
    assert find_family(model) is None
    assert "knows no deberta-v2, but bert, roberta" in str(why_padded(model))


def with_dropout(**changes: object) -> FlatClassifier:
    options = {**SMALL, "hidden_dropout_prob": 0.4, "attention_probs_dropout_prob": 0.3, **changes}
    torch.manual_seed(0)
    model = transformers.BertForSequenceClassification(transformers.BertConfig(**options))
    for parameter in model.parameters():
        parameter.data.add_(torch.randn_like(parameter) * 0.1)
    return FlatClassifier(model, FAMILIES["bert"])


def test_dropout_is_drawn_in_training_only() -> None:
    flat, batch = with_dropout(), make_batch(LENGTHS, 2)
    flat.eval()
    assert torch.equal(flat(batch), flat(batch))
    flat.train()
    torch.manual_seed(3)
    first = flat(batch)
    assert not torch.equal(first, flat(batch))
    torch.manual_seed(3)
    assert torch.equal(first, flat(batch))


def test_dropout_is_a_function_of_seed_step_and_example_alone() -> None:
    """Whoever computes an example, in whatever company, drops the same elements."""
    flat, batch = with_dropout().train(), make_batch(LENGTHS, 2)
    flat.begin_micro_batch(5, 17, micro_batch=0, rank=0)
    together = flat(batch)
    starts = batch.first_token.tolist()
    for i in reversed(range(len(LENGTHS))):
        span = slice(starts[i], starts[i] + LENGTHS[i])
        alone = PackedBatch(
            token_ids=batch.token_ids[span], type_ids=batch.type_ids[span], position_ids=batch.position_ids[span],
            lengths=(LENGTHS[i],), labels=None, example_ids=batch.example_ids[i : i + 1],
        )  # fmt: skip
        flat.begin_micro_batch(5, 17, micro_batch=3, rank=2)
        torch.testing.assert_close(flat(alone)[0], together[i], rtol=1e-5, atol=1e-6)
    for seed, step in ((5, 18), (6, 17)):
        flat.begin_micro_batch(seed, step, micro_batch=0, rank=0)
        assert not torch.equal(flat(batch), together)


def test_dropouts_are_those_of_the_modules_now() -> None:
    """DistilBERT drops no output of attention; a module that was switched off by hand drops nothing."""
    model = transformers.DistilBertModel(
        transformers.DistilBertConfig(**{**SMALL_DISTILBERT, "dropout": 0.3, "attention_dropout": 0.2, "n_layers": 1})
    )
    rates = {Site.EMBEDDINGS: 0.3, Site.ATTENTION: 0.2, Site.OUTPUT: 0.3}
    family = FAMILIES["distilbert"]
    assert {site: rate for (_, site), rate in dropout_rates(model.train(), family).items()} == rates
    model.transformer.layer[0].ffn.dropout.p = 0.1
    model.embeddings.dropout.eval()
    changed = {**rates, Site.OUTPUT: 0.1, Site.EMBEDDINGS: 0.0}
    assert {site: rate for (_, site), rate in dropout_rates(model, family).items()} == changed
    assert not any(dropout_rates(model.eval(), family).values())


@pytest.mark.parametrize("training", [False, True])
@pytest.mark.parametrize("biases", [True, False])
def test_the_last_layer_for_first_tokens_is_the_last_layer(training: bool, biases: bool) -> None:
    """The shorter way to the first tokens gives what the whole layer gives, with its gradients and its dropout."""
    flat = with_dropout().train(training)
    encoder = flat._encoder
    if not biases:
        for layer in encoder._parts.layers:
            for part in layer.qkv:
                part.bias = None
    batch = make_batch(LENGTHS, 2)
    draws = flat._draws(batch)
    found, expected = encoder.first_tokens(batch, draws), encoder.tokens(batch, draws)[batch.first_token]
    torch.testing.assert_close(found, expected, rtol=1e-5, atol=1e-5)
    gradients = []
    for out in (found, expected):
        flat.zero_grad()
        out.square().sum().backward()
        gradients.append({n: p.grad.clone() for n, p in flat.named_parameters() if p.grad is not None})
    assert gradients[0].keys() == gradients[1].keys()
    for name, gradient in gradients[1].items():
        torch.testing.assert_close(
            gradients[0][name], gradient, rtol=1e-4, atol=1e-4, msg=lambda m, n=name: f"{n}: {m}"
        )


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("has_dropout", [False, True])
@pytest.mark.parametrize("plain", [False, True])
def test_a_layer_in_one_operation_is_the_layer_of_its_parts(
    monkeypatch: pytest.MonkeyPatch, dtype: torch.dtype, has_dropout: bool, plain: bool
) -> None:
    """Results and all gradients, compiled and plain; the additions are the same, but for one order of two terms."""
    flat, batch = with_dropout().train(has_dropout), make_batch(LENGTHS, 2)
    flat.compute_in(dtype)
    found = []
    for as_one in (True, False):
        if not as_one:
            monkeypatch.setattr(LayerParts, "is_one_operation", lambda *args: False)
        flat.zero_grad()
        flat.begin_micro_batch(1, 2, micro_batch=0, rank=0)
        with using_reference() if plain else contextlib.nullcontext():
            logits = flat(batch)
            logits.square().sum().backward()
        grads = {n: p.grad.clone() for n, p in flat.named_parameters() if p.grad is not None}
        found.append((logits.detach().clone(), grads))
    (logits, grads), (expected, expected_grads) = found
    limit = 1e-5 if dtype == torch.float32 else 2e-2
    torch.testing.assert_close(logits, expected, rtol=limit, atol=limit)
    assert grads.keys() == expected_grads.keys()
    for name, gradient in expected_grads.items():
        assert (grads[name] - gradient).norm() <= limit * (gradient.norm() + 1e-2), name  # keys' biases: zero


def test_a_layer_is_taken_apart_where_it_is_not_all_of_one_kind(monkeypatch: pytest.MonkeyPatch) -> None:
    """Another activation, a missing bias, a frozen weight."""
    calls = []
    whole = FlatEncoder._whole_layer
    monkeypatch.setattr(FlatEncoder, "_whole_layer", lambda *args: calls.append(args[1]) or whole(*args))
    flat, batch = with_dropout().train(), make_batch(LENGTHS, 2)
    flat(batch)
    assert calls == [1, 2]  # and the last for first tokens
    first, second, _ = flat._encoder.parts.layers
    first.up.weight.requires_grad_(False)
    flat(batch)
    assert calls == [1, 2, 2]
    first.up.weight.requires_grad_(True)
    for module in second.qkv:
        module.bias = None
    flat(batch)
    assert calls == [1, 2, 2, 1]
    with torch.no_grad():
        first.up.weight.requires_grad_(False)
        flat(batch)
    assert calls == [1, 2, 2, 1, 1]


def test_products_of_a_step_are_those_that_it_needs(monkeypatch: pytest.MonkeyPatch) -> None:
    """Per layer one product for query, key and value, three more, and two gradients each; none for what is frozen."""
    calls: list[tuple[int, int]] = []
    plain = reference.product

    def counted(a: Tensor, b: Tensor, bias: Tensor | None = None) -> Tensor:
        calls.append((a.shape[0] * a.shape[1], b.shape[1]))
        return plain(a, b, bias)

    monkeypatch.setattr(linear_module, "torch_wins", lambda: False)
    monkeypatch.setattr(reference, "product", counted)  # every product of the plain operations is one of the compiled
    flat, batch = with_dropout().train(), make_batch(LENGTHS, 2)
    with using_reference():
        flat(batch).sum().backward()
    whole_layers, last = 2, 1
    assert len(calls) == 3 * (4 * whole_layers + 4 * last)
    calls.clear()
    for parameter in flat.model.bert.embeddings.parameters():
        parameter.requires_grad_(False)
    for parameter in flat.model.bert.encoder.layer[0].parameters():
        parameter.requires_grad_(False)
    with using_reference():
        flat(batch).sum().backward()
    forward, input_gradients, weight_gradients = 12, 3 + 4, 8  # layer 2's query, key and value need no input gradient
    assert len(calls) == forward + input_gradients + weight_gradients


def test_query_key_and_value_lie_together_and_stay_the_models_own(tmp_path: Path) -> None:
    flat = with_dropout()
    attention = flat.model.bert.encoder.layer[0].attention.self
    weights = [attention.query.weight, attention.key.weight, attention.value.weight]
    assert lies_together(weights)
    assert joined(weights).data_ptr() == weights[0].data_ptr()
    before = {k: v.clone() for k, v in flat.model.state_dict().items()}
    flat.model.save_pretrained(tmp_path)
    again = transformers.BertForSequenceClassification.from_pretrained(tmp_path).state_dict()
    assert again.keys() == before.keys()
    assert all(torch.equal(again[k], v) for k, v in before.items())


@pytest.mark.parametrize("name", ["bert", "distilbert"])
def test_bfloat16_is_near_float32(name: str) -> None:
    """Within a few roundings of 2^-8; parameters and their gradients stay float32."""
    torch.manual_seed(0)
    model = MODELS[name]().train()
    flat, batch = FlatClassifier(model, find_family(model)), make_batch((30, 17, 5), num_types(model))
    exact = flat(batch)
    exact_gradients = gradients(model, exact, batch)
    flat.compute_in(torch.bfloat16)
    rounded = flat(batch)
    assert rounded.dtype == torch.float32
    assert not torch.equal(rounded, exact)
    torch.testing.assert_close(rounded, exact, rtol=0.05, atol=0.02)
    for key, gradient in gradients(model, rounded, batch).items():
        assert gradient.dtype == torch.float32
        near = (gradient - exact_gradients[key]).norm() / (exact_gradients[key].norm() + 1e-4)
        assert near < 0.08, (key, near)


def test_recomputing_layers_in_backward_keeps_less_and_changes_nothing() -> None:
    flat, batch = with_dropout().train(), make_batch(LENGTHS, 2)

    def run() -> tuple[int, dict[str, Tensor]]:
        kept = 0

        def count(x: Tensor) -> Tensor:
            nonlocal kept
            kept += x.numel()
            return x

        flat.zero_grad()
        flat.begin_micro_batch(1, 2, micro_batch=0, rank=0)
        with torch.autograd.graph.saved_tensors_hooks(count, lambda x: x):
            loss = flat(batch).square().sum()
        loss.backward()
        return kept, {n: p.grad.clone() for n, p in flat.named_parameters()}

    kept, expected = run()
    flat.model.activation_checkpointing_enable()
    kept_less, found = run()
    assert kept_less < kept / 2
    assert all(torch.equal(found[name], gradient) for name, gradient in expected.items())
