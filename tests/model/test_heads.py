"""Heads that read all tokens: forward, gradients and losses are those of transformers."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
import transformers
from torch import Tensor, nn
from torch.nn.utils.rnn import pad_sequence

from fleetune.data.batches import PackedBatch
from fleetune.model.families import FAMILIES, find_family
from fleetune.model.flat import FlatClassifier
from fleetune.model.heads import HEADS, Head, kind_of, problem_of_head
from fleetune.model.losses import LOSSES
from fleetune.model.padded import PaddedClassifier
from tests.model.test_flat import LENGTHS, SMALL, SMALL_DISTILBERT, make_batch

PROBLEMS = ("token_classification", "question_answering")
CONFIGS = {
    "bert": lambda labels: transformers.BertConfig(**SMALL | labels),
    "roberta": lambda labels: transformers.RobertaConfig(**SMALL | labels),
    "xlm-roberta": lambda labels: transformers.XLMRobertaConfig(**SMALL | labels),
    "camembert": lambda labels: transformers.CamembertConfig(**SMALL | labels),
    "electra": lambda labels: transformers.ElectraConfig(**SMALL | labels, embedding_size=16),
    "distilbert": lambda labels: transformers.DistilBertConfig(**SMALL_DISTILBERT | labels, qa_dropout=0.0),
    "albert": lambda labels: transformers.AlbertConfig(
        **SMALL | labels, embedding_size=16, classifier_dropout_prob=0.0
    ),
    "mpnet": lambda labels: transformers.MPNetConfig(**SMALL | labels),
    "modernbert": lambda labels: transformers.ModernBertConfig(
        **{k: v for k, v in SMALL.items() if "dropout" not in k} | labels,
        local_attention=6,
        bos_token_id=2,
        eos_token_id=3,
        cls_token_id=2,
        sep_token_id=3,
    ),
}


TYPES = {"bert": 2, "electra": 2, "albert": 2}


def model_of(name: str, problem: str, **changes: Any) -> Any:
    torch.manual_seed(0)
    labels = {"num_labels": 2 if problem == "question_answering" else 3} | changes
    model = head_of(problem).auto_class.from_config(CONFIGS[name](labels))
    for parameter in model.parameters():
        parameter.data.add_(torch.randn_like(parameter) * 0.1)
    return model


def head_of(problem: str) -> Head:
    return HEADS[problem]  # type: ignore[index]


def with_labels(batch: PackedBatch, problem: str) -> PackedBatch:
    """Tags of some tokens, of others none; or places of answers, of the first sequence the first token."""
    if problem == "token_classification":
        labels = torch.arange(batch.num_tokens) % 3
        labels[::4] = -100
    else:
        labels = torch.tensor([(0, 0), (0, 0), (3, 7), (1, 1)])
    return PackedBatch(
        token_ids=batch.token_ids, type_ids=batch.type_ids, position_ids=batch.position_ids, lengths=batch.lengths,
        labels=labels, example_ids=batch.example_ids,
    )  # fmt: skip


def loss_of_transformers(model: nn.Module, batch: PackedBatch, problem: str) -> Tensor:
    """The model's own loss of the batch, padded."""

    def pad(values: Tensor, fill: int) -> Tensor:
        return pad_sequence(list(values.split(list(batch.lengths))), batch_first=True, padding_value=fill)

    inputs = {"input_ids": pad(batch.token_ids, 1), "attention_mask": pad(torch.ones_like(batch.token_ids), 0)}
    if batch.type_ids is not None:
        inputs["token_type_ids"] = pad(batch.type_ids, 0)
    assert batch.labels is not None
    if problem == "token_classification":
        return model(**inputs, labels=pad(batch.labels, -100)).loss  # type: ignore[no-any-return]
    return _answers_loss(model(**inputs), batch)


