"""What logits mean in each kind of task, as metrics and as files: one row of `OUTPUTS` for each `Problem`."""

from __future__ import annotations

import json
from abc import ABC, abstractmethod
from collections.abc import Iterator
from pathlib import Path
from typing import Any, final

import numpy as np
from numpy.typing import NDArray

from fleetune.config import RunConfig
from fleetune.data.tags import mark_spans
from fleetune.data.tasks import Problem, Task
from fleetune.data.tokens import UNLABELLED, TokenTable
from fleetune.evaluate.answers import AnswerRules, FoundAnswer, find_answers
from fleetune.evaluate.metrics import Outcome, compute_metrics
from fleetune.evaluate.predict import FloatArray
from fleetune.evaluate.spans import span_metrics, word_accuracy
from fleetune.evaluate.squad import squad_metrics, squad_v2_metrics
from fleetune.model.load import Classifier

Metrics = dict[str, float | None]
REHEARSED_SEQUENCES = 64


class Outputs(ABC):
    """What is made of the logits of a split.

    Args:
        task: Says which metrics.
        classifier: Says what the logits stand for.
        config: Has the rules for answers.
    """

    def __init__(self, task: Task, classifier: Classifier, config: RunConfig) -> None:
        self.task, self.classifier, self.config = task, classifier, config

    @property
    def names(self) -> tuple[str, ...]:
        """Class names in the model's order."""
        assert self.classifier.labels is not None
        return self.classifier.labels.names

    @abstractmethod
    def metrics(self, logits: FloatArray, table: TokenTable) -> Metrics:
        """The task's metrics of a labelled split; None where one is undefined."""

    @abstractmethod
    def lines(self, logits: FloatArray, table: TokenTable) -> Iterator[dict[str, Any]]:
        """The prediction for each example, JSON-ready, in the split's order; with its label where that is known."""

    @abstractmethod
    def write_files(self, folder: Path, split: str, logits: FloatArray, table: TokenTable) -> None:
        """Write the files that transformers' example script for such a task would leave for a split."""

    @abstractmethod
    def rehearse(self, table: TokenTable) -> None:
        """Try on a few sequences, before training, what will be made of the logits."""


class _SequenceOutputs(Outputs):
    """Logits of sequences."""

    @abstractmethod
    def predictions(self, logits: FloatArray) -> NDArray[Any]:
        """What is predicted for each sequence, as labels are."""

    @abstractmethod
    def shown(self, value: Any) -> str:
        """A prediction in the file of `run_glue.py`."""

    def metrics(self, logits: FloatArray, table: TokenTable) -> Metrics:
        """See `Outputs.metrics`."""
        assert table.labels is not None
        positive_id = None if self.classifier.labels is None else self.classifier.labels.id_of(self.task.positive_label)
        outcome = Outcome(predictions=self.predictions(logits), labels=table.labels, positive_id=positive_id)
        return compute_metrics(self.task.metrics, outcome)

    def rehearse(self, table: TokenTable) -> None:
        """See `Outputs.rehearse`: nothing depends on the texts."""

    def write_files(self, folder: Path, split: str, logits: FloatArray, table: TokenTable) -> None:
        """See `Outputs.write_files`: of test splits, a header, then index and prediction."""
        if not split.startswith("test"):
            return
        name = self.task.name + ("-mm" if split.endswith("_mismatched") else "")
        lines = [f"{i}\t{self.shown(value)}" for i, value in enumerate(self.predictions(logits))]
        text = "\n".join(["index\tprediction", *lines]) + "\n"
        (folder / f"predict_results_{name}.txt").write_text(text, encoding="utf-8")


@final
class ClassOutputs(_SequenceOutputs):
    """One class of each sequence."""

    def predictions(self, logits: FloatArray) -> NDArray[Any]:
        """The model's class ids (N,)."""
        ids: NDArray[Any] = logits.argmax(axis=1)
        return ids

    def shown(self, value: Any) -> str:
        """Its name."""
        return self.names[int(value)]

    def lines(self, logits: FloatArray, table: TokenTable) -> Iterator[dict[str, Any]]:
        """See `Outputs.lines`: row, class, and each class's probability."""
        shifted = np.exp(logits - logits.max(axis=1, keepdims=True))
        probabilities = shifted / shifted.sum(axis=1, keepdims=True)
        values = self.predictions(logits)
        for i, row in enumerate(table.rows.tolist()):
            entry = {"row": row, "prediction": self.names[values[i]]}
            entry["probabilities"] = _by_name(self.names, probabilities[i])
            yield entry if table.labels is None else {**entry, "label": self.names[table.labels[i]]}


