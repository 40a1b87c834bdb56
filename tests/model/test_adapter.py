"""Low-rank updates: forward, gradients and files are those of peft, for every family."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor, nn

from fleetune.data.batches import PackedBatch
from fleetune.errors import ConfigError, ModelError
from fleetune.kernels import linear as linear_module
from fleetune.kernels import low_rank
from fleetune.kernels.library import using_reference
from fleetune.kernels.low_rank import LowRankUpdate, low_rank_linear
from fleetune.kernels.random import Dropout, row_keys
from fleetune.model.adapter import ALL_LINEAR, Adapter, LoraSettings, make_adapter
from fleetune.model.adapter_files import (
    describe_head,
    merge_into,
    modules_to_save,
    read_adapter,
    restore,
    targets_of,
    write_adapter,
)
from fleetune.model.families import FAMILIES, find_family
from fleetune.model.flat import FlatClassifier
from fleetune.model.heads import HEADS, SEQUENCE, kind_of
from fleetune.model.padded import PaddedClassifier
from tests.conftest import REPOSITORY
from tests.model.test_flat import LENGTHS, make_batch, padded_logits
from tests.model.test_heads import CONFIGS, TYPES, head_of

# peft asks transformers 5 for a property that has another name since
pytestmark = pytest.mark.filterwarnings("ignore:.*is_gradient_checkpointing.* is deprecated:FutureWarning")
RANK, ALPHA = 3, 5.0
HEADED = ("classification", "token_classification", "question_answering")


@pytest.fixture(autouse=True)
def _same_draws_every_time() -> None:
    torch.manual_seed(0)


def model_of(name: str, problem: str = "classification", **changes: Any) -> Any:
    labels = {"num_labels": 2 if problem == "question_answering" else 3} | changes
    model = head_of(problem).auto_class.from_config(CONFIGS[name](labels))
    for parameter in model.parameters():
        parameter.data.add_(torch.randn_like(parameter) * 0.1)
    return model


def adapted(model: Any, targets: tuple[str, ...] | None = None, dropout: float = 0.0) -> FlatClassifier:
    """The model with updates of which no factor is 0, and all but these and the head frozen."""
    family = find_family(model)
    assert family is not None
    flat = FlatClassifier(model, family, reads_all_tokens=not type(model).__name__.endswith(SEQUENCE))
    settings = LoraSettings(r=RANK, alpha=ALPHA, dropout=dropout, target_modules=targets)
    head = set(flat.stages[-1])
    for parameter in flat.parameters():
        parameter.requires_grad_(parameter in head)
    adapter = make_adapter(model, flat.parts, settings)
    for update in adapter.by_name().values():
        update.up.data.normal_(0.0, 0.3)
    flat.adapt(adapter)
    return flat


def adapter_of(flat: FlatClassifier) -> Adapter:
    assert flat.adapter is not None
    return flat.adapter


def batch_for(model: Any) -> PackedBatch:
    return make_batch(LENGTHS, TYPES.get(model.config.model_type, 0))


def logits_of(model: Any, batch: PackedBatch) -> Tensor:
    """Of a Hugging Face model, padded, as the flat forward lays them out."""
    base = model if not hasattr(model, "peft_config") else model.get_base_model()
    kind = next(k for k in ("ForSequenceClassification", "ForTokenClassification", "ForQuestionAnswering")
                if type(base).__name__.endswith(k))  # fmt: skip
    assert kind_of(base.config) in (None, kind)
    if kind == SEQUENCE:
        return padded_logits(base, batch)
    head = next(h for h in HEADS.values() if h.kind == kind)
    logits: Tensor = PaddedClassifier(base, 1, head).train(base.training)(batch)
    return logits


def with_peft(folder: Path, name: str, problem: str, weights: dict[str, Tensor], *, trained: bool = False) -> Any:
    """Peft's model of a folder, on a base with some weights."""
    peft = pytest.importorskip("peft")
    base = model_of(name, problem)
    base.load_state_dict(weights)
    return peft.PeftModel.from_pretrained(base, str(folder), is_trainable=trained)


