from __future__ import annotations

import ctypes
import os
import re
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from fleetune.errors import KernelError
from fleetune.kernels.build import SOURCES, build_kernels, error_lines, read_sources
from fleetune.kernels.facts import FACTS_FILE, LIBRARY
from tests.conftest import environment
from tests.kernels.conftest import CountingCompiler

Compiler = Callable[..., CountingCompiler]

BUILD = """
import os, sys
from pathlib import Path
from fleetune.kernels.build import build_kernels
made = build_kernels(Path(sys.argv[1]), Path(sys.argv[2]), say=lambda line: print(line, flush=True), environ=os.environ)
print(made.library)
"""


def start_building(sources: Path, cache: Path, compiler: CountingCompiler) -> subprocess.Popen[str]:
    return subprocess.Popen(
        [sys.executable, "-c", BUILD, str(sources), str(cache)], text=True, stdout=subprocess.PIPE,
        env=environment(**{name: compiler.environ[name] for name in ("CXX", "TMPDIR")}), start_new_session=True,
        preexec_fn=lambda: signal.signal(signal.SIGINT, signal.SIG_DFL),  # tests in the background ignore it
    )  # fmt: skip


def wait_for(condition: Callable[[], object]) -> None:
    deadline = time.monotonic() + 30
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.02)


def names(folder: Path) -> list[str]:
    return sorted(path.name for path in folder.iterdir())


def test_a_library_is_built_once_and_found_again(sources: Path, tmp_path: Path, compiler: Compiler) -> None:
    gcc, said, cache = compiler(), list[str](), tmp_path / "cache"
    made = build_kernels(sources, cache, say=said.append, environ=gcc.environ)
    assert made.library.parent.parent == cache / "kernels"
    assert ctypes.CDLL(str(made.library)).count_to(21) == 42
    assert ctypes.CDLL(str(made.library)).other() == 7
    assert made.seconds is not None
    assert said == [
        "compiling the kernels for this machine, once: about half a minute",
        f"compiled the kernels in {made.seconds:.0f} s",
    ]
    found = build_kernels(sources, cache, say=said.append, environ=gcc.environ)
    assert (found.library, found.seconds, len(said), gcc.compiled()) == (made.library, None, 2, 2)
    assert found.facts == made.facts
    key = made.library.parent.name
    assert names(cache / "kernels") == [key, f"{key}.lock"]
    assert names(made.library.parent) == [FACTS_FILE, LIBRARY]


def test_a_changed_header_is_another_build(sources: Path, tmp_path: Path, compiler: Compiler) -> None:
    gcc = compiler()
    first = build_kernels(sources, tmp_path, say=print, environ=gcc.environ)
    (sources / "value.h").write_text("constexpr int VALUE = 3;\n")
    second = build_kernels(sources, tmp_path, say=print, environ=gcc.environ)
    assert first.library != second.library
    assert [ctypes.CDLL(str(b.library)).count_to(2) for b in (first, second)] == [4, 6]


def test_force_builds_again_beside_a_process_that_has_it_loaded(
    sources: Path, tmp_path: Path, compiler: Compiler
) -> None:
    gcc = compiler()
    loaded = ctypes.CDLL(str(build_kernels(sources, tmp_path, say=print, environ=gcc.environ).library))
    again = build_kernels(sources, tmp_path, say=print, environ=gcc.environ, force=True)
    assert again.seconds is not None
    assert gcc.compiled() == 4
    assert loaded.count_to(2) == ctypes.CDLL(str(again.library)).count_to(2) == 4
    assert names(tmp_path / "kernels") == [again.library.parent.name, f"{again.library.parent.name}.lock"]


