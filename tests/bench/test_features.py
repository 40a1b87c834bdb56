"""Examples as the peers get them."""

from __future__ import annotations

from typing import Any, cast

import numpy as np

from fleetune.bench.features import feature_of


class Table:
    """The arrays of two examples."""

    token_ids = np.array([2, 9, 3, 2, 8, 7, 3], dtype=np.int32)
    type_ids = np.array([0, 0, 0, 0, 0, 1, 1], dtype=np.uint8)
    offsets = np.array([0, 3, 7], dtype=np.int64)
    labels = np.array([1, 0], dtype=np.int64)


def test_an_example_as_it_is() -> None:
    assert feature_of(cast(Any, Table()), 1) == {
        "input_ids": [2, 8, 7, 3], "attention_mask": [1, 1, 1, 1], "token_type_ids": [0, 0, 1, 1], "label": 0,
    }  # fmt: skip


def test_an_example_padded() -> None:
    assert feature_of(cast(Any, Table()), 0, pad_to=5, pad_token_id=6) == {
        "input_ids": [2, 9, 3, 6, 6], "attention_mask": [1, 1, 1, 0, 0], "token_type_ids": [0] * 5, "label": 1,
    }  # fmt: skip


def test_a_window_with_its_answer() -> None:
    table = Table()
    table.labels = np.array([[1, 1], [2, 3]], dtype=np.int64)
    feature = feature_of(cast(Any, table), 1, pad_to=5)
    assert (feature["start_positions"], feature["end_positions"], "label" in feature) == (2, 3, False)
