"""An optimized model computes what it computed before, through every door that a Hugging Face model has."""

from __future__ import annotations

import copy
import inspect
import io
import warnings
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import accelerate
import pytest
import safetensors.torch
import torch
import transformers
from torch import Tensor, nn
from torch import distributed as dist
from torch.multiprocessing.spawn import spawn
from torch.nn.parallel import DistributedDataParallel
from torch.nn.utils.prune import random_unstructured

import fleetune
from fleetune.errors import ConfigError, FleetuneWarning
from fleetune.kernels.library import using_reference
from fleetune.kernels.linear import lies_together
from fleetune.model.flat import FlatEncoder
from fleetune.model.optimize import FlatForward
from tests.model.test_flat import SMALL, SMALL_DISTILBERT, VOCABULARY

ROWS, LENGTH, PADDING = 4, 9, 1

NAMES = {"bert": "Bert", "roberta": "Roberta", "xlm-roberta": "XLMRoberta", "camembert": "Camembert",
         "electra": "Electra", "distilbert": "DistilBert"}  # fmt: skip
HEADS = ("Model", "ForSequenceClassification", "ForTokenClassification", "ForQuestionAnswering", "ForMaskedLM",
         "ForMultipleChoice")  # fmt: skip
OTHER_HEADS = (("bert", "ForPreTraining"), ("bert", "ForNextSentencePrediction"), ("electra", "ForPreTraining"))


def build(name: str = "bert", head: str = "ForSequenceClassification", **changes: Any) -> Any:
    """A tiny model of which every parameter matters: initial biases are 0 and norms 1."""
    torch.manual_seed(0)
    options = {**(SMALL_DISTILBERT if name == "distilbert" else SMALL), "classifier_dropout": 0.0}
    options |= {"qa_dropout": 0.0, "summary_last_dropout": 0.0, "embedding_size": 16} if name != "bert" else {}
    options["num_labels"] = 2 if head == "ForQuestionAnswering" else 3
    config = getattr(transformers, f"{NAMES[name]}Config")(**(options | changes))
    model = getattr(transformers, f"{NAMES[name]}{head}")(config)
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


def make_mask(pattern: str) -> Tensor | None:
    mask = torch.ones(ROWS, LENGTH, dtype=torch.int64)
    if pattern == "none":
        return None
    if pattern in ("right", "mixed"):
        mask[1, 4:] = 0
        mask[2, 1:] = 0
    if pattern in ("left", "mixed"):
        mask[3, :5] = 0
    if pattern in ("holes", "mixed"):
        mask[0, 2], mask[1, 3] = 0, 0
    return mask


def draw(low: int, high: int, *shape: int) -> Tensor:
    return torch.randint(low, high, shape, generator=torch.Generator().manual_seed(1))


def make_inputs(model: Any, pattern: str = "right") -> dict[str, Tensor]:
    """Inputs with labels for the model's head; padding is the padding token, or in a hole any other."""
    mask, ids = make_mask(pattern), draw(2, VOCABULARY, ROWS, LENGTH)
    inputs = {"input_ids": ids}
    if mask is not None:
        inputs["attention_mask"] = mask
        if pattern in ("left", "right"):
            ids[mask == 0] = PADDING
    if model.config.model_type in ("bert", "electra"):
        inputs["token_type_ids"] = draw(0, 2, ROWS, LENGTH)
    if type(model).__name__.endswith("ForMultipleChoice"):
        inputs = {name: x.view(2, 2, LENGTH) for name, x in inputs.items()}
    return inputs | make_labels(type(model).__name__, ids, torch.ones_like(ids) if mask is None else mask)


def make_labels(model: str, ids: Tensor, mask: Tensor) -> dict[str, Tensor]:
    """As the heads take them; -100 where they are ignored."""
    by_token = {
        "BertForPreTraining": {"labels": ids, "next_sentence_label": draw(0, 2, ROWS)},
        "ElectraForPreTraining": {"labels": ids % 2},
    }
    by_head = {
        "ForSequenceClassification": {"labels": draw(0, 3, ROWS)},
        "ForTokenClassification": {"labels": torch.where(mask == 1, ids % 3, -100)},
        "ForMaskedLM": {"labels": torch.where(mask == 1, ids, -100)},
        "ForQuestionAnswering": {"start_positions": draw(0, 4, ROWS), "end_positions": draw(4, LENGTH, ROWS)},
        "ForNextSentencePrediction": {"labels": draw(0, 2, ROWS)},
        "ForMultipleChoice": {"labels": draw(0, 2, 2)},
    }
    by_token["BertForPreTraining"]["labels"] = by_head["ForMaskedLM"]["labels"]
    return by_token.get(model) or next((x for head, x in by_head.items() if model.endswith(head)), {})


def loss_of(outputs: Any, mask: Tensor | None) -> Tensor:
    if outputs.get("loss") is not None:
        return outputs.loss
    hidden = outputs.last_hidden_state
    loss = hidden.sin().sum() if mask is None else (hidden.sin() * mask.unsqueeze(2)).sum()
    pooled = outputs.get("pooler_output")
    return loss if pooled is None else loss + pooled.square().sum()


def gradients(model: nn.Module, loss: Tensor) -> dict[str, Tensor]:
    model.zero_grad()
    loss.backward()
    return {n: p.grad.clone() for n, p in model.named_parameters() if p.grad is not None}


def assert_same_gradients(found: dict[str, Tensor], expected: dict[str, Tensor]) -> None:
    assert found.keys() == expected.keys()
    for name, gradient in expected.items():
        close = {"rtol": 1e-4, "atol": 1e-5 * max(1.0, float(gradient.abs().max()))}
        torch.testing.assert_close(found[name], gradient, **close, msg=lambda m, n=name: f"{n}: {m}")


