"""When bfloat16 is chosen."""

from __future__ import annotations

import pytest
import torch
import transformers

from fleetune.config import RunConfig
from fleetune.errors import ConfigError
from fleetune.model import precision
from fleetune.model.families import FAMILIES
from fleetune.model.flat import FlatClassifier
from fleetune.model.load import Classifier
from fleetune.model.precision import choose_precision, probe


@pytest.fixture(scope="module")
def classifier() -> Classifier:
    config = transformers.BertConfig(
        vocab_size=20, hidden_size=32, num_hidden_layers=1, num_attention_heads=2, intermediate_size=64
    )
    model = transformers.BertForSequenceClassification(config)
    return Classifier(module=FlatClassifier(model, FAMILIES["bert"]), labels=None, notices=())


def test_float32_unless_asked(classifier: Classifier) -> None:
    assert RunConfig().bf16 == "false"
    chosen = choose_precision("false", ("amx_bf16",), classifier)
    assert (chosen.dtype, chosen.notices) == ("float32", ())


def test_forced_on_a_cpu_with_units(classifier: Classifier) -> None:
    chosen = choose_precision("true", ("avx2", "avx512_bf16"), classifier)
    assert (chosen.dtype, chosen.notices) == ("bfloat16", ())


def test_forced_without_units_it_works_with_a_warning(classifier: Classifier) -> None:
    chosen = choose_precision("true", ("avx2",), classifier)
    assert chosen.dtype == "bfloat16"
    (notice,) = chosen.notices
    assert "emulated" in notice
    assert "slower" in notice


def test_auto_without_units_measures_nothing(classifier: Classifier, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(precision, "probe", None)
    assert choose_precision("auto", ("avx2",), classifier).dtype == "float32"


@pytest.mark.parametrize(("bfloat16_s", "dtype", "told"), [
    (0.01, "bfloat16", "--bf16 auto: bfloat16, in which the layers' products take 10.00 ms, 20.00 ms in float32"),
    (0.05, "float32", "--bf16 auto: float32, in which the layers' products take 20.00 ms, 50.00 ms in bfloat16"),
    (0.02, "float32", "--bf16 auto: float32, in which the layers' products take 20.00 ms, 20.00 ms in bfloat16"),
])  # fmt: skip
def test_auto_takes_what_the_probe_finds_faster(
    classifier: Classifier, monkeypatch: pytest.MonkeyPatch, bfloat16_s: float, dtype: str, told: str
) -> None:
    monkeypatch.setattr(precision, "probe", lambda model: (0.02, bfloat16_s))
    chosen = choose_precision("auto", ("bf16",), classifier)
    assert (chosen.dtype, chosen.notices) == (dtype, (told,))


@pytest.mark.parametrize("isa", [(), ("bf16",)])
@pytest.mark.parametrize("earlier", ["float32", "bfloat16"])
def test_auto_goes_on_as_the_checkpoint_began(
    classifier: Classifier, monkeypatch: pytest.MonkeyPatch, isa: tuple[str, ...], earlier: str
) -> None:
    monkeypatch.setattr(precision, "probe", None)
    chosen = choose_precision("auto", isa, classifier, earlier=earlier)
    assert (chosen.dtype, chosen.notices) == (earlier, (f"--bf16 auto: {earlier}, as in the checkpoint",))


def test_the_probe_measures_the_models_own_layers(classifier: Classifier, monkeypatch: pytest.MonkeyPatch) -> None:
    measured = set()
    monkeypatch.setattr(precision, "_PROBE_S", 0.001)
    monkeypatch.setattr(precision, "_round", lambda x, weight, dy: measured.add((tuple(weight.shape), x.dtype)))
    assert min(probe(classifier.hugging_face, num_tokens=8)) > 0
    shapes = [(64, 32), (32, 64), (32, 32), (2, 32)]  # up, down, attention and pooler, head
    assert measured == {(shape, dtype) for shape in shapes for dtype in (torch.float32, torch.bfloat16)}


@pytest.mark.parametrize(("given", "kept"), [
    (True, "true"), (False, "false"), ("True", "true"), ("auto", "auto"), ("false", "false"), ("1", "true"),
    (1, "true"), ("0", "false"), ("yes", "true"), (" off", "false"),
])  # fmt: skip
def test_the_setting_may_be_given_as_other_booleans(given: object, kept: str) -> None:
    assert RunConfig(bf16=given).bf16 == kept


def test_other_words_are_refused() -> None:
    with pytest.raises(ConfigError, match="one of false, true, auto is expected"):
        RunConfig(bf16="maybe")
