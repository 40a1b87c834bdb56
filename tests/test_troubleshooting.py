"""docs/troubleshooting.md quotes messages as they are: each is looked up in the sources, or in torch."""

from __future__ import annotations

import ast
import functools
import importlib.util
import mmap
import re
from pathlib import Path

import pytest

from fleetune.cli.main import COMMANDS
from fleetune.cluster.remote import _REASONS
from fleetune.doctor.checks.all import CHECKS
from tests.conftest import REPOSITORY

PAGE = (REPOSITORY / "docs" / "troubleshooting.md").read_text(encoding="utf-8")
HOLE = "…"


def quoted(kind: str) -> list[str]:
    """Lines of the page's blocks of a kind."""
    blocks = re.findall(rf"^```{kind}\n(.*?)^```$", PAGE, re.MULTILINE | re.DOTALL)
    return [line for block in blocks for line in block.splitlines() if line.strip()]


def pieces(message: str) -> list[str]:
    """What a message says between its values."""
    parts = (piece.strip(" .,:;") for piece in message.split(HOLE))
    return [piece for piece in parts if len(piece) > 3]


@functools.cache
def texts() -> tuple[str, ...]:
    """All texts of the sources, with a hole for each value in them."""
    found = []
    for path in sorted((REPOSITORY / "src").rglob("*.py")):
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            if isinstance(node, ast.JoinedStr):
                found.append("".join(str(v.value) if isinstance(v, ast.Constant) else HOLE for v in node.values))
            elif isinstance(node, ast.Constant) and isinstance(node.value, str):
                found.append(re.sub(r"\{[^}]*\}", HOLE, node.value))
    return tuple(found)


@pytest.mark.parametrize("message", quoted("fleetune"))
def test_a_message_of_fleetune_is_in_its_sources(message: str) -> None:
    fixed = [piece for piece in message.split(HOLE) if piece.strip()]
    assert sum(map(len, fixed)) >= 10, "hardly more than values"
    in_order = re.compile(".*".join(re.escape(piece.strip()) for piece in fixed), re.DOTALL)
    assert any(in_order.search(text) for text in texts())


@pytest.mark.parametrize("message", quoted("torch"))
def test_a_message_of_torch_is_in_torch(message: str) -> None:
    spec = importlib.util.find_spec("torch")
    assert spec is not None
    assert spec.origin is not None
    library = Path(spec.origin).parent / "lib" / "libtorch_cpu.so"
    with library.open("rb") as file, mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as content:
        missing = [piece for piece in pieces(message) if content.find(piece.encode()) < 0]
    assert not missing


def test_every_reason_of_ssh_is_explained() -> None:
    for _, reason, _ in _REASONS:
        assert f"| `{reason}` |" in PAGE


def test_the_page_names_checks_that_there_are() -> None:
    table = re.search(r"\| --- \| --- \| --- \|\n(.*?)\n\n", PAGE, re.DOTALL)
    assert table is not None
    named = {name for row in table[1].splitlines() for name in re.findall(r"`([^`]+)`", row.split("|")[2])}
    told = set(re.findall(r'"([^"\n]+)"', (REPOSITORY / "src/fleetune/doctor/checks/all.py").read_text()))
    of_several = {"ssh", "connections", "versions"}  # told by checks that compare hosts
    assert named <= told | of_several
    assert len(CHECKS) > 20


def test_links_within_the_page_lead_somewhere() -> None:
    headings = re.findall(r"^## (.*)$", PAGE, re.MULTILINE)
    anchors = {re.sub(r"[^a-z0-9 -]", "", heading.lower()).replace(" ", "-") for heading in headings}
    assert set(re.findall(r"\]\(#([^)]+)\)", PAGE)) <= anchors


def test_commands_that_the_page_names_are_there() -> None:
    named = set(re.findall(r"`?fleetune ([a-z-]+)\b(?= (?:--|`)|`|$)", PAGE))
    assert named <= set(COMMANDS)