def assert_same_outputs(found: Any, expected: Any, mask: Tensor | None) -> None:
    """Equal where the mask is 1; whatever is not of a (B, L) shape, everywhere."""
    assert type(found) is type(expected)
    assert [k for k in found if found[k] is not None] == [k for k in expected if expected[k] is not None]
    for name in expected:
        a, b = found[name], expected[name]
        if mask is not None and b.shape[:2] == mask.shape and not name.startswith(("start_", "end_")):
            a, b = a[mask == 1], b[mask == 1]
        torch.testing.assert_close(a, b, rtol=1e-5, atol=1e-5)


def assert_computes_the_same(found: Any, expected: Any, pattern: str = "right") -> None:
    """Outputs, loss and every gradient."""
    inputs = make_inputs(expected, pattern)
    a, b = found(**inputs), expected(**inputs)
    assert_same_outputs(a, b, inputs.get("attention_mask"))
    losses = [loss_of(outputs, inputs.get("attention_mask")) for outputs in (a, b)]
    assert_same_gradients(gradients(found, losses[0]), gradients(expected, losses[1]))


@pytest.fixture
def flat_calls(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Which of its methods the flat encoder was asked for."""
    calls: list[str] = []

    def noted(name: str, method: Callable[..., Tensor]) -> Callable[..., Tensor]:
        def note(*args: Any, **kwargs: Any) -> Tensor:
            calls.append(name)
            return method(*args, **kwargs)

        return note

    for name in ("tokens", "first_tokens"):
        monkeypatch.setattr(FlatEncoder, name, noted(name, getattr(FlatEncoder, name)))
    return calls


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("head", HEADS)
def test_outputs_loss_and_gradients_equal_those_before(name: str, head: str, flat_calls: list[str]) -> None:
    model = build(name, head)
    stock = copy.deepcopy(model)
    assert fleetune.optimize(model) is model
    for pattern, training in (("right", True), ("mixed", True), ("mixed", False), ("none", True)):
        model.train(training)
        stock.train(training)
        assert_computes_the_same(model, stock, pattern)
    assert len(flat_calls) == 4
    wanted = ["first_tokens", "tokens", "tokens", "first_tokens"] if "Sequence" in head else ["tokens"] * 4
    assert flat_calls == wanted


@pytest.mark.parametrize(("name", "head"), OTHER_HEADS)
@pytest.mark.parametrize("pattern", ["right", "left", "holes"])
def test_other_heads(name: str, head: str, pattern: str, flat_calls: list[str]) -> None:
    stock = build(name, head)
    assert_computes_the_same(fleetune.optimize(copy.deepcopy(stock)), stock, pattern)
    assert flat_calls == ["tokens"]


@pytest.mark.parametrize("pattern", ["left", "holes"])
@pytest.mark.parametrize("name", ["bert", "roberta", "distilbert"])
def test_padding_on_the_left_and_holes(name: str, pattern: str, flat_calls: list[str]) -> None:
    for head in ("Model", "ForSequenceClassification"):
        stock = build(name, head).train()
        assert_computes_the_same(fleetune.optimize(copy.deepcopy(stock)).train(), stock, pattern)
    assert len(flat_calls) == 2


@pytest.mark.parametrize("name", ["bert", "roberta"])
def test_padding_tokens_without_a_mask_have_no_gradient(name: str, flat_calls: list[str]) -> None:
    """The row of the padding token in its table has none by definition, whoever attends to the token."""
    stock = build(name, "ForTokenClassification")
    model = fleetune.optimize(copy.deepcopy(stock))
    inputs = make_inputs(stock, "right")
    del inputs["attention_mask"]
    found, expected = (gradients(m, m(**inputs).loss) for m in (model, stock))
    assert_same_gradients(found, expected)
    key = next(key for key in found if key.endswith("word_embeddings.weight"))
    assert not found[key][PADDING].any()
    assert found[key].any()
    assert flat_calls == ["tokens"]


def test_masked_positions_are_zero_and_the_first_is_not() -> None:
    model = fleetune.optimize(build("bert", "Model").eval())
    inputs = make_inputs(model, "mixed")
    hidden = model(**inputs).last_hidden_state
    is_masked = inputs["attention_mask"] == 0
    is_masked[:, 0] = False
    assert not hidden[is_masked].any()
    assert hidden[~is_masked].all()


@pytest.mark.parametrize("name", ["bert", "roberta", "distilbert"])
def test_positions_of_the_caller_are_used(name: str, flat_calls: list[str]) -> None:
    stock = build(name, "Model").eval()
    model = fleetune.optimize(copy.deepcopy(stock))
    inputs = make_inputs(stock, "right")
    for positions in (torch.arange(LENGTH).flip(0)[None] + 3, torch.randint(2, 30, (ROWS, LENGTH))):
        found, expected = (m(**inputs, position_ids=positions) for m in (model, stock))
        assert_same_outputs(found, expected, inputs["attention_mask"])
    assert not torch.allclose(found.last_hidden_state[0, 0], model(**inputs).last_hidden_state[0, 0], atol=1e-3)
    assert len(flat_calls) == 3


def test_one_sequence_and_positional_arguments(flat_calls: list[str]) -> None:
    stock = build("bert", "Model").eval()
    model = fleetune.optimize(copy.deepcopy(stock))
    ids = torch.randint(2, VOCABULARY, (1, 5), dtype=torch.int32)
    mask = torch.ones(1, 5, dtype=torch.bool)
    with torch.no_grad():
        assert_same_outputs(model(ids, mask), stock(ids, mask), None)
    with torch.inference_mode():
        assert_same_outputs(model(ids, mask.float()), stock(ids, mask), None)
    assert len(flat_calls) == 2
    model.train()(ids).last_hidden_state.sum().backward()  # nothing was left in inference mode


@pytest.mark.parametrize("name", ["bert", "electra", "distilbert"])
def test_results_as_a_tuple(name: str, flat_calls: list[str]) -> None:
    for head in ("Model", "ForSequenceClassification"):
        stock = build(name, head).eval()
        model = fleetune.optimize(copy.deepcopy(stock))
        ids = make_inputs(stock)["input_ids"]
        found, expected = (m(ids, return_dict=False) for m in (model, stock))
        assert isinstance(found, tuple)
        torch.testing.assert_close(found, expected, rtol=1e-5, atol=1e-5)
        model.config.return_dict = stock.config.return_dict = False
        assert type(model(ids)) is type(stock(ids)) is tuple
    assert len(flat_calls) == 4


class TestFallingBack:
    """Calls that go through the model's own forward, whose results are then the very same."""

    @pytest.mark.parametrize(
        "arguments",
        [
            {"output_hidden_states": True},
            {"output_attentions": True},
            {"attention_mask": torch.ones(ROWS, 1, LENGTH, LENGTH, dtype=torch.bool)},
            {"attention_mask": torch.cat([torch.zeros(1, LENGTH), torch.ones(ROWS - 1, LENGTH)]).long()},
            {"use_cache": True},
            {"is_causal": True},
            {"cu_seq_lens_q": torch.tensor([0, 4])},
            {"encoder_hidden_states": torch.ones(ROWS, 2, 24)},
        ],
        ids=lambda arguments: next(iter(arguments)),
    )
    def test_arguments(self, arguments: dict[str, Any], flat_calls: list[str]) -> None:
        stock = build("bert", "Model", attn_implementation="eager").eval()
        model = fleetune.optimize(copy.deepcopy(stock))
        ids = make_inputs(stock)["input_ids"]
        with torch.no_grad():
            found, expected = (m(ids, **arguments) for m in (model, stock))
            assert found.keys() == expected.keys()
            assert torch.equal(found.last_hidden_state, expected.last_hidden_state)
            assert flat_calls == []
            model(ids)
            assert flat_calls == ["tokens"], "a call that asks for nothing special is computed here again"

    def test_config_asks_for_hidden_states(self, flat_calls: list[str]) -> None:
        model = fleetune.optimize(build())
        model.config.output_hidden_states = True
        assert len(model(**make_inputs(model)).hidden_states) == 4
        assert flat_calls == []

    def test_embeddings_given(self, flat_calls: list[str]) -> None:
        stock = build("bert", "Model").eval()
        model = fleetune.optimize(copy.deepcopy(stock))
        embeddings = torch.randn(2, 3, 24)
        assert torch.equal(model(inputs_embeds=embeddings)[0], stock(inputs_embeds=embeddings)[0])
        assert flat_calls == []

    def test_what_is_wrong_is_said_by_the_model(self) -> None:
        stock = build("bert", "Model")
        model = fleetune.optimize(copy.deepcopy(stock))
        for arguments in ({}, {"input_ids": torch.ones(2, 3).long(), "inputs_embeds": torch.ones(2, 3, 24)}):
            with pytest.raises(ValueError, match="exactly one of input_ids or inputs_embeds"):
                model(**arguments)

    def test_meta_device(self, flat_calls: list[str]) -> None:
        model = fleetune.optimize(build("bert", "Model")).to("meta")
        assert model(torch.ones(2, 3, dtype=torch.int64, device="meta")).last_hidden_state.is_meta
        assert flat_calls == []

    @pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float64])
    def test_other_weights_than_float32(self, dtype: torch.dtype, flat_calls: list[str]) -> None:
        stock = build().eval()
        model = fleetune.optimize(copy.deepcopy(stock))
        inputs = make_inputs(stock)
        with pytest.warns(FleetuneWarning, match=f"its weights are {dtype}"):
            found = model.to(dtype)(**inputs)
        assert torch.equal(found.logits, copy.deepcopy(stock).to(dtype)(**inputs).logits)
        model(**inputs)  # told once
        assert flat_calls == []
        model.float()
        model(**inputs).loss.backward()
        assert flat_calls == ["first_tokens"]

    def test_autocast_to_half(self, flat_calls: list[str]) -> None:
        model = fleetune.optimize(build())
        with torch.autocast("cpu", dtype=torch.float16):
            model(**make_inputs(model))
        assert flat_calls == []

    def test_tracing(self) -> None:
        stock = build("bert", "Model", return_dict=False).eval()
        model = fleetune.optimize(copy.deepcopy(stock))
        ids = make_inputs(stock)["input_ids"]
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            traced = torch.jit.trace(model, (ids,), check_trace=False)
        torch.testing.assert_close(traced(ids), stock(ids))

    def test_compiling(self, flat_calls: list[str]) -> None:
        stock = build().eval()
        model = torch.compile(fleetune.optimize(copy.deepcopy(stock)), backend="eager")
        inputs = make_inputs(stock)
        torch.testing.assert_close(model(**inputs).logits, stock(**inputs).logits)
        assert flat_calls == []


