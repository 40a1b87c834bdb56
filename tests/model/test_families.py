"""Every row of the table of families, with random small configs and every head: what transformers computes itself.

Arithmetic is float32, attention is transformers' eager one, and nothing is dropped unless a test says so. A tolerance
is relative to the largest value of a tensor (at least 1); of a gradient, to the tenth part of the largest of the model
where that is more: the gradient of keys' biases is zero but for rounding.
"""

from __future__ import annotations

import copy
import random
import warnings
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
import transformers
from torch import Tensor, nn

import fleetune
from fleetune.errors import FleetuneWarning
from fleetune.model.draws import Site
from fleetune.model.families import FAMILIES, find_family, why_padded
from fleetune.model.flat import FlatClassifier, FlatEncoder
from fleetune.model.load import check_tokenizer_fits
from fleetune.model.rates import dropout_rates
from tests.model.test_flat import make_batch, padded_logits

ROWS, LENGTH, VOCABULARY, PADDING = 4, 11, 50, 1
LIMIT = 1e-5

CLASSES = {"bert": "Bert", "roberta": "Roberta", "xlm-roberta": "XLMRoberta", "camembert": "Camembert",
           "electra": "Electra", "distilbert": "DistilBert", "albert": "Albert", "mpnet": "MPNet",
           "modernbert": "ModernBert"}  # fmt: skip
HEADS = ("Model", "ForSequenceClassification", "ForTokenClassification", "ForQuestionAnswering", "ForMaskedLM",
         "ForMultipleChoice")  # fmt: skip
ACTIVATIONS = ("gelu", "gelu_new", "gelu_pytorch_tanh", "gelu_fast", "gelu_python", "relu", "silu", "tanh", "mish",
               "quick_gelu", "gelu_10", "gelu_accurate", "relu2", "sigmoid", "leaky_relu", "linear")  # fmt: skip
NO_DROPOUT = dict.fromkeys(("hidden_dropout_prob", "attention_probs_dropout_prob", "classifier_dropout", "dropout",
                            "attention_dropout", "seq_classif_dropout", "qa_dropout", "classifier_dropout_prob",
                            "summary_last_dropout", "embedding_dropout", "mlp_dropout"), 0.0)  # fmt: skip


def general(draw: random.Random) -> dict[str, Any]:
    """Options that most families have."""
    heads = draw.choice((1, 2, 3, 4))
    return {
        "vocab_size": VOCABULARY, "hidden_size": heads * draw.choice((8, 10) if heads < 3 else (4, 6, 10)),
        "num_hidden_layers": draw.choice((1, 2, 4)), "num_attention_heads": heads,
        "intermediate_size": draw.choice((8, 20, 33)), "max_position_embeddings": 40,
        "hidden_act": draw.choice(ACTIVATIONS), "layer_norm_eps": draw.choice((1e-12, 1e-5)),
        "type_vocab_size": 2, "pad_token_id": PADDING, "num_labels": draw.choice((2, 3)),
    }  # fmt: skip


def distilbert(draw: random.Random) -> dict[str, Any]:
    heads = draw.choice((1, 2, 4))
    return {
        "vocab_size": VOCABULARY, "dim": heads * draw.choice((8, 12)), "n_layers": draw.choice((1, 3)),
        "n_heads": heads, "hidden_dim": draw.choice((8, 33)), "max_position_embeddings": 40, "pad_token_id": PADDING,
        "activation": draw.choice(("gelu", "relu")), "sinusoidal_pos_embds": draw.choice((False, True)),
    }  # fmt: skip


def electra(draw: random.Random) -> dict[str, Any]:
    options = general(draw)
    return options | {"embedding_size": draw.choice((options["hidden_size"], 7))}


def albert(draw: random.Random) -> dict[str, Any]:
    layers = draw.choice((1, 2, 3, 4))
    return general(draw) | {
        "embedding_size": draw.choice((5, 12)), "num_hidden_layers": layers,
        "num_hidden_groups": draw.choice([n for n in (1, 2, 3) if n <= layers]), "inner_group_num": draw.choice((1, 2)),
    }  # fmt: skip


