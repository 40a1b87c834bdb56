"""Trackers: what real packages have written is read back with their own readers; none can end a run."""

from __future__ import annotations

import importlib.util
import json
import struct
import subprocess
import sys
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import pytest

from fleetune import RunConfig
from fleetune.errors import ConfigError
from fleetune.trackers import table
from fleetune.trackers.table import TRACKERS, chosen, open_trackers
from fleetune.trackers.tracker import TrackedRun, Trackers, tag
from fleetune.train.checks import check_before_start
from tests.conftest import TinyData, environment

CONFIG = {"learning_rate": 3e-5, "model": "bert-base-uncased", "text_column_names": ["a", "b"], "seed": None}
RECORD = {"status": "finished", "step": 4, "metrics": {"eval_accuracy": 0.75}}

SCRIPT = """
import json, sys
from pathlib import Path
from fleetune.trackers.table import open_trackers
from fleetune.trackers.tracker import TrackedRun
name, folder, config, record = sys.argv[1], Path(sys.argv[2]), json.loads(sys.argv[3]), json.loads(sys.argv[4])
said = []
trackers = open_trackers([name], TrackedRun(name="out", folder=folder, config=config), said.append)
trackers.log(2, {"loss": 0.5, "learning_rate": 1e-5, "epoch": 0.5, "step": 2})
trackers.log(4, {"eval_accuracy": 0.75, "eval_pearson": None, "epoch": 1.0, "step": 4})
trackers.close(record)
assert said == [], said
"""


def needs(package: str) -> None:
    if importlib.util.find_spec(package) is None:
        pytest.skip(f"the package {package} is not installed")


def track(name: str, folder: Path, **environ: str) -> None:
    """Let a process of its own tell a tracker of a run: packages start processes and threads, and warn."""
    result = subprocess.run(
        [sys.executable, "-c", SCRIPT, name, str(folder), json.dumps(CONFIG), json.dumps(RECORD)],
        capture_output=True, text=True, timeout=240, check=False, env=environment(**environ),
    )  # fmt: skip
    assert result.returncode == 0, result.stdout + result.stderr


def test_tensorboards_own_reader_finds_the_numbers(tmp_path: Path) -> None:
    needs("tensorboard")
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    track("tensorboard", tmp_path)
    found = EventAccumulator(str(tmp_path / "runs"))
    found.Reload()
    points = {name: [(p.step, p.value) for p in found.Scalars(name)] for name in found.Tags()["scalars"]}
    assert points == {
        "train/loss": [(2, 0.5)], "train/learning_rate": [(2, pytest.approx(1e-5))], "eval/accuracy": [(4, 0.75)],
    }  # fmt: skip
    texts = {name: found.Tensors(name)[0].tensor_proto.string_val[0].decode() for name in found.Tags()["tensors"]}
    assert json.loads(texts["config/text_summary"]) == CONFIG
    assert json.loads(texts["record/text_summary"]) == RECORD


def test_wandb_offline(tmp_path: Path) -> None:
    """Its file is a log of messages, which its own package decodes."""
    needs("wandb")
    track("wandb", tmp_path, WANDB_MODE="offline", WANDB_DATA_DIR=str(tmp_path), WANDB_CACHE_DIR=str(tmp_path))
    (file,) = (tmp_path / "wandb").glob("offline-run-*/run-*.wandb")
    history, config, summary, told = _read_wandb(file)
    assert told == ("fleetune", "out")
    assert history == [
        {"train/loss": 0.5, "train/learning_rate": 1e-5, "train/global_step": 2},
        {"eval/accuracy": 0.75, "train/global_step": 4},
    ]
    assert {name: config[name] for name in CONFIG} == CONFIG
    assert summary["record"] == RECORD


def _read_wandb(file: Path) -> tuple[list[dict[str, Any]], dict[str, Any], dict[str, Any], tuple[str, str]]:
    """History, settings, summary, and project and name of a file of W&B."""
    from wandb.proto import wandb_internal_pb2

    history: list[dict[str, Any]] = []
    config: dict[str, Any] = {}
    summary: dict[str, Any] = {}
    told = ("", "")
    for data in _log_records(file.read_bytes()):
        record = wandb_internal_pb2.Record()
        record.ParseFromString(data)
        kind = record.WhichOneof("record_type")
        if kind == "history":
            items = {"/".join(i.nested_key) or i.key: json.loads(i.value_json) for i in record.history.item}
            history.append({name: value for name, value in items.items() if not name.startswith("_")})
        elif kind == "summary":
            summary |= {"/".join(i.nested_key) or i.key: json.loads(i.value_json) for i in record.summary.update}
        elif kind == "run":
            told = record.run.project, record.run.display_name
            config |= {item.key: json.loads(item.value_json) for item in record.run.config.update}
    return history, config, _nested(summary), told


def _log_records(content: bytes) -> Iterator[bytes]:
    """The records of a file in LevelDB's log format, behind W&B's header of 7 bytes.

    A block has 32 KiB; a piece of a record begins with its checksum, its length and which piece it is: the whole (1),
    the first (2), one between (3), the last (4).
    """
    block_bytes, header = 32 * 1024, struct.Struct("<IHB")
    at, record = header.size, b""
    while at + header.size <= len(content):
        if block_bytes - at % block_bytes < header.size:
            at += block_bytes - at % block_bytes
            continue
        _, length, piece = header.unpack_from(content, at)
        at += header.size
        record += content[at : at + length]
        at += length
        if piece in (1, 4):
            yield record
            record = b""


def _nested(flat: Mapping[str, Any]) -> dict[str, Any]:
    """{"a/b": 1} as {"a": {"b": 1}}."""
    nested: dict[str, Any] = {}
    for name, value in flat.items():
        *above, last = name.split("/")
        inner = nested
        for key in above:
            inner = inner.setdefault(key, {})
        inner[last] = value
    return nested


