"""Build token tables once, and find them again by what they were made from."""

from __future__ import annotations

import contextlib
import errno
import hashlib
import json
import shutil
import time
import uuid
from collections.abc import Callable
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path

from fleetune.data.examples import BadRowLog, Reading, no_examples, read_examples
from fleetune.data.sources import Source
from fleetune.data.tokens.table import FORMAT_VERSION, DamagedTableError, TokenTable
from fleetune.data.tokens.tokenizing import Encoder, TextEncoder, TokenBlock, Tokenizer, tokenise
from fleetune.data.tokens.writer import TableWriter, cache_errors
from fleetune.errors import DataError

Progress = Callable[[int, int | None], None]
"""Called after each block with the rows done, and how many there are where that is known."""

PARTIAL_SUFFIX = ".partial"
# A build killed outright leaves its partial folder behind; none that is alive is this old.
STALE_PARTIAL_S = 24 * 3600.0


@dataclass(frozen=True, kw_only=True)
class TableRequest:
    """Everything that decides the content of a token table."""

    source: Source
    split: str
    reading: Reading
    tokenizer: Tokenizer
    tokenizer_identity: str
    """See `fleetune.data.tokens.tokenizing.tokenizer_identity`."""
    max_length: int
    """Tokens a sequence may have."""
    encoding: str | None
    encoder: Encoder = field(default_factory=TextEncoder)
    """How examples become tokens."""

    def key(self) -> str:
        """SHA-256, in hex, of all of it; reads the source once."""
        reading = self.reading
        parts = {
            "format_version": FORMAT_VERSION,
            "content": self.source.digest(),
            "format": type(self.source).__name__,
            "split": self.split,
            "columns": asdict(reading.columns),
            "labels": None if reading.labels is None else reading.labels.rules(),
            "label_optional": reading.label_optional,
            "texts": reading.texts.rules(),
            "on_bad_row": reading.on_bad_row,
            "max_rows": reading.max_rows,
            "tokenizer": self.tokenizer_identity,
            "max_length": self.max_length,
            "encoding": self.encoding,
            "encoder": self.encoder.rules(),
        }
        return hashlib.sha256(json.dumps(parts, sort_keys=True).encode()).hexdigest()


@dataclass(frozen=True, kw_only=True)
class CachedTable:
    """A table, and what is to be told about it."""

    table: TokenTable
    notice: str | None


def load_or_build(
    request: TableRequest, cache_dir: Path, *, overwrite: bool = False, progress: Progress | None = None
) -> CachedTable:
    """The table that was asked for, from the cache if it is there and whole.

    Any number of processes may ask for the same table at once: each builds in a folder of its own, the first to
    finish gives it its name, and the others take that one.

    Args:
        request: What to tokenise, and how.
        cache_dir: Tables go into its folder `tokens`.
        overwrite: Build anew, whatever is there.
        progress: Called while building.

    Raises:
        DataError: A row cannot be used, or none can.
        OutputError: The cache cannot be written.
    """
    folder = cache_dir / "tokens" / request.key()
    notice = None
    if folder.exists() and not overwrite:
        try:
            table = TokenTable.open(folder, verify=True)
            return CachedTable(table=replace(table, source=request.source.name), notice=None)
        except DamagedTableError as error:
            notice = f"{request.split}: the cached tokens are damaged and were made anew ({error})"
    table = _build(request, folder, replace_existing=overwrite or notice is not None, progress=progress)
    return CachedTable(table=table, notice=notice)


def _build(request: TableRequest, folder: Path, *, replace_existing: bool, progress: Progress | None) -> TokenTable:
    with cache_errors(folder.parent):
        folder.parent.mkdir(parents=True, exist_ok=True)
        _remove_stale_partials(folder.parent)
        partial = folder.with_name(f"{folder.name}.{uuid.uuid4().hex}{PARTIAL_SUFFIX}")
        partial.mkdir()
    try:
        _fill(request, partial, progress)
        with cache_errors(folder.parent):
            return _publish(partial, folder, replace_existing=replace_existing)
    finally:
        shutil.rmtree(partial, ignore_errors=True)


def _fill(request: TableRequest, partial: Path, progress: Progress | None) -> None:
    source, log = request.source, BadRowLog()
    total = source.total_rows() if progress else None
    if total is not None and request.reading.max_rows is not None:
        total = min(total, request.reading.max_rows)
    examples = read_examples(source, request.reading, log.add)
    with TableWriter(partial, request.reading.labels) as writer:
        for block in tokenise(examples, request.tokenizer, request.max_length, request.encoder):
            _take_bad_rows(block, request, log)
            writer.append(block)
            if progress:
                progress(writer.num_examples + log.total, total)
        if writer.num_examples == 0:
            raise no_examples(source.name, log)
        writer.finish(log, split=request.split, source=source.name, columns=request.reading.columns)
    if progress:
        progress(writer.num_examples + log.total, writer.num_examples + log.total)


def _take_bad_rows(block: TokenBlock, request: TableRequest, log: BadRowLog) -> None:
    """Log the rows that no tokens could be made of.

    Raises:
        DataError: There is one, with `on_bad_row="error"`.
    """
    for bad in block.bad_rows:
        if request.reading.on_bad_row == "error":
            reason = f"{bad.reason}\n  (--on_bad_row skip leaves bad rows out and lists them)"
            raise DataError(reason, file=request.source.name, row=bad.row, column=bad.column)
        log.add(bad)


def _publish(partial: Path, folder: Path, *, replace_existing: bool) -> TokenTable:
    """Give a finished table its name; if another process was first, take its table."""
    # Mapped before it gets its name: from then on another process may replace the folder, but not the mapping.
    table = TokenTable.open(partial)
    while not _renamed(partial, folder):
        if not replace_existing:
            with contextlib.suppress(DamagedTableError):
                return TokenTable.open(folder)
        _remove(folder)
    return replace(table, folder=folder)


def _renamed(partial: Path, folder: Path) -> bool:
    """Rename, unless there is a folder of that name."""
    try:
        partial.rename(folder)
    except OSError as error:
        if error.errno in (errno.ENOTEMPTY, errno.EEXIST):
            return False
        raise
    return True


def _remove(folder: Path) -> None:
    """Remove a folder that others may be opening: under its name it is there as a whole, or not at all."""
    doomed = folder.with_name(f"{folder.name}.{uuid.uuid4().hex}{PARTIAL_SUFFIX}")
    with contextlib.suppress(FileNotFoundError):
        folder.rename(doomed)
        shutil.rmtree(doomed, ignore_errors=True)


def _remove_stale_partials(tokens_dir: Path) -> None:
    for partial in tokens_dir.glob(f"*{PARTIAL_SUFFIX}"):
        with contextlib.suppress(OSError):
            if time.time() - partial.stat().st_mtime > STALE_PARTIAL_S:
                shutil.rmtree(partial, ignore_errors=True)