@pytest.mark.parametrize("targets", [None, (ALL_LINEAR,)], ids=["queries and values", "all"])
@pytest.mark.parametrize("problem", HEADED)
@pytest.mark.parametrize("name", CONFIGS)
def test_forward_and_gradients_equal_those_of_peft(
    name: str, problem: str, targets: tuple[str, ...] | None, tmp_path: Path
) -> None:
    model = model_of(name, problem)
    weights = {key: value.clone() for key, value in model.state_dict().items()}
    flat, batch = adapted(model, targets).train(), batch_for(model)
    write_adapter(tmp_path, adapter_of(flat), model, base="base", head_kind=head_of(problem).kind)
    peft_model = with_peft(tmp_path, name, problem, weights, trained=True).train()
    found, expected = flat(batch), logits_of(peft_model, batch)
    torch.testing.assert_close(found, expected, rtol=1e-5, atol=1e-5)
    factors = torch.randn_like(found)
    (found * factors).sum().backward()
    (expected * factors).sum().backward()
    theirs = {key: p.grad for key, p in peft_model.named_parameters() if p.grad is not None}
    ours: dict[str, Tensor | None] = {}
    for layer, update in adapter_of(flat).by_name().items():
        ours[f"base_model.model.{layer}.lora_A.default.weight"] = update.down.grad
        ours[f"base_model.model.{layer}.lora_B.default.weight"] = update.up.grad
    for key, p in model.named_parameters():
        if p.grad is not None:
            module = next(m for m in modules_to_save(model) if f".{m}." in f".{key}")
            ours[
                "base_model.model." + f".{key}".replace(f".{module}.", f".{module}.modules_to_save.default.", 1)[1:]
            ] = p.grad
    assert ours.keys() == theirs.keys()
    largest = max(float(grad.abs().max()) for grad in theirs.values())
    for key, grad in theirs.items():
        torch.testing.assert_close(ours[key], grad, rtol=1e-4, atol=1e-5 * largest, msg=lambda m, k=key: f"{k}: {m}")


@pytest.mark.parametrize("name", CONFIGS)
def test_what_peft_writes_is_read_with_the_same_logits(name: str, tmp_path: Path) -> None:
    peft = pytest.importorskip("peft")
    model, other = model_of(name), model_of(name)
    other.load_state_dict(model.state_dict())
    linears = sorted({key.rpartition(".")[2] for key, m in model.base_model.named_modules()
                      if isinstance(m, nn.Linear) and "pooler" not in key})  # fmt: skip
    config = peft.LoraConfig(r=4, lora_alpha=6, target_modules=linears, task_type="SEQ_CLS", use_rslora=True,
                             rank_pattern={linears[0]: 2}, alpha_pattern={linears[0]: 9},
                             modules_to_save=["pooler"] if name in ("bert", "albert") else None)  # fmt: skip
    peft_model = peft.get_peft_model(model, config)
    for parameter in peft_model.parameters():
        if parameter.requires_grad:
            parameter.data.normal_(0.0, 0.2)
    peft_model.save_pretrained(tmp_path)
    batch = batch_for(other)
    there = merge_into(other, read_adapter(tmp_path))
    assert {key for key in there if key.startswith("classifier")}
    family = find_family(other)
    assert family is not None
    found = FlatClassifier(other, family).eval()(batch)
    torch.testing.assert_close(found, padded_logits(peft_model.eval().get_base_model(), batch), rtol=1e-5, atol=1e-5)


def test_every_family_has_a_test() -> None:
    assert set(FAMILIES) == set(CONFIGS)


