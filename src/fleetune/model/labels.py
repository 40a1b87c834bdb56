"""The order of a model's classes: the task's, or the checkpoint's when it already knows these labels by name."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

_GENERIC = re.compile(r"LABEL_\d+", re.IGNORECASE)


@dataclass(frozen=True, kw_only=True)
class LabelOrder:
    """Class names in the model's order."""

    names: tuple[str, ...]
    to_model: NDArray[np.int64]
    """(C,): the model's class id for each class id of the task."""
    keeps_head: bool
    """Whether a head that the checkpoint has means these classes, so that its weights are worth keeping."""

    def id_of(self, name: str | None) -> int | None:
        """The model's class id of a label."""
        return None if name is None else self.names.index(name)


def align_labels(task_labels: tuple[str, ...], id2label: Mapping[int, str]) -> LabelOrder:
    """Match a task's labels with those of a checkpoint, by name, whatever their case.

    Args:
        task_labels: Names in the task's order.
        id2label: The checkpoint's names; transformers writes LABEL_0, LABEL_1 ... where it knows none.
    """
    known = [id2label[i] for i in sorted(id2label)]
    same_order = np.arange(len(task_labels))
    if len(known) == len(task_labels) and all(_GENERIC.fullmatch(name) for name in known):
        return LabelOrder(names=task_labels, to_model=same_order, keeps_head=True)
    # as they are written, where only their case tells them apart
    key = str.casefold if len({name.casefold() for name in known}) == len(known) else str
    place = {key(name): i for i, name in enumerate(known)}
    if len(known) == len(task_labels) and set(place) == {key(name) for name in task_labels}:
        to_model = np.array([place[key(name)] for name in task_labels])
        names = tuple(task_labels[i] for i in np.argsort(to_model))
        return LabelOrder(names=names, to_model=to_model, keeps_head=True)
    return LabelOrder(names=task_labels, to_model=same_order, keeps_head=False)