def _answers_loss(output: Any, batch: PackedBatch) -> Tensor:
    """Transformers lets padding take part in the softmax over a sequence: without it, sequence by sequence."""
    losses = []
    assert batch.labels is not None
    for number, (length, places) in enumerate(zip(batch.lengths, batch.labels, strict=True)):
        for logits, place in zip((output.start_logits, output.end_logits), places, strict=True):
            losses.append(nn.functional.cross_entropy(logits[number, :length], place))
    return torch.stack(losses).mean()


@pytest.mark.parametrize("name", CONFIGS)
@pytest.mark.parametrize("problem", PROBLEMS)
def test_loss_and_gradients_equal_those_of_transformers(name: str, problem: str) -> None:
    model = model_of(name, problem).train()
    family = find_family(model)
    assert family is not None
    flat = FlatClassifier(model, family, reads_all_tokens=True).train()
    batch = with_labels(make_batch(LENGTHS, TYPES.get(model.config.model_type, 0)), problem)
    assert batch.labels is not None
    expected = loss_of_transformers(model, batch, problem)
    expected.backward()
    gradients = {n: p.grad.clone() for n, p in model.named_parameters() if p.grad is not None}
    model.zero_grad()
    count = int((batch.labels != -100).sum()) if problem == "token_classification" else len(batch)
    found = LOSSES[problem](flat(batch), batch.labels, batch.boundaries) / count  # type: ignore[index]
    found.backward()
    torch.testing.assert_close(found, expected, rtol=1e-5, atol=1e-5)
    assert {n for n, p in model.named_parameters() if p.grad is not None} == gradients.keys()
    for key, gradient in gradients.items():
        found_gradient = model.get_parameter(key).grad
        torch.testing.assert_close(found_gradient, gradient, rtol=1e-4, atol=1e-6, msg=lambda m, k=key: f"{k}: {m}")


def test_every_family_has_a_test() -> None:
    assert set(FAMILIES) == set(CONFIGS)