def test_two_processes_at_once_build_once(sources: Path, tmp_path: Path, compiler: Compiler) -> None:
    gcc = compiler(f"while ! [ -e {tmp_path}/go ]; do sleep 0.05; done")
    processes = [start_building(sources, tmp_path, gcc) for _ in range(2)]
    first_lines = {process.stdout.readline() for process in processes if process.stdout is not None}
    (tmp_path / "go").touch()
    rest = [process.communicate(timeout=50)[0].splitlines() for process in processes]
    assert {re.sub(r"for \d+ s,", "for some s,", line) for line in first_lines} == {  # the second may start late
        "compiling the kernels for this machine, once: about half a minute\n",
        "another process has been compiling the kernels for some s, of about half a minute: waiting for it\n",
    }
    assert gcc.compiled() == 2  # two sources
    assert rest[0][-1] == rest[1][-1]
    assert rest[0][-1].endswith(LIBRARY)
    assert sorted(map(len, rest)) == [1, 2]


def test_who_waits_says_so(sources: Path, tmp_path: Path, compiler: Compiler) -> None:
    """Two threads: a lock is of an open file, not of a process."""
    gcc, said = compiler(f"while ! [ -e {tmp_path}/go ]; do sleep 0.05; done"), list[str]()
    other = threading.Thread(target=build_kernels, args=(sources, tmp_path),
                             kwargs={"say": lambda line: None, "environ": gcc.environ})  # fmt: skip
    other.start()
    wait_for(gcc.compiled)
    (lock,) = (tmp_path / "kernels").glob("*.lock")
    os.utime(lock, (began := time.time() - 12.2, began))

    def say(line: str) -> None:
        said.append(line)
        (tmp_path / "go").touch()

    found = build_kernels(sources, tmp_path, say=say, environ=gcc.environ)
    other.join()
    assert said == ["another process has been compiling the kernels for 12 s, of about half a minute: waiting for it"]
    assert found.seconds is None


def test_a_killed_builder_is_in_nobodys_way(sources: Path, tmp_path: Path, compiler: Compiler) -> None:
    gcc = compiler("sleep 60")
    killed = start_building(sources, tmp_path, gcc)
    wait_for(gcc.compiled)
    os.killpg(killed.pid, signal.SIGKILL)
    killed.communicate()
    (left,) = partials(tmp_path)
    (others := left.with_name(f"another-key.1{left.suffix}")).mkdir()
    said: list[str] = []
    made = build_kernels(sources, tmp_path, say=said.append, environ=compiler().environ)
    assert made.seconds is not None
    assert "waiting" not in " ".join(said)
    assert not left.exists()  # who has the lock is the only one to build this
    assert others.exists()  # its builder might be alive
    os.utime(others, (0, 0))
    build_kernels(sources, tmp_path, say=print, environ=compiler().environ, force=True)
    assert not others.exists()


def partials(cache: Path) -> list[Path]:
    return list((cache / "kernels").glob("*.partial"))


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_a_builder_that_is_told_to_stop_leaves_nothing(
    number: signal.Signals, sources: Path, tmp_path: Path, compiler: Compiler
) -> None:
    """The compiler has started another program, as g++ does, and only the builder gets the signal."""
    gcc = compiler(f"echo $$ >> {tmp_path}/pids; sleep 60 & echo $! >> {tmp_path}/pids; wait")
    told = start_building(sources, tmp_path, gcc)
    wait_for(lambda: gcc.compiled() and partials(tmp_path) and len(pids_in(tmp_path)) >= 2)
    told.send_signal(number)
    told.communicate(timeout=30)
    assert told.returncode == (128 + number if number == signal.SIGTERM else -number)
    assert partials(tmp_path) == []
    wait_for(lambda: not any(Path(f"/proc/{pid}").exists() for pid in pids_in(tmp_path)))


def pids_in(folder: Path) -> list[str]:
    file = folder / "pids"
    return file.read_text().split() if file.exists() else []