def modernbert(draw: random.Random) -> dict[str, Any]:
    options = general(draw)
    return {
        **{name: options[name] for name in ("vocab_size", "hidden_size", "num_attention_heads", "intermediate_size",
                                            "max_position_embeddings", "pad_token_id", "num_labels")},
        "hidden_activation": draw.choice(ACTIVATIONS), "num_hidden_layers": draw.choice((1, 2, 4)),
        "global_attn_every_n_layers": draw.choice((1, 2, 3)), "local_attention": draw.choice((2, 5, 8, 128)),
        "rope_parameters": draw.choice((
            None,
            {"full_attention": {"rope_type": "default", "rope_theta": 50.0},
             "sliding_attention": {"rope_type": "default", "rope_theta": 7.0}},
            {"full_attention": {"rope_type": "linear", "rope_theta": 50.0, "factor": 3.0},
             "sliding_attention": {"rope_type": "default", "rope_theta": 7.0}},
            {"full_attention": {"rope_type": "yarn", "rope_theta": 50.0, "factor": 4.0,
                                "original_max_position_embeddings": 10},
             "sliding_attention": {"rope_type": "default", "rope_theta": 7.0}},
        )),
        "norm_eps": draw.choice((1e-5, 1e-3)), "norm_bias": draw.choice((False, True)),
        "attention_bias": draw.choice((False, True)), "mlp_bias": draw.choice((False, True)),
        "classifier_bias": draw.choice((False, True)), "classifier_activation": draw.choice(("gelu", "relu", "silu")),
        "classifier_pooling": draw.choice(("cls", "mean")), "decoder_bias": draw.choice((False, True)),
        "deterministic_flash_attn": draw.choice((False, True)), "sparse_prediction": draw.choice((False, True)),
        "reference_compile": draw.choice((None, False)),
        "bos_token_id": 2, "eos_token_id": 3, "cls_token_id": 2, "sep_token_id": 3,
    }  # fmt: skip


OPTIONS: dict[str, Callable[[random.Random], dict[str, Any]]] = {
    "distilbert": distilbert,
    "electra": electra,
    "albert": albert,
    "modernbert": modernbert,
}


def build(name: str, head: str, seed: int = 0, **changes: Any) -> Any:
    """A model of a random config of which every parameter matters: initial biases are 0 and norms 1."""
    draw = random.Random(f"{name} {seed}")
    options = NO_DROPOUT | OPTIONS.get(name, general)(draw) | {"attn_implementation": "eager"} | changes
    if head == "ForQuestionAnswering":
        options["num_labels"] = 2
    torch.manual_seed(seed)
    config = getattr(transformers, f"{CLASSES[name]}Config")(**options)
    model = getattr(transformers, f"{CLASSES[name]}{head}")(config)
    for parameter in model.parameters():
        parameter.data.add_(torch.randn_like(parameter) * 0.1)
    return model


@pytest.fixture(autouse=True)
def one_thread() -> Iterator[None]:
    """Nothing here is worth waking two for."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


def integers(low: int, high: int, *shape: int) -> Tensor:
    return torch.randint(low, high, shape, generator=torch.Generator().manual_seed(1))


def make_inputs(model: Any, pattern: str = "right") -> dict[str, Tensor]:
    """Inputs with labels for the model's head."""
    mask, ids = torch.ones(ROWS, LENGTH, dtype=torch.int64), integers(2, VOCABULARY, ROWS, LENGTH)
    if pattern == "right":
        mask[1, 4:] = mask[2, 1:] = mask[3, LENGTH - 1 :] = 0
    if pattern == "left":
        mask[1, :4] = mask[2, :9] = 0
    ids[mask == 0] = PADDING
    inputs = {"input_ids": ids} if pattern == "none" else {"input_ids": ids, "attention_mask": mask}
    if model.config.model_type in ("bert", "electra", "albert"):
        inputs["token_type_ids"] = integers(0, 2, ROWS, LENGTH)
    name = type(model).__name__
    if name.endswith("ForMultipleChoice"):
        inputs = {key: x.view(2, 2, LENGTH) for key, x in inputs.items()}
    labels = {
        "ForSequenceClassification": {"labels": integers(0, 2, ROWS)},
        "ForTokenClassification": {"labels": torch.where(mask == 1, ids % 2, -100)},
        "ForMaskedLM": {"labels": torch.where(mask == 1, ids, -100)},
        "ForQuestionAnswering": {"start_positions": integers(0, 4, ROWS), "end_positions": integers(4, LENGTH, ROWS)},
        "ForMultipleChoice": {"labels": integers(0, 2, 2)},
        "ForPreTraining": {"labels": torch.where(mask == 1, ids, -100), "sentence_order_label": integers(0, 2, ROWS)},
    }
    return inputs | next((x for head, x in labels.items() if name.endswith(head)), {})


