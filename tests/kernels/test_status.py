"""What a run would find of the kernels, without building any."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import torch

from fleetune.kernels.library import load_kernels
from tests.conftest import environment


def status(**environ: str) -> dict[str, Any]:
    result = subprocess.run(
        [sys.executable, "-m", "fleetune.kernels.status"], capture_output=True, text=True, timeout=120, check=True,
        env=environment(**environ),
    )  # fmt: skip
    told: dict[str, Any] = json.loads(result.stdout)
    return told


def test_built() -> None:
    told = status()
    assert told["torch"] == torch.__version__
    assert told["built"] == (None if (path := load_kernels().path) is None else str(path))


def test_nothing_is_built(tmp_path: Path) -> None:
    told = status(XDG_CACHE_HOME=str(tmp_path), TMPDIR=str(tmp_path))
    assert told["built"] is None
    assert list(tmp_path.rglob("*.so")) == []


def test_without_a_compiler_what_was_built_before_is_found() -> None:
    told = status(CXX="/no/compiler")
    assert "/no/compiler" in told["no_compiler"]
    assert "compiler" not in told
    assert told["built"] is not None


def test_a_torch_that_is_broken(tmp_path: Path) -> None:
    (tmp_path / "torch.py").write_text("raise OSError('libgomp.so.1: cannot open shared object file')\n")
    told = status(PYTHONPATH=str(tmp_path) + ":" + environment().get("PYTHONPATH", ""))
    assert told == {"torch": None, "problem": "OSError: libgomp.so.1: cannot open shared object file"}
