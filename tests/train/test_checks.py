"""What is refused before any rank starts, and by whom: files and folders are of the first rank's host."""

from __future__ import annotations

from pathlib import Path

import pytest

from fleetune.config import RunConfig
from fleetune.errors import CheckpointError, ConfigError, OutputError
from fleetune.train.checks import check_before_start


@pytest.fixture
def config(tmp_path: Path) -> RunConfig:
    return RunConfig(
        model="/nowhere/model", train_file="/nowhere/train.csv", validation_file="/nowhere/validation.csv",
        output_dir=tmp_path / "out",
    )  # fmt: skip


def test_the_first_rank_refuses_files_that_are_not_there(config: RunConfig) -> None:
    with pytest.raises(ConfigError, match=r"--train_file /nowhere/train\.csv: there is no such file"):
        check_before_start(config)


def test_other_ranks_need_neither_files_nor_checkpoints(config: RunConfig, tmp_path: Path) -> None:
    check_before_start(config.replace(resume_from_checkpoint="/nowhere/checkpoint-5"), has_files=False)
    check_before_start(config.replace(train_file=None, task="mrpc", data_dir="/nowhere"), has_files=False)


def test_another_rank_leaves_an_occupied_folder_of_that_name_alone(config: RunConfig, tmp_path: Path) -> None:
    (tmp_path / "out").mkdir()
    (tmp_path / "out" / "letters").touch()
    check_before_start(config, has_files=False)
    for name in ("train", "validation"):
        (tmp_path / f"{name}.csv").touch()
    here = config.replace(train_file=tmp_path / "train.csv", validation_file=tmp_path / "validation.csv")
    with pytest.raises(OutputError, match="holds no run of fleetune"):
        check_before_start(here)
    with pytest.raises(CheckpointError):
        check_before_start(here.replace(resume_from_checkpoint="/nowhere/checkpoint-5"))


def test_every_rank_refuses_settings_that_are_missing(config: RunConfig) -> None:
    with pytest.raises(ConfigError, match="--model is missing"):
        check_before_start(config.replace(model=None), has_files=False)
