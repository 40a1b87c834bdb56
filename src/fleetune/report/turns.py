"""What a report is made of: runs, as their folders tell of them, and the bench that they were runs of.

    read_source(path) -> Source      a bench's folder, a run's output folder, or a record

A bench's folder holds `bench.json` and, in `runs/<name>`, for every run its `record.json` and `turn.json`: what was
measured around it, or why it failed. `turn.json` is written last; a run without one was cut short.
"""

from __future__ import annotations

import dataclasses
import json
import shlex
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

from fleetune.errors import ConfigError
from fleetune.files import write_json
from fleetune.report.record import RECORD_FILE

BENCH_FILE, TURN_FILE, RUNS_FOLDER = "bench.json", "turn.json", "runs"
HISTORY_FILE = "trainer_state.json"
_READ_FROM_ELSEWHERE = ("record", "history")

Mode = Literal["steps", "full"]
TRAINERS = ("fleetune", "transformers")
"""Who trained: this project, or the stock Trainer beside it."""


@dataclass(frozen=True, kw_only=True)
class Bench:
    """What a bench was asked to measure."""

    command: str
    """Repeats it."""
    started: str
    mode: Mode
    """"steps": some updates, from which the whole run is extrapolated; "full": training to the end."""
    steps: int | None
    """Counted updates of a run, in the mode "steps"."""
    discarded_steps: int
    """First updates of a run that its speed does not count."""
    rounds: int
    seeds: tuple[int, ...]
    sizes: tuple[str, ...]
    """Labels of the sizes, smallest first."""
    trainers: tuple[str, ...]
    price_per_hour: float | None
    """Of one host."""
    settings: dict[str, Any]
    """Of every run, beside what its size and its round decide."""
    plan: dict[str, list[str]] = field(default_factory=dict)
    """By size: lines of what was known before it ran."""

    def write(self, folder: Path) -> None:
        write_json(folder / BENCH_FILE, dataclasses.asdict(self))


@dataclass(frozen=True, kw_only=True)
class Turn:
    """One run: of a bench, or by itself."""

    name: str
    size: str
    """Label of the size it was a run of; of a run by itself, its folder."""
    trainer: str = "fleetune"
    hosts: int = 1
    round: int | None = None
    """Counted from 1; None outside a bench."""
    seed: int | None = None
    status: Literal["finished", "failed"] = "finished"
    reason: str | None = None
    """Why it failed."""
    wall_s: float | None = None
    """From its command to its end; None outside a bench."""
    command: str = ""
    record: dict[str, Any] = field(default_factory=dict)
    """Content of its `record.json`; empty where it left none."""
    history: list[dict[str, Any]] = field(default_factory=list)
    """Losses and metrics by step, from its `trainer_state.json`."""

    def write(self, folder: Path) -> None:
        content = {name: value for name, value in dataclasses.asdict(self).items() if name not in _READ_FROM_ELSEWHERE}
        write_json(folder / TURN_FILE, content)


@dataclass(frozen=True, kw_only=True)
class Source:
    """One argument of a report."""

    name: str
    turns: tuple[Turn, ...]
    bench: Bench | None = None


def read_source(path: Path) -> Source:
    """The runs of a bench's folder, or the one of an output folder or of a record.

    Raises:
        ConfigError: There is none, or it cannot be read.
    """
    if not path.exists():
        raise ConfigError(f"{path}: there is no such run; a folder with {RECORD_FILE} or {BENCH_FILE} is expected")
    if (path / BENCH_FILE).is_file():
        return Source(name=_name(path), bench=read_bench(path), turns=read_turns(path))
    file = path / RECORD_FILE if path.is_dir() else path
    if not file.is_file():
        raise ConfigError(f"{path} holds neither {RECORD_FILE} nor {BENCH_FILE}: it is no run of fleetune, nor a bench")
    return Source(name=_name(file.parent), turns=(_single(file),))


def read_bench(folder: Path) -> Bench:
    """The bench of a folder.

    Raises:
        ConfigError: It cannot be read.
    """
    content = _read_object(folder / BENCH_FILE)
    try:
        told = _known(Bench, content)
        return Bench(**{**told, **{name: tuple(told[name]) for name in ("seeds", "sizes", "trainers")}})
    except (TypeError, KeyError) as error:
        raise ConfigError(f"{folder / BENCH_FILE}: not as `fleetune bench` writes it ({error})") from error


def read_turns(folder: Path) -> tuple[Turn, ...]:
    """The runs of a bench that ended, well or not, in the order of their rounds.

    Raises:
        ConfigError: One cannot be read.
    """
    files = sorted((folder / RUNS_FOLDER).glob(f"*/{TURN_FILE}"))
    turns = [read_turn(file.parent) for file in files]
    return tuple(sorted(turns, key=lambda turn: (turn.round or 0, turn.name)))


def read_turn(folder: Path) -> Turn:
    """A run of a bench that ended.

    Raises:
        ConfigError: It cannot be read.
    """
    content = _read_object(folder / TURN_FILE)
    record = _read_object(folder / RECORD_FILE) if (folder / RECORD_FILE).is_file() else {}
    try:
        return Turn(**_known(Turn, content) | {"record": record, "history": read_history(folder)})
    except TypeError as error:
        raise ConfigError(f"{folder / TURN_FILE}: not as `fleetune bench` writes it ({error})") from error


def _single(file: Path) -> Turn:
    """A run by itself."""
    record = _read_object(file)
    if not isinstance(record.get("config"), dict):
        raise ConfigError(f"{file} is no record of a run of fleetune: it has no settings")
    status = record.get("status")
    is_done = status == "finished"
    return Turn(
        name=_name(file.parent),
        size=_name(file.parent),
        trainer=str(record.get("trainer", TRAINERS[0])),
        hosts=len({member.get("host") for member in record.get("roster", [])}) or 1,
        seed=record["config"].get("seed"),
        status="finished" if is_done else "failed",
        reason=None if is_done else f"the run is {status}, at step {record.get('step', 0)}",
        command=train_command(record["config"]),
        record=record,
        history=read_history(file.parent),
    )


def read_history(folder: Path) -> list[dict[str, Any]]:
    """Losses and metrics of a run by step; empty where it left none."""
    file = folder / HISTORY_FILE
    history: list[dict[str, Any]] = _read_object(file).get("log_history", []) if file.is_file() else []
    return history


def train_command(settings: Mapping[str, Any]) -> str:
    """The command that repeats a run: all settings that its record has."""
    words = ["fleetune", "train"]
    for name, value in settings.items():
        if value is not None:
            text = ",".join(map(str, value)) if isinstance(value, (list, tuple)) else str(value)
            words += [f"--{name}", text.lower() if isinstance(value, bool) else text]
    return shlex.join(words)


def _known(kind: type, content: Mapping[str, Any]) -> dict[str, Any]:
    """What a dataclass has a field for: a newer version may have written more."""
    names = {f.name for f in dataclasses.fields(kind)}
    return {name: value for name, value in content.items() if name in names}


def _read_object(file: Path) -> dict[str, Any]:
    try:
        content = json.loads(file.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise ConfigError(f"{file} cannot be read: {error}") from error
    if not isinstance(content, dict):
        raise ConfigError(f"{file}: a JSON object is expected, not {type(content).__name__}")
    return content


def _name(folder: Path) -> str:
    return folder.absolute().name or str(folder)
