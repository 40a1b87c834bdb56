"""Find the source of each split: in a folder, as named files, or on the hub."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from fnmatch import fnmatchcase
from pathlib import Path
from typing import TYPE_CHECKING

from fleetune.data.sources.hub import open_hub
from fleetune.data.sources.opening import COLUMN_OPENERS, OPENERS, open_source
from fleetune.data.sources.rows import Source
from fleetune.data.tasks import PLAIN_SPLITS, Role, Split, Task
from fleetune.errors import ConfigError, DataError

if TYPE_CHECKING:  # settings stand above sources: they speak of examples
    from fleetune.data.settings import DataSettings


class Places:
    """Where the splits of a data set are; sources are opened when they are asked for.

    Args:
        settings: Where to look. Named files come before a folder, a folder before the hub.
        task: Its splits, GLUE folder and hub data set; None: a task that is yet to be discovered.

    Raises:
        ConfigError: The settings name no data at all.
        DataError: `data_dir` is not a folder, or holds a split twice.
    """

    def __init__(self, settings: DataSettings, task: Task | None) -> None:
        named = _named_files(settings)
        splits = task.splits if task else PLAIN_SPLITS
        self._encoding = settings.encoding
        self._where = str(settings.data_dir or settings.dataset_name or "the named files")
        self._files: dict[str, Path] = {}
        if settings.data_dir is not None:
            self._files = _files_in(_task_folder(settings.data_dir, task), splits)
        for role, path in named.items():
            _override(self._files, splits, role, path)
        self._hub_name, self._hub_config = settings.dataset_name, settings.dataset_config_name
        self._hub: Mapping[str, Source] | None = None
        if self._hub_name is None and settings.data_dir is None and not named:
            self._use_task_hub(task)

    def _use_task_hub(self, task: Task | None) -> None:
        if task is None or task.hub_name is None:
            raise ConfigError(
                "no data is named: give --task, --data_dir, --train_file (and --validation_file), or --dataset_name"
            )
        self._hub_name, self._hub_config = task.hub_name, task.hub_config
        self._where = f"{task.hub_name}/{task.hub_config}"

    def find(self, split: Split) -> Source | None:
        """Open a split's source, or None if it has none.

        Raises:
            DataError: It cannot be opened.
        """
        path = self._files.get(split.name)
        if path is not None:
            return open_source(path, self._encoding)
        if self._hub_name is None:
            return None
        if self._hub is None:
            self._hub = open_hub(self._hub_name, self._hub_config)
        return next((self._hub[name] for name in (split.name, *split.stems) if name in self._hub), None)

    def require(self, split: Split) -> Source:
        """Open a split's source.

        Raises:
            DataError: There is none, or it cannot be opened.
        """
        source = self.find(split)
        if source is None:
            names = " or ".join(f"{stem}.*" for stem in split.stems if "*" not in stem)
            raise DataError(
                f"there is no {split.name} split: it would be {names} ({', '.join(OPENERS)}) in a --data_dir, "
                f"or --{split.role}_file",
                file=self._where,
            )
        return source


def _named_files(settings: DataSettings) -> dict[Role, Path]:
    files: dict[Role, Path | None] = {
        "train": settings.train_file,
        "validation": settings.validation_file,
        "test": settings.test_file,
    }
    return {role: path for role, path in files.items() if path is not None}


def _override(files: dict[str, Path], splits: Sequence[Split], role: Role, path: Path) -> None:
    """Let a named file stand for its role: as the split its name says, else as the role's first."""
    of_role = [split for split in splits if split.role == role]
    for split in of_role:
        files.pop(split.name, None)
    chosen = next((s for s in of_role if any(fnmatchcase(path.stem, stem) for stem in s.stems)), of_role[0])
    files[chosen.name] = path


def _task_folder(data_dir: Path, task: Task | None) -> Path:
    """The folder itself, or its sub-folder that GLUE names after the task."""
    if not data_dir.is_dir():
        what = "this is a file, not a folder" if data_dir.exists() else "there is no such folder"
        raise DataError(what, file=data_dir)
    inner = data_dir / task.folder if task and task.folder else data_dir
    return inner if inner.is_dir() else data_dir


def _files_in(folder: Path, splits: Sequence[Split]) -> dict[str, Path]:
    found: dict[str, Path] = {}
    for split in splits:
        files = _files_of(folder, split, OPENERS) or _files_of(folder, split, COLUMN_OPENERS)
        if len(files) > 1:
            names = " and ".join(path.name for path in files)
            raise DataError(
                f"{names} could each be the {split.name} split: name one with --{split.role}_file", file=folder
            )
        if files:
            found[split.name] = files[0]
    return found


def _files_of(folder: Path, split: Split, suffixes: Iterable[str]) -> list[Path]:
    patterns = [f"{stem}{suffix}" for stem in split.stems for suffix in suffixes]
    return [path for pattern in patterns for path in sorted(folder.glob(pattern)) if path.is_file()]
