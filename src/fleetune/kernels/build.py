"""Compile the kernels, and other libraries of ours, for this machine, once, and find them again.

A build is a folder of the cache, named by all that decides its content. Processes of a host that want the same one at
the same time build it once: the first takes a lock, the others wait for it. The system gives the lock back when its
holder dies, and a folder gets its name when all of it is there, so a killed process leaves nothing that is in the way.
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import os
import shutil
import stat
import tempfile
import time
import uuid
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, replace
from pathlib import Path

from fleetune.errors import KernelError, OutputError
from fleetune.files import remove, sync, write_whole
from fleetune.kernels.compilers import cleaning_up_on_sigterm, run_all
from fleetune.kernels.facts import FACTS_FILE, LIBRARY, MEASURED, BuildFacts, read_facts, sources_digest, write_facts
from fleetune.kernels.toolchain import Toolchain, compiler_of_user, find_toolchain

SOURCES = Path(__file__).parent / "csrc"
PARTIAL_SUFFIX = ".partial"
# Nothing that is alive builds for so long.
STALE_PARTIAL_S = 3600.0
UNUSED_S = 90 * 24 * 3600.0
_SUFFIXES = (".cpp", ".h")
_ERRORS_SHOWN = 5

# What a compiler says when the fault is the machine's: no reason not to try again.
_NO_ROOM = (os.strerror(errno.ENOSPC), os.strerror(errno.EDQUOT))
_PASSING = (*_NO_ROOM, "Killed", "ended by signal", os.strerror(errno.ENOMEM), "out of memory", "memory exhausted")

Say = Callable[[str], None]
"""Called with a line for people: what takes long, and how long it took."""


@dataclass(frozen=True, kw_only=True)
class Recipe:
    """What kind of library is built, beyond its sources."""

    name: str
    """In messages; a plural."""
    folder: str
    """Of the cache."""
    usual_time: str
    command: str = "fleetune build-kernels"
    """Which builds it ahead, and again."""
    compile_flags: tuple[str, ...] = ()
    link_flags: tuple[str, ...] = ()
    """In addition to those of every library, and after them."""

    def toolchain(self, environ: Mapping[str, str]) -> Toolchain:
        """The compiler of this machine, with these flags.

        Raises:
            KernelError: There is none, or it does not work.
        """
        found = find_toolchain(environ)
        return replace(
            found, compile_flags=(*found.compile_flags, *self.compile_flags),
            link_flags=(*found.link_flags, *self.link_flags),
        )  # fmt: skip


KERNELS = Recipe(name="the kernels", folder="kernels", usual_time="about half a minute")


@dataclass(frozen=True, kw_only=True)
class Build:
    """A library that is there."""

    library: Path
    facts: BuildFacts
    seconds: float | None
    """Time it took; None: it was there."""


def build_kernels(
    sources: Path,
    cache_dir: Path,
    *,
    say: Say,
    environ: Mapping[str, str],
    retry: bool = False,
    force: bool = False,
) -> Build:
    """The library of the kernels; see `build_library`.

    Args:
        sources: Folder of the C++ files.
        cache_dir: See `build_library`.
        say: See `build_library`.
        environ: See `build_library`.
        retry: See `build_library`.
        force: See `build_library`.

    Raises:
        KernelError: See `build_library`; or the sources cannot be read.
    """
    return build_library(KERNELS, read_sources(sources), cache_dir, say=say, environ=environ, retry=retry, force=force)


def build_library(
    recipe: Recipe,
    content: Mapping[str, bytes],
    cache_dir: Path,
    *,
    say: Say,
    environ: Mapping[str, str],
    retry: bool = False,
    force: bool = False,
) -> Build:
    """The library of these sources, from the cache if it is there. Without a compiler, one that was built ahead.

    Args:
        recipe: What kind of library it is.
        content: The sources: path -> content, headers too.
        cache_dir: Builds go into the recipe's folder there, or where that cannot be written into one of the user's own
            among the temporary files.
        say: Told before and after compiling, and when another process is waited for.
        environ: Of the compiler; `CXX` names it.
        retry: Compile even if that failed before.
        force: Compile even if the library is there.

    Raises:
        KernelError: There is no compiler and no library, it refuses the sources, or no folder can be written.
    """
    cache = cache_dir / recipe.folder
    places = [place for place in (cache, _temporary_place(recipe)) if place is not None]
    try:
        toolchain = recipe.toolchain(environ)
    except KernelError as error:
        if force or (ahead := _built_ahead(places, sources_digest(content))) is None:
            raise
        if compiler_of_user(environ):
            say(f"{error.reason}: {recipe.name} are those that {ahead.facts.compiler} made before")
        return ahead
    job = _Job(
        recipe=recipe, sources=content, toolchain=toolchain, key=toolchain.key(content), say=say, environ=environ,
        retry=retry, force=force,
    )  # fmt: skip
    if not force:
        for place in places:
            if found := _found(place / job.key):
                return found
    try:
        return job.build_in(cache)
    except OSError as error:
        return _build_elsewhere(job, cache, error.strerror or str(error))


def find_build(sources: Path, cache_dir: Path, toolchain: Toolchain | None) -> Build | None:
    """The library of these sources, if a run on this host would find it; nothing is compiled.

    Args:
        sources: Folder of the C++ files.
        cache_dir: See `build_kernels`.
        toolchain: Of this host; None without one, for what was built ahead.

    Raises:
        KernelError: The sources cannot be read.
    """
    content = read_sources(sources)
    places = [place for place in (cache_dir / KERNELS.folder, _temporary_place(KERNELS)) if place is not None]
    if toolchain is None:
        return _built_ahead(places, sources_digest(content))
    found = (_found(place / toolchain.key(content)) for place in places)
    return next((build for build in found if build is not None), None)


def _built_ahead(places: list[Path], sources: str) -> Build | None:
    """The newest library that fits this host, found without asking a compiler."""
    folders = [file.parent for place in places for file in place.glob(f"*/{FACTS_FILE}")]
    fitting = [folder for folder in folders if (facts := read_facts(folder)) is not None and facts.fits(sources)]
    newest = max(fitting, key=lambda folder: (folder / FACTS_FILE).stat().st_mtime, default=None)
    return None if newest is None else _found(newest)


def _found(folder: Path) -> Build | None:
    """The build in a folder, if it is there as it was made."""
    facts = read_facts(folder)
    if facts is None:
        return None
    with contextlib.suppress(OSError):  # a cache that may only be read
        os.utime(folder)  # see `_remove_unused`
    return Build(library=folder / LIBRARY, facts=facts, seconds=None)


def _build_elsewhere(job: _Job, cache: Path, problem: str) -> Build:
    """Build in a temporary folder: better than once a start and rank, or not at all."""
    place = _temporary_place(job.recipe, create=True)
    if place is not None:
        job.say(f"{cache} cannot be written ({problem}): {job.recipe.name} go into {place}")
        with contextlib.suppress(OSError):
            return job.build_in(place)
    raise KernelError(
        f"{cache} cannot be written ({problem}), nor can a temporary folder",
        remedy="make room, or name another cache with XDG_CACHE_HOME",
    )


def read_sources(folder: Path) -> dict[str, bytes]:
    """The C++ files of a folder by their paths in it, headers too; read once, so that what is named is what is built.

    Raises:
        KernelError: There is none, or one cannot be read.
    """
    files = sorted(
        file for file in folder.rglob("*") if file.suffix in _SUFFIXES and not file.name.startswith(".")
    )  # fmt: skip
    if not any(file.suffix == ".cpp" for file in files):
        raise KernelError(f"the sources of the kernels are missing from {folder}", remedy="install fleetune again")
    try:
        return {file.relative_to(folder).as_posix(): file.read_bytes() for file in files}
    except OSError as error:
        raise KernelError(
            f"the sources of the kernels in {folder} cannot be read ({error})", remedy="install fleetune again"
        ) from error


def _temporary_place(recipe: Recipe, *, create: bool = False) -> Path | None:
    """A folder of this user's among the temporary files; None where another user could have put something into it."""
    try:
        folder = Path(tempfile.gettempdir()) / f"fleetune-{os.getuid()}"
        if create:
            folder.mkdir(mode=0o700, exist_ok=True)
        facts = folder.lstat()
    except OSError:
        return None
    is_own = stat.S_ISDIR(facts.st_mode) and facts.st_uid == os.getuid() and not facts.st_mode & 0o022
    return folder / recipe.folder if is_own else None


