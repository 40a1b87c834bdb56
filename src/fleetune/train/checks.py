"""What can be said against a training run before any rank is started. Imports no torch."""

from __future__ import annotations

from fleetune.config import RunConfig
from fleetune.config.run import check_train
from fleetune.data.tasks import find_task
from fleetune.train.checkpoint import named_checkpoint
from fleetune.train.output import check_occupied


def check_before_start(config: RunConfig, *, has_files: bool = True) -> None:
    """Refuse a run that lacks a setting, names an unknown task, or would write over another run.

    Args:
        config: The settings.
        has_files: Whether this process is the first rank, or starts the ranks: data, model and output folder are of
            its host.

    Raises:
        ConfigError: Lists every missing or wrong setting.
        CheckpointError: The checkpoint to resume from is not there.
        OutputError: The output folder holds something that must not be overwritten.
    """
    check_train(config, has_files=has_files)
    if config.task is not None:
        find_task(config.task)
    if not has_files:
        return
    if config.resume_from_checkpoint not in (None, "auto"):
        named_checkpoint(str(config.resume_from_checkpoint))
    check_occupied(config)
