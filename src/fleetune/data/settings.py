"""The settings that this room reads; a run's config has them."""

from __future__ import annotations

from pathlib import Path
from typing import Literal, Protocol

from fleetune.data.examples import OnBadRow
from fleetune.data.tasks import Problem


class DataSettings(Protocol):
    """Where the data is, and how it becomes tokens. Any object with these attributes will do."""

    @property
    def task(self) -> str | None:
        """Name of a GLUE task; None: a task on files of one's own."""

    @property
    def data_dir(self) -> Path | None:
        """Folder with a file per split, or a GLUE folder with one folder per task."""

    @property
    def train_file(self) -> Path | None:
        """Comes before what `data_dir` holds, as do the next two."""

    @property
    def validation_file(self) -> Path | None: ...

    @property
    def test_file(self) -> Path | None: ...

    @property
    def dataset_name(self) -> str | None:
        """Data set on the hub; None: that of the task, if no file or folder is named."""

    @property
    def dataset_config_name(self) -> str | None: ...

    @property
    def text_column_names(self) -> tuple[str, ...] | None:
        """One or two columns; None: those of the task, or chosen from the file's."""

    @property
    def label_column_name(self) -> str | None:
        """None: that of the task, or chosen from the file's."""

    @property
    def problem_type(self) -> Literal["auto"] | Problem:
        """What a task on files of one's own is; "auto": told from the training file."""

    @property
    def label_delimiter(self) -> str | None:
        """What stands between several labels in a cell of text; None: nothing, it holds one."""

    @property
    def doc_stride(self) -> int:
        """Tokens that a window of a context has in common with the next."""

    @property
    def version_2_with_negative(self) -> bool:
        """Whether questions in files of one's own may have no answer."""

    @property
    def encoding(self) -> str | None:
        """Python codec name for the text files; None: UTF-8, or what a byte-order mark says."""

    @property
    def on_bad_row(self) -> OnBadRow: ...

    @property
    def max_seq_length(self) -> int:
        """Tokens an example may have, special tokens included."""

    @property
    def max_train_samples(self) -> int | None:
        """Only the first rows of the training split; None: all. The next two likewise."""

    @property
    def max_eval_samples(self) -> int | None: ...

    @property
    def max_predict_samples(self) -> int | None: ...

    @property
    def cache_dir(self) -> Path:
        """Token tables go into its folder `tokens`."""

    @property
    def overwrite_cache(self) -> bool: ...