@dataclass(frozen=True, kw_only=True)
class _Job:
    """One build, wherever it is put."""

    recipe: Recipe
    sources: Mapping[str, bytes]
    toolchain: Toolchain
    key: str
    say: Say
    environ: Mapping[str, str]
    retry: bool
    force: bool

    def build_in(self, place: Path) -> Build:
        """Build in a folder, unless another process does so first.

        Raises:
            KernelError: The compiler refuses the sources, or did so before.
            OSError: The folder cannot be written.
        """
        place.mkdir(parents=True, exist_ok=True)
        with _locked(place / f"{self.key}.lock", self.recipe, self.say) as is_alone, cleaning_up_on_sigterm():
            if not self.force and (found := _found(place / self.key)):
                return found
            log = place / f"{self.key}.log"
            if not (self.retry or self.force) and (told := _remembered(log)):
                raise self._compile_error(told, log)
            _remove_dead_partials(place, self.key if is_alone else None)
            partial = place / f"{self.key}.{uuid.uuid4().hex}{PARTIAL_SUFFIX}"
            try:
                return self._build(partial, place / self.key, log)
            finally:
                remove(partial)

    def _build(self, partial: Path, folder: Path, log: Path) -> Build:
        if folder.exists() and not self.force:
            self.say(f"{self.recipe.name} in {folder} are damaged, they are built again")
        self.say(f"compiling {self.recipe.name} for this machine, once: {self.recipe.usual_time}")
        began = time.perf_counter()
        work = partial / "work"
        for name, data in self.sources.items():
            (work / name).parent.mkdir(parents=True, exist_ok=True)
            (work / name).write_bytes(data)
        self._compile(work, log)
        remove(work)
        sync(partial / LIBRARY)
        facts = write_facts(
            partial, sources=sources_digest(self.sources), compiler=self.toolchain.name,
            flags=self.toolchain.short_flags,
        )  # fmt: skip
        for kept in folder.glob(MEASURED):
            shutil.copy2(kept, partial)
        _publish(partial, folder)
        remove(log)
        _remove_unused(folder.parent)
        seconds = time.perf_counter() - began
        self.say(f"compiled {self.recipe.name} in {seconds:.0f} s")
        return Build(library=folder / LIBRARY, facts=facts, seconds=seconds)

    def _compile(self, work: Path, log: Path) -> None:
        """Make the library in the folder above `work`."""
        names = [name for name in self.sources if name.endswith(".cpp")]
        commands = [self.toolchain.compiling(name, f"{name}.o") for name in names]
        linking = self.toolchain.linking([f"{name}.o" for name in names], f"../{LIBRARY}")
        failed = run_all(commands, work, self.environ) or run_all([linking], work, self.environ)
        if failed:
            raise self._failure("\n".join(failed), log)

    def _failure(self, output: str, log: Path) -> Exception:
        """Keep what the compiler said in a file, which is also what later starts remember the failure by."""
        if any(words in output for words in _NO_ROOM):
            return OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), str(log.parent))
        text = f"{self.toolchain.version}\n{output}"
        with contextlib.suppress(OutputError):
            write_whole(log, lambda unfinished: _write(unfinished, text))
        return self._compile_error(text, log)

    def _compile_error(self, output: str, log: Path) -> KernelError:
        told = compiler_of_user(self.environ)
        return KernelError(
            f"{self.recipe.name} could not be compiled" + (f" by {told}" if told else ""),
            remedy=f"see {log}; once that is mended: {self.recipe.command}",
            details=error_lines(output),
        )


