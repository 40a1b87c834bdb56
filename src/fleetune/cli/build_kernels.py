"""`fleetune build-kernels`: compile ahead what a run would compile at its start."""

from __future__ import annotations

import os
from collections.abc import Sequence

from fleetune.cli.arguments import make_parser, parse, tell_notices

DESCRIPTION = """Compile the kernels for this machine, which the first run would do otherwise, and check that they
load. They lie where every run looks for them, in fleetune's folder of the user's cache. Environment variables: CXX
names another compiler, XDG_CACHE_HOME another cache."""


def run(words: Sequence[str]) -> int:
    """Build the kernels, load them, and say what was made."""
    parser = make_parser("build-kernels", DESCRIPTION, frozenset())
    parser.add_argument("--force", action="store_true", help="compile even if that was done already")
    parser.add_argument(
        "--backends", action="store_true",
        help="compile the backends of torch.distributed, too, whose libraries are installed: a minute or two more",
    )  # fmt: skip
    parsed = parse(parser, words, ("force", "backends"))
    tell_notices(parsed)

    from fleetune.kernels import build, library

    if library.kernels_wished(os.environ) == "reference":
        print(f"{library.VARIABLE}=reference asks for plain PyTorch: nothing is compiled", flush=True)
        return 0
    made = build.build_kernels(
        build.SOURCES,
        library.cache_folder(),
        say=lambda line: print(line, flush=True),
        environ=os.environ,
        retry=True,
        force=parsed.extra.get("force", False),
    )
    openmp = library.load_library(made.library)
    told = {
        "compiler": made.facts.compiler,
        "flags": made.facts.flags,
        "time": "none, it was there (--force compiles again)" if made.seconds is None else f"{made.seconds:.1f} s",
        "library": f"{made.library} ({made.library.stat().st_size / 1e6:.2f} MB)",
        "OpenMP": "not used" if openmp is None else f"{openmp}, as torch",
    }
    print("\n".join(f"{name:<9} {text}" for name, text in told.items()))
    if parsed.extra.get("backends", False):
        _build_backends(force=parsed.extra.get("force", False))
    return 0


def _build_backends(*, force: bool) -> None:
    """Those whose libraries are here; what the others need is said."""
    from fleetune.comm.backends.native import build_native
    from fleetune.comm.backends.parts import native_parts

    for name, part in native_parts().items():
        if isinstance(part, str):
            print(f"{name:<9} not built: {part}", flush=True)
        else:
            made = build_native(part, lambda line: print(line, flush=True), retry=True, force=force)
            print(f"{name:<9} {made.library} ({made.library.stat().st_size / 1e6:.2f} MB)", flush=True)
