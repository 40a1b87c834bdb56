"""Real GLUE data with the pretrained encoder of the extra [demo]: slow, and skipped where the data are not at hand."""

from __future__ import annotations

from pathlib import Path

import pytest

from fleetune import RunConfig, finetune
from fleetune.report.record import RunRecord
from tests.conftest import SHARED_DATA

pytestmark = [pytest.mark.slow, pytest.mark.timeout(1500)]


def finetune_glue(task: str, folder: str, model: Path, tmp_path: Path, **settings: object) -> RunRecord:
    data = SHARED_DATA / "glue" / folder
    if not data.is_dir():
        pytest.skip(f"needs the {folder} folder of GLUE beside the checkout, in shared/data/glue")
    return finetune(
        RunConfig(task=task, data_dir=data, model=str(model), output_dir=tmp_path / "out", cache_dir=tmp_path / "cache",
                  save_strategy="no", report_to="none", **settings)
    )  # fmt: skip


def test_mrpc_for_one_epoch(packaged_model: Path, tmp_path: Path) -> None:
    """Always saying "equivalent" gives accuracy .684 and F1 .812."""
    record = finetune_glue("mrpc", "MRPC", packaged_model, tmp_path, num_train_epochs=1, learning_rate=1e-4)
    assert record.metrics["eval_samples"] == 408
    assert record.metrics["eval_accuracy"] > 0.70
    assert record.metrics["eval_f1"] > 0.815


def test_sst2_for_a_few_hundred_steps(packaged_model: Path, tmp_path: Path) -> None:
    """Guessing gives .509."""
    record = finetune_glue("sst2", "SST-2", packaged_model, tmp_path, max_steps=300, learning_rate=1e-4)
    assert record.metrics["eval_samples"] == 872
    assert record.metrics["eval_accuracy"] > 0.80


def test_stsb_for_a_few_hundred_steps(packaged_model: Path, tmp_path: Path) -> None:
    record = finetune_glue("stsb", "STS-B", packaged_model, tmp_path, max_steps=300, learning_rate=1e-4)
    assert record.metrics["eval_samples"] == 1500
    assert record.metrics["eval_pearson"] > 0.72
    assert record.metrics["eval_spearmanr"] > 0.75
