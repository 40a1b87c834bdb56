"""Examples as a tokenised data set of Hugging Face holds them, from token tables: what other trainers are given."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from fleetune.data.tokens import TokenTable

Feature = dict[str, Any]
ANSWER = ("start_positions", "end_positions")
"""Names of the label of a window: the first and the last token of the answer."""


def feature_of(table: TokenTable, example: int, *, pad_to: int | None = None, pad_token_id: int = 0) -> Feature:
    """One labelled example, or window with its answer, already padded if all are to be padded alike.

    Args:
        table: A labelled split.
        example: Index in it.
        pad_to: Tokens after padding; None: none are added.
        pad_token_id: The tokenizer's.
    """
    assert table.labels is not None
    begin, end = int(table.offsets[example]), int(table.offsets[example + 1])
    padding = 0 if pad_to is None else pad_to - (end - begin)
    label = table.labels[example].tolist()
    feature: Feature = {
        "input_ids": table.token_ids[begin:end].tolist() + [pad_token_id] * padding,
        "attention_mask": [1] * (end - begin) + [0] * padding,
        **(dict(zip(ANSWER, label, strict=True)) if isinstance(label, list) else {"label": label}),
    }
    if table.type_ids is not None:
        feature["token_type_ids"] = table.type_ids[begin:end].tolist() + [0] * padding
    return feature