def test_a_failed_compile_is_told_and_remembered(sources: Path, tmp_path: Path, compiler: Compiler) -> None:
    (sources / "other.cpp").write_text("int other() { return nothing; }\n")
    gcc, said = compiler(), list[str]()
    with pytest.raises(KernelError) as caught:
        build_kernels(sources, tmp_path, say=said.append, environ=gcc.environ)
    (log,) = (tmp_path / "kernels").glob("*.log")
    assert caught.value.reason == f"the kernels could not be compiled by CXX={gcc.environ['CXX']}"
    assert caught.value.remedy == f"see {log}; once that is mended: fleetune build-kernels"
    (told,) = caught.value.details
    assert told.startswith("other.cpp:1:")
    assert "'nothing' was not declared" in told
    assert told in log.read_text()
    assert [path.suffix for path in sorted((tmp_path / "kernels").iterdir())] == [".lock", ".log"]
    said.clear()
    with pytest.raises(KernelError) as again:
        build_kernels(sources, tmp_path, say=said.append, environ=gcc.environ)
    assert str(again.value) == str(caught.value)
    assert (gcc.compiled(), said) == (2, [])


def test_a_remembered_failure_is_tried_again_when_asked(sources: Path, tmp_path: Path, compiler: Compiler) -> None:
    """The compiler's own fault here, as of a header that was installed meanwhile."""
    gcc = compiler(f'[ -e {tmp_path}/mended ] || {{ echo "x.cpp:1: fatal error: no y.h"; exit 1; }}')
    with pytest.raises(KernelError):
        build_kernels(sources, tmp_path, say=print, environ=gcc.environ)
    (tmp_path / "mended").touch()
    with pytest.raises(KernelError):
        build_kernels(sources, tmp_path, say=print, environ=gcc.environ)
    made = build_kernels(sources, tmp_path, say=print, environ=gcc.environ, retry=True)
    assert made.library.exists()
    assert list((tmp_path / "kernels").glob("*.log")) == []


def test_what_is_left_undefined_is_an_error_of_the_build(sources: Path, tmp_path: Path, compiler: Compiler) -> None:
    (sources / "other.cpp").write_text("int missing();\nint other() { return missing(); }\n")
    with pytest.raises(KernelError) as caught:
        build_kernels(sources, tmp_path, say=print, environ=compiler().environ)
    assert any("missing()" in line for line in caught.value.details)


@pytest.mark.parametrize(
    "end", ["echo 'g++: fatal error: Killed signal terminated program cc1plus'; exit 1", "kill -9 $$"]
)
def test_a_fault_of_the_machine_is_not_remembered(
    end: str, sources: Path, tmp_path: Path, compiler: Compiler
) -> None:  # fmt: skip
    with pytest.raises(KernelError) as caught:
        build_kernels(sources, tmp_path, say=print, environ=compiler(end).environ)
    assert caught.value.details
    assert build_kernels(sources, tmp_path, say=print, environ=compiler().environ).seconds is not None


def test_a_cache_that_cannot_be_written(sources: Path, tmp_path: Path, compiler: Compiler) -> None:
    """A file in its place: root, who may run this, can write into any folder."""
    gcc, said, cache = compiler(), list[str](), tmp_path / "file"
    cache.touch()
    made = build_kernels(sources, cache, say=said.append, environ=gcc.environ)
    place = gcc.temporary_dir / f"fleetune-{os.getuid()}" / "kernels"
    assert made.library.parent.parent == place
    assert said[0] == f"{cache}/kernels cannot be written (Not a directory): the kernels go into {place}"
    said.clear()
    assert build_kernels(sources, cache, say=said.append, environ=gcc.environ).library == made.library
    assert (said, gcc.compiled()) == ([], 2)


def test_a_temporary_folder_that_others_may_write_is_not_trusted(
    sources: Path, tmp_path: Path, compiler: Compiler
) -> None:
    gcc, cache = compiler(), tmp_path / "file"
    cache.touch()
    planted = gcc.temporary_dir / f"fleetune-{os.getuid()}"
    build_kernels(sources, cache, say=print, environ=gcc.environ)
    planted.chmod(0o777)
    with pytest.raises(KernelError, match=r"cannot be written \(Not a directory\), nor can a temporary folder"):
        build_kernels(sources, cache, say=print, environ=gcc.environ)


