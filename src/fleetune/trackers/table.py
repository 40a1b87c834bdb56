"""Which trackers there are, what each needs, and how those of a run are opened."""

from __future__ import annotations

import importlib
import importlib.util
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

from fleetune.trackers.tracker import Say, TrackedRun, Tracker, Trackers, failure_in_words

ALL, NONE = "all", "none"


@dataclass(frozen=True, kw_only=True)
class TrackerKind:
    """A tracker that `--report_to` may name."""

    package: str
    """What it needs."""
    class_name: str
    """In the module of its name beside this one."""
    install: str
    """What installs the package."""


TRACKERS = {
    "tensorboard": TrackerKind(
        package="tensorboard", class_name="TensorBoardTracker", install="pip install tensorboard"
    ),
    "wandb": TrackerKind(package="wandb", class_name="WandbTracker", install="pip install 'fleetune[wandb]'"),
    "mlflow": TrackerKind(package="mlflow", class_name="MlflowTracker", install="pip install 'fleetune[mlflow]'"),
}


def chosen(names: Iterable[str]) -> list[str]:
    """The trackers that `--report_to` asks for; all: those whose packages are installed."""
    wanted = dict.fromkeys(names)
    if ALL in wanted:
        return [name for name, kind in TRACKERS.items() if _is_installed(kind)]
    return [name for name in wanted if name != NONE]


def missing_packages(names: Iterable[str]) -> list[str]:
    """What is to be said of trackers that are asked for by name and whose packages are not installed."""
    return [
        f"--report_to {name}: the package {TRACKERS[name].package} is not installed: {TRACKERS[name].install}"
        for name in chosen(names)
        if not _is_installed(TRACKERS[name])
    ]


def open_trackers(names: Iterable[str], run: TrackedRun, say: Say) -> Trackers:
    """Open the trackers of a run; for one that cannot be opened a line is said, and the run goes on without it.

    Args:
        names: Of `--report_to`.
        run: What they are told.
        say: Told what fails, now and later.
    """
    opened: dict[str, Tracker] = {}
    for name in chosen(names):
        try:
            opened[name] = _tracker_class(name)(run)
        except Exception as error:  # whatever a tracker's package raises: the run is worth more
            say(failure_in_words(name, error))
    return Trackers(opened, say)


def _tracker_class(name: str) -> Any:
    module = importlib.import_module(f"fleetune.trackers.{name}")
    return getattr(module, TRACKERS[name].class_name)


def _is_installed(kind: TrackerKind) -> bool:
    return importlib.util.find_spec(kind.package) is not None