class Doubled(nn.Module):
    """What adapters put in the place of a linear layer."""

    def __init__(self, inner: nn.Module) -> None:
        super().__init__()
        self.inner = inner

    def forward(self, x: Tensor) -> Tensor:
        return 2 * self.inner(x)


class DoubledLinear(nn.Linear):
    def forward(self, x: Tensor) -> Tensor:
        return 2 * super().forward(x)


def replace_by_wrapper(model: Any) -> None:
    attention = model.bert.encoder.layer[1].attention.self
    attention.query = Doubled(attention.query)


def replace_by_subclass(model: Any) -> None:
    layer, new = model.bert.encoder.layer[1].output, DoubledLinear(40, 24)
    new.load_state_dict(layer.dense.state_dict())
    layer.dense = new


def replace_by_sequence(model: Any) -> None:
    layer = model.bert.encoder.layer[0].intermediate
    layer.dense = nn.Sequential(layer.dense, nn.Tanh())


def replace_norm(model: Any) -> None:
    model.bert.encoder.layer[0].output.LayerNorm = nn.Identity()


class Passing(nn.Module):
    def forward(self, x: Tensor, *args: Any, **kwargs: Any) -> Tensor:
        return x


def replace_layer(model: Any) -> None:
    model.bert.encoder.layer[0] = Passing()