@pytest.mark.parametrize("problem", PROBLEMS)
def test_the_padded_way_gives_the_same_logits(problem: str) -> None:
    model = model_of("bert", problem).eval()
    family = find_family(model)
    assert family is not None
    batch = make_batch(LENGTHS, 2)
    flat = FlatClassifier(model, family, reads_all_tokens=True).eval()
    padded = PaddedClassifier(model, 1, head_of(problem)).eval()
    assert padded(batch).shape == (sum(LENGTHS), model.config.num_labels)
    torch.testing.assert_close(padded(batch), flat(batch), rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("kind", ["flat", "padded"])
@pytest.mark.parametrize("problem", PROBLEMS)
def test_an_empty_batch_gives_gradients_of_zero(kind: str, problem: str) -> None:
    model = model_of("bert", problem)
    family = find_family(model)
    assert family is not None
    module = (
        FlatClassifier(model, family, reads_all_tokens=True)
        if kind == "flat"
        else PaddedClassifier(model, 1, head_of(problem))
    )
    batch = make_batch((), 2)
    labels = torch.zeros((0, 2) if problem == "question_answering" else (0,), dtype=torch.int64)
    logits = module.train()(batch)
    assert logits.shape == (0, model.config.num_labels)
    LOSSES[problem](logits, labels, batch.boundaries).backward()  # type: ignore[index]
    assert all(p.grad is None or not p.grad.any() for p in model.parameters())


def test_dropout_before_a_head_of_tokens_follows_the_example_and_the_place() -> None:
    """Whoever computes a sequence drops the same: alone or in company."""
    model = model_of("bert", "token_classification", hidden_dropout_prob=0.3, attention_probs_dropout_prob=0.3)
    family = find_family(model)
    assert family is not None
    flat = FlatClassifier(model, family, reads_all_tokens=True).train()
    batch = make_batch(LENGTHS, 2)
    start, end = (int(i) for i in batch.boundaries[2:4])
    assert batch.type_ids is not None
    alone = PackedBatch(
        token_ids=batch.token_ids[start:end], type_ids=batch.type_ids[start:end],
        position_ids=batch.position_ids[start:end], lengths=(end - start,), labels=None,
        example_ids=batch.example_ids[2:3],
    )  # fmt: skip
    flat.begin_micro_batch(1, 5, micro_batch=0, rank=0)
    torch.testing.assert_close(flat(alone), flat(batch)[start:end], rtol=1e-5, atol=1e-5)
    without = flat.eval()(alone)
    assert not torch.allclose(flat.train()(alone), without)


def test_the_loss_of_answers_by_hand() -> None:
    # Two sequences of 2 and 1 tokens. Starts of the first: softmax of (0, ln 3) = (1/4, 3/4); ends: of (0, 0) = 1/2.
    # Label (1, 0): -ln 3/4 - ln 1/2, halved. The second has one token: its loss is 0.
    logits = torch.tensor([[0.0, 0.0], [np.log(3.0), 0.0], [7.0, -2.0]], dtype=torch.float64)
    boundaries = torch.tensor([0, 2, 3])
    loss = LOSSES["question_answering"]
    expected = -(np.log(3 / 4) + np.log(1 / 2)) / 2
    assert loss(logits, torch.tensor([[1, 0], [0, 0]]), boundaries).item() == pytest.approx(expected)
    assert loss(logits, torch.tensor([[-100, -100], [0, 0]]), boundaries).item() == pytest.approx(0.0)
    assert loss(1e4 * logits, torch.tensor([[0, 1], [0, 0]]), boundaries).isfinite()


def test_the_loss_of_several_labels_is_that_of_transformers() -> None:
    config = transformers.BertConfig(**SMALL, problem_type="multi_label_classification")
    torch.manual_seed(0)
    model = transformers.BertForSequenceClassification(config).eval()
    labels = torch.tensor([[0.0, 1.0, 1.0], [0.0, 0.0, 0.0], [1.0, 0.0, 1.0]])
    output = model(input_ids=torch.tensor([[3, 4], [5, 6], [7, 8]]), labels=labels)
    found = LOSSES["multi_label_classification"](output.logits, labels) / 3
    torch.testing.assert_close(found, output.loss)


def test_labels_as_the_model_counts_them() -> None:
    """Class 0 of the task is the model's 2, its 1 the model's 0, its 2 the model's 1."""
    to_model = np.array([2, 0, 1])
    tags = HEADS["token_classification"].to_model(np.array([0, -100, 1, 2]), to_model)
    assert tags.tolist() == [2, -100, 0, 1]
    flags = HEADS["multi_label_classification"].to_model(np.array([[1.0, 0.0, 0.0], [0.0, 1.0, 1.0]]), to_model)
    assert flags.tolist() == [[0.0, 0.0, 1.0], [1.0, 1.0, 0.0]]
    places = np.array([[3, 4]])
    assert HEADS["question_answering"].to_model(places, to_model) is places


@pytest.mark.parametrize(
    ("architecture", "problem_type", "num_labels", "problem"),
    [
        ("BertForTokenClassification", None, 9, "token_classification"),
        ("BertForQuestionAnswering", None, 2, "question_answering"),
        ("BertForSequenceClassification", "multi_label_classification", 5, "multi_label_classification"),
        ("BertForSequenceClassification", None, 1, "regression"),
        ("BertForSequenceClassification", None, 2, "classification"),
        (None, None, 2, "classification"),
    ],
)
def test_what_a_models_head_is_for(
    architecture: str | None, problem_type: str | None, num_labels: int, problem: str
) -> None:
    architectures = None if architecture is None else [architecture]
    config = SimpleNamespace(architectures=architectures, problem_type=problem_type, num_labels=num_labels)
    assert problem_of_head(config) == problem
    assert kind_of(config) == (None if architecture is None else architecture.removeprefix("Bert"))
