"""Tiny data for every kind of task, that the tiny model learns in seconds."""

from __future__ import annotations

import json
import random
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from tests.conftest import ANIMALS, FILLERS

COUNTS = {"train": 90, "validation": 25, "test": 7}
EMPTY: dict[str, list[Any]] = {"text": [], "answer_start": []}


@dataclass(frozen=True, kw_only=True)
class Kind:
    """A kind of task on tiny data."""

    suffix: str
    row: Callable[[random.Random, int], str]
    """(dice, number) -> a row of a file."""
    settings: dict[str, Any] = field(default_factory=dict)
    transformers_class: str
    metric: str
    floor: float
    """What the metric reaches."""
    epochs: int
    files: frozenset[str]
    """Of predictions, left beside those of every kind."""

    def write(self, folder: Path) -> dict[str, Any]:
        """Write a file for each split; gives the settings of a run."""
        folder.mkdir(parents=True, exist_ok=True)
        files = {name: folder / f"{name}{self.suffix}" for name in COUNTS}
        for seed, (name, count) in enumerate(COUNTS.items()):
            draw = random.Random(seed)
            files[name].write_text("\n".join(self.row(draw, i) for i in range(count)) + "\n", encoding="utf-8")
        return {f"{name}_file": path for name, path in files.items()} | self.settings


def _labels(draw: random.Random, number: int) -> str:
    """The labels are the animals of the text."""
    chosen = draw.sample(ANIMALS, draw.randint(0, 2))
    words = ["the", *chosen, *draw.choices(FILLERS, k=draw.randint(1, 9))]
    draw.shuffle(words)
    return json.dumps({"text": " ".join(words), "labels": chosen})


def _tags(draw: random.Random, number: int) -> str:
    """An animal is a span, and so is a house with the tree behind it."""
    parts = [[("the", "O")], *([(animal, "B-PET")] for animal in draw.sample(ANIMALS, 2))]
    parts += [[("house", "B-PLACE"), ("tree", "I-PLACE")]] * draw.randint(0, 1)
    fillers = [word for word in FILLERS if word not in ("house", "tree")]
    parts += [[(word, "O")] for word in draw.choices(fillers, k=draw.randint(1, 12))]
    draw.shuffle(parts)
    return "".join(f"{word} x {tag}\n" for part in parts for word, tag in part)


def _question(draw: random.Random, number: int, *, may_lack_answers: bool = False) -> str:
    """The answer is the animal of the context, which is longer than a window."""
    words = draw.choices(FILLERS, k=draw.randint(2, 30))
    answers = EMPTY
    if not may_lack_answers or number % 3:
        place = draw.randint(0, len(words))
        words.insert(place, animal := draw.choice(ANIMALS))
        answers = {"text": [animal], "answer_start": [len(" ".join([*words[:place], ""]))]}
    return json.dumps({"id": f"q{number}", "question": "the sees", "context": " ".join(words), "answers": answers})


_WINDOWS = {"max_seq_length": 24, "doc_stride": 6}
KINDS = {
    "labels": Kind(
        suffix=".jsonl", row=_labels, transformers_class="AutoModelForSequenceClassification", metric="eval_f1_micro",
        floor=0.9, epochs=40, files=frozenset({"predict_results_custom.txt"}),
    ),
    "tags": Kind(
        suffix=".conll", row=_tags, transformers_class="AutoModelForTokenClassification", metric="eval_f1", floor=0.9,
        epochs=12, files=frozenset({"predictions.txt"}),
    ),
    "questions": Kind(
        suffix=".jsonl", row=_question, settings={"task": "squad", **_WINDOWS},
        transformers_class="AutoModelForQuestionAnswering", metric="eval_f1", floor=90.0, epochs=24,
        files=frozenset(f"{stage}_{name}.json" for stage in ("eval", "predict")
                        for name in ("predictions", "nbest_predictions")),
    ),
    "questions-v2": Kind(
        suffix=".jsonl", row=lambda draw, number: _question(draw, number, may_lack_answers=True),
        settings={"task": "squad_v2", **_WINDOWS}, transformers_class="AutoModelForQuestionAnswering",
        metric="eval_f1", floor=80.0, epochs=24,
        files=frozenset(f"{stage}_{name}.json" for stage in ("eval", "predict")
                        for name in ("predictions", "nbest_predictions", "null_odds")),
    ),
}  # fmt: skip
