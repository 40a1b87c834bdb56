"""The import law: what plans, launches, checks and reports needs no torch, and dependencies point one way."""

from __future__ import annotations

import ast
import functools
import graphlib
import json
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.conftest import REPOSITORY, environment

SOURCE = REPOSITORY / "src"
HEAVY = ("torch", "transformers", "tokenizers", "safetensors", "numpy", "scipy", "sklearn", "pyarrow", "datasets")

LIGHT = (
    *("config", "errors", "files", "cluster", "hardware", "cost", "report", "hub", "doctor", "bench", "cli", "timing"),
    "trackers",
)
"""Rooms of the law; those that do not exist yet are part of it from their first module on."""
MAY_BE_HEAVY = ("fleetune.hardware.probes",)

BELOW: dict[str, set[str]] = {
    "errors": set(),
    "files": {"errors"},
    "config": {"errors"},
    "hardware": {"errors"},
    "timing": set(),
    "trackers": set(),
    "report": {"errors", "files", "timing"},
    "cluster": {"errors", "config", "hardware"},
    "doctor": {"errors", "files", "config", "hardware", "cluster"},
    "comm": {"errors", "files", "config", "hardware", "cluster", "kernels", "timing"},
    "data": {"errors", "files", "config", "hardware", "comm", "report"},
    "kernels": {"errors", "files", "config", "hardware", "timing"},
    "model": {"errors", "files", "config", "hardware", "comm", "data", "kernels"},
    "evaluate": {"errors", "files", "config", "hardware", "report", "cluster", "comm", "data", "kernels", "model"},
    "export": {
        *("errors", "files", "config", "hardware", "report", "comm", "data", "kernels", "model", "evaluate"),
    },
    "hub": {"errors", "files", "config", "hardware", "report"},
    "train": {
        *("errors", "files", "config", "hardware", "report", "cluster", "comm", "data", "kernels", "model"),
        *("evaluate", "hub", "timing", "trackers"),
    },
    "bench": {"errors", "files", "config", "hardware", "report", "cluster"},
    "cli": {"errors", "files", "config", "hardware", "report", "cluster", "data", "doctor", "bench", "timing"},
    "__main__": {"cli"},
    "__init__": set(),
}
"""Room -> rooms whose modules it may import at the top of a file. The programs of `cli` import the heavy rooms when
they run, inside functions."""


def module_name(path: Path) -> str:
    parts = path.relative_to(SOURCE).with_suffix("").parts
    return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)


MODULES = {module_name(path): path for path in sorted((SOURCE / "fleetune").rglob("*.py"))}


def room_of(module: str) -> str:
    """The package, or top-level module, of `fleetune` that a module is in."""
    return module.split(".")[1] if "." in module else "__init__"


def imports(tree: ast.AST, *, everywhere: bool = False) -> Iterator[str]:
    """Modules that are imported when a file is; with `everywhere`, also those in functions and for types only."""
    for node in ast.iter_child_nodes(tree):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, "imports are absolute"
            assert node.module is not None
            names = [f"{node.module}.{alias.name}" for alias in node.names]
            yield from (name if name in MODULES else node.module for name in names)
        elif everywhere or not _is_put_off(node):
            yield from imports(node, everywhere=everywhere)


def _is_put_off(node: ast.AST) -> bool:
    if isinstance(node, ast.If):
        return "TYPE_CHECKING" in ast.unparse(node.test)
    return isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef, ast.Lambda))


def package_imports(module: str, *, everywhere: bool = False) -> set[str]:
    """Modules of fleetune that a module imports."""
    tree = ast.parse(MODULES[module].read_text(encoding="utf-8"))
    return {name for name in imports(tree, everywhere=everywhere) if name.split(".")[0] == "fleetune"}


@functools.cache
def edges() -> dict[str, dict[str, list[str]]]:
    """Room -> imported room -> the imports, told one by one."""
    found: dict[str, dict[str, list[str]]] = {}
    for module in MODULES:
        for target in package_imports(module):
            if room_of(module) != room_of(target):
                found.setdefault(room_of(module), {}).setdefault(room_of(target), []).append(f"{module} -> {target}")
    return found