@final
class ScoreOutputs(_SequenceOutputs):
    """A score of each sequence."""

    def predictions(self, logits: FloatArray) -> NDArray[Any]:
        """The scores (N,)."""
        return logits[:, 0]

    def shown(self, value: Any) -> str:
        """Three decimals."""
        return f"{value:3.3f}"

    def lines(self, logits: FloatArray, table: TokenTable) -> Iterator[dict[str, Any]]:
        """See `Outputs.lines`: row and score."""
        for i, row in enumerate(table.rows.tolist()):
            entry = {"row": row, "prediction": round(float(logits[i, 0]), 6)}
            yield entry if table.labels is None else {**entry, "label": round(float(table.labels[i]), 6)}


@final
class LabelSetOutputs(_SequenceOutputs):
    """Any number of classes of each sequence: those that are likelier than not."""

    def predictions(self, logits: FloatArray) -> NDArray[Any]:
        """Flags of the model's classes (N, C)."""
        return (logits > 0.0).astype(np.float32)

    def shown(self, value: Any) -> str:
        """A list of names."""
        return str(self._chosen(value))

    def lines(self, logits: FloatArray, table: TokenTable) -> Iterator[dict[str, Any]]:
        """See `Outputs.lines`: row, classes, and each class's probability."""
        flags, probabilities = self.predictions(logits), 1.0 / (1.0 + np.exp(-logits.astype(np.float64)))
        for i, row in enumerate(table.rows.tolist()):
            entry = {"row": row, "prediction": self._chosen(flags[i])}
            entry["probabilities"] = _by_name(self.names, probabilities[i])
            yield entry if table.labels is None else {**entry, "label": self._chosen(table.labels[i])}

    def _chosen(self, flags: NDArray[Any]) -> list[str]:
        return [name for name, flag in zip(self.names, flags, strict=True) if flag]


@final
class TagOutputs(Outputs):
    """A tag for each word. Words that the model did not see, cut off or without a token, have none, and no score."""

    def metrics(self, logits: FloatArray, table: TokenTable) -> Metrics:
        """See `Outputs.metrics`."""
        assert table.labels is not None
        is_scored = table.labels != UNLABELLED
        predicted = self._names_of(logits.argmax(axis=1), table, is_scored)
        labels = self._names_of(table.labels, table, is_scored)
        if mark_spans(self.names):
            found: Metrics = {**span_metrics(labels, predicted)}
        else:
            found = {"accuracy": word_accuracy(labels, predicted)}
        return {name: found[name] for name in self.task.metrics}

    def lines(self, logits: FloatArray, table: TokenTable) -> Iterator[dict[str, Any]]:
        """See `Outputs.lines`: row, words, and the tag of each or null."""
        assert table.notes is not None
        for note, tags in zip(table.notes, self._tags(logits, table), strict=False):
            entry = {"row": note["row"], "words": note["words"], "prediction": tags}
            yield {**entry, "label": note["tags"]} if "tags" in note and table.labels is not None else entry

    def write_files(self, folder: Path, split: str, logits: FloatArray, table: TokenTable) -> None:
        """See `Outputs.write_files`: as `run_ner.py`, of test splits the tags of a sentence a line, of words seen."""
        if split.startswith("test"):
            lines = (" ".join(tag for tag in tags if tag is not None) for tags in self._tags(logits, table))
            (folder / "predictions.txt").write_text("".join(f"{line}\n" for line in lines), encoding="utf-8")

    def rehearse(self, table: TokenTable) -> None:
        """See `Outputs.rehearse`: nothing depends on the words."""

    def _names_of(self, ids: NDArray[Any], table: TokenTable, is_wanted: NDArray[np.bool_]) -> list[list[str]]:
        """The tags of each sentence's wanted tokens."""
        spans = [slice(int(a), int(b)) for a, b in zip(table.offsets[:-1], table.offsets[1:], strict=True)]
        return [[self.names[tag] for tag in ids[span][is_wanted[span]]] for span in spans]

    def _tags(self, logits: FloatArray, table: TokenTable) -> Iterator[list[str | None]]:
        """The tag of each word of each sentence; None where the model did not see it."""
        assert table.notes is not None
        assert table.places is not None
        best = logits.argmax(axis=1)
        for i in range(len(table)):
            span = slice(int(table.offsets[i]), int(table.offsets[i + 1]))
            tags: list[str | None] = [None] * len(table.notes[i]["words"])
            for word, tag in zip(table.places[span].tolist(), best[span].tolist(), strict=True):
                if word >= 0:
                    tags[word] = self.names[tag]
            yield tags


