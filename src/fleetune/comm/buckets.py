"""How gradients are cut into buckets, and in which order the buckets cross the wire: plain data, no communication."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

Phase = Literal["reduce", "gather"]


@dataclass(frozen=True, kw_only=True)
class Size:
    """A parameter's place and size."""

    stage: int
    """Which part of the forward uses it first, counted from 0."""
    count: int
    """Its numbers."""
    alone: bool = False
    """Whether it needs a bucket of its own."""


def cut(sizes: Sequence[Size], most: int) -> list[list[int]]:
    """Cut parameters, in the order in which backward finishes them, into buckets of one stage each.

    Args:
        sizes: Of every parameter.
        most: Numbers of a bucket; a parameter that has more is a bucket of its own.

    Returns:
        Indices of each bucket's parameters.
    """
    buckets: list[list[int]] = []
    count = 0
    for i, size in enumerate(sizes):
        before = sizes[i - 1]
        joins = i > 0 and before.stage == size.stage and not (before.alone or size.alone)
        if not joins or count + size.count > most:
            buckets.append([])
            count = 0
        buckets[-1].append(i)
        count += size.count
    return buckets


def wire_order(stages: Sequence[int]) -> list[tuple[Phase, int]]:
    """The order of all exchanges of an update, the same on every rank.

    All sums come first: the norm of the gradients, which every update needs, is known when the last sum is. What is
    gathered last is what the next forward needs last.

    Args:
        stages: Of every bucket, in the order in which backward finishes them.
    """
    buckets = range(len(stages))
    forward = sorted(buckets, key=lambda bucket: stages[bucket])
    return [*(("reduce", bucket) for bucket in buckets), *(("gather", bucket) for bucket in forward)]


def padded(count: int, parts: int) -> int:
    """The least number from `count` on that can be shared out to `parts` in whole cache lines."""
    line = 16 * parts
    return -(-count // line) * line
