"""What can be said against a training run before any rank is started. Imports no torch."""

from __future__ import annotations

from fleetune.config import RunConfig
from fleetune.config.run import check_train
from fleetune.data.tasks import find_task
from fleetune.train.checkpoint import named_checkpoint
from fleetune.train.output import check_occupied


def check_before_start(config: RunConfig) -> None:
    """Refuse a run that lacks a setting, names an unknown task, or would write over another run.

    Raises:
        ConfigError: Lists every missing or wrong setting.
        CheckpointError: The checkpoint to resume from is not there.
        OutputError: The output folder holds something that must not be overwritten.
    """
    check_train(config)
    if config.task is not None:
        find_task(config.task)
    if config.resume_from_checkpoint not in (None, "auto"):
        named_checkpoint(str(config.resume_from_checkpoint))
    check_occupied(config)
