"""The scenes: every core tells the whole event, and opposite sides are parallel."""

from __future__ import annotations

import re

import pytest

from fleetune.data.demo.scenes import SCENES, Scene


@pytest.mark.parametrize("scene", SCENES, ids=lambda scene: scene.name)
def test_every_core_says_every_fact(scene: Scene) -> None:
    assert all(len(side) >= 4 for side in scene.cores)
    assert {len(side) for side in scene.cores} == {len(scene.cores[0])}
    assert (len(scene.cores) == 2) == (scene.opposite is not None)
    for core in (core for side in scene.cores for core in side):
        assert set(re.findall(r"\{(\w+)", core)) == set(scene.slots), core


def test_roles_are_swapped_between_like_kinds() -> None:
    swaps = [scene for scene in SCENES if scene.swap]
    assert len(swaps) >= 8
    for scene in swaps:
        first, second = scene.swap
        assert scene.slots[first] == scene.slots[second]
