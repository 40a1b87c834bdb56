"""`fleetune build-kernels`, on small sources of its own."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

from fleetune.cli import main
from fleetune.comm.backends import native, parts
from fleetune.comm.backends.native import NativePart
from fleetune.config import RunConfig
from fleetune.errors import BackendError
from fleetune.kernels import build, library
from tests.kernels.conftest import CountingCompiler, compiler, sources

__all__ = ["compiler", "sources"]  # fixtures

Run = Callable[..., int]


@pytest.fixture
def run(
    sources: Path, tmp_path: Path, compiler: Callable[..., CountingCompiler], monkeypatch: pytest.MonkeyPatch
) -> Run:
    """Run the command with a compiler that counts; gives the status."""
    monkeypatch.setattr(build, "SOURCES", sources)
    monkeypatch.setattr(RunConfig, "cache_dir", tmp_path / "cache")
    monkeypatch.setenv("CXX", compiler().environ["CXX"])
    return lambda *words: main.run(["build-kernels", *words])


def test_it_builds_and_says_what(run: Run, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert run() == 0
    told = capsys.readouterr()
    assert told.err == ""
    lines = told.out.splitlines()
    (made,) = (tmp_path / "cache").rglob("*.so")
    assert lines[0].startswith("compiling the kernels")
    assert lines[1].startswith("compiled the kernels in ")
    names, values = zip(*(line.split(maxsplit=1) for line in lines[2:]), strict=True)
    assert names == ("compiler", "flags", "time", "library", "OpenMP")
    assert values[0].endswith(f"({tmp_path}/compiler.sh)")
    assert values[1].startswith("-O3 ")
    assert values[2].endswith(" s")
    assert values[3].startswith(f"{made} (0.")
    assert values[3].endswith(" MB)")
    assert values[4].endswith(", as torch")


def test_what_is_there_is_said_and_force_builds_again(run: Run, capsys: pytest.CaptureFixture[str]) -> None:
    assert run() == 0
    capsys.readouterr()
    assert run() == 0
    told = capsys.readouterr().out
    assert "time      none, it was there (--force compiles again)\n" in told
    assert "compiling" not in told
    assert run("--force") == 0
    assert "compiling" in capsys.readouterr().out


def test_a_failure_shows_the_compilers_first_errors_and_is_tried_again(
    run: Run, sources: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:  # fmt: skip
    (sources / "other.cpp").write_text("int other() { return nothing; }\n")
    for _ in range(2):
        assert run() == 1
        told = capsys.readouterr()
        assert told.err.startswith(
            f"error: the kernels could not be compiled by CXX={tmp_path}/compiler.sh (see {tmp_path}/cache/kernels/"
        )
        assert "\n  other.cpp:1:22: error: 'nothing' was not declared in this scope\n" in told.err
        assert "compiling" in told.out


def test_backends_are_built_on_request(
    run: Run, sources: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """One whose library is here, of the same small sources, and one whose is not."""
    here = NativePart(name="here")

    def missing() -> NativePart:
        raise BackendError("backend there needs a thing", remedy="pip install thing")

    monkeypatch.setattr(parts, "PARTS", {"here": lambda: here, "there": missing})
    monkeypatch.setattr(native, "SOURCES", sources)
    monkeypatch.setattr(NativePart, "recipe", lambda part: build.Recipe(name="parts", folder="b", usual_time="short"))
    assert run("--backends") == 0
    lines = capsys.readouterr().out.splitlines()
    (made,) = (tmp_path / "cache" / "b").rglob("*.so")
    assert lines[-4:-2] == ["compiling parts for this machine, once: short", lines[-3]]
    assert lines[-2].startswith(f"here      {made} (0.")
    assert lines[-1] == "there     not built: backend there needs a thing (pip install thing)"


def test_no_compiler(
    run: Run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.delenv("CXX")
    monkeypatch.setenv("PATH", str(tmp_path))
    assert run() == 1
    assert capsys.readouterr().err == (
        "error: no C++ compiler was found (install g++, then: fleetune build-kernels)\n"
    )  # fmt: skip


@pytest.mark.parametrize("word", ["--learning_rate", "--cache_dir"])
def test_settings_of_training_are_refused(run: Run, word: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert run(word, "1") == 2
    assert "this command does not take it" in capsys.readouterr().err


def test_it_builds_where_runs_look(run: Run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """And a run then compiles nothing."""
    assert run() == 0
    (made,) = (tmp_path / "cache" / "kernels").rglob("*.so")
    said: list[str] = []
    monkeypatch.setattr(library, "_loaded", None)
    assert (library.load_kernels(said.append).path, said) == (made, [])


def test_plain_pytorch_needs_nothing(
    run: Run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("FLEETUNE_KERNELS", "reference")
    assert run() == 0
    assert capsys.readouterr() == ("FLEETUNE_KERNELS=reference asks for plain PyTorch: nothing is compiled\n", "")
    assert not (tmp_path / "cache").exists()
    monkeypatch.setenv("FLEETUNE_KERNELS", "off")
    assert run() == 2
    assert capsys.readouterr().err == "error: FLEETUNE_KERNELS=off: compiled or reference is expected\n"
