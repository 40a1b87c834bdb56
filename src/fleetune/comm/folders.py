"""A folder of the first rank's host on every host of a run: found there, or sent there once.

The files go from host to host in a chain, in blocks: every host passes on what it has just received, so that the time
hardly grows with their number. On the receiving host the folder is whole or not there.
"""

from __future__ import annotations

import errno
import hashlib
import json
import os
import shutil
import socket
import uuid
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor

from fleetune.comm.ranks import Ranks
from fleetune.config.run import user_cache
from fleetune.errors import OutputError
from fleetune.files import disk_errors, remove, sync

BLOCK_BYTES = 4 << 20
PARTIAL_SUFFIX = ".partial"

Stores = Callable[["FolderContent"], Path]
"""What a folder holds -> where a host without it keeps it."""


@dataclass(frozen=True, kw_only=True)
class FileContent:
    """One file."""

    name: str
    size: int
    sha256: str


@dataclass(frozen=True, kw_only=True)
class FolderContent:
    """The files of a folder that count, by name."""

    files: tuple[FileContent, ...]

    @property
    def digest(self) -> str:
        """SHA-256, in hex, of names and contents."""
        return hashlib.sha256(json.dumps([asdict(file) for file in self.files]).encode()).hexdigest()

    @property
    def size(self) -> int:
        """Bytes of all files."""
        return sum(file.size for file in self.files)

    @classmethod
    def from_json(cls, told: Sequence[Mapping[str, Any]]) -> FolderContent:
        """Of `asdict(file)` of each file."""
        return cls(files=tuple(FileContent(**fields) for fields in told))


def content_of(folder: Path, names: Sequence[str]) -> FolderContent:
    """What some files of a folder hold; reads them."""
    files = (
        FileContent(name=name, size=(folder / name).stat().st_size, sha256=_sha256(folder / name))
        for name in sorted(names)
    )
    return FolderContent(files=tuple(files))


def holds(folder: Path, content: FolderContent) -> bool:
    """Whether a folder has exactly these contents under these names; it may have other files, too."""
    try:
        if any((folder / file.name).stat().st_size != file.size for file in content.files):
            return False
        return all(_sha256(folder / file.name) == file.sha256 for file in content.files)
    except OSError:
        return False


def _sha256(path: Path) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def own_cache(cache_dir: Path) -> Path:
    """The cache folder of the settings where this host can have it, or else the user's own.

    Settings name the first rank's folder, whose path may mean nothing here.
    """
    usable = cache_dir if cache_dir.exists() else cache_dir.parent
    if usable.is_dir() and os.access(usable, os.W_OK | os.X_OK):
        return cache_dir
    return user_cache(os.environ).expanduser()


# ---- between hosts


def folder_here(what: str, ranks: Ranks, find: Callable[[], tuple[Path, Sequence[str]]], keep_in: Stores,
                say: Callable[[str], None]) -> Path:  # fmt: skip
    """A folder of the first rank's host, on this one. All ranks call this.

    Args:
        what: What is in it, as "the model", for people.
        ranks: Of the run.
        find: Gives the folder and the names of the files that count; called on the first rank.
        keep_in: Where a host that has it neither there nor at the path of the first one's keeps it.
        say: Told, on the first rank, what was sent.

    Returns:
        On the first rank's host its own path; elsewhere that of an equal folder.

    Raises:
        OutputError: This host cannot keep it.
        PeerError: Another one cannot, or the first rank has none.
    """

    def look() -> dict[str, Any]:
        folder, names = find()
        folder = folder.absolute()
        files = content_of(folder, names).files if ranks.has_several_hosts else ()
        return {"folder": str(folder), "files": [asdict(file) for file in files]}

    told = ranks.on_first(look)
    original, content = Path(told["folder"]), FolderContent.from_json(told["files"])
    if not ranks.has_several_hosts:
        return original
    leads, lead = ranks.roster.leads, ranks.roster.lead_of(ranks.rank)
    own: Path | None = original if ranks.is_first else None
    if ranks.rank == lead and not ranks.is_first:
        own = next((folder for folder in (original, keep_in(content)) if holds(folder, content)), None)
    places = ranks.tell_all(None if own is None else str(own))
    chain = [0, *(rank for rank in leads if places[rank] is None)]
    if len(chain) > 1:
        failure = _pass_on(chain, ranks.rank, original, content, keep_in)
        ranks.raise_any(failure)
        if ranks.is_first:
            say(_sent(what, [ranks.roster.host_name(rank) for rank in chain[1:]], content.size))
        places = ranks.tell_all(str(keep_in(content)) if ranks.rank in chain[1:] else places[ranks.rank])
    return Path(places[lead])