def replace_part(model: Any) -> None:
    model.bert.encoder.layer[0].intermediate = nn.Linear(24, 40)


def replace_forward(model: Any) -> None:
    module = model.bert.encoder.layer[0].attention
    forward = module.forward
    module.forward = lambda *args, **kwargs: (3 * forward(*args, **kwargs)[0], None)


def hook_into(model: Any) -> None:
    model.bert.encoder.layer[2].register_forward_hook(lambda module, args, output: 2 * output)


def parametrize(model: Any) -> None:
    nn.utils.parametrizations.weight_norm(model.bert.encoder.layer[0].intermediate.dense)
    model.bert.encoder.layer[0].intermediate.dense.parametrizations.weight.original0.data.mul_(3)


def prune(model: Any) -> None:
    random_unstructured(model.bert.encoder.layer[0].intermediate.dense, "weight", 0.5)


class TestReplacedModules:
    @pytest.mark.parametrize(
        "change",
        [replace_by_wrapper, replace_by_subclass, replace_by_sequence, replace_norm, replace_layer, replace_part,
         replace_forward, hook_into, parametrize, prune],
    )  # fmt: skip
    def test_another_module_is_never_overlooked(self, change: Callable[[Any], None], flat_calls: list[str]) -> None:
        model = fleetune.optimize(build()).eval()
        inputs = make_inputs(model)
        before = model(**inputs).logits
        change(model)
        with pytest.warns(FleetuneWarning, match="its own forward, which is slower"):
            found = model(**inputs).logits
        del model.bert.forward
        assert torch.equal(found, model(**inputs).logits)
        assert not torch.allclose(found, before)
        assert flat_calls == ["first_tokens"]

    def test_what_transformers_leaves_behind_is_no_hook(self, flat_calls: list[str]) -> None:
        model = fleetune.optimize(build())
        inputs = make_inputs(model)
        model(**inputs, output_hidden_states=True)
        assert model.bert.encoder.layer[0]._forward_hooks
        model(**inputs)
        assert flat_calls == ["first_tokens"]

    def test_another_linear_layer_is_found(self, flat_calls: list[str]) -> None:
        stock = build()
        model = fleetune.optimize(copy.deepcopy(stock))
        for m in (model, stock):
            torch.manual_seed(5)
            m.bert.encoder.layer[1].attention.self.key = nn.Linear(24, 24)
        assert_computes_the_same(model, stock)
        assert flat_calls == ["first_tokens"]

    def test_adapters_before_are_told(self) -> None:
        model = build()
        replace_by_wrapper(model)
        stock = copy.deepcopy(model).eval()
        with pytest.warns(FleetuneWarning, match="Doubled is none of its own modules"):
            assert fleetune.optimize(model) is model
        inputs = make_inputs(model)
        assert torch.equal(model.eval()(**inputs).logits, stock(**inputs).logits)


class MeanHead(nn.Module):
    """A head that reads every token."""

    def __init__(self) -> None:
        super().__init__()
        self.out = nn.Linear(24, 3)

    def forward(self, hidden: Tensor) -> Tensor:
        return self.out(hidden.mean(dim=1))


class MeanModel(transformers.RobertaForSequenceClassification):
    """A subclass whose name says one thing and whose forward does another."""

    def forward(self, input_ids: Tensor, **kwargs: Any) -> Tensor:
        return self.roberta(input_ids, **kwargs).last_hidden_state.mean(dim=1)


class TestFirstTokens:
    def test_the_encoder_called_by_itself_gives_all(self, flat_calls: list[str]) -> None:
        model = fleetune.optimize(build("roberta")).eval()
        inputs = make_inputs(model, "none")
        hidden = model.roberta(inputs["input_ids"]).last_hidden_state
        assert hidden.shape == (ROWS, LENGTH, 24)
        model(**inputs)
        assert flat_calls == ["tokens", "first_tokens"]

    def test_a_replaced_head_gets_all(self, flat_calls: list[str]) -> None:
        model = build("roberta").eval()
        model.classifier = MeanHead()
        stock = copy.deepcopy(model)
        assert_computes_the_same(fleetune.optimize(model), stock, "none")
        model.roberta.register_forward_hook(lambda *args: None)
        assert_computes_the_same(model, stock, "none")
        assert flat_calls == ["tokens", "tokens"]

    def test_a_subclass_gets_all(self, flat_calls: list[str]) -> None:
        stock = build("roberta").eval()
        stock.__class__ = MeanModel
        model, ids = fleetune.optimize(copy.deepcopy(stock)), make_inputs(stock)["input_ids"]
        torch.testing.assert_close(model(ids), stock(ids), rtol=1e-5, atol=1e-5)
        assert flat_calls == ["tokens"]

    def test_a_pooler_that_looks_at_all_gets_all(self, flat_calls: list[str]) -> None:
        stock = build("bert").eval()
        stock.bert.pooler = MeanHead()
        stock.bert.pooler.out = nn.Linear(24, 24)
        model = fleetune.optimize(copy.deepcopy(stock))
        assert_computes_the_same(model, stock, "none")
        assert flat_calls == ["tokens"]