@final
class AnswerOutputs(Outputs):
    """A span of the context of each question."""

    def metrics(self, logits: FloatArray, table: TokenTable) -> Metrics:
        """See `Outputs.metrics`."""
        found = list(self._found(logits, table))
        predicted = {answer.note["id"]: answer.text for answer in found}
        answers = {answer.note["id"]: answer.note["answers"] for answer in found}
        if not self.task.may_lack_answers:
            return squad_metrics(predicted, answers)
        return squad_v2_metrics(predicted, answers, {answer.note["id"]: answer.null_odds for answer in found})

    def lines(self, logits: FloatArray, table: TokenTable) -> Iterator[dict[str, Any]]:
        """See `Outputs.lines`: row, identifier, answer, and the right ones."""
        for answer in self._found(logits, table):
            note = answer.note
            entry = {"row": note["row"], "id": note["id"], "prediction": answer.text}
            if self.task.may_lack_answers:
                entry["null_odds"] = round(answer.null_odds, 6)
            yield {**entry, "label": note["answers"]} if table.labels is not None else entry

    def write_files(self, folder: Path, split: str, logits: FloatArray, table: TokenTable) -> None:
        """See `Outputs.write_files`: as `run_qa.py`, answers, the best spans, and how much better none of them is."""
        prefix = "predict" if split.startswith("test") else "eval"
        found = {answer.note["id"]: answer for answer in self._found(logits, table)}
        files: dict[str, dict[str, Any]] = {
            "predictions": {question: answer.text for question, answer in found.items()},
            "nbest_predictions": {question: answer.n_best for question, answer in found.items()},
        }
        if self.task.may_lack_answers:
            files["null_odds"] = {question: answer.null_odds for question, answer in found.items()}
        for name, content in files.items():
            (folder / f"{prefix}_{name}.json").write_text(json.dumps(content, indent=4) + "\n", encoding="utf-8")

    def rehearse(self, table: TokenTable) -> None:
        """See `Outputs.rehearse`: every window must lead to an answer in its context."""
        sample = table.head(REHEARSED_SEQUENCES)
        assert sample.places is not None
        favour_context = (sample.places >= 0).astype(np.float32)
        for answer in self._found(favour_context, sample):
            assert answer.text or self.task.may_lack_answers, f"no span of {answer.note['id']} is an answer"
            assert answer.text in answer.note["context"]

    def _found(self, logits: FloatArray, table: TokenTable) -> Iterator[FoundAnswer]:
        config = self.config
        rules = AnswerRules(
            may_lack_answers=self.task.may_lack_answers,
            n_best_size=config.n_best_size,
            max_answer_length=config.max_answer_length,
            null_score_diff_threshold=config.null_score_diff_threshold,
        )
        return find_answers(logits, table, rules)


OUTPUTS: dict[Problem, type[Outputs]] = {
    "classification": ClassOutputs,
    "regression": ScoreOutputs,
    "multi_label_classification": LabelSetOutputs,
    "token_classification": TagOutputs,
    "question_answering": AnswerOutputs,
}
"""Kind of task -> what is made of its logits."""


def outputs_of(task: Task, classifier: Classifier, config: RunConfig) -> Outputs:
    """What is made of a model's logits in a task."""
    return OUTPUTS[task.problem](task, classifier, config)


def _by_name(names: tuple[str, ...], probabilities: NDArray[Any]) -> dict[str, float]:
    return {name: round(float(p), 6) for name, p in zip(names, probabilities, strict=True)}