@pytest.mark.parametrize(
    ("name", "targets"),
    [*((name, (ALL_LINEAR,)) for name in CONFIGS), ("bert", ("intermediate.dense", "layer.2.output.dense")),
     ("bert", ("key", "attention.output.dense"))],
)  # fmt: skip
def test_merged_weights_give_the_same_logits(name: str, targets: tuple[str, ...], tmp_path: Path) -> None:
    """Merged by us when an adapter is read, and when one is written as a whole model."""
    model = model_of(name)
    weights = {key: value.clone() for key, value in model.state_dict().items()}
    flat, batch = adapted(model, targets).eval(), batch_for(model)
    expected = flat(batch)
    write_adapter(tmp_path, adapter_of(flat), model, base="base", head_kind=SEQUENCE)
    for state in (weights, weights | adapter_of(flat).merged_weights()):
        other = model_of(name)
        other.load_state_dict(state)
        if state is weights:
            merge_into(other, read_adapter(tmp_path))
        torch.testing.assert_close(padded_logits(other.eval(), batch), expected, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_compiled_and_plain_kernels_agree(dtype: torch.dtype) -> None:
    model = model_of("bert", hidden_dropout_prob=0.1)
    flat, batch = adapted(model, dropout=0.2).train(), batch_for(model)
    flat.compute_in(dtype)
    flat.begin_micro_batch(3, 5, micro_batch=0, rank=0)
    found = flat(batch)
    with using_reference():
        expected = flat(batch)
    limit = 1e-5 if dtype == torch.float32 else 0.05
    torch.testing.assert_close(found, expected, rtol=limit, atol=limit)


def test_dropout_is_of_what_the_updates_read_alone_and_follows_the_example() -> None:
    model = model_of("bert")
    flat, batch = adapted(model, (ALL_LINEAR,), dropout=0.4).train(), batch_for(model)
    flat.begin_micro_batch(1, 5, micro_batch=0, rank=0)
    together = flat(batch)
    assert not torch.allclose(together, flat.eval()(batch))
    start, end = (int(i) for i in batch.boundaries[2:4])
    assert batch.type_ids is not None
    alone = PackedBatch(
        token_ids=batch.token_ids[start:end], type_ids=batch.type_ids[start:end],
        position_ids=batch.position_ids[start:end], lengths=(end - start,), labels=None,
        example_ids=batch.example_ids[2:3],
    )  # fmt: skip
    torch.testing.assert_close(flat.train()(alone)[0], together[2], rtol=1e-5, atol=1e-5)
    for update in adapter_of(flat).by_name().values():
        update.up.data.zero_()
    torch.testing.assert_close(flat(batch), flat.eval()(batch), rtol=1e-5, atol=1e-5)


def test_gradients_with_dropout_are_numerical_ones() -> None:
    """Directional derivatives of the loss, in float64, with the same masks."""
    layers = [nn.Linear(6, width, bias=True).double().requires_grad_(False) for width in (4, 3, 5)]
    downs, ups = ([torch.randn(*s, dtype=torch.float64, requires_grad=True) for s in shapes]
                  for shapes in (((2, 6), (3, 6)), ((4, 2), (5, 3))))  # fmt: skip
    x = torch.randn(7, 6, dtype=torch.float64, requires_grad=True)
    dropout = Dropout(rate=0.3, site_key=5, row_keys=row_keys(torch.arange(7), torch.arange(7)))

    def compute(x: Tensor, *factors: Tensor) -> Tensor:
        first, last = (LowRankUpdate(down=factors[i], up=factors[2 + i], scale=0.7) for i in range(2))  # type: ignore[arg-type]
        return low_rank_linear(x, layers, [first, None, last], dropout)

    with using_reference(), pytest.MonkeyPatch.context() as patch:
        patch.setattr(Tensor, "float", lambda self: self)
        assert torch.autograd.gradcheck(compute, (x, *downs, *ups))


def test_nothing_is_computed_for_frozen_weights(monkeypatch: pytest.MonkeyPatch) -> None:
    """Products of a backward: of each updated layer's input, of its two factors, of what goes below; the lowest layer's
    input has no gradient."""
    model = model_of("distilbert")
    flat, batch = adapted(model).train(), batch_for(model)
    flat(batch)  # before counting
    shapes: list[tuple[int, ...]] = []

    def counted(a: Tensor, b: Tensor, bias: Tensor | None = None) -> Tensor:
        shapes.append((a.shape[0], a.shape[1], b.shape[1]))
        return torch.mm(a, b) if bias is None else torch.addmm(bias, a, b)

    for module in (linear_module, low_rank):
        monkeypatch.setattr(module, "product", counted)
    monkeypatch.setattr("fleetune.kernels.activation.product", counted)
    logits = flat(batch)
    forward = len(shapes)
    logits.sum().backward()
    backward = shapes[forward:]
    weight_like = [shape for shape in backward if min(shape[0], shape[2]) > 2 * RANK and shape[1] == sum(LENGTHS)]
    assert weight_like == [], "a gradient of a whole weight"
    assert all(p.grad is None for p in model.base_model.parameters())
    # the lowest layer: dB twice, what they pass on twice, dA once; no input
    assert backward[-5:] == [(sum(LENGTHS), 24, RANK), (24, sum(LENGTHS), RANK)] * 2 + [(2 * RANK, sum(LENGTHS), 24)]


def test_checkpoints_are_restored(tmp_path: Path) -> None:
    flat = adapted(model_of("bert"))
    write_adapter(tmp_path, adapter_of(flat), flat.model, base="base", head_kind=SEQUENCE)
    other = adapted(model_of("bert"))
    restore(adapter_of(other), other.model, read_adapter(tmp_path))
    for found, expected in zip(adapter_of(other).parameters(), adapter_of(flat).parameters(), strict=True):
        assert torch.equal(found, expected)
    assert torch.equal(other.model.classifier.weight, flat.model.classifier.weight)
    assert torch.equal(other.model.bert.pooler.dense.weight, flat.model.bert.pooler.dense.weight)
    wide = adapted(model_of("bert"), (ALL_LINEAR,))
    with pytest.raises(ModelError, match="updates of 6 layers, not of 18"):
        restore(adapter_of(wide), wide.model, read_adapter(tmp_path))


@pytest.mark.parametrize(
    ("name", "targets", "names", "saved"),
    [
        ("bert", None, ["attention.self.query", "attention.self.value"], ["pooler", "classifier"]),
        ("roberta", None, ["attention.self.query", "attention.self.value"], ["classifier"]),
        ("distilbert", ("lin1", "lin2"), ["ffn.lin1", "ffn.lin2"], ["pre_classifier", "classifier"]),
        ("albert", None, ["attention.query", "attention.value"], ["pooler", "classifier"]),
        ("mpnet", ("attn.o",), ["attention.attn.o"], ["classifier"]),
        ("modernbert", None, ["attn.Wqkv"], ["head", "classifier"]),
        ("bert", ("intermediate.dense",), ["intermediate.dense"], ["pooler", "classifier"]),
        ("bert", ("layer.1.output.dense",), ["bert.encoder.layer.1.output.dense"], ["pooler", "classifier"]),
    ],
)
def test_names_of_layers(name: str, targets: tuple[str, ...] | None, names: list[str], saved: list[str]) -> None:
    flat = adapted(model_of(name), targets)
    assert targets_of(adapter_of(flat), flat.model) == names
    assert modules_to_save(flat.model) == saved


def test_a_layer_that_is_not_there_is_refused_by_name() -> None:
    with pytest.raises(
        ConfigError, match=r"--lora_target_modules q_proj: .* attention.self.query, .* all-linear alone"
    ):
        adapted(model_of("bert"), ("q_proj",))


@pytest.mark.parametrize(
    ("option", "value"),
    [("use_dora", True), ("bias", "all"), ("peft_type", "LOHA"), ("init_lora_weights", "pissa_niter_4"),
     ("layer_replication", [[0, 2]])],
)  # fmt: skip
def test_options_that_are_not_known_are_refused_by_name(option: str, value: Any, tmp_path: Path) -> None:
    flat = adapted(model_of("bert"))
    write_adapter(tmp_path, adapter_of(flat), flat.model, base="base", head_kind=SEQUENCE)
    path = tmp_path / "adapter_config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | {option: value}))
    with pytest.raises(ModelError, match=f"{option}={value!r}".replace("[", r"\[")):
        read_adapter(tmp_path)


def test_what_is_wrong_with_an_adapter_is_said(tmp_path: Path) -> None:
    flat = adapted(model_of("bert"))
    write_adapter(tmp_path, adapter_of(flat), flat.model, base="base", head_kind=SEQUENCE)
    with pytest.raises(ModelError, match=r"of another model: there is no bert\."):
        merge_into(model_of("roberta"), read_adapter(tmp_path))
    with pytest.raises(ModelError, match=r"of another model: classifier.bias: \(5,\) is not \(3,\)"):
        merge_into(model_of("bert", num_labels=5), read_adapter(tmp_path))
    weights = tmp_path / "adapter_model.safetensors"
    tensors = load_file(weights)
    save_file(tensors | {"base_model.model.bert.embeddings.word_embeddings.lora_embedding_A": torch.ones(2)}, weights)
    with pytest.raises(ModelError, match="only updates of linear layers"):
        read_adapter(tmp_path)
    weights.unlink()
    with pytest.raises(ModelError, match=r"no adapter_model.safetensors"):
        read_adapter(tmp_path)


def test_the_labels_of_an_adapter_without_our_file_are_counted(tmp_path: Path) -> None:
    flat = adapted(model_of("roberta"))
    write_adapter(tmp_path, adapter_of(flat), flat.model, base="base", head_kind=SEQUENCE)
    config = model_of("roberta", num_labels=2).config
    describe_head(config, tmp_path)
    assert (config.num_labels, config.architectures) == (3, ["RobertaForSequenceClassification"])
    (tmp_path / "adapter_head.json").unlink()
    config = model_of("roberta", num_labels=2).config
    describe_head(config, tmp_path)
    assert (config.num_labels, config.architectures) == (3, ["ForSequenceClassification"])


def test_the_stages_have_the_updates_of_their_layers() -> None:
    flat = adapted(model_of("bert"))
    updates = list(adapter_of(flat).by_name().values())
    assert len(flat.stages) == 5
    for number, stage in enumerate(flat.stages[1:-1]):
        for update in updates[2 * number : 2 * number + 2]:
            assert any(p is update.down for p in stage)
            assert any(p is update.up for p in stage)
    assert sum(len(stage) for stage in flat.stages) == len(list(flat.parameters()))


def test_peft_is_not_needed() -> None:
    sources = (REPOSITORY / "src").rglob("*.py")
    assert not [path for path in sources if "import peft" in path.read_text() or "from peft" in path.read_text()]
