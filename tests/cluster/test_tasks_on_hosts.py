"""Tags of words and answers to questions on two hosts of a lab: the model of one process, and its predictions."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest

import fleetune
from lab import Lab
from tests.cluster.lab_runs import assert_nothing_left
from tests.conftest import fleetune as run_here
from tests.conftest import losses_of, read_json
from tests.train.kinds import KINDS

NAMES = ("node1", "node2")
ENVIRON = {"HF_HUB_OFFLINE": "1", "PYTHONPATH": str(Path(fleetune.__file__).parents[1])}


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Where both hosts see the same files."""
    return tmp_path_factory.mktemp("hosts")


@pytest.fixture(scope="module")
def lab(folder: Path) -> Iterator[Lab]:
    if reason := Lab.unavailable(with_ssh=True):
        pytest.skip(reason)
    base = Path(*folder.parts[:3])
    with Lab.up(NAMES, with_ssh=True, keep=[base] if folder.is_relative_to("/tmp") else []) as lab:
        yield lab


def on_hosts(lab: Lab, cwd: Path, *words: object) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "fleetune", *map(str, words), "--hosts", ",".join(NAMES)]
    result = lab["node1"].run(command, env=ENVIRON, cwd=cwd, timeout=200)
    assert result.returncode == 0, f"{result.stdout}\n{result.stderr}"
    return result


@pytest.mark.slow
@pytest.mark.parametrize("name", ["tags", "questions"])
def test_two_hosts_train_and_predict_as_one_process_does(
    name: str, lab: Lab, tiny_model_with_dropout: Path, tmp_path: Path
) -> None:
    kind = KINDS[name]
    settings = {
        **kind.write(tmp_path / "data"), "model": tiny_model_with_dropout, "cache_dir": tmp_path / "cache",
        "learning_rate": 1e-3, "scale_lr": "none", "max_steps": 5, "logging_steps": 1, "report_to": "none",
        "threads": 1, "save_strategy": "no", "eval_strategy": "no",
    }  # fmt: skip
    words = [word for key, value in settings.items() for word in (f"--{key}", value)]
    run_here("train", *words, "--output_dir", tmp_path / "one", "--per_device_train_batch_size", 32)
    on_hosts(lab, tmp_path, "train", *words, "--output_dir", tmp_path / "two", "--per_device_train_batch_size", 16)
    np.testing.assert_allclose(losses_of(tmp_path / "two"), losses_of(tmp_path / "one"), rtol=2e-5)
    record = read_json(tmp_path / "two" / "record.json")
    assert [member["host"] for member in record["roster"]] == list(NAMES)
    results = [read_json(tmp_path / run / "eval_results.json") for run in ("one", "two")]
    assert results[1]["eval_loss"] == pytest.approx(results[0]["eval_loss"], rel=1e-4)
    assert f"| hosts | {len(NAMES)} |" in (tmp_path / "two" / "README.md").read_text()

    source = tmp_path / "data" / f"test{kind.suffix}"
    on_hosts(lab, tmp_path, "predict", tmp_path / "two", "--input", source, "--output", tmp_path / "p2.jsonl")
    run_here("predict", tmp_path / "two", "--input", source, "--output", tmp_path / "p1.jsonl", "--threads", 1)
    found, expected = (
        [json.loads(line) for line in (tmp_path / f"p{n}.jsonl").read_text().splitlines()] for n in (2, 1)
    )
    assert [(line["row"], line["prediction"]) for line in found] == [
        (line["row"], line["prediction"]) for line in expected
    ]
    assert_nothing_left(lab)
