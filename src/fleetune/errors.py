"""The exceptions that fleetune raises for its users.

    FleetuneError
    ├── ConfigError       (ValueError)    settings that cannot be used; lists all problems at once
    ├── DataError         (ValueError)    a file, row or column that cannot be read as asked
    ├── ModelError        (ValueError)    a model or tokenizer that cannot be loaded or does not fit the task
    ├── OutputError       (RuntimeError)  an output folder that must not be touched, or a disk that is full
    ├── CheckpointError   (RuntimeError)  a checkpoint that is torn, or of another run
    ├── TrainingError     (RuntimeError)  training cannot go on, such as a loss that is not finite
    ├── KernelError       (RuntimeError)  compiled kernels that cannot be built or loaded
    ├── BackendError      (RuntimeError)  a communication backend that cannot be had
    ├── LaunchError       (RuntimeError)  ranks that could not be started, or one that failed
    └── PeerError         (RuntimeError)  another rank failed and has already said why

Its warnings are of the category FleetuneWarning (UserWarning).

A mistake of our own is an ``AssertionError``. Everything else that escapes is a bug.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path


class FleetuneError(Exception):
    """Root of the tree: the command line prints its text without a traceback and exits with `exit_status`."""

    exit_status = 1


class FleetuneWarning(UserWarning):
    """Something is slower, or less, than was asked for: a category to filter by."""


class ConfigError(FleetuneError, ValueError):
    """One or more settings cannot be used.

    Args:
        problems: One sentence per problem: the setting, its value, what is expected.
    """

    exit_status = 2

    def __init__(self, problems: Sequence[str] | str) -> None:
        self.problems = (problems,) if isinstance(problems, str) else tuple(problems)
        super().__init__("\n".join(self.problems))


class DataError(FleetuneError, ValueError):
    """A data file, or one row or cell of it, is not what was asked for.

    Args:
        reason: What is wrong, with the value, and how to mend it.
        file: The file (or data set) it is in.
        row: Line number in the file, counted from 1 with the header, as an editor shows it.
        column: Name of the column.
    """

    exit_status = 2

    def __init__(
        self, reason: str, *, file: Path | str | None = None, row: int | None = None, column: str | None = None
    ) -> None:
        self.reason, self.file, self.row, self.column = reason, file, row, column
        place = [str(file)] if file is not None else []
        place += [f"row {row}"] if row is not None else []
        place += [f"column {column!r}"] if column is not None else []
        super().__init__(f"{', '.join(place)}: {reason}" if place else reason)


class ModelError(FleetuneError, ValueError):
    """A model or tokenizer cannot be loaded, or does not fit the task."""

    exit_status = 2


class OutputError(FleetuneError, RuntimeError):
    """The output folder must not be overwritten, or cannot be written."""


class CheckpointError(FleetuneError, RuntimeError):
    """A checkpoint is torn, missing, or belongs to another run."""


class TrainingError(FleetuneError, RuntimeError):
    """Training cannot go on."""


class KernelError(FleetuneError, RuntimeError):
    """The compiled kernels cannot be built or loaded.

    Args:
        reason: What is wrong, in one line.
        remedy: How to mend it, in one line.
        details: Lines of the compiler's.
    """

    def __init__(self, reason: str, *, remedy: str, details: Sequence[str] = ()) -> None:
        self.reason, self.remedy, self.details = reason, remedy, tuple(details)
        super().__init__("\n  ".join([f"{reason} ({remedy})", *self.details]))


class BackendError(FleetuneError, RuntimeError):
    """A communication backend cannot be had on this host.

    Args:
        reason: What is missing, in one line.
        remedy: How to mend it, in one line.
    """

    def __init__(self, reason: str, *, remedy: str) -> None:
        self.reason, self.remedy = reason, remedy
        super().__init__(f"{reason} ({remedy})")


class LaunchError(FleetuneError, RuntimeError):
    """Ranks could not be started, or one of them failed."""


class PeerError(FleetuneError, RuntimeError):
    """Another rank failed and has printed the reason: this rank ends without a message of its own."""

    exit_status = 76  # what a launcher does not take for the cause
