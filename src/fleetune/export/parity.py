"""Whether a written model computes what ours computes, on real rows."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from fleetune.data.batches import Indices, pack, sorted_batches
from fleetune.data.tokens import TokenTable
from fleetune.errors import ModelError
from fleetune.evaluate.predict import FloatArray
from fleetune.export.formats import RunModel, Signature
from fleetune.model.load import Classifier

TOLERANCE = 1e-4
"""How far float32 logits may differ, in units of the largest of them or of 1: runtimes add up in other orders."""
BATCH_SEQUENCES = 32


@dataclass(frozen=True, kw_only=True)
class Parity:
    """How two forwards compare on some sequences."""

    num_sequences: int
    largest_difference: float
    largest_logit: float

    @property
    def limit(self) -> float:
        """The largest difference that is taken for rounding."""
        return TOLERANCE * max(1.0, self.largest_logit)

    def require(self, file: str) -> None:
        """Refuse a model that computes something else.

        Raises:
            ModelError: It does.
        """
        if not self.largest_difference <= self.limit:
            raise ModelError(
                f"{file} does not compute what the model computes: logits of {self.num_sequences} rows differ by up to "
                f"{self.largest_difference:.2g}, {self.limit:.2g} is tolerated; nothing was kept"
            )


def padded_inputs(
    table: TokenTable, sequences: Indices, signature: Signature, padding: int
) -> dict[str, NDArray[np.int64]]:
    """The inputs of some sequences, filled up on the right to the longest: (B, L) each."""
    lengths = table.lengths[sequences]
    mask = np.arange(int(lengths.max()))[None, :] < lengths[:, None]
    tokens = np.concatenate([np.arange(table.offsets[i], table.offsets[i + 1]) for i in sequences])
    found = {"input_ids": np.full(mask.shape, padding, np.int64), "attention_mask": mask.astype(np.int64)}
    found["input_ids"][mask] = table.token_ids[tokens]
    if "token_type_ids" in signature.inputs:
        found["token_type_ids"] = np.zeros(mask.shape, np.int64)
        if table.type_ids is not None:
            found["token_type_ids"][mask] = table.type_ids[tokens]
    return {name: found[name] for name in signature.inputs}


def examples_to_follow(signature: Signature, padding: int) -> list[Tensor]:
    """Inputs to follow a forward with: two sequences of different lengths, no size like another's."""
    mask = torch.ones(2, 7, dtype=torch.int64)
    mask[1, 4:] = 0
    values = {
        "input_ids": torch.where(mask == 1, mask * (padding + 1), padding),
        "attention_mask": mask,
        "token_type_ids": torch.zeros_like(mask),
    }
    return [values[name] for name in signature.inputs]


def logits_of(
    run: RunModel, table: TokenTable, classifier: Classifier, signature: Signature, padding: int
) -> FloatArray:
    """Logits of all sequences from a written model, laid out as `Predictor.logits` lays them out."""
    per_token = classifier.head.reads_all_tokens
    result = np.empty((table.num_tokens if per_token else len(table), classifier.num_labels), np.float32)
    for sequences in sorted_batches(table.lengths, BATCH_SEQUENCES):
        inputs = padded_inputs(table, sequences, signature, padding)
        outputs = run(inputs)
        values = np.stack(outputs, axis=-1) if len(outputs) > 1 else outputs[0]
        if per_token:
            tokens = np.concatenate([np.arange(table.offsets[i], table.offsets[i + 1]) for i in sequences])
            result[tokens] = values[inputs["attention_mask"] == 1]
        else:
            result[sequences] = values
    return result


def compare(
    run: RunModel, table: TokenTable, classifier: Classifier, signature: Signature, padding: int
) -> Parity:  # fmt: skip
    """Our forward against a written model's, on all sequences of a table."""
    found = logits_of(run, table, classifier, signature, padding)
    expected = _ours(classifier, table)
    return Parity(
        num_sequences=len(table),
        largest_difference=float(np.abs(found - expected).max()),
        largest_logit=float(np.abs(expected).max()),
    )


def _ours(classifier: Classifier, table: TokenTable) -> FloatArray:
    module: Any = classifier.module
    module.eval()
    everything: Sequence[int] = range(len(table))
    with torch.inference_mode():
        logits: FloatArray = module(pack(table, np.array(everything, np.int64))).float().numpy()
    return logits
