"""The C++ compiler of this machine, and how it is called.

We call it ourselves. `torch.utils.cpp_extension.load` would need ninja, waits for other processes on a lock file that
a killed one leaves behind, links whichever OpenMP runtime the compiler prefers, and knows a build by its sources and
flags only; what it would give us is two paths.
"""

from __future__ import annotations

import hashlib
import json
import os
import platform
import shlex
import shutil
import subprocess
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from pathlib import Path

import torch

from fleetune.errors import KernelError
from fleetune.kernels.facts import sources_digest
from fleetune.kernels.openmp import torch_openmp

# GNU's first: torch's wheels hold its OpenMP runtime, and code from clang cannot use that one.
_PROGRAMS = ("g++", "c++", "clang++")

_FLAGS = (
    *("-O3", "-std=c++20", "-fPIC", "-fopenmp", "-g0", "-pipe"),
    *("-fno-math-errno", "-fno-trapping-math"),  # what keeps loops over exp and comparisons from being vectorised
)
_NATIVE = {"x86_64": "-march=native", "aarch64": "-mcpu=native", "arm64": "-mcpu=native"}

INSTALL = "install g++, then: fleetune build-kernels"
CORRECT = "correct or unset CXX, then: fleetune build-kernels"


@dataclass(frozen=True, kw_only=True)
class Toolchain:
    """A compiler and its flags: with the sources, all that decides what a library is made of."""

    command: tuple[str, ...]
    """The program, and the arguments that `$CXX` gives it."""
    program: str
    """Where the program really is, beyond links."""
    version: str
    """What it says of itself."""
    target: str
    """Digest of the macros it defines: what -march=native means on this CPU, told by the one who knows."""
    compile_flags: tuple[str, ...]
    link_flags: tuple[str, ...]
    torch_version: str

    @property
    def name(self) -> str:
        """First line of its version, and how it is called."""
        version = self.version.splitlines()[0] if self.version else self.program
        return f"{version} ({' '.join(self.command)})"

    @property
    def short_flags(self) -> str:
        """The flags that decide about the code, without those that say where things are."""
        return " ".join(flag for flag in self.compile_flags if flag.startswith(("-O", "-m", "-f", "-std")))

    def compiling(self, source: str, target: str) -> tuple[str, ...]:
        """The command that compiles a source."""
        return (*self.command, *self.compile_flags, "-c", source, "-o", target)

    def linking(self, objects: list[str], target: str) -> tuple[str, ...]:
        """The command that makes a shared library."""
        return (*self.command, "-shared", "-o", target, *objects, *self.link_flags)

    def key(self, sources: Mapping[str, bytes]) -> str:
        """Name of a build: a digest, in hex, of this and the sources.

        Args:
            sources: Path in the folder of the sources -> content, headers too.
        """
        text = json.dumps({"toolchain": asdict(self), "sources": sources_digest(sources)}, sort_keys=True)
        return hashlib.sha256(text.encode()).hexdigest()[:24]


def find_toolchain(environ: Mapping[str, str]) -> Toolchain:
    """The compiler to use: `$CXX`, or one that is found on `$PATH`.

    Raises:
        KernelError: There is none, or it does not work.
    """
    command = _find_command(environ)
    folder = Path(torch.__file__).parent
    native = [flag for machine, flag in _NATIVE.items() if machine == platform.machine()]
    code_flags = (*_FLAGS, *native)
    macros = _ask(command, (*code_flags, *_MACROS), environ)
    if "__cplusplus" not in macros:
        raise _refusal(command, environ, "is no C++ compiler (asked for its macros, it names none)")
    return Toolchain(
        command=command,
        program=os.path.realpath(command[0]),
        version=_ask(command, ("--version",), environ),
        target=hashlib.sha256(macros.encode()).hexdigest(),
        compile_flags=(
            *code_flags,
            f"-D_GLIBCXX_USE_CXX11_ABI={int(torch.compiled_with_cxx11_abi())}",
            "-I.",
            *("-isystem", str(folder / "include")),
            *("-isystem", str(folder / "include/torch/csrc/api/include")),
        ),
        link_flags=_link_flags(folder / "lib", torch_openmp()),
        torch_version=str(torch.__version__),
    )


_MACROS = ("-dM", "-E", "-x", "c++", os.devnull)


def _find_command(environ: Mapping[str, str]) -> tuple[str, ...]:
    path = environ.get("PATH", os.defpath)
    try:
        told = shlex.split(environ.get("CXX", ""))
    except ValueError as error:
        raise KernelError(f"CXX={environ['CXX']}: it is no command ({error})", remedy=CORRECT) from error
    if told:
        program = shutil.which(told[0], path=path)
        if program is None:
            raise KernelError(f"CXX={environ['CXX']}: there is no such compiler", remedy=CORRECT)
        return (program, *told[1:])
    found = [program for name in _PROGRAMS if (program := shutil.which(name, path=path))]
    if not found:
        raise KernelError("no C++ compiler was found", remedy=INSTALL)
    return (found[0],)


def _ask(command: tuple[str, ...], arguments: tuple[str, ...], environ: Mapping[str, str]) -> str:
    try:
        result = subprocess.run(
            [*command, *arguments], capture_output=True, text=True, errors="replace", env=compiler_environment(environ),
            stdin=subprocess.DEVNULL, check=False,
        )  # fmt: skip
    except OSError as error:
        raise _refusal(command, environ, f"cannot be run ({error.strerror or error})") from error
    if result.returncode != 0:
        first = next(iter(result.stderr.splitlines()), f"status {result.returncode}")
        raise _refusal(command, environ, f"does not do its work ({first})")
    return result.stdout


def _refusal(command: tuple[str, ...], environ: Mapping[str, str], problem: str) -> KernelError:
    told = compiler_of_user(environ)
    return KernelError(f"{told or f'the C++ compiler {command[0]}'} {problem}", remedy=CORRECT if told else INSTALL)


def compiler_of_user(environ: Mapping[str, str]) -> str | None:
    """$CXX and its value, to be named where it is at fault; None where it is not set."""
    return f"CXX={environ['CXX']}" if environ.get("CXX", "").strip() else None


def compiler_environment(environ: Mapping[str, str]) -> dict[str, str]:
    """The environment that a compiler runs in: it speaks English, so that its errors are recognised."""
    return {**environ, "LC_ALL": "C"}


def _link_flags(libraries: Path, openmp: Path | None) -> tuple[str, ...]:
    """Against torch's own libraries, and the very file of the OpenMP runtime that torch uses.

    The library then asks for that runtime by the name under which torch has loaded it; `-fopenmp` would name
    the compiler's. Nothing may stay undefined: better an error here than a crash in the first step.
    """
    runtime = ("-fopenmp",) if openmp is None else (str(openmp), "-lpthread")
    return ("-Wl,-z,defs", f"-L{libraries}", f"-Wl,-rpath-link,{libraries}", "-ltorch_cpu", "-lc10", *runtime)