class TestSavingAndLoading:
    def test_state_is_the_same(self) -> None:
        stock = build(head="ForMaskedLM")
        model = fleetune.optimize(copy.deepcopy(stock))
        assert list(model.state_dict()) == list(stock.state_dict())
        torch.testing.assert_close(model.state_dict(), stock.state_dict(), rtol=0, atol=0)
        assert [n for n, _ in model.named_parameters()] == [n for n, _ in stock.named_parameters()]
        assert type(model) is type(stock)
        assert [type(m) for m in model.modules()] == [type(m) for m in stock.modules()]

    @pytest.mark.parametrize("head", ["Model", "ForSequenceClassification", "ForMaskedLM"])
    def test_saved_and_loaded_by_a_stock_model(self, head: str, tmp_path: Path) -> None:
        stock = build("roberta", head).eval()
        stock.save_pretrained(tmp_path / "stock")
        model = fleetune.optimize(copy.deepcopy(stock))
        model.save_pretrained(tmp_path / "optimized")
        files = [safetensors.torch.load_file(tmp_path / n / "model.safetensors") for n in ("stock", "optimized")]
        assert files[0].keys() == files[1].keys()
        assert all(torch.equal(files[0][key], files[1][key]) for key in files[0])
        sizes = [(tmp_path / n / "model.safetensors").stat().st_size for n in ("stock", "optimized")]
        assert sizes[0] == sizes[1]
        again = type(stock).from_pretrained(tmp_path / "optimized").eval()
        assert again.config.architectures == stock.config.architectures == [type(stock).__name__]
        assert "forward" not in vars(again.base_model)
        assert_computes_the_same(model, again, "mixed")
        assert_computes_the_same(fleetune.optimize(again), stock, "mixed")

    def test_saved_by_safetensors_and_torch_themselves(self, tmp_path: Path) -> None:
        model = fleetune.optimize(build())
        safetensors.torch.save_file(model.state_dict(), tmp_path / "a.safetensors")
        torch.save(model.state_dict(), tmp_path / "a.pt")
        for loaded in (safetensors.torch.load_file(tmp_path / "a.safetensors"), torch.load(tmp_path / "a.pt")):
            torch.testing.assert_close(loaded, dict(model.state_dict()), rtol=0, atol=0)

    @pytest.mark.parametrize("assign", [False, True])
    def test_loading_after_optimizing(self, assign: bool, flat_calls: list[str]) -> None:
        model, other = fleetune.optimize(build()), build(initializer_range=0.5)
        model.load_state_dict(other.state_dict(), assign=assign)
        assert_computes_the_same(model, copy.deepcopy(other))
        assert flat_calls == ["first_tokens"]

    @pytest.mark.parametrize("head", ["Model", "ForSequenceClassification"])
    def test_a_copy_uses_its_own_weights(self, head: str, flat_calls: list[str]) -> None:
        model = fleetune.optimize(build(head=head)).eval()
        stock = build(head=head).eval()
        copied = copy.deepcopy(model)
        inputs = make_inputs(model, "none")
        first = model(**inputs)[-1]
        for m in (copied, stock):
            for parameter in m.parameters():
                parameter.data.mul_(1.5)
        assert_same_outputs(copied(**inputs), stock(**inputs), None)
        assert torch.equal(model(**inputs)[-1], first)
        assert copied.base_model.forward is not model.base_model.forward
        assert len(flat_calls) == 3

    @pytest.mark.parametrize("head", ["Model", "ForSequenceClassification"])
    def test_pickled(self, head: str, flat_calls: list[str]) -> None:
        model = fleetune.optimize(build(head=head)).eval()
        buffer = io.BytesIO()
        torch.save(model, buffer)
        buffer.seek(0)
        loaded = torch.load(buffer, weights_only=False)
        assert isinstance(loaded.base_model.forward, FlatForward)
        inputs = make_inputs(model)
        expected = model(**inputs)
        for parameter in model.parameters():
            parameter.data.zero_()
        assert_same_outputs(loaded(**inputs), expected, inputs["attention_mask"])
        assert len(flat_calls) == 2