def loss_of(outputs: Any, mask: Tensor | None) -> Tensor:
    """The head's, or of an encoder without one a function of whatever it gives for tokens that are no padding."""
    if outputs.get("loss") is not None:
        return outputs.loss
    hidden = outputs.last_hidden_state.sin()
    loss = hidden.sum() if mask is None else (hidden * mask.unsqueeze(2)).sum()
    pooled = outputs.get("pooler_output")
    return loss if pooled is None else loss + pooled.square().sum()


def gradients(model: nn.Module, loss: Tensor) -> dict[str, Tensor]:
    model.zero_grad()
    loss.backward()
    return {n: p.grad.clone() for n, p in model.named_parameters() if p.grad is not None}


def assert_near(found: Tensor, expected: Tensor, scale: float, what: str, limit: float = LIMIT) -> None:
    error = float((found - expected).detach().abs().max()) if found.numel() else 0.0
    assert found.shape == expected.shape, what
    assert error <= limit * scale, f"{what}: an error of {error} where the scale is {scale}"


def assert_same_gradients(found: dict[str, Tensor], expected: dict[str, Tensor], limit: float = LIMIT) -> None:
    assert found.keys() == expected.keys()
    largest = max(float(gradient.abs().max()) for gradient in expected.values())
    for name, gradient in expected.items():
        assert_near(found[name], gradient, max(float(gradient.abs().max()), 0.1 * largest), name, limit)


def assert_computes_the_same(found: Any, expected: Any, pattern: str, limit: float = LIMIT) -> None:
    """Outputs, loss and every gradient."""
    inputs = make_inputs(expected, pattern)
    mask = inputs.get("attention_mask")
    a, b = found(**inputs), expected(**inputs)
    assert type(a) is type(b)
    assert [k for k in a if a[k] is not None] == [k for k in b if b[k] is not None]
    for name in b:
        x, y = a[name], b[name]
        if mask is not None and y.shape[:2] == mask.shape and not name.startswith(("start_", "end_")):
            x, y = x[mask == 1], y[mask == 1]
        assert_near(x, y, max(1.0, float(y.detach().abs().max())), name, limit)
    losses = [loss_of(outputs, mask) for outputs in (a, b)]
    assert_same_gradients(gradients(found, losses[0]), gradients(expected, losses[1]), limit)


