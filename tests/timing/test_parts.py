"""The guide to the time has every part, and no other."""

from __future__ import annotations

import re

from fleetune.timing.parts import HIDDEN, PARTS
from fleetune.trackers.table import TRACKERS
from tests.conftest import REPOSITORY

GUIDE = (REPOSITORY / "docs" / "time.md").read_text(encoding="utf-8")


def test_every_part_is_explained() -> None:
    rows = re.findall(r"^\| `(\w+)`", GUIDE, flags=re.MULTILINE)
    around = {part.name for part in PARTS["around"]}
    expected = {part.name for group in ("start_up", "steps") for part in PARTS[group]} | {HIDDEN.name}
    assert set(rows) == expected | set(TRACKERS)
    assert all(f"`{name}`" in GUIDE for name in around)


def test_parts_of_steps_have_their_labels_there() -> None:
    for part in (*PARTS["steps"], HIDDEN):
        assert f"| `{part.name}` {part.label} |" in GUIDE


def test_every_tracker_is_there_with_what_installs_it() -> None:
    for name, kind in TRACKERS.items():
        assert f"| `{name}` |" in GUIDE
        assert name == "tensorboard" or kind.install in GUIDE