class TestChangesAfterwards:
    def test_twice_is_harmless(self, flat_calls: list[str]) -> None:
        stock = build()
        model = fleetune.optimize(fleetune.optimize(copy.deepcopy(stock)))
        assert len(model._forward_pre_hooks) == 1
        assert_computes_the_same(model, stock)
        assert flat_calls == ["first_tokens"]

    def test_tied_decoder_and_more_tokens(self, flat_calls: list[str]) -> None:
        stock = build("roberta", "ForMaskedLM")
        model = fleetune.optimize(copy.deepcopy(stock))
        for m in (model, stock):
            m.resize_token_embeddings(VOCABULARY + 6, mean_resizing=False)
            m.get_input_embeddings().weight.data[VOCABULARY:] = 0.1
            assert m.lm_head.decoder.weight is m.get_input_embeddings().weight
        inputs = make_inputs(stock) | {"input_ids": torch.full((ROWS, LENGTH), VOCABULARY + 5)}
        found, expected = (gradients(m, m(**inputs).loss) for m in (model, stock))
        assert_same_gradients(found, expected)
        assert flat_calls == ["tokens"]

    def test_frozen_parameters_get_no_gradients(self, flat_calls: list[str]) -> None:
        stock = build()
        model = fleetune.optimize(copy.deepcopy(stock))
        for m in (model, stock):
            for parameter in (*m.bert.embeddings.parameters(), *m.bert.encoder.layer[0].parameters()):
                parameter.requires_grad_(False)
            m.bert.encoder.layer[1].attention.self.key.weight.requires_grad_(False)
            m.bert.encoder.layer[2].output.LayerNorm.bias.requires_grad_(False)
        assert_computes_the_same(model, stock)
        for m in (model, stock):
            m.bert.requires_grad_(False)
        assert_computes_the_same(model, stock)
        assert flat_calls == ["first_tokens"] * 2

    def test_an_optimizer_made_before_still_updates_the_weights(self) -> None:
        model = build()
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
        stock = copy.deepcopy(model)
        other = torch.optim.AdamW(stock.parameters(), lr=1e-2)
        fleetune.optimize(model)
        layer = model.bert.encoder.layer[0].attention.self
        assert lies_together([layer.query.weight.data, layer.key.weight.data, layer.value.weight.data])
        inputs = make_inputs(model)
        for m, o in ((model, optimizer), (stock, other)):
            for _ in range(3):
                gradients(m, m(**inputs).loss)
                o.step()
        torch.testing.assert_close(model(**inputs).loss, stock(**inputs).loss, rtol=1e-3, atol=1e-4)

    @pytest.mark.filterwarnings("ignore:.*gradient_checkpointing.* is deprecated:FutureWarning")
    @pytest.mark.parametrize("head", ["ForSequenceClassification", "ForTokenClassification"])
    def test_gradient_checkpointing(self, head: str, flat_calls: list[str]) -> None:
        stock = build(head=head, num_hidden_layers=6).train()
        model = fleetune.optimize(copy.deepcopy(stock))
        inputs = make_inputs(stock)

        def saved_bytes() -> int:
            kept: dict[int, int] = {}

            def pack(x: Tensor) -> Tensor:
                kept[x.untyped_storage().data_ptr()] = x.untyped_storage().nbytes()
                return x

            with torch.autograd.graph.saved_tensors_hooks(pack, lambda x: x):
                loss = model(**inputs).loss
            parameters = {p.untyped_storage().data_ptr() for p in model.parameters()}
            loss.backward()
            return sum(size for at, size in kept.items() if at not in parameters)

        everything = saved_bytes()
        model.gradient_checkpointing_enable()
        assert saved_bytes() < 0.5 * everything
        assert_computes_the_same(model, stock)
        model.gradient_checkpointing_disable()
        assert saved_bytes() == everything
        assert len(flat_calls) == 4


class TestDropout:
    RATES = {"hidden_dropout_prob": 0.3, "attention_probs_dropout_prob": 0.2}  # noqa: RUF012

    def test_repeats_from_torchs_generator_and_only_in_training(self, flat_calls: list[str]) -> None:
        model = fleetune.optimize(build(**self.RATES))
        inputs = make_inputs(model)
        model.eval()
        state = torch.get_rng_state()
        assert torch.equal(model(**inputs).logits, model(**inputs).logits)
        assert torch.equal(state, torch.get_rng_state())
        model.train()
        torch.manual_seed(3)
        first, second = model(**inputs).logits, model(**inputs).logits
        assert not torch.equal(first, second)
        torch.manual_seed(3)
        assert torch.equal(model(**inputs).logits, first)
        assert len(flat_calls) == 5

    @pytest.mark.filterwarnings("ignore:.*gradient_checkpointing.* is deprecated:FutureWarning")
    def test_checkpointing_draws_the_same_masks_again(self) -> None:
        model = fleetune.optimize(build(**self.RATES)).train()
        inputs, found = make_inputs(model), []
        for _ in range(2):
            torch.manual_seed(3)
            found.append(gradients(model, model(**inputs).loss))
            model.gradient_checkpointing_enable()
        assert_same_gradients(found[1], found[0])

    @pytest.mark.parametrize("name", ["bert", "distilbert"])
    def test_rates_are_those_of_the_modules(self, name: str, flat_calls: list[str]) -> None:
        stock = build(name, "Model").train()
        model = fleetune.optimize(build(name, "Model", **self.RATES, dropout=0.3, attention_dropout=0.2)).train()
        for module in model.modules():
            if isinstance(module, nn.Dropout):
                module.p = 0.0
        assert_computes_the_same(model, stock, "mixed")
        assert flat_calls == ["tokens"]

    def test_distilbert_drops_nothing_behind_attention(self) -> None:
        """Of the moments of a sum that only dropout moves: the stock model's place for it has none."""
        model = fleetune.optimize(build("distilbert", "Model", dropout=0.9, attention_dropout=0.0)).train()
        stock = build("distilbert", "Model", dropout=0.9, attention_dropout=0.0).train()
        for m in (model, stock):
            m.embeddings.dropout.p = 0.0
            for layer in m.transformer.layer:
                layer.ffn.dropout.p = 0.0
        ids = make_inputs(stock)["input_ids"]
        torch.testing.assert_close(model(ids)[0], stock(ids)[0], rtol=1e-5, atol=1e-5)

    def test_modules_that_are_not_training_drop_nothing(self) -> None:
        model = fleetune.optimize(build(head="Model", **self.RATES)).train()
        ids = make_inputs(model)["input_ids"]
        for child in model.children():
            child.eval()
        assert torch.equal(model(ids)[0], model(ids)[0])
        model.encoder.layer[1].attention.self.train()
        assert not torch.equal(model(ids)[0], model(ids)[0])

    def test_share_and_scale(self) -> None:
        """The expectation over masks is near to that of the stock model, and each row and column has its own."""
        config = dict.fromkeys(self.RATES, 0.0)
        models = [build(head="Model", num_hidden_layers=1, **config) for _ in range(2)]
        fleetune.optimize(models[0])
        for m in models:
            m.train().encoder.layer[0].output.dropout.p = 0.5
        ids = torch.full((400, 4), 7)
        torch.manual_seed(0)
        found, expected = (m(ids, position_ids=torch.zeros(1, 4).long())[0] for m in models)
        assert len(found.flatten(0, 1).unique(dim=0)) > 1590
        torch.testing.assert_close(found.mean((0, 1)), expected.mean((0, 1)), rtol=0, atol=0.1)
        torch.testing.assert_close(found.std((0, 1)), expected.std((0, 1)), rtol=0.1, atol=0.05)