@pytest.fixture
def flat_calls(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Which of its methods the flat encoder was asked for."""
    calls: list[str] = []

    def noted(name: str, method: Callable[..., Tensor]) -> Callable[..., Tensor]:
        return lambda *args, **kwargs: calls.append(name) or method(*args, **kwargs)

    for name in ("tokens", "first_tokens"):
        monkeypatch.setattr(FlatEncoder, name, noted(name, getattr(FlatEncoder, name)))
    return calls


def test_every_family_is_here() -> None:
    assert set(FAMILIES) == set(CLASSES)


@pytest.mark.parametrize("seed", range(4))
@pytest.mark.parametrize("head", HEADS)
@pytest.mark.parametrize("name", CLASSES)
def test_every_head_of_random_configs(name: str, head: str, seed: int, flat_calls: list[str]) -> None:
    if not hasattr(transformers, f"{CLASSES[name]}{head}"):
        pytest.skip(f"transformers has no {CLASSES[name]}{head}")
    stock = build(name, head, seed).train()
    model = copy.deepcopy(stock)
    assert fleetune.optimize(model) is model
    mean_of_all = "Multiple" in head and getattr(stock.config, "classifier_pooling", "cls") == "mean"
    for pattern in ("right",) if mean_of_all else ("right", "none"):  # without a mask, that head fails by itself
        assert_computes_the_same(model, stock, pattern)
    windows = (
        name == "modernbert" and head == "ForQuestionAnswering" and "sliding_attention" in stock.config.layer_types
    )
    assert len(flat_calls) == 2 - windows - mean_of_all


@pytest.mark.parametrize("seed", range(2))
def test_the_head_that_albert_was_trained_with(seed: int, flat_calls: list[str]) -> None:
    """Masked words, and the order of two sentences."""
    stock = build("albert", "ForPreTraining", seed, num_labels=2).train()
    assert_computes_the_same(fleetune.optimize(copy.deepcopy(stock)), stock, "right")
    assert flat_calls == ["tokens"]


@pytest.mark.parametrize("name", CLASSES)
@pytest.mark.parametrize("head", ["Model", "ForSequenceClassification"])
def test_padding_on_the_left(name: str, head: str, flat_calls: list[str]) -> None:
    stock = build(name, head, 1).eval()
    assert_computes_the_same(fleetune.optimize(copy.deepcopy(stock)), stock, "left")
    counts_tokens = name == "mpnet" or (name == "modernbert" and "sliding_attention" in stock.config.layer_types)
    assert flat_calls == ([] if counts_tokens else ["tokens"])


@pytest.mark.parametrize("seed", range(8))
@pytest.mark.parametrize("name", CLASSES)
def test_classifiers_on_flat_batches(name: str, seed: int) -> None:
    model = build(name, "ForSequenceClassification", seed).train()
    family = find_family(model)
    assert family is not None
    flat = FlatClassifier(model, family).train()
    batch = make_batch((7, 1, 12, 3), 2 if name in ("bert", "electra", "albert") else 0)
    expected = padded_logits(model, batch)
    found = flat(batch)
    assert_near(found, expected, max(1.0, float(expected.detach().abs().max())), "logits")
    labels = batch.labels % model.config.num_labels
    losses = [nn.functional.cross_entropy(logits, labels) for logits in (found, expected)]
    assert_same_gradients(gradients(model, losses[0]), gradients(model, losses[1]))


NEW = ("albert", "mpnet", "modernbert")
HEIGHTENED = {"hidden_dropout_prob": 0.3, "attention_probs_dropout_prob": 0.2, "embedding_dropout": 0.3,
              "attention_dropout": 0.2, "mlp_dropout": 0.4, "classifier_dropout": 0.0}  # fmt: skip


def small(name: str, head: str = "ForSequenceClassification", **changes: Any) -> Any:
    """A model that exercises what its family adds: shared layers, windows of both kinds, all dropouts where wanted."""
    own: dict[str, dict[str, Any]] = {
        "albert": {"num_hidden_layers": 3, "num_hidden_groups": 2, "inner_group_num": 2, "hidden_act": "gelu_new"},
        "mpnet": {"num_hidden_layers": 3, "hidden_act": "gelu"},
        "modernbert": {"num_hidden_layers": 4, "global_attn_every_n_layers": 3, "local_attention": 6,
                       "hidden_activation": "gelu", "classifier_pooling": "cls", "rope_parameters": None},
    }  # fmt: skip
    sizes = {
        "hidden_size": 24,
        "num_attention_heads": 4,
        "intermediate_size": 40,
        "layer_norm_eps": 1e-5,
        "num_labels": 3,
    }
    if name == "modernbert":
        del sizes["layer_norm_eps"]
    return build(name, head, **(sizes | own.get(name, {}) | changes))


def flat_of(model: Any) -> FlatClassifier:
    family = find_family(model)
    assert family is not None
    return FlatClassifier(model, family).train(model.training)


def types_of(name: str) -> int:
    return 2 if name in ("bert", "electra", "albert") else 0


class TestDropout:
    def test_sites_of_every_new_family(self) -> None:
        """As the sources of transformers have them; ALBERT's layers have a dropout that they do not call."""
        albert = dropout_rates(small("albert", "Model", **HEIGHTENED).train(), FAMILIES["albert"])
        layer = {Site.ATTENTION: 0.2, Site.ATTENTION_OUTPUT: 0.3}
        assert albert == {(0, Site.EMBEDDINGS): 0.3} | {(n, s): r for n in range(1, 7) for s, r in layer.items()}
        mpnet = dropout_rates(small("mpnet", "Model", **HEIGHTENED).train(), FAMILIES["mpnet"])
        layer[Site.OUTPUT] = 0.3
        assert mpnet == {(0, Site.EMBEDDINGS): 0.3} | {(n, s): r for n in range(1, 4) for s, r in layer.items()}
        modernbert = small("modernbert", "Model", **HEIGHTENED).train()
        layer = {Site.ATTENTION: 0.2, Site.ATTENTION_OUTPUT: 0.2, Site.FEED_FORWARD: 0.4}
        expected = {(0, Site.EMBEDDINGS): 0.3} | {(n, s): r for n in range(1, 5) for s, r in layer.items()}
        assert dropout_rates(modernbert, FAMILIES["modernbert"]) == expected
        assert not any(dropout_rates(modernbert.eval(), FAMILIES["modernbert"]).values())

    def test_a_dropout_that_is_called_says_itself_whether_it_drops(self) -> None:
        """MPNet calls the one of its probabilities; the others' rate is taken by whoever computes attention."""
        mpnet, bert = (small(name, "Model", **HEIGHTENED).train() for name in ("mpnet", "bert"))
        mpnet.encoder.layer[0].attention.attn.dropout.eval()
        bert.encoder.layer[0].attention.self.dropout.eval()
        assert dropout_rates(mpnet, FAMILIES["mpnet"])[1, Site.ATTENTION] == 0.0
        assert dropout_rates(bert, FAMILIES["bert"])[1, Site.ATTENTION] == 0.2

    @pytest.mark.parametrize("name", NEW)
    def test_whoever_computes_an_example_drops_the_same(self, name: str) -> None:
        flat, batch = flat_of(small(name, **HEIGHTENED).train()), make_batch((7, 1, 12, 3), types_of(name))
        flat.begin_micro_batch(5, 17, micro_batch=0, rank=0)
        together = flat(batch)
        starts = batch.first_token.tolist()
        for i, length in enumerate(batch.lengths):
            span = slice(starts[i], starts[i] + length)
            alone = type(batch)(
                token_ids=batch.token_ids[span], type_ids=None if batch.type_ids is None else batch.type_ids[span],
                position_ids=batch.position_ids[span], lengths=(length,), labels=None,
                example_ids=batch.example_ids[i : i + 1],
            )  # fmt: skip
            flat.begin_micro_batch(5, 17, micro_batch=3, rank=2)
            torch.testing.assert_close(flat(alone)[0], together[i], rtol=1e-5, atol=1e-5)
        flat.begin_micro_batch(5, 18, micro_batch=0, rank=0)
        assert not torch.equal(flat(batch), together)

    @pytest.mark.parametrize("name", NEW)
    def test_first_tokens_are_those_of_the_whole_layer(self, name: str) -> None:
        """With masks that differ from layer to layer, also where layers share their weights."""
        flat, batch = flat_of(small(name, **HEIGHTENED).train()), make_batch((7, 1, 12, 3), types_of(name))
        draws = flat._draws(batch)
        found, expected = (
            flat._encoder.first_tokens(batch, draws),
            flat._encoder.tokens(batch, draws)[batch.first_token],
        )
        torch.testing.assert_close(found, expected, rtol=1e-5, atol=1e-5)
        results = [gradients(flat, out.sin().sum()) for out in (found, expected)]
        assert_same_gradients(results[0], results[1], 1e-4)

    def test_repetitions_of_a_shared_layer_draw_masks_of_their_own(self) -> None:
        model = small("albert", "Model", num_hidden_layers=2, num_hidden_groups=1, inner_group_num=1, **HEIGHTENED)
        draws = flat_of(small("albert", **HEIGHTENED).train())._draws(make_batch((5,), 2))
        assert len(FAMILIES["albert"].layers(model)) == 2
        assert draws.at(1, Site.ATTENTION).site_key != draws.at(2, Site.ATTENTION).site_key


class TestSharedParameters:
    def test_gradients_of_repetitions_add_up(self) -> None:
        """A layer used twice has the sum of what two layers of the same weights have, each used once."""
        shared = small("albert", num_hidden_layers=2, num_hidden_groups=1, inner_group_num=1)
        apart = small("albert", num_hidden_layers=2, num_hidden_groups=2, inner_group_num=1)
        groups = apart.albert.encoder.albert_layer_groups
        for group in groups:
            group.load_state_dict(shared.albert.encoder.albert_layer_groups[0].state_dict())
        others = {k: v for k, v in shared.state_dict().items() if "layer_groups" not in k}
        apart.load_state_dict(others, strict=False)
        batch = make_batch((7, 1, 12, 3), 2)
        sums, each = (gradients(m, flat_of(m)(batch).square().sum()) for m in (shared, apart))
        for name, gradient in sums.items():
            parts = [v for k, v in each.items() if k.replace("groups.1.", "groups.0.") == name]
            assert len(parts) == (2 if "layer_groups" in name else 1)
            assert_near(gradient, sum(parts), max(float(gradient.abs().max()), 0.1), name)

    def test_a_parameter_is_of_the_stage_that_uses_it_first(self) -> None:
        model = small("albert")
        flat, groups = flat_of(model), model.albert.encoder.albert_layer_groups
        stages = [set(stage) for stage in flat.stages]
        assert len(stages) == 1 + 3 * 2 + 1
        assert [len(stage) for stage in flat.stages] == [len(stage) for stage in stages], "each of them once"
        assert set(model.albert.encoder.embedding_hidden_mapping_in.parameters()) < stages[0]
        per_group = [[set(layer.parameters()) for layer in group.albert_layers] for group in groups]
        # 3 layers in 2 groups: the first two are of the first group, of two inner layers each
        assert stages[1:-1] == [*per_group[0], set(), set(), *per_group[1]]
        assert sorted(map(id, set().union(*stages))) == sorted(map(id, set(model.parameters())))
        assert sum(map(len, stages)) == len(set(model.parameters()))

    @pytest.mark.parametrize("name", CLASSES)
    def test_stages_hold_every_parameter_once(self, name: str) -> None:
        model = small(name) if name in NEW else build(name, "ForSequenceClassification")
        stages = flat_of(model).stages
        assert sorted(id(p) for stage in stages for p in stage) == sorted(map(id, set(model.parameters())))

    @pytest.mark.parametrize("name", NEW)
    def test_forward_tells_of_a_stage_before_it_reads_its_parameters(self, name: str) -> None:
        """Parameters hold wrong numbers until their stage is told of, as if their update were still on its way."""
        model = small(name).eval()
        flat, batch = flat_of(model), make_batch((7, 1, 12, 3), types_of(name))
        expected, right = flat(batch), [p.detach().clone() for p in model.parameters()]
        ready = dict(zip(model.parameters(), right, strict=True))
        for parameter in model.parameters():
            parameter.data = torch.full_like(parameter, torch.nan)
        stages, told = flat.stages, []

        def settle(stage: int) -> None:
            told.append(stage)
            for parameter in stages[stage]:
                parameter.data = ready[parameter]

        flat.before_stage(settle)
        torch.testing.assert_close(flat(batch), expected, rtol=0, atol=0)
        assert told == list(range(len(stages)))


class TestTraining:
    @pytest.mark.parametrize("name", NEW)
    def test_frozen_parameters_get_no_gradients(self, name: str) -> None:
        stock = small(name).train()
        model = fleetune.optimize(copy.deepcopy(stock))
        for m in (model, stock):
            m.base_model.embeddings.requires_grad_(False)
            for parameter in list(m.base_model.parameters())[5:12]:
                parameter.requires_grad_(False)
        assert_computes_the_same(model, stock, "right")
        for m in (model, stock):
            m.base_model.requires_grad_(False)
        assert_computes_the_same(model, stock, "right")

    @pytest.mark.parametrize("name", NEW)
    def test_layers_computed_again_in_backward(self, name: str) -> None:
        """Less is kept, and not a bit is different; with dropout, shared layers, and the bias that all layers share."""
        model = small(name, **HEIGHTENED).train()
        flat, batch = flat_of(model), make_batch((7, 1, 12, 3), types_of(name))

        def run() -> tuple[int, dict[str, Tensor]]:
            kept = 0

            def count(x: Tensor) -> Tensor:
                nonlocal kept
                kept += x.numel()
                return x

            flat.begin_micro_batch(1, 2, micro_batch=0, rank=0)
            with torch.autograd.graph.saved_tensors_hooks(count, lambda x: x):
                loss = flat(batch).square().sum()
            return kept, gradients(flat, loss)

        kept, expected = run()
        for layer in flat._encoder.parts.modules:
            layer.gradient_checkpointing = True
        kept_less, found = run()
        assert kept_less < kept / 2
        assert all(torch.equal(found[key], gradient) for key, gradient in expected.items())

    @pytest.mark.parametrize("name", NEW)
    def test_the_table_of_words_has_a_gradient_of_touched_rows(self, name: str) -> None:
        model = small(name)
        flat, batch = flat_of(model), make_batch((7, 1, 12, 3), types_of(name))
        dense = gradients(flat, flat(batch).square().sum())
        words = flat.word_embeddings
        words.sparse = True
        sparse = gradients(flat, flat(batch).square().sum())
        (key,) = [key for key, gradient in sparse.items() if gradient.is_sparse]
        found = sparse[key].coalesce()
        assert torch.equal(found.to_dense(), dense[key])
        assert found.indices()[0].tolist() == sorted(set(batch.token_ids.tolist()) - {words.padding_idx})

    @pytest.mark.parametrize("name", NEW)
    def test_an_empty_batch_gives_no_logits_and_zero_gradients(self, name: str) -> None:
        for changes in ({}, {"classifier_pooling": "mean"} if name == "modernbert" else {}):
            model = small(name, **changes).train()
            logits = flat_of(model)(make_batch((), types_of(name)))
            assert logits.shape == (0, 3)
            logits.sum().backward()
            assert all(p.grad is not None and not p.grad.any() for p in model.parameters())

    @pytest.mark.parametrize("name", CLASSES)
    def test_bfloat16_is_near_float32(self, name: str) -> None:
        """Of logits 0.02 and 5 %, of gradients 8 % of their norm, where that is not far below the largest one's."""
        model = (small(name) if name != "distilbert" else build(name, "ForSequenceClassification", 3)).train()
        flat, batch = flat_of(model), make_batch((20, 17, 5), types_of(name))
        labels = batch.labels % model.config.num_labels
        exact = flat(batch)
        expected = gradients(model, nn.functional.cross_entropy(exact, labels))
        flat.compute_in(torch.bfloat16)
        rounded = flat(batch)
        assert rounded.dtype == torch.float32
        assert not torch.equal(rounded, exact)
        torch.testing.assert_close(rounded, exact, rtol=0.05, atol=0.02)
        largest = max(gradient.norm() for gradient in expected.values())
        for key, gradient in gradients(model, nn.functional.cross_entropy(rounded, labels)).items():
            assert gradient.dtype == torch.float32
            near = (gradient - expected[key]).norm() / (expected[key].norm() + 0.01 * largest)
            assert near < 0.08, (key, near)

    def test_layers_of_albert_are_one_operation(self, monkeypatch: pytest.MonkeyPatch) -> None:
        """Norms behind, GELU, all biases: the same as BERT's. The other two are taken apart."""
        whole, calls = FlatEncoder._whole_layer, []
        monkeypatch.setattr(FlatEncoder, "_whole_layer", lambda *args: calls.append(args[1]) or whole(*args))
        for name in NEW:
            flat_of(small(name).train())(make_batch((7, 1), types_of(name)))
        assert calls == [1, 2, 3, 4, 5]  # and the sixth for first tokens


def refused() -> Iterator[tuple[str, dict[str, Any], str]]:
    yield "bert", {"is_decoder": True}, "is_decoder=True makes it a decoder"
    yield "bert", {"is_decoder": True, "add_cross_attention": True}, "is_decoder=True"
    yield "bert", {"position_embedding_type": "relative_key"}, "position_embedding_type='relative_key': only 'absolute'"
    yield "roberta", {"hidden_act": "prelu"}, "hidden_act='prelu': an activation with parameters of its own"
    yield "albert", {"is_causal": True}, "is_causal=True makes it a decoder"
    yield "modernbert", {"hidden_activation": "xielu"}, "hidden_activation='xielu'"
    yield "modernbert", {"local_attention": 1}, "local_attention=1: a window of the token alone"
    for kind, own in (("dynamic", {}), ("longrope", {"short_factor": [1.0] * 3, "long_factor": [2.0] * 3})):
        rope = {"rope_type": kind, "rope_theta": 50.0, "factor": 2.0, "original_max_position_embeddings": 20, **own}
        rope = {"full_attention": rope, "sliding_attention": {"rope_type": "default", "rope_theta": 7.0}}
        yield "modernbert", {"rope_parameters": rope}, f"rope_type='{kind}' of full_attention"


@pytest.mark.parametrize(("name", "changes", "told"), list(refused()))
def test_options_that_are_not_known_are_refused_by_name(name: str, changes: dict[str, Any], told: str) -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # transformers has a word about some of them
        model = small(name, **changes)
    assert find_family(model) is None
    assert told in str(why_padded(model))
    with pytest.warns(FleetuneWarning, match="left the .* as it was") as caught:
        assert fleetune.optimize(model) is model
    assert told in str(caught[0].message)
    assert "forward" not in vars(model.base_model)


def test_unknown_kinds_of_layers_are_refused_by_name() -> None:
    model = small("modernbert")
    model.config.layer_types[1] = "chunked_attention"
    assert "layer_types=['chunked_attention']" in str(why_padded(model))


def test_minilm_is_a_bert(flat_calls: list[str]) -> None:
    """Its checkpoints say so: model type bert, of 384 columns in 12 heads."""
    config = {"hidden_size": 384, "num_attention_heads": 12, "intermediate_size": 1536, "num_hidden_layers": 2}
    stock = build("bert", "Model", hidden_act="gelu", layer_norm_eps=1e-12, **config)
    for parameter in stock.parameters():
        parameter.data.mul_(0.3)
    assert_computes_the_same(fleetune.optimize(copy.deepcopy(stock)), stock, "right")
    assert flat_calls == ["tokens"]


def test_positions_that_follow_the_padding_token_are_fewer() -> None:
    """MPNet's and RoBERTa's begin at 2, ALBERT's and ModernBERT's at 0."""
    found = {name: check_tokenizer_fits(range(9), build(name, "Model").config, 512) for name in CLASSES}
    assert {name for name, most in found.items() if most == 38} == {"roberta", "xlm-roberta", "camembert", "mpnet"}
    assert {most for name, most in found.items()} == {38, 40}


def test_rotary_frequencies_are_read_at_every_call(flat_calls: list[str]) -> None:
    stock = small("modernbert", "Model").eval()
    model = fleetune.optimize(copy.deepcopy(stock))
    for m in (model, stock):
        m.rotary_emb.full_attention_inv_freq.mul_(1.7)
    assert_computes_the_same(model, stock, "right")
    assert flat_calls == ["tokens"]


@pytest.mark.parametrize("name", ["modernbert", "mpnet"])
def test_a_changed_module_is_never_overlooked(name: str, flat_calls: list[str]) -> None:
    stock = small(name, "Model").eval()
    model = fleetune.optimize(copy.deepcopy(stock))
    changed = model.rotary_emb if name == "modernbert" else model.encoder.relative_attention_bias
    changed.register_forward_hook(lambda module, args, output: None)
    with pytest.warns(FleetuneWarning, match="its own forward, which is slower: a .* has hooks"):
        assert_computes_the_same(model, stock, "right")
    assert flat_calls == []


def test_more_distances_than_buckets(flat_calls: list[str]) -> None:
    """MPNet's buckets are one distance wide up to 8, then grow, and end at 128: sequences of 300 tokens use all."""
    stock = small("mpnet", "Model", max_position_embeddings=320, num_hidden_layers=1).eval()
    model = fleetune.optimize(copy.deepcopy(stock))
    ids = integers(2, VOCABULARY, 2, 300)
    losses = [m(ids).last_hidden_state.sin().sum() for m in (model, stock)]
    found, expected = (gradients(m, loss) for m, loss in zip((model, stock), losses, strict=True))
    assert_same_gradients(found, expected, 5e-5)  # sums over 90,000 pairs of tokens
    used = expected["encoder.relative_attention_bias.weight"].ne(0).any(dim=1)
    assert used.nonzero().flatten().tolist() == [n for n in range(32) if n != 16]  # of a distance of 0 after the query
    assert flat_calls == ["tokens"]
