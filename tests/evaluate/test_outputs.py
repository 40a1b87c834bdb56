"""What logits mean in each kind of task, on tables made by hand."""

from __future__ import annotations

import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from fleetune.config import RunConfig
from fleetune.data.tasks import Columns, custom_task
from fleetune.data.tokens import TokenTable
from fleetune.evaluate.outputs import Outputs, outputs_of
from fleetune.evaluate.score import score, write_predictions
from fleetune.model.labels import align_labels


def table_of(lengths: tuple[int, ...], labels: Any, **more: Any) -> TokenTable:
    return TokenTable(
        folder=Path(), split="validation", source="x", columns=Columns(texts=("text",), label="label"),
        token_ids=np.zeros(sum(lengths), np.int32), type_ids=None, offsets=np.cumsum([0, *lengths]), labels=labels,
        rows=np.arange(len(lengths)) + 2, num_bad_rows=0, bad_rows=(), num_unlabelled=0, **more,
    )  # fmt: skip


def outputs(problem: Any, labels: tuple[str, ...]) -> Outputs:
    task = custom_task(problem, text_columns=("text",), label_column="label", labels=labels)
    classifier: Any = SimpleNamespace(labels=align_labels(labels, {}))
    return outputs_of(task, classifier, RunConfig())


def test_several_labels_by_hand(tmp_path: Path) -> None:
    # Likelier than not is a logit above 0. Predicted: {a, c}, {}, {b}; true: {a}, {}, {b, c}.
    logits = np.array([[1.0, -1.0, 0.5], [-1.0, -2.0, 0.0], [-1.0, 3.0, -0.1]], np.float32)
    labels = np.array([[1, 0, 0], [0, 0, 0], [0, 1, 1]], np.float32)
    of_labels, table = outputs("multi_label_classification", ("a", "b", "c")), table_of((1, 1, 1), labels)
    found = score(logits, table, of_labels)
    # In all: 2 right of 3 predicted and 3 true: micro F1 2 * 2 / 6. By class: a 1, b 1, c 0. Whole sets: the second.
    assert (found["eval_f1_micro"], found["eval_f1_macro"]) == (pytest.approx(2 / 3), pytest.approx(2 / 3))
    assert found["eval_accuracy"] == pytest.approx(1 / 3)
    # -log of the probability of each flag: 1 / (1 + e^-x) where it is set, 1 / (1 + e^x) where not; mean of all 9.
    expected = np.mean(np.log1p(np.exp(np.where(labels == 1, -logits, logits).astype(np.float64))))
    assert found["eval_loss"] == pytest.approx(expected)
    write_predictions(tmp_path / "p.jsonl", logits, table, of_labels)
    first = json.loads((tmp_path / "p.jsonl").read_text().splitlines()[0])
    assert (first["row"], first["prediction"], first["label"]) == (2, ["a", "c"], ["a"])
    assert first["probabilities"]["a"] == pytest.approx(1 / (1 + np.exp(-1.0)), abs=1e-6)


def test_words_that_were_not_seen_have_no_tag_and_no_score(tmp_path: Path) -> None:
    # [CLS] one two ##2 [SEP], and a third word that was cut off; the second sentence's only word has no token.
    labels = np.array([-100, 1, 0, -100, -100, -100, -100])
    notes: Any = [
        {"row": 2, "words": ["one", "two", "three"], "tags": ["B-X", "O", "B-X"]},
        {"row": 6, "words": [""], "tags": ["O"]},
    ]
    places = np.array([-1, 0, 1, -1, -1, -1, -1], np.int32)
    table = table_of((5, 2), labels, labels_of_tokens=True, places=places, notes=notes)
    logits = np.zeros((7, 2), np.float32)
    logits[1:4] = [[0.0, 2.0], [0.0, 1.0], [9.0, 0.0]]  # B-X, B-X; what follows within a word does not matter
    of_tags = outputs("token_classification", ("O", "B-X"))
    found = score(logits, table, of_tags)
    # Of two words seen one is right; of two spans predicted one is, and it is the only true one that was seen.
    assert found == pytest.approx({
        "eval_loss": (np.log1p(np.exp(-2.0)) + np.log1p(np.exp(1.0))) / 2, "eval_accuracy": 0.5,
        "eval_precision": 0.5, "eval_recall": 1.0, "eval_f1": 2 / 3,
    })  # fmt: skip
    lines = list(of_tags.lines(logits, table))
    assert lines == [
        {"row": 2, "words": ["one", "two", "three"], "prediction": ["B-X", "B-X", None], "label": ["B-X", "O", "B-X"]},
        {"row": 6, "words": [""], "prediction": [None], "label": ["O"]},
    ]
    of_tags.write_files(tmp_path, "test", logits, table)
    assert (tmp_path / "predictions.txt").read_text() == "B-X B-X\n\n"
    of_tags.write_files(tmp_path / "nowhere", "validation", logits, table)


def test_tags_that_mark_no_spans_are_scored_by_word() -> None:
    table = table_of((3,), np.array([-100, 0, -100]), labels_of_tokens=True)
    found = score(np.zeros((3, 2), np.float32), table, outputs("token_classification", ("NOUN", "VERB")))
    assert found == pytest.approx({"eval_loss": np.log(2), "eval_accuracy": 1.0})