class TestDtypes:
    def test_bfloat16(self, flat_calls: list[str]) -> None:
        stock = build().eval()
        model = fleetune.optimize(copy.deepcopy(stock), dtype=torch.bfloat16)
        inputs = make_inputs(stock, "mixed")
        found, expected = model(**inputs), stock(**inputs)
        assert found.logits.dtype == torch.float32
        assert model.bert(inputs["input_ids"]).last_hidden_state.dtype == torch.float32
        torch.testing.assert_close(found.logits, expected.logits, rtol=0.05, atol=0.05)
        assert not torch.equal(found.logits, expected.logits)
        for name, gradient in gradients(model, found.loss).items():
            assert gradient.dtype == torch.float32
            wanted = dict(stock.named_parameters())[name].grad
            assert wanted is None or wanted.shape == gradient.shape
        assert flat_calls == ["tokens", "tokens"]
        fleetune.optimize(model)
        torch.testing.assert_close(model(**inputs).logits, expected.logits, rtol=1e-5, atol=1e-5)

    @pytest.mark.parametrize("reference", [False, True])
    def test_autocast(self, reference: bool, monkeypatch: pytest.MonkeyPatch) -> None:
        stock = build(head="ForTokenClassification")
        model = fleetune.optimize(copy.deepcopy(stock))
        inputs = make_inputs(stock)
        seen: list[torch.dtype] = []
        tokens = FlatEncoder.tokens

        def noted(self: FlatEncoder, *args: Any) -> Tensor:
            seen.append(tokens(self, *args).dtype)
            return tokens(self, *args)

        monkeypatch.setattr(FlatEncoder, "tokens", noted)
        with using_reference() if reference else warnings.catch_warnings():
            with torch.autocast("cpu", dtype=torch.bfloat16):
                loss, expected = model(**inputs).loss, stock(**inputs).loss
            found = gradients(model, loss)
        assert seen == [torch.bfloat16]
        torch.testing.assert_close(loss, expected, rtol=0.02, atol=0.02)
        for name, gradient in gradients(stock, expected).items():
            torch.testing.assert_close(found[name], gradient, rtol=0.1, atol=0.1 * float(gradient.abs().max()) + 1e-3)

    @pytest.mark.parametrize("dtype", [torch.float16, torch.float64, torch.int8])
    def test_others_are_refused(self, dtype: torch.dtype) -> None:
        with pytest.raises(ValueError, match=r"None, torch\.float32 or torch\.bfloat16 is expected") as caught:
            fleetune.optimize(build(), dtype=dtype)
        assert isinstance(caught.value, ConfigError)


class Renamed(transformers.BertModel):
    def forward(self, *args: Any, **kwargs: Any) -> Any:
        return super().forward(*args, **kwargs)


def unsupported() -> Iterator[tuple[Any, str]]:
    deberta = transformers.DebertaV2Config(vocab_size=50, hidden_size=16, num_attention_heads=2, intermediate_size=32)
    yield transformers.DebertaV2Model(deberta), "left the DebertaV2Model as it was: .* no deberta-v2, but bert, roberta"
    yield build("bert", "LMHeadModel", is_decoder=True), "left the BertLMHeadModel as it was: is_decoder=True"
    yield Renamed(transformers.BertConfig(**SMALL)), "left the Renamed as it was"
    yield nn.Sequential(build()), "left the Sequential as it was: it is no PreTrainedModel"
    relative = build("bert", "Model")
    relative.config.position_embedding_type = "relative_key"
    yield relative, "left the BertModel as it was: position_embedding_type='relative_key'"
    patched = build("bert", "Model")
    patched.forward = lambda *args: None
    yield patched, "left the BertModel as it was: its encoder's forward was replaced"
    yield object(), "left the object as it was"


@pytest.mark.parametrize("number", range(7))
def test_unsupported_models_are_returned_as_they_were(number: int) -> None:
    model, told = list(unsupported())[number]
    forward = vars(model).get("forward") if isinstance(model, nn.Module) else None
    with pytest.warns(FleetuneWarning, match=told) as caught:
        assert fleetune.optimize(model) is model
    assert caught[0].filename == __file__
    if isinstance(model, nn.Module):
        assert vars(model).get("forward") is forward


def test_signatures_are_those_of_before() -> None:
    for name, head in (("bert", "Model"), ("distilbert", "Model"), ("bert", "ForMaskedLM")):
        stock = build(name, head)
        model = fleetune.optimize(copy.deepcopy(stock))
        assert inspect.signature(model.forward) == inspect.signature(stock.forward)
        assert inspect.signature(model.base_model.forward) == inspect.signature(stock.base_model.forward)


def test_without_a_compiler() -> None:
    for head in ("ForSequenceClassification", "ForTokenClassification"):
        stock = build(head=head)
        with using_reference():
            assert_computes_the_same(fleetune.optimize(copy.deepcopy(stock)), stock, "mixed")


WORDS_PER_ROW, NUM_EXAMPLES = 12, 40


def examples(count: int) -> list[dict[str, Any]]:
    generator = torch.Generator().manual_seed(9)
    lengths = torch.randint(2, WORDS_PER_ROW, (count,), generator=generator).tolist()
    return [
        {"input_ids": torch.randint(2, VOCABULARY, (n,), generator=generator).tolist(), "labels": n % 3}
        for n in lengths
    ]


def collate(rows: list[dict[str, Any]]) -> dict[str, Tensor]:
    width = max(len(row["input_ids"]) for row in rows)
    ids = torch.tensor([row["input_ids"] + [PADDING] * (width - len(row["input_ids"])) for row in rows])
    return {"input_ids": ids, "attention_mask": (ids != PADDING).long(),
            "labels": torch.tensor([row["labels"] for row in rows])}  # fmt: skip


