"""How gradients are cut and ordered: worked out by hand."""

from __future__ import annotations

import pytest

from fleetune.comm.buckets import Size, cut, padded, wire_order


def sizes(*pairs: tuple[int, int]) -> list[Size]:
    return [Size(stage=stage, count=count) for stage, count in pairs]


@pytest.mark.parametrize(
    ("given", "most", "expected"),
    [
        (sizes((2, 5), (2, 3), (2, 4)), 8, [[0, 1], [2]]),
        (sizes((2, 5), (1, 1), (1, 1)), 8, [[0], [1, 2]]),  # a bucket is of one stage
        (sizes((0, 20), (0, 1)), 8, [[0], [1]]),  # larger than a bucket
        (sizes((0, 1)), 8, [[0]]),
    ],
)
def test_buckets(given: list[Size], most: int, expected: list[list[int]]) -> None:
    assert cut(given, most) == expected


def test_what_stands_alone_shares_no_bucket() -> None:
    words = Size(stage=0, count=2, alone=True)
    assert cut([*sizes((0, 1), (0, 1)), words, *sizes((0, 1), (0, 1))], 100) == [[0, 1], [2], [3, 4]]


def test_sums_come_first_and_what_forward_needs_last_is_gathered_last() -> None:
    """Backward ends with the embeddings (stage 0), with which the next forward begins."""
    assert wire_order([2, 1, 0]) == [
        *(("reduce", 0), ("reduce", 1), ("reduce", 2)),
        *(("gather", 2), ("gather", 1), ("gather", 0)),
    ]


@pytest.mark.parametrize(("count", "parts", "expected"), [(1, 1, 16), (16, 1, 16), (17, 2, 32), (33, 2, 64), (0, 3, 0)])
def test_room_that_hosts_can_share_out(count: int, parts: int, expected: int) -> None:
    assert padded(count, parts) == expected
