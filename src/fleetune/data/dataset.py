"""From settings to the tokenised splits of a task."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path

from fleetune.data.columns import apply_header, match_layout
from fleetune.data.examples import Reading
from fleetune.data.label_sets import with_label_columns
from fleetune.data.notices import notices_of
from fleetune.data.problems import PROBLEMS, discover_task
from fleetune.data.settings import DataSettings
from fleetune.data.sources import Places, Source
from fleetune.data.tasks import (
    PLAIN_SPLITS,
    Role,
    Split,
    Task,
    find_task,
    task_from_json,
    with_columns,
)
from fleetune.data.tokens import (
    CachedTable,
    Encoder,
    Progress,
    TableRequest,
    Tokenizer,
    TokenTable,
    load_or_build,
    tokenizer_identity,
    usable_length,
)
from fleetune.errors import ConfigError

__all__ = ["DataSettings", "TaskData", "prepare_data"]


@dataclass(frozen=True, kw_only=True)
class TaskData:
    """A task whose labels are known, and its tokenised splits."""

    task: Task
    splits: dict[str, TokenTable]
    """By name, in the task's order: train, validation (or validation_matched ...), test."""
    notices: tuple[str, ...]
    """What was chosen or left out on the way, one line each."""

    def to_json(self) -> str:
        """All that another process on this machine needs to open the same tables; the sources are not read."""
        splits = {
            name: {"folder": str(table.folder.absolute()), "source": table.source}
            for name, table in self.splits.items()
        }
        return json.dumps({"task": asdict(self.task), "splits": splits, "notices": self.notices})

    @classmethod
    def from_json(cls, text: str) -> TaskData:
        """Open what `to_json` describes.

        Raises:
            DamagedTableError: A table is gone or damaged.
        """
        fields = json.loads(text)
        splits = {
            name: replace(TokenTable.open(Path(entry["folder"])), source=entry["source"])
            for name, entry in fields["splits"].items()
        }
        return cls(task=task_from_json(fields["task"]), splits=splits, notices=tuple(fields["notices"]))


def prepare_data(
    settings: DataSettings,
    tokenizer: Tokenizer,
    *,
    task: Task | None = None,
    splits: Sequence[str] | None = None,
    progress: Progress | None = None,
) -> TaskData:
    """Find, check and tokenise the splits of a task, or take them from the cache.

    Args:
        settings: Where the data is and how it is read.
        tokenizer: The tokenizer of the model that will see the tokens.
        task: A task whose labels are known already, as for a finished run. None: the task that the settings
            name, or one on files of one's own, whose classes are those of its training split.
        splits: Names or roles of the splits that are needed ("validation" stands for both of MNLI's); None: all
            that there are.
        progress: Called while a split is tokenised; starts again with each split.

    Raises:
        ConfigError: The settings name no data, or an unknown task or split.
        DataError: A split that is needed is missing, or something in a file cannot be used.
        OutputError: The cache cannot be written.
    """
    if settings.text_column_names is not None and len(settings.text_column_names) not in (1, 2):
        raise ConfigError(f"text_column_names {settings.text_column_names}: one or two columns are read")
    notices: list[str] = []
    task = task or (find_task(settings.task) if settings.task else None)
    places = Places(settings, task)
    if task is None:
        found = discover_task(settings, places.require(PLAIN_SPLITS[0]))
        task = found.task
        notices += found.notices
    else:
        task = with_columns(task, settings.text_column_names, settings.label_column_name)
    encoder = PROBLEMS[task.problem].encoder(task, settings.doc_stride)
    limit = usable_length(tokenizer, settings.max_seq_length, pair=task.is_pair)
    encoder.adapt(tokenizer, limit)
    if limit < settings.max_seq_length:
        notices.append(f"max_seq_length is lowered to {limit}, the longest input of the tokenizer's model")
    preparation = _Preparation(
        settings=settings,
        task=task,
        tokenizer=tokenizer,
        tokenizer_identity=tokenizer_identity(tokenizer),
        max_length=limit,
        encoder=encoder,
        progress=progress,
    )
    tables: dict[str, TokenTable] = {}
    for split, source in _wanted(task, places, splits):
        cached = preparation.table(split, source)
        tables[split.name] = cached.table
        notices += notices_of(cached)
    return TaskData(task=task, splits=tables, notices=tuple(notices))


def _wanted(task: Task, places: Places, asked: Sequence[str] | None) -> list[tuple[Split, Source]]:
    """The splits to prepare, in the task's order, with their sources."""
    _refuse_unknown_splits(task, asked or ())
    found = [(split, places.find(split)) for split in task.splits if asked is None or _is_asked(split, asked)]
    wanted = [(split, source) for split, source in found if source is not None]
    names = {name for split, _ in wanted for name in (split.name, split.role)}
    for name in asked if asked is not None else ([] if wanted else ["train"]):
        if name not in names:
            places.require(next(split for split in task.splits if _is_asked(split, [name])))
    return wanted


def _is_asked(split: Split, asked: Sequence[str]) -> bool:
    return split.name in asked or split.role in asked


def _refuse_unknown_splits(task: Task, asked: Sequence[str]) -> None:
    known = list(dict.fromkeys(name for split in task.splits for name in (split.role, split.name)))
    for name in asked:
        if name not in known:
            raise ConfigError(f"the task {task.name} has no split {name!r}: it has {', '.join(known)}")


@dataclass(frozen=True, kw_only=True)
class _Preparation:
    """What the splits of one task have in common."""

    settings: DataSettings
    task: Task
    tokenizer: Tokenizer
    tokenizer_identity: str
    max_length: int
    encoder: Encoder
    progress: Progress | None

    def table(self, split: Split, source: Source) -> CachedTable:
        """Tokenise a split, or take it from the cache."""
        is_test = split.role == "test"
        problem = PROBLEMS[self.task.problem]
        source = with_label_columns(source, self.task.label_column)
        columns = match_layout(source, self.task.layouts, label_optional=is_test)
        reading = Reading(
            columns=columns,
            labels=None if columns.label is None else problem.labels(self.task, self.settings.label_delimiter),
            label_optional=is_test,
            on_bad_row=self.settings.on_bad_row,
            max_rows=self._max_rows(split.role),
            texts=problem.texts(self.task, split.role),
        )
        request = TableRequest(
            source=apply_header(source, columns),
            split=split.name,
            reading=reading,
            tokenizer=self.tokenizer,
            tokenizer_identity=self.tokenizer_identity,
            max_length=self.max_length,
            encoding=self.settings.encoding,
            encoder=self.encoder,
        )
        overwrite = self.settings.overwrite_cache
        return load_or_build(request, self.settings.cache_dir, overwrite=overwrite, progress=self.progress)

    def _max_rows(self, role: Role) -> int | None:
        limits = {
            "train": self.settings.max_train_samples,
            "validation": self.settings.max_eval_samples,
            "test": self.settings.max_predict_samples,
        }
        return limits[role]