def _sent(what: str, hosts: Sequence[str], size: int) -> str:
    listed = ", ".join(hosts[:4]) + (f" and {len(hosts) - 4} more" if len(hosts) > 4 else "")
    return f"sent {what} to {len(hosts)} host{'s' if len(hosts) > 1 else ''} ({listed}): {size / 1e6:,.1f} MB each"


def _pass_on(chain: Sequence[int], rank: int, original: Path, content: FolderContent, keep_in: Stores
             ) -> OutputError | None:  # fmt: skip
    """This rank's part of the chain; gives what it could not write."""
    if rank not in chain:
        return None
    place = chain.index(rank)
    following = chain[place + 1] if place + 1 < len(chain) else None
    if place == 0:
        _forward(_blocks_of(original, content), following)
        return None
    return _receive(_forward_each(_blocks_from(chain[place - 1], content), following), content, keep_in(content))


Block = tuple[FileContent, Tensor]


def _sizes(content: FolderContent) -> Iterator[tuple[FileContent, int]]:
    for file in content.files:
        for start in range(0, file.size, BLOCK_BYTES):
            yield file, min(BLOCK_BYTES, file.size - start)


def _blocks_of(folder: Path, content: FolderContent) -> Iterator[Block]:
    """The files' bytes, read."""
    for described in content.files:
        with (folder / described.name).open("rb") as file:
            for start in range(0, described.size, BLOCK_BYTES):
                block = np.fromfile(file, dtype=np.uint8, count=min(BLOCK_BYTES, described.size - start))
                yield described, torch.from_numpy(block)


def _blocks_from(sender: int, content: FolderContent) -> Iterator[Block]:
    """The files' bytes, received."""
    for file, size in _sizes(content):
        block = torch.empty(size, dtype=torch.uint8)
        dist.recv(block, src=sender)
        yield file, block


def _forward_each(blocks: Iterator[Block], receiver: int | None) -> Iterator[Block]:
    """The same blocks, each on its way to the next host while it is worked on here."""
    under_way: Any = None
    for file, block in blocks:
        if under_way is not None:
            under_way.wait()
        under_way = None if receiver is None else dist.isend(block, dst=receiver)
        yield file, block
    if under_way is not None:
        under_way.wait()


def _forward(blocks: Iterator[Block], receiver: int | None) -> None:
    for _ in _forward_each(blocks, receiver):
        pass


def _receive(blocks: Iterator[Block], content: FolderContent, target: Path) -> OutputError | None:
    """Write a folder. After a failure the rest is still received, since other hosts wait for it behind this one."""
    partial = target.with_name(f"{target.name}.{uuid.uuid4().hex}{PARTIAL_SUFFIX}")
    failure = None
    try:
        with disk_errors(target, partial):
            partial.mkdir(parents=True)
            _write(blocks, content, partial)
            _publish(partial, target, content)
    except OutputError as error:
        failure = OutputError(f"{socket.gethostname()}: {error}")
    for _ in blocks:
        pass
    return failure


def _write(blocks: Iterator[Block], content: FolderContent, partial: Path) -> None:
    """Write the files, and compare what came with what was to come."""
    digests = {file.name: hashlib.sha256() for file in content.files}
    for file in content.files:
        (partial / file.name).touch()
    for file, block in blocks:
        with (partial / file.name).open("ab") as written:
            written.write(block.numpy().data)
        digests[file.name].update(block.numpy().data)
    for file in content.files:
        if digests[file.name].hexdigest() != file.sha256:
            raise OSError(errno.EIO, f"{file.name} changed on the first rank's host while it was sent")
        sync(partial / file.name)


def _publish(partial: Path, target: Path, content: FolderContent) -> None:
    """Give a whole folder its name. Another run may be first with an equal one; another content makes room."""
    while True:
        try:
            partial.rename(target)
            return
        except OSError as error:
            if error.errno not in (errno.ENOTEMPTY, errno.EEXIST):
                raise
        if holds(target, content):
            shutil.rmtree(partial)
            return
        doomed = target.with_name(f"{target.name}.{uuid.uuid4().hex}{PARTIAL_SUFFIX}")
        with suppress(FileNotFoundError):
            target.rename(doomed)
            remove(doomed)
