"""From logits to what a run reports of a split: loss, metrics and predictions."""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from fleetune.data.tokens import TokenTable
from fleetune.evaluate.outputs import Outputs
from fleetune.evaluate.predict import FloatArray, Predictor
from fleetune.model.losses import LOSSES


def score(logits: FloatArray, table: TokenTable, outputs: Outputs) -> dict[str, float | None]:
    """Loss and metrics of a labelled split, named with the prefix `eval_`; None where a metric is undefined."""
    assert table.labels is not None
    metrics = outputs.metrics(logits, table)
    loss = LOSSES[outputs.task.problem]
    total = loss(torch.from_numpy(logits).double(), _targets(table.labels), torch.from_numpy(np.array(table.offsets)))
    num_targets = table.num_targets(np.arange(len(table)))
    values = {"loss": float(total) / num_targets if num_targets else None, **metrics}
    return {f"eval_{name}": value for name, value in values.items()}


def _targets(labels: NDArray[Any]) -> torch.Tensor:
    return torch.from_numpy(np.array(labels, dtype=np.float64 if labels.dtype == np.float32 else labels.dtype))


def evaluate_splits(
    predictor: Predictor, tables: dict[str, TokenTable], outputs: Outputs,
    progress: Callable[[int], None] = lambda done: None,
    keep: Callable[[str, FloatArray], None] = lambda split, logits: None,
) -> dict[str, Any]:  # fmt: skip
    """Metrics of all validation splits, the same on every rank.

    The first split's are named eval_<metric>; those of MNLI's mismatched split end in `_mm`, as in `run_glue.py`.

    Args:
        predictor: Computes the logits.
        tables: Labelled splits by name, the main one first.
        outputs: What is made of the logits.
        progress: Told how many of this rank's sequences are done.
        keep: Given each split's logits on the first rank.
    """
    results: dict[str, Any] = {}
    for split, table in tables.items():
        began = time.perf_counter()
        logits = predictor.logits(table, progress)

        def finish(split: str = split, table: TokenTable = table, logits: Any = logits, began: float = began) -> Any:
            keep(split, logits)
            seconds = time.perf_counter() - began
            count = table.num_examples
            speed = {"eval_runtime": seconds, "eval_samples_per_second": count / seconds}
            return {**score(logits, table, outputs), "eval_samples": count, **speed}

        suffix = "_mm" if split.endswith("_mismatched") else ""
        results |= {name + suffix: value for name, value in predictor.ranks.on_first(finish).items()}
    return results


def metric_text(results: dict[str, Any]) -> str:
    """The metrics of an evaluation in one line, without timings."""
    hidden = ("runtime", "samples", "per_second", "total")
    shown = {k: v for k, v in results.items() if k.startswith("eval_") and not any(word in k for word in hidden)}
    return "  ".join(f"{k.removeprefix('eval_')} {'undefined' if v is None else f'{v:.4f}'}" for k, v in shown.items())


def prediction_lines(logits: FloatArray, table: TokenTable, outputs: Outputs) -> Iterator[str]:
    """One JSON object a line, in the split's order; see `Outputs.lines`."""
    return (json.dumps(entry, ensure_ascii=False) + "\n" for entry in outputs.lines(logits, table))


def write_predictions(path: Path, logits: FloatArray, table: TokenTable, outputs: Outputs) -> None:
    """The same as a file."""
    with path.open("w", encoding="utf-8") as file:
        file.writelines(prediction_lines(logits, table, outputs))
