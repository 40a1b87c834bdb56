"""From logits to what a task reports: predictions, probabilities, loss and metrics."""

from __future__ import annotations

import json
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from fleetune.data.tasks import Task
from fleetune.data.tokens import TokenTable
from fleetune.evaluate.metrics import Outcome, compute_metrics
from fleetune.evaluate.predict import FloatArray, Predictor
from fleetune.model.load import Classifier
from fleetune.model.losses import LOSSES


def predictions_of(logits: FloatArray, task: Task) -> NDArray[Any]:
    """The model's class ids (N,), or its scores (N,)."""
    return logits[:, 0] if task.problem == "regression" else logits.argmax(axis=1)


def score(logits: FloatArray, table: TokenTable, task: Task, classifier: Classifier) -> dict[str, float | None]:
    """Loss and metrics of a labelled split, named with the prefix `eval_`; None where a metric is undefined."""
    assert table.labels is not None
    positive_id = None if classifier.labels is None else classifier.labels.id_of(task.positive_label)
    outcome = Outcome(predictions=predictions_of(logits, task), labels=table.labels, positive_id=positive_id)
    total = LOSSES[task.problem](torch.from_numpy(logits).double(), _targets(table.labels))
    values = {"loss": float(total) / len(table), **compute_metrics(task.metrics, outcome)}
    return {f"eval_{name}": value for name, value in values.items()}


def _targets(labels: NDArray[Any]) -> torch.Tensor:
    labels = labels.astype(np.float64) if labels.dtype == np.float32 else labels
    return torch.from_numpy(labels)


def evaluate_splits(
    predictor: Predictor, tables: dict[str, TokenTable], task: Task, classifier: Classifier,
    progress: Callable[[int], None] = lambda done: None,
    keep: Callable[[str, FloatArray], None] = lambda split, logits: None,
) -> dict[str, Any]:  # fmt: skip
    """Metrics of all validation splits, the same on every rank.

    The first split's are named eval_<metric>; those of MNLI's mismatched split end in `_mm`, as in `run_glue.py`.

    Args:
        predictor: Computes the logits.
        tables: Labelled splits by name, the main one first.
        task: Says which metrics.
        classifier: Says what the logits mean.
        progress: Told how many of this rank's examples are done.
        keep: Given each split's logits on the first rank.
    """
    results: dict[str, Any] = {}
    for split, table in tables.items():
        began = time.perf_counter()
        logits = predictor.logits(table, progress)

        def finish(split: str = split, table: TokenTable = table, logits: Any = logits, began: float = began) -> Any:
            keep(split, logits)
            seconds = time.perf_counter() - began
            speed = {"eval_runtime": seconds, "eval_samples_per_second": len(table) / seconds}
            return {**score(logits, table, task, classifier), "eval_samples": len(table), **speed}

        suffix = "_mm" if split.endswith("_mismatched") else ""
        results |= {name + suffix: value for name, value in predictor.ranks.on_first(finish).items()}
    return results


def metric_text(results: dict[str, Any]) -> str:
    """The metrics of an evaluation in one line, without timings."""
    hidden = ("runtime", "samples", "per_second")
    shown = {k: v for k, v in results.items() if k.startswith("eval_") and not any(word in k for word in hidden)}
    return "  ".join(f"{k.removeprefix('eval_')} {'undefined' if v is None else f'{v:.4f}'}" for k, v in shown.items())


def write_predictions(path: Path, logits: FloatArray, table: TokenTable, task: Task, classifier: Classifier) -> None:
    """One JSON object a line, in the split's order: row, prediction, and for classes each one's probability."""
    values = predictions_of(logits, task)
    names = None if classifier.labels is None else classifier.labels.names
    shifted = np.exp(logits - logits.max(axis=1, keepdims=True))
    probabilities = shifted / shifted.sum(axis=1, keepdims=True)
    with path.open("w", encoding="utf-8") as file:
        for i, row in enumerate(table.rows.tolist()):
            entry: dict[str, Any] = {"row": row}
            if names is None:
                entry["prediction"] = round(float(values[i]), 6)
            else:
                entry["prediction"] = names[values[i]]
                entry["probabilities"] = {n: round(float(p), 6) for n, p in zip(names, probabilities[i], strict=True)}
            if table.labels is not None:
                label = table.labels[i]
                entry["label"] = round(float(label), 6) if names is None else names[label]
            file.write(json.dumps(entry, ensure_ascii=False) + "\n")


def write_glue_predictions(path: Path, logits: FloatArray, task: Task, classifier: Classifier) -> None:
    """The layout of `run_glue.py`'s predict_results file: a header, then index and prediction by name or score."""
    values = predictions_of(logits, task)
    names = None if classifier.labels is None else classifier.labels.names
    shown = [f"{v:3.3f}" for v in values] if names is None else [names[v] for v in values]
    lines = ["index\tprediction", *(f"{i}\t{value}" for i, value in enumerate(shown))]
    path.write_text("\n".join(lines) + "\n", encoding="utf-8")