def test_light_rooms_import_nothing_heavy() -> None:
    """One process imports all of them, and looks after each."""
    light = [m for m in MODULES if room_of(m) in (*LIGHT, "__init__") and not m.startswith(MAY_BE_HEAVY)]
    assert {room_of(m) for m in light} >= {"config", "errors", "files", "cluster", "hardware", "report", "cli"}
    script = (
        "import importlib, json, sys\n"
        "heavy, found = set(sys.argv[1].split(',')), {}\n"
        "for module in sys.argv[2:]:\n"
        "    importlib.import_module(module)\n"
        "    found[module] = sorted(heavy & set(sys.modules))\n"
        "print(json.dumps(found))"
    )
    result = subprocess.run(
        [sys.executable, "-c", script, ",".join(HEAVY), *light],
        capture_output=True, text=True, check=True, timeout=60, env=environment(),
    )  # fmt: skip
    found: dict[str, list[str]] = json.loads(result.stdout)
    assert len(found) == len(light)
    guilty = next((f"{module} imports {', '.join(heavy)}" for module, heavy in found.items() if heavy), None)
    assert guilty is None


def test_importing_does_no_work() -> None:
    """No output, no change of the environment, no logging set up."""
    script = (
        "import logging, os\n"
        "before = dict(os.environ), list(logging.root.handlers)\n"
        "import fleetune.cli.main, fleetune.cli.train, fleetune.cli.evaluate, fleetune.cli.predict\n"
        "assert before == (dict(os.environ), logging.root.handlers)\n"
    )
    result = subprocess.run(
        [sys.executable, "-W", "error", "-c", script], capture_output=True, text=True, timeout=60, env=environment()
    )  # fmt: skip
    assert (result.returncode, result.stdout, result.stderr) == (0, "", "")


def test_nothing_imports_the_command_line() -> None:
    for module in MODULES:
        if room_of(module) not in ("cli", "__main__"):
            used = [name for name in package_imports(module, everywhere=True) if room_of(name) == "cli"]
            assert not used, f"{module} imports {used}"


def test_report_sees_only_records() -> None:
    """Of fleetune `errors`, `files` and `timing`; else the standard library and rich."""
    for module in (m for m in MODULES if room_of(m) == "report"):
        names = set(imports(ast.parse(MODULES[module].read_text(encoding="utf-8")), everywhere=True))
        for name in names:
            if name.split(".")[0] == "fleetune":
                assert room_of(name) in ("errors", "files", "report", "timing"), f"{module} imports {name}"
            else:
                assert name.split(".")[0] in {*sys.stdlib_module_names, "rich"}, f"{module} imports {name}"


def test_no_room_imports_in_a_circle() -> None:
    graph = {room: set(targets) for room, targets in edges().items()}
    try:
        list(graphlib.TopologicalSorter(graph).static_order())
    except graphlib.CycleError as error:
        pytest.fail(f"rooms import each other: {' -> '.join(error.args[1])}")


def test_no_module_imports_in_a_circle() -> None:
    graph = {module: package_imports(module) - {module} for module in MODULES}
    try:
        list(graphlib.TopologicalSorter(graph).static_order())
    except graphlib.CycleError as error:
        pytest.fail(f"modules import each other: {' -> '.join(error.args[1])}")


def test_the_table_of_directions_is_itself_without_circles() -> None:
    list(graphlib.TopologicalSorter(BELOW).static_order())
    assert {room_of(m) for m in MODULES} <= set(BELOW), "a new room needs a row"


@pytest.mark.parametrize("room", sorted(BELOW))
def test_rooms_import_only_what_is_below_them(room: str) -> None:
    found = edges().get(room, {})
    wrong = [told for target, lines in found.items() if target not in BELOW[room] for told in lines]
    assert not wrong, "; ".join(wrong)


def test_nothing_is_unpickled() -> None:
    """Checkpoints, caches and messages between ranks are safetensors, plain arrays and JSON."""
    unsafe = {"pickle", "cloudpickle", "dill", "joblib", "shelve", "marshal"}
    calls = {"torch.load", "np.load", "numpy.load", "broadcast_object_list", "all_gather_object", "gather_object"}
    found = []
    for path in MODULES.values():
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            names = [a.name for a in node.names] if isinstance(node, (ast.Import, ast.ImportFrom)) else []
            called = ast.unparse(node.func) if isinstance(node, ast.Call) else ""
            if unsafe & set(names) or called in calls or called.rpartition(".")[2] in calls:
                found.append(f"{path}:{node.lineno}")
    assert found == []
