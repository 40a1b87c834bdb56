"""The order of turns."""

from __future__ import annotations

from benchmarks.rotation import rotated


def test_every_arm_is_first_in_turn() -> None:
    assert ["".join(rotated("abc", i)) for i in range(4)] == ["abc", "bca", "cab", "abc"]