def test_a_full_disk_is_no_fault_of_the_sources(sources: Path, tmp_path: Path, compiler: Compiler) -> None:
    """It is full in the cache only."""
    gcc = compiler(f'case "$PWD" in {tmp_path}/cache/*) echo "fatal error: No space left on device"; exit 1;; esac')
    said: list[str] = []
    made = build_kernels(sources, tmp_path / "cache", say=said.append, environ=gcc.environ)
    assert made.library.is_relative_to(gcc.temporary_dir)
    assert any("No space left on device" in line for line in said)
    assert not list((tmp_path / "cache").rglob("*.log"))


def test_a_library_that_was_lost_from_its_folder_is_built_again(
    sources: Path, tmp_path: Path, compiler: Compiler
) -> None:
    gcc = compiler()
    made = build_kernels(sources, tmp_path, say=print, environ=gcc.environ)
    made.library.rename(made.library.with_name("leftover"))
    assert build_kernels(sources, tmp_path, say=print, environ=gcc.environ).library == made.library
    assert names(made.library.parent) == [FACTS_FILE, LIBRARY]


def cut(file: Path) -> None:
    file.write_bytes(file.read_bytes()[:-1000])


def change_a_byte(file: Path) -> None:
    data = bytearray(file.read_bytes())
    data[len(data) // 2] ^= 1
    file.write_bytes(data)


@pytest.mark.parametrize(("name", "damage"), [
    (LIBRARY, cut), (LIBRARY, change_a_byte), (FACTS_FILE, Path.unlink), (FACTS_FILE, cut),
])  # fmt: skip
def test_a_damaged_build_is_noticed_and_made_again(
    name: str, damage: Callable[[Path], object], sources: Path, tmp_path: Path, compiler: Compiler
) -> None:
    gcc, said = compiler(), list[str]()
    made = build_kernels(sources, tmp_path, say=print, environ=gcc.environ)
    whole = made.library.read_bytes()
    damage(made.library.with_name(name))
    again = build_kernels(sources, tmp_path, say=said.append, environ=gcc.environ)
    assert again.library == made.library
    assert again.library.read_bytes() == whole
    assert said[0] == f"the kernels in {made.library.parent} are damaged, they are built again"


def test_a_rebuild_keeps_what_was_measured(sources: Path, tmp_path: Path, compiler: Compiler) -> None:
    gcc = compiler()
    made = build_kernels(sources, tmp_path, say=print, environ=gcc.environ)
    measured = made.library.with_name("products-2.json")
    measured.write_text("{}")
    build_kernels(sources, tmp_path, say=print, environ=gcc.environ, force=True)
    assert measured.read_text() == "{}"


def test_builds_that_nobody_uses_are_removed_after_a_build(sources: Path, tmp_path: Path, compiler: Compiler) -> None:
    gcc = compiler()

    def built(value: int) -> Path:
        (sources / "value.h").write_text(f"constexpr int VALUE = {value};\n")
        return build_kernels(sources, tmp_path, say=print, environ=gcc.environ).library.parent

    unused, used, recent = (built(value) for value in (1, 2, 3))
    day = 24 * 3600
    for folder, days in ((unused, 91), (used, 91), (recent, 89)):
        os.utime(folder, (0, time.time() - days * day))
    assert built(2) == used
    assert unused.exists()  # only a build clears up
    built(4)
    assert [folder.exists() for folder in (unused, used, recent)] == [False, True, True]
    assert partials(tmp_path) == []


def without_compiler(environ: dict[str, str], tmp_path: Path) -> dict[str, str]:
    """Nothing is on its path."""
    return {name: value for name, value in environ.items() if name != "CXX"} | {"PATH": str(tmp_path / "nowhere")}


def test_a_library_that_was_built_ahead_needs_no_compiler(sources: Path, tmp_path: Path, compiler: Compiler) -> None:
    environ, said = compiler().environ, list[str]()
    build_kernels(sources, tmp_path, say=print, environ={**environ, "CXX": f"{environ['CXX']} -O1"})
    made = build_kernels(sources, tmp_path, say=print, environ=environ)
    bare = without_compiler(environ, tmp_path)
    found = build_kernels(sources, tmp_path, say=said.append, environ=bare)
    assert (found.library, found.facts, found.seconds, said) == (made.library, made.facts, None, [])
    with pytest.raises(KernelError, match="no C\\+\\+ compiler was found"):
        build_kernels(sources, tmp_path, say=print, environ=bare, force=True)
    build_kernels(sources, tmp_path, say=said.append, environ={**bare, "CXX": "no-such-compiler"})
    assert said == [
        "CXX=no-such-compiler: there is no such compiler: the kernels are those that "
        f"{made.facts.compiler} made before"
    ]  # fmt: skip


def test_what_was_built_ahead_must_fit(
    sources: Path, tmp_path: Path, compiler: Compiler, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The same sources and torch, a CPU that can do no less, and a library that is whole."""
    environ = compiler().environ
    made = build_kernels(sources, tmp_path, say=print, environ=environ)
    bare = without_compiler(environ, tmp_path)

    def is_refused() -> bool:
        try:
            return build_kernels(sources, tmp_path, say=print, environ=bare).library != made.library
        except KernelError:
            return True

    with monkeypatch.context() as patch:
        patch.setattr("fleetune.kernels.facts.cpu_flags", lambda: (*made.facts.cpu_flags, "avx9"))
        assert not is_refused()
        patch.setattr("fleetune.kernels.facts.cpu_flags", lambda: made.facts.cpu_flags[1:])
        assert is_refused()
    with monkeypatch.context() as patch:
        patch.setattr("torch.__version__", "2.99")
        assert is_refused()
    (sources / "value.h").write_text("constexpr int VALUE = 3;\n")
    assert is_refused()
    (sources / "value.h").write_text("constexpr int VALUE = 2;\n")
    assert not is_refused()
    cut(made.library)
    assert is_refused()


def test_sources_are_read_with_headers_and_without_the_files_of_editors(sources: Path) -> None:
    (sources / "notes.txt").touch()
    (sources / ".#count.cpp").touch()
    (sources / "inner").mkdir()
    (sources / "inner" / "x.h").write_text("int x;")
    found = read_sources(sources)
    assert list(found) == ["count.cpp", "inner/x.h", "other.cpp", "value.h"]
    assert found["inner/x.h"] == b"int x;"


def test_sources_that_cannot_be_read(sources: Path) -> None:
    (sources / "lost.h").symlink_to("nowhere")
    with pytest.raises(KernelError, match=r"cannot be read \(.*lost\.h"):
        read_sources(sources)


def test_missing_sources(tmp_path: Path) -> None:
    (tmp_path / "a.h").touch()
    with pytest.raises(KernelError, match=r"sources of the kernels are missing from .* \(install fleetune again\)"):
        build_kernels(tmp_path, tmp_path / "cache", say=print, environ=os.environ)


def test_the_sources_of_the_package_are_there() -> None:
    assert SOURCES.name == "csrc"
    assert SOURCES.parent.name == "kernels"


@pytest.mark.parametrize(
    ("output", "lines"),
    [
        ("a.cpp: In function f:\na.cpp:3:1: error: bad\n  3 | f\nb.cpp:1: fatal error: worse\n",
         ["a.cpp:3:1: error: bad", "b.cpp:1: fatal error: worse"]),
        ("ld: a.o: in f:\na.cpp:(.text+0x5): undefined reference to `g()'\n",
         ["a.cpp:(.text+0x5): undefined reference to `g()'"]),
        ("\n".join(f"x.cpp:{i}: error: e" for i in range(9)), [f"x.cpp:{i}: error: e" for i in range(5)]),
        ("one\n\ntwo\n", ["one", "two"]),
        ("", []),
    ],
)  # fmt: skip
def test_error_lines(output: str, lines: list[str]) -> None:
    assert error_lines(output) == lines
