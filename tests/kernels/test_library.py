from __future__ import annotations

import os
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import torch

from fleetune.config.run import user_cache
from fleetune.errors import ConfigError, KernelError
from fleetune.kernels import library, reference
from fleetune.kernels.build import build_kernels
from fleetune.kernels.facts import write_facts
from fleetune.kernels.library import Kernels, choose_kernels, load_kernels, load_library, raw_ops, using_reference
from tests.conftest import environment
from tests.kernels.conftest import CountingCompiler

Compiler = Callable[..., CountingCompiler]
COMPILED = Kernels(compiled=True, reason=None, path=Path("lib.so"))
PLAIN = Kernels(compiled=False, reason="no", path=None)


@pytest.fixture(autouse=True)
def nothing_loaded(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """As in a new process."""
    monkeypatch.setattr(library, "_loaded", None)
    monkeypatch.delenv("FLEETUNE_KERNELS", raising=False)
    yield
    assert library._num_using_reference == 0


def chosen(sources: Path, cache: Path, said: list[str], environ: dict[str, str], **changes: str) -> Kernels:
    return choose_kernels(sources, cache, environ={**environ, **changes}, say=said.append)


@pytest.mark.parametrize("wish", ["", "compiled"])
def test_compiled_kernels(wish: str, sources: Path, tmp_path: Path, compiler: Compiler) -> None:
    said: list[str] = []
    kernels = chosen(sources, tmp_path, said, compiler().environ, FLEETUNE_KERNELS=wish)
    assert (kernels.compiled, kernels.reason, len(said)) == (True, None, 2)
    assert kernels.path is not None
    assert kernels.path.is_relative_to(tmp_path)
    assert str(kernels.path) in Path("/proc/self/maps").read_text()


def test_reference_compiles_nothing(sources: Path, tmp_path: Path, compiler: Compiler) -> None:
    gcc, said = compiler(), list[str]()
    kernels = chosen(sources, tmp_path / "cache", said, gcc.environ, FLEETUNE_KERNELS="reference")
    assert kernels == Kernels(
        compiled=False, reason="FLEETUNE_KERNELS=reference asks for plain PyTorch", path=None
    )  # fmt: skip
    assert (gcc.compiled(), said, (tmp_path / "cache").exists()) == (0, [], False)


def test_another_wish_is_refused(sources: Path, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"^FLEETUNE_KERNELS=fast: compiled or reference is expected$"):
        chosen(sources, tmp_path, [], {}, FLEETUNE_KERNELS="fast")


def test_without_a_compiler_the_reference_is_used_and_said(sources: Path, tmp_path: Path) -> None:
    said: list[str] = []
    kernels = chosen(sources, tmp_path, said, {"PATH": str(tmp_path)})
    assert kernels.reason == (
        "no C++ compiler was found: the kernels run in plain PyTorch, which is slower "
        "(install g++, then: fleetune build-kernels)"
    )
    assert (kernels.compiled, kernels.path, said) == (False, None, [kernels.reason])


def test_without_a_compiler_the_compiled_ones_cannot_be_asked_for(sources: Path, tmp_path: Path) -> None:
    with pytest.raises(KernelError, match="no C\\+\\+ compiler was found"):
        chosen(sources, tmp_path, [], {"PATH": str(tmp_path)}, FLEETUNE_KERNELS="compiled")


def test_a_failed_compile_is_one_line_with_the_log(sources: Path, tmp_path: Path, compiler: Compiler) -> None:
    (sources / "other.cpp").write_text("nonsense")
    kernels = chosen(sources, tmp_path, [], compiler().environ)
    assert kernels.reason is not None
    assert "\n" not in kernels.reason
    (log,) = (tmp_path / "kernels").glob("*.log")
    assert str(log) in kernels.reason


def test_a_library_that_cannot_be_loaded_is_not_used(sources: Path, tmp_path: Path, compiler: Compiler) -> None:
    """It is as it was made, by a linker that made no library."""
    gcc = compiler()
    made = build_kernels(sources, tmp_path, say=print, environ=gcc.environ)
    made.library.write_bytes(b"\x7fELF, and no more")
    write_facts(made.library.parent, sources=made.facts.sources, compiler="ld", flags="")
    kernels = chosen(sources, tmp_path, [], gcc.environ)
    assert not kernels.compiled
    assert kernels.reason is not None
    assert kernels.reason.startswith(f"the compiled kernels {made.library} cannot be loaded (")
    assert kernels.reason.endswith("(fleetune build-kernels --force)")


def test_another_openmp_runtime_is_not_used(
    sources: Path, tmp_path: Path, compiler: Compiler, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("fleetune.kernels.openmp.torch_openmp", lambda: Path("/opt/intel/libiomp5.so"))
    kernels = chosen(sources, tmp_path, [], compiler().environ)
    assert not kernels.compiled
    assert kernels.reason is not None
    assert "torch uses /opt/intel/libiomp5.so: the kernels run in plain PyTorch" in kernels.reason


def test_a_library_uses_torchs_openmp(sources: Path, tmp_path: Path, compiler: Compiler) -> None:
    made = build_kernels(sources, tmp_path, say=print, environ=compiler().environ)
    openmp = load_library(made.library)
    assert openmp is not None
    assert openmp.parent == Path(torch.__file__).parent / "lib"


def test_loading_is_done_once(monkeypatch: pytest.MonkeyPatch) -> None:
    calls: list[Path] = []

    def choose(sources: Path, cache_dir: Path, **rest: object) -> Kernels:
        calls.append(cache_dir)
        threading.Event().wait(0.1)
        return COMPILED

    monkeypatch.setattr(library, "choose_kernels", choose)
    threads = [threading.Thread(target=load_kernels) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert load_kernels() is COMPILED
    assert calls == [user_cache(os.environ).expanduser()]


def test_an_error_is_not_kept(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("FLEETUNE_KERNELS", "fast")
    for _ in range(2):
        with pytest.raises(ConfigError):
            load_kernels()
    monkeypatch.setenv("FLEETUNE_KERNELS", "reference")
    assert not load_kernels().compiled


def test_raw_ops_of_either_kind(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(library, "_loaded", COMPILED)
    assert raw_ops() is torch.ops.fleetune
    monkeypatch.setattr(library, "_loaded", PLAIN)
    assert raw_ops() is reference


def test_using_reference(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(library, "_loaded", COMPILED)
    with using_reference():
        with using_reference():
            assert raw_ops() is reference
        assert raw_ops() is reference
    with pytest.raises(ZeroDivisionError), using_reference():
        raise ZeroDivisionError
    assert raw_ops() is torch.ops.fleetune


def test_using_reference_loads_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(library, "choose_kernels", None)
    with using_reference():
        assert raw_ops() is reference


OPERATOR = """#include <ATen/ops/mul.h>
#include <torch/library.h>
static at::Tensor twice(const at::Tensor& x) { return at::mul(x, 2); }
TORCH_LIBRARY(fleetune, m) { m.def("twice(Tensor x) -> Tensor"); m.impl("twice", c10::DispatchKey::CPU, twice); }
"""
CALL = """
import sys
from pathlib import Path
import torch
from fleetune.kernels import build, library
build.SOURCES = Path(sys.argv[1])
kernels = library.load_kernels()
print(library.raw_ops().twice(torch.tensor([1.5, 4.0])).tolist(), kernels.path)
"""


def test_an_operator_of_torch(tmp_path: Path, compiler: Compiler) -> None:
    """In a process of its own: torch ends a process that registers a namespace twice."""
    (tmp_path / "csrc").mkdir()
    (tmp_path / "csrc" / "operators.cpp").write_text(OPERATOR)
    command = [sys.executable, "-c", CALL, str(tmp_path / "csrc")]
    changes = {"CXX": compiler("").environ["CXX"] + " -O0", "XDG_CACHE_HOME": str(tmp_path / "cache")}
    result = subprocess.run(command, capture_output=True, text=True, timeout=60, check=False,
                            env=environment(FLEETUNE_KERNELS="compiled", **changes))  # fmt: skip
    assert result.returncode == 0, result.stderr
    assert result.stdout.startswith(f"[3.0, 8.0] {tmp_path}/cache/fleetune/kernels/")
    assert [line.split(" the ")[0] for line in result.stderr.splitlines()] == ["compiling", "compiled"]
