"""Versions of the distributions that take part in a run."""

from __future__ import annotations

import platform
from importlib import metadata

import pytest

from fleetune.hardware import versions


def test_versions_of_python_and_the_required_distributions() -> None:
    found = versions.read_versions()
    assert found["python"] == platform.python_version()
    assert found["torch"] == metadata.version("torch")
    assert {"fleetune", "transformers", "numpy", "safetensors"} <= set(found)
    assert not {"pytest", "ruff", "mypy"} & set(found)


def test_missing_required_is_said_and_missing_optional_is_left_out(monkeypatch: pytest.MonkeyPatch) -> None:
    requirements = ["no-such-required>=1.0", 'no-such-extra>=4.0; extra == "hub"', 'pytest; extra == "dev"']
    monkeypatch.setattr(metadata, "requires", lambda _: requirements)
    found = versions.read_versions()
    assert found["no-such-required"] == "missing"
    assert "no-such-extra" not in found
    assert "pytest" not in found
