"""Small C++ sources without torch's headers, and a compiler that counts what it compiles."""

from __future__ import annotations

import os
import shutil
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import pytest

SOURCE = """#include "value.h"
#include <omp.h>
extern "C" int count_to(int n) {
  int sum = 0;
#pragma omp parallel for reduction(+ : sum)
  for (int i = 0; i < n; ++i) sum += VALUE;
  return sum;
}
"""


@pytest.fixture
def sources(tmp_path: Path) -> Path:
    """A library whose `count_to(n)` is n times the 2 of its header."""
    folder = tmp_path / "csrc"
    folder.mkdir()
    (folder / "count.cpp").write_text(SOURCE)
    (folder / "value.h").write_text("constexpr int VALUE = 2;\n")
    (folder / "other.cpp").write_text('extern "C" int other() { return 7; }\n')
    return folder


@dataclass(frozen=True, kw_only=True)
class CountingCompiler:
    """A script around g++."""

    environ: dict[str, str]
    """Names the script as the compiler."""
    log: Path
    temporary_dir: Path

    def compiled(self) -> int:
        """How many sources were compiled so far, failures counted."""
        return len(self.log.read_text().splitlines()) if self.log.exists() else 0


@pytest.fixture
def compiler(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[..., CountingCompiler]:
    """Make a compiler that first runs some lines of shell whenever it compiles; temporary files are the test's own."""
    gcc, temporary = shutil.which("g++"), tmp_path / "temporary"
    assert gcc is not None, "the tests compile C++"
    temporary.mkdir()
    monkeypatch.setattr("tempfile.tempdir", str(temporary))

    def make(before: str = "") -> CountingCompiler:
        script, log = tmp_path / "compiler.sh", tmp_path / "compiled.txt"
        script.write_text(
            f'#!/bin/sh\ncase " $* " in *" -c "*)\necho run >> {log}\n{before}\n;; esac\nexec {gcc} "$@"\n'
        )
        script.chmod(0o755)
        environ = {**os.environ, "CXX": str(script), "TMPDIR": str(temporary)}
        return CountingCompiler(environ=environ, log=log, temporary_dir=temporary)

    return make