def _write(file: Path, text: str) -> None:
    file.write_text(text, encoding="utf-8")


def _remembered(log: Path) -> str | None:
    """What the compiler said when it refused these very sources, if it did."""
    try:
        text = log.read_text(encoding="utf-8", errors="replace")
    except OSError:
        return None
    return None if any(words in text for words in _PASSING) else text


def error_lines(output: str) -> list[str]:
    """The first lines of a compiler's output that tell an error, or else its last ones."""
    lines = [line for line in output.splitlines() if line.strip()]
    told = [line for line in lines if "error:" in line or "undefined reference" in line or "undefined symbol" in line]
    return told[:_ERRORS_SHOWN] or lines[-_ERRORS_SHOWN:]


@contextlib.contextmanager
def _locked(path: Path, recipe: Recipe, say: Say) -> Iterator[bool]:
    """Be the only process that builds this. Gives false on a file system without locks: there the last library stays.

    The file stays, since removing it would part those who wait from new ones.
    """
    is_alone = True
    with path.open("a") as file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            passed = f"{time.time() - path.stat().st_mtime:.0f} s"
            say(
                f"another process has been compiling {recipe.name} for {passed}, of {recipe.usual_time}: waiting for it"
            )
            fcntl.flock(file, fcntl.LOCK_EX)
        except OSError:
            is_alone = False
        os.utime(path)  # for those who wait: when this build began
        yield is_alone


def _publish(partial: Path, folder: Path) -> None:
    """Give a finished build its name; one that is there is as good or damaged, and whoever has it loaded keeps it."""
    while True:
        try:
            partial.rename(folder)
        except OSError as error:
            if error.errno not in (errno.ENOTEMPTY, errno.EEXIST):
                raise
            _remove_build(folder)
        else:
            return


def _remove_build(folder: Path) -> None:
    """Remove a build that others may be opening: under its name it is there as a whole, or not at all."""
    doomed = folder.with_name(f"{folder.name}.{uuid.uuid4().hex}{PARTIAL_SUFFIX}")
    with contextlib.suppress(FileNotFoundError):
        folder.rename(doomed)
        remove(doomed)


def _remove_unused(place: Path) -> None:
    """Remove builds that nobody has used for long, as those of earlier versions of the sources."""
    for library in place.glob(f"*/{LIBRARY}"):
        with contextlib.suppress(OSError):
            if time.time() - library.parent.stat().st_mtime > UNUSED_S:
                _remove_build(library.parent)


def _remove_dead_partials(place: Path, locked_key: str | None) -> None:
    """Remove what killed builds left: those of the key that we have the lock of, and others when they are old."""
    for partial in place.glob(f"*{PARTIAL_SUFFIX}"):
        with contextlib.suppress(OSError):
            is_old = time.time() - partial.stat().st_mtime > STALE_PARTIAL_S
            if is_old or partial.name.partition(".")[0] == locked_key:
                remove(partial)
