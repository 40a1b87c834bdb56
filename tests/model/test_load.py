"""Which head a model gets, and whether it is that of the checkpoint."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
import transformers

from fleetune import RunConfig
from fleetune.data.tasks import Task, custom_task
from fleetune.model.load import Classifier, load_classifier, load_model_config
from tests.model.test_flat import SMALL

LABELS = ("O", "B-X", "I-X")
NAMES = {"id2label": dict(enumerate(LABELS)), "label2id": {name: i for i, name in enumerate(LABELS)}}


def task_of(problem: Any) -> Task:
    labels = None if problem in ("regression", "question_answering") else LABELS
    return custom_task(problem, text_columns=("a",), label_column="b", labels=labels)


def saved(folder: Path, kind: str, **changes: Any) -> dict[str, torch.Tensor]:
    """A checkpoint with a head; gives its weights."""
    torch.manual_seed(3)
    config = transformers.BertConfig(**{k: v for k, v in SMALL.items() if k != "num_labels"}, **NAMES | changes)
    model = getattr(transformers, f"Bert{kind}")(config)
    model.save_pretrained(folder)
    return dict(model.state_dict())


def loaded(folder: Path, problem: str) -> Classifier:
    config = RunConfig(model=str(folder))
    return load_classifier(config, load_model_config(config), task_of(problem), pad_token_id=1)


@pytest.mark.parametrize(
    ("kind", "problem", "head"),
    [
        ("ForTokenClassification", "token_classification", "classifier"),
        ("ForQuestionAnswering", "question_answering", "qa_outputs"),
        ("ForSequenceClassification", "multi_label_classification", "classifier"),
    ],
)
def test_a_head_of_the_kind_and_the_labels_is_kept(tmp_path: Path, kind: str, problem: str, head: str) -> None:
    names = {"id2label": {0: "LABEL_0", 1: "LABEL_1"}} if head == "qa_outputs" else {}
    before = saved(tmp_path, kind, **names)
    found = loaded(tmp_path, problem)
    assert type(found.hugging_face).__name__ == f"Bert{kind}"
    assert torch.equal(found.hugging_face.state_dict()[f"{head}.weight"], before[f"{head}.weight"])
    assert (found.has_new_head, found.notices) == (False, ())


@pytest.mark.parametrize(
    ("kind", "problem"),
    [
        ("ForSequenceClassification", "token_classification"), ("ForTokenClassification", "classification"),
        ("ForTokenClassification", "multi_label_classification"),
    ],
)  # fmt: skip
def test_a_head_of_another_kind_is_replaced_though_its_weights_would_fit(
    tmp_path: Path, kind: str, problem: str
) -> None:
    """Both are called "classifier", and have as many labels of the same names."""
    before = saved(tmp_path, kind)
    found = loaded(tmp_path, problem)
    assert not torch.equal(found.hugging_face.classifier.weight, before["classifier.weight"])
    assert found.has_new_head
    assert any("it was replaced by a new one" in notice for notice in found.notices)


def test_an_encoder_without_a_head(tmp_path: Path) -> None:
    config = transformers.BertConfig(**SMALL)
    transformers.BertModel(config).save_pretrained(tmp_path)
    found = loaded(tmp_path, "question_answering")
    assert (found.has_new_head, found.num_labels) == (True, 2)
    assert found.notices == ("new weights, not in the checkpoint: qa_outputs.bias, qa_outputs.weight",)