def train(model: Any, folder: Path, **changes: Any) -> tuple[list[float], list[float], Any]:
    """Losses of a run of Trainer, those of its evaluations, and the trainer."""
    arguments = transformers.TrainingArguments(
        output_dir=str(folder), per_device_train_batch_size=8, per_device_eval_batch_size=8, num_train_epochs=2,
        learning_rate=1e-3, logging_steps=1, eval_strategy="epoch", save_strategy="epoch", load_best_model_at_end=True,
        report_to="none", use_cpu=True, seed=1, disable_tqdm=True, **changes,
    )  # fmt: skip
    data: Any = examples(NUM_EXAMPLES)
    trainer = transformers.Trainer(model=model, args=arguments, train_dataset=data, eval_dataset=data[:16],
                                   data_collator=collate)  # fmt: skip
    trainer.train()
    history = trainer.state.log_history
    losses = [[entry[key] for entry in history if key in entry] for key in ("loss", "eval_loss")]
    return losses[0], losses[1], trainer


@pytest.mark.usefixtures("fresh_accelerate")
@pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore::FutureWarning", "ignore:.*pin_memory.*")
class TestTrainer:
    @pytest.mark.parametrize("name", ["bert", "distilbert"])
    def test_same_losses_as_the_stock_model(self, name: str, tmp_path: Path, flat_calls: list[str]) -> None:
        stock = build(name).train()
        model = fleetune.optimize(copy.deepcopy(stock))
        expected, expected_evaluations, _ = train(stock, tmp_path / "stock")
        assert flat_calls == []
        found, found_evaluations, trainer = train(model, tmp_path / "optimized")
        assert set(flat_calls) == {"first_tokens"}
        assert len(flat_calls) >= 2 * NUM_EXAMPLES // 8 + 2 * 2
        assert len(found) == 2 * NUM_EXAMPLES // 8
        assert found == pytest.approx(expected, abs=1e-4)
        assert found_evaluations == pytest.approx(expected_evaluations, abs=1e-4)
        assert isinstance(model.base_model.forward, FlatForward)
        trainer.save_model(str(tmp_path / "saved"))
        again = type(model).from_pretrained(tmp_path / "saved").eval()
        inputs = collate(examples(6))
        torch.testing.assert_close(model.eval()(**inputs).logits, again(**inputs).logits, rtol=1e-5, atol=1e-5)
        logits = trainer.predict(examples(6)).predictions
        torch.testing.assert_close(torch.from_numpy(logits), again(**inputs).logits, rtol=1e-4, atol=1e-5)

    def test_checkpointing_bfloat16_and_accumulation(self, tmp_path: Path, flat_calls: list[str]) -> None:
        model = fleetune.optimize(build())
        losses, _, _ = train(
            model, tmp_path, gradient_checkpointing=True, bf16=True, gradient_accumulation_steps=2, max_steps=4
        )
        assert len(losses) == 4
        assert set(flat_calls) == {"first_tokens"}


@pytest.fixture
def fresh_accelerate() -> Iterator[None]:
    accelerate.state.AcceleratorState._reset_state(reset_partial_state=True)
    yield
    accelerate.state.AcceleratorState._reset_state(reset_partial_state=True)


@pytest.mark.usefixtures("fresh_accelerate")
@pytest.mark.parametrize("precision", ["no", "bf16"])
@pytest.mark.parametrize("head", ["Model", "ForSequenceClassification"])
def test_accelerate(precision: str, head: str, flat_calls: list[str]) -> None:
    stock = build(head=head)
    accelerator = accelerate.Accelerator(mixed_precision=precision, cpu=True)
    model = accelerator.prepare(fleetune.optimize(copy.deepcopy(stock)))
    inputs = make_inputs(stock)
    accelerator.backward(loss_of(model(**inputs), inputs["attention_mask"]))
    assert flat_calls == ["first_tokens" if "Sequence" in head else "tokens"]
    unwrapped = accelerator.unwrap_model(model, keep_fp32_wrapper=False)
    assert_computes_the_same(unwrapped, stock)
    copied = copy.deepcopy(unwrapped)
    for parameter in unwrapped.parameters():
        parameter.data.zero_()
    assert_computes_the_same(copied, stock)
    assert fleetune.optimize(copied) is copied


def run_rank(rank: int, folder: Path) -> None:
    """A rank of two: half of the batch through DDP, and a forward with dropout."""
    dist.init_process_group("gloo", init_method=f"file://{folder}/store", rank=rank, world_size=2)
    torch.set_num_threads(1)
    model = fleetune.optimize(build()).train()
    wrapped = DistributedDataParallel(model)
    inputs = {name: x[2 * rank : 2 * rank + 2] for name, x in make_inputs(model).items()}
    found = gradients(model, wrapped(**inputs).loss)
    torch.save(found, folder / f"gradients-{rank}.pt")
    dropping = fleetune.optimize(build(hidden_dropout_prob=0.5)).train()
    torch.manual_seed(4)
    torch.save(dropping(**make_inputs(dropping)).logits.detach(), folder / f"logits-{rank}.pt")
    dist.destroy_process_group()


def test_two_ranks_have_the_gradients_of_one(tmp_path: Path) -> None:
    """World size 2."""
    spawn(run_rank, (tmp_path,), nprocs=2)
    stock = build().train()
    expected = gradients(stock, stock(**make_inputs(stock)).loss)
    for rank in range(2):
        assert_same_gradients(torch.load(tmp_path / f"gradients-{rank}.pt"), expected)
    logits = [torch.load(tmp_path / f"logits-{rank}.pt") for rank in range(2)]
    assert not torch.equal(*logits), "ranks that were seeded alike draw different masks"
