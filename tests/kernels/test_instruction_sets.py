"""The same sources on CPUs with narrower vectors: all tests of the operators, on kernels that were compiled for these.

The narrowest, four numbers wide, takes the way through the sources that Arm takes.
"""

from __future__ import annotations

import os
import platform
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from tests.conftest import REPOSITORY, environment

WITHOUT = {
    "AVX2, eight numbers": "-mno-avx512f",
    "SSE, four numbers": "-mno-avx512f -mno-avx2 -mno-fma -mno-f16c -mno-avx",
}


@pytest.mark.slow
@pytest.mark.timeout(600)
@pytest.mark.skipif(platform.machine() != "x86_64", reason="the flags are those of x86-64")
@pytest.mark.parametrize("flags", WITHOUT.values(), ids=WITHOUT.keys())
def test_operators_are_right(flags: str, tmp_path: Path) -> None:
    compiler = os.environ.get("CXX") or shutil.which("g++")
    if compiler is None:
        pytest.skip("there is no g++")
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", "tests/kernels/test_operators.py"]
    changes = {"CXX": f"{compiler} {flags}", "FLEETUNE_KERNELS": "compiled", "HOME": str(tmp_path)}
    result = subprocess.run(
        command, cwd=REPOSITORY, env=environment(**changes), capture_output=True, text=True, timeout=580, check=False
    )
    assert result.returncode == 0, result.stdout[-3000:] + result.stderr[-2000:]
    assert "skipped" not in result.stdout
    (build,) = (tmp_path / ".cache" / "fleetune" / "kernels").glob("*/libfleetune.so")
    assert build.stat().st_size > 0
