"""Checks of what is installed: versions, torch, kernels, allocators."""

from __future__ import annotations

from collections.abc import Mapping

from fleetune.doctor.examine import Examination, Scope
from fleetune.doctor.facts import Facts, Software
from fleetune.doctor.finding import Finding, Verdict, about, failure, ok, warning

_MUST_AGREE = ("fleetune", "torch", "transformers", "tokenizers")
"""Ranks with other versions of these are refused, or would compute something else."""
_SHOULD_AGREE = ("numpy", "safetensors", "pyarrow")
_SHOWN = ("fleetune", "torch", "transformers", "numpy")


def versions(examination: Examination) -> list[Finding]:
    """Whether all hosts have the head's versions."""
    installed = {view.name: view.facts.software for view in examination.views if view.facts is not None}
    if not installed:
        return []
    head = next(iter(installed))
    targets = {view.name: view.host.target for view in examination.views}
    found = [
        about(verdict, "versions", name)
        for name, software in installed.items()
        if (verdict := _compared(software, installed[head], targets[name], head)) is not None
    ]
    if not found:
        known = installed[head].versions
        told = ", ".join(f"{name} {known.get(name, 'missing')}" for name in ("python", *_SHOWN))
        found.append(about(ok(told), "versions", *installed))
    return found


def _compared(software: Software, head: Software, target: str, head_name: str) -> Verdict | None:
    mine, theirs = software.versions, head.versions
    fix = f"fleetune setup --hosts {target}"
    must = _differences(mine, theirs, _MUST_AGREE)
    if _minor(mine["python"]) != _minor(theirs["python"]):
        must = [f"Python {mine['python']}, not {theirs['python']}", *must]
    if must:
        return failure(f"other versions than on {head_name}: {'; '.join(must)}", fix)
    if software.sources != head.sources:
        return failure(f"fleetune {mine['fleetune']}, but its files differ from those on {head_name}", fix)
    should = _differences(mine, theirs, ("python", *_SHOULD_AGREE))
    return warning(f"other versions than on {head_name}: {'; '.join(should)}", fix) if should else None


def _differences(mine: Mapping[str, str], theirs: Mapping[str, str], names: tuple[str, ...]) -> list[str]:
    return [
        f"{name} {mine.get(name, 'missing')}, not {theirs.get(name, 'missing')}"
        for name in names
        if mine.get(name) != theirs.get(name)
    ]


def _minor(version: str) -> str:
    return ".".join(version.split(".")[:2])


def requirements(facts: Facts, scope: Scope) -> Verdict | None:
    """Whether what fleetune needs is there, in versions that it works with."""
    missing = [f"{name} is missing" for name, version in facts.software.versions.items() if version == "missing"]
    problems = [*missing, *facts.software.unmet]
    fix = f"{facts.software.executable} -m pip install --upgrade fleetune"
    return failure("; ".join(problems), fix) if problems else ok("all met")


def retired_extensions(facts: Facts, scope: Scope) -> Verdict | None:
    """Archived extensions work with the one torch that they were built for, and break scripts that import them."""
    if not facts.software.retired:
        return None
    names = [told.split()[0] for told in facts.software.retired]
    return warning(
        f"{', '.join(facts.software.retired)} with torch {facts.software.versions.get('torch')}: archived extensions, "
        "built for one version of torch each; fleetune does not use them, a script that imports them fails",
        f"{facts.software.executable} -m pip uninstall {' '.join(names)}",
    )


def torch_imports(facts: Facts, scope: Scope) -> Verdict | None:
    """Whether torch is whole."""
    if facts.kernels.waited_s is not None:
        reason = (
            f"importing it takes more than {facts.kernels.waited_s:.0f} s: is the environment on a slow network folder?"
        )
        return warning(reason, "give --timeout_s more, or copy the environment to a local disk")
    if facts.kernels.problem is not None:
        fix = f"{facts.software.executable} -m pip install --force-reinstall torch"
        return failure(f"it cannot be imported: {facts.kernels.problem}", fix)
    return ok(f"{facts.kernels.torch} can be imported")


def kernels(facts: Facts, scope: Scope) -> Verdict | None:
    """Whether the compiled kernels are there, or can be made."""
    told = facts.kernels
    if told.torch is None:
        return None
    if told.wish == "reference":
        return warning("FLEETUNE_KERNELS=reference asks for plain PyTorch, which is slower", "unset FLEETUNE_KERNELS")
    if told.built is not None:
        return ok("built")
    if told.compiler is not None:
        return ok(f"not built yet; {told.compiler} builds them when the first run starts")
    return warning(
        f"neither built nor to be built: {told.no_compiler}; they run in plain PyTorch, which is slower",
        "sudo apt-get install g++ && fleetune build-kernels",
    )


def allocators(facts: Facts, scope: Scope) -> Verdict | None:
    """Which allocators could be tried, and whether one is in use."""
    if facts.preloaded is not None and facts.preloaded not in facts.allocators:
        return warning(
            f"LD_PRELOAD names {facts.preloaded}, which is not installed: the loader complains, and goes on without",
            f"sudo apt-get install {_PACKAGES.get(facts.preloaded, facts.preloaded)}, or unset LD_PRELOAD",
        )
    if facts.preloaded is not None:
        return ok(f"{facts.preloaded}, by LD_PRELOAD")
    return ok(f"the C library's; {' and '.join(facts.allocators) or 'no other'} found")


_PACKAGES = {"tcmalloc": "libtcmalloc-minimal4", "jemalloc": "libjemalloc2"}
