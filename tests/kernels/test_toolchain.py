from __future__ import annotations

import dataclasses
import os
import platform
from pathlib import Path

import pytest
import torch

from fleetune.errors import KernelError
from fleetune.kernels.toolchain import Toolchain, find_toolchain

SOURCES = {"a.cpp": b"int a;", "a.h": b""}


@pytest.fixture(scope="module")
def toolchain() -> Toolchain:
    return find_toolchain({k: v for k, v in os.environ.items() if k != "CXX"})


def test_what_is_found_on_the_path(toolchain: Toolchain) -> None:
    assert Path(toolchain.command[0]).name in ("g++", "c++", "clang++")
    assert Path(toolchain.command[0]).resolve() == Path(toolchain.program)
    assert "\n" not in toolchain.name
    assert toolchain.name.endswith(f" ({toolchain.command[0]})")
    assert toolchain.torch_version == torch.__version__


def test_flags(toolchain: Toolchain) -> None:
    flags = toolchain.compile_flags
    native = "-march=native" if platform.machine() == "x86_64" else "-mcpu=native"
    for flag in ("-O3", native, "-fopenmp", "-std=c++20", "-fPIC", "-fno-math-errno", "-fno-trapping-math", "-g0"):
        assert flag in flags
    assert f"-D_GLIBCXX_USE_CXX11_ABI={int(torch.compiled_with_cxx11_abi())}" in flags
    assert toolchain.short_flags.startswith("-O3 -std=c++20")
    assert "include" not in toolchain.short_flags
    assert "-fopenmp" not in toolchain.link_flags  # torch's own runtime in place of the compiler's
    assert any(flag.startswith("/") and "libgomp" in flag for flag in toolchain.link_flags)


@pytest.mark.parametrize(
    "changes",
    [
        {"torch_version": "2.99"},
        {"version": "g++ 99"},
        {"program": "/opt/bin/g++"},
        {"target": "another CPU"},
        {"compile_flags": ("-O2",)},
        {"link_flags": ()},
    ],
)
def test_every_part_decides_the_key(toolchain: Toolchain, changes: dict[str, object]) -> None:
    assert dataclasses.replace(toolchain, **changes).key(SOURCES) != toolchain.key(SOURCES)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    "sources", [{"a.cpp": b"int a;"}, {"a.cpp": b"int b;", "a.h": b""}, {"b.cpp": b"int a;", "a.h": b""}]
)
def test_every_source_decides_the_key(toolchain: Toolchain, sources: dict[str, bytes]) -> None:
    assert toolchain.key(sources) != toolchain.key(SOURCES)


def test_the_key_is_the_same_again(toolchain: Toolchain) -> None:
    again = find_toolchain({k: v for k, v in os.environ.items() if k != "CXX"})
    assert again.key(dict(reversed(SOURCES.items()))) == toolchain.key(SOURCES)


def test_the_target_is_what_the_compiler_would_compile_for(toolchain: Toolchain) -> None:
    """Another instruction set gives other macros: here one that $CXX takes away."""
    if platform.machine() != "x86_64":
        pytest.skip("names an instruction set of x86-64")
    less = find_toolchain({**os.environ, "CXX": f"{toolchain.command[0]} -DLESS=1"})
    assert less.command == (toolchain.command[0], "-DLESS=1")
    assert less.target != toolchain.target


def test_no_compiler(tmp_path: Path) -> None:
    with pytest.raises(KernelError) as caught:
        find_toolchain({"PATH": str(tmp_path)})
    assert str(caught.value) == "no C++ compiler was found (install g++, then: fleetune build-kernels)"


def test_cxx_names_nothing() -> None:
    with pytest.raises(KernelError, match=r"^CXX=no-such-compiler -O9: there is no such compiler \(correct or unset"):
        find_toolchain({**os.environ, "CXX": "no-such-compiler -O9"})
    with pytest.raises(
        KernelError, match=r"^CXX=g\+\+ ': it is no command \(No closing quotation\) \(correct or unset"
    ):
        find_toolchain({**os.environ, "CXX": "g++ '"})


@pytest.mark.parametrize(
    ("script", "told"),
    [
        ("#!/bin/sh\necho broken >&2\nexit 3\n", "does not do its work (broken)"),
        ("#!/bin/sh\nexit 3\n", "does not do its work (status 3)"),
        ("#!/bin/sh\n", "is no C++ compiler (asked for its macros, it names none)"),
        ("#!/no/such/shell\n", "cannot be run (No such file or directory)"),
    ],
)
def test_a_compiler_that_does_not_work(script: str, told: str, tmp_path: Path) -> None:
    program = tmp_path / "g++"
    program.write_text(script)
    program.chmod(0o755)
    with pytest.raises(KernelError) as caught:
        find_toolchain({"PATH": str(tmp_path)})
    assert caught.value.reason == f"the C++ compiler {program} {told}"
    assert caught.value.remedy == "install g++, then: fleetune build-kernels"
    with pytest.raises(KernelError) as named:
        find_toolchain({"CXX": f"{program} -O9"})
    assert named.value.reason == f"CXX={program} -O9 {told}"
    assert named.value.remedy == "correct or unset CXX, then: fleetune build-kernels"