@pytest.mark.parametrize("uri", [None, "elsewhere"], ids=["beside the output", "MLFLOW_TRACKING_URI"])
def test_mlflows_store_of_files(tmp_path: Path, uri: str | None) -> None:
    needs("mlflow")
    folder = tmp_path / (uri or "mlruns")
    track("mlflow", tmp_path, **({"MLFLOW_TRACKING_URI": folder.as_uri()} if uri else {}))
    script = (
        "import json, sys, mlflow\n"
        "client = mlflow.MlflowClient(sys.argv[1])\n"
        "(run,) = client.search_runs([client.get_experiment_by_name('fleetune').experiment_id])\n"
        "points = {n: [[p.step, p.value] for p in client.get_metric_history(run.info.run_id, n)]"
        " for n in run.data.metrics}\n"
        "told = [run.info.run_name, run.info.status, run.data.params, points, run.info.artifact_uri]\n"
        "print(json.dumps(told))\n"
    )
    result = subprocess.run(
        [sys.executable, "-W", "ignore", "-c", script, folder.as_uri()], capture_output=True, text=True, timeout=240,
        check=False, env=environment(MLFLOW_ALLOW_FILE_STORE="true"),
    )  # fmt: skip
    assert result.returncode == 0, result.stderr
    name, status, params, points, artifacts = json.loads(result.stdout.splitlines()[-1])
    assert (name, status) == ("out", "FINISHED")
    assert params == {key: str(value) for key, value in CONFIG.items()}
    assert points == {"loss": [[2, 0.5]], "learning_rate": [[2, 1e-5]], "eval_accuracy": [[4, 0.75]]}
    record = Path(artifacts.removeprefix("file://")) / "record.json"
    assert json.loads(record.read_text()) == RECORD


class Failing:
    """A tracker that fails when it is told something for the second time."""

    def __init__(self, run: TrackedRun) -> None:
        self.told = 0

    def log(self, step: int, numbers: Mapping[str, float]) -> None:
        self.told += 1
        if self.told > 1:
            raise OSError("no space\nleft")

    def close(self, record: Mapping[str, Any]) -> None:
        raise AssertionError("it had failed before")


class Kept:
    def __init__(self) -> None:
        self.told: list[object] = []

    def log(self, step: int, numbers: Mapping[str, float]) -> None:
        self.told.append((step, dict(numbers)))

    def close(self, record: Mapping[str, Any]) -> None:
        self.told.append(record)


def run(folder: Path) -> TrackedRun:
    return TrackedRun(name="out", folder=folder, config=CONFIG)


def test_one_that_fails_is_said_once_and_the_others_go_on(tmp_path: Path) -> None:
    said: list[str] = []
    kept = Kept()
    trackers = Trackers({"wandb": Failing(run(tmp_path)), "mlflow": kept}, said.append)
    for step in (1, 2, 3):
        trackers.log(step, {"loss": 0.5, "step": step, "epoch": 0.1, "note": "text", "eval_f1": None})
    trackers.close(RECORD)
    assert said == ["--report_to wandb: OSError: no space left; the run goes on without it"]
    assert kept.told == [*((step, {"loss": 0.5}) for step in (1, 2, 3)), RECORD]
    trackers.close(RECORD)
    assert len(kept.told) == 4


def test_one_that_cannot_be_opened_is_said(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(name: str) -> Any:
        raise RuntimeError(f"{name} does not like you")

    monkeypatch.setattr(table, "_tracker_class", refuse)
    said: list[str] = []
    open_trackers(["tensorboard"], run(tmp_path), said.append).log(1, {"loss": 1.0})
    assert said == ["--report_to tensorboard: RuntimeError: tensorboard does not like you; the run goes on without it"]


def test_all_are_those_that_are_installed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(table, "_is_installed", lambda kind: kind.package == "mlflow")
    assert chosen(["all"]) == ["mlflow"]
    assert chosen(["none"]) == []
    assert chosen(["wandb", "tensorboard", "wandb"]) == ["wandb", "tensorboard"]


def test_what_is_not_installed_is_refused_before_anything_starts(
    tmp_path: Path, tiny_data: TinyData, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(table, "_is_installed", lambda kind: kind.package == "tensorboard")
    config = RunConfig(
        model="m", train_file=tiny_data.train, validation_file=tiny_data.validation, output_dir=tmp_path / "out",
        report_to=("tensorboard", "wandb", "mlflow"),
    )  # fmt: skip
    with pytest.raises(ConfigError) as caught:
        check_before_start(config)
    assert list(caught.value.problems) == [
        "--report_to wandb: the package wandb is not installed: pip install 'fleetune[wandb]'",
        "--report_to mlflow: the package mlflow is not installed: pip install 'fleetune[mlflow]'",
    ]
    check_before_start(config, has_files=False)  # another host has them, or says so itself
    check_before_start(config.replace(report_to=("all",)))


@pytest.mark.parametrize("name", sorted(TRACKERS))
def test_extras_of_the_install_commands_exist(name: str) -> None:
    import tomllib

    from tests.conftest import REPOSITORY

    extras = tomllib.loads((REPOSITORY / "pyproject.toml").read_text())["project"]["optional-dependencies"]
    _, bracket, extra = TRACKERS[name].install.rstrip("]'").partition("[")
    assert not bracket or extra in extras


def test_names_are_those_of_transformers() -> None:
    assert [tag(name) for name in ("loss", "learning_rate", "eval_accuracy")] == [
        "train/loss", "train/learning_rate", "eval/accuracy",
    ]  # fmt: skip
