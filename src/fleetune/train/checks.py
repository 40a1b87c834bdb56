"""What can be said against a training run before any rank is started. Imports no torch."""

from __future__ import annotations

from fleetune.config import RunConfig
from fleetune.config.run import check_train
from fleetune.config.tuning import objective_problem
from fleetune.data.tasks import Problem, find_task
from fleetune.errors import ConfigError
from fleetune.hub.upload import check_login
from fleetune.model.adapter_folder import is_adapter
from fleetune.trackers.table import missing_packages
from fleetune.train.checkpoint import named_checkpoint
from fleetune.train.output import check_occupied


def check_before_start(config: RunConfig, *, has_files: bool = True) -> None:
    """Refuse a run that lacks a setting, names an unknown task, or would write over another run.

    Args:
        config: The settings.
        has_files: Whether this process is the first rank, or starts the ranks: data, model and output folder are of
            its host.

    Raises:
        ConfigError: Lists every missing or wrong setting, or trackers that are not installed.
        CheckpointError: The checkpoint to resume from is not there.
        OutputError: The output folder holds something that must not be overwritten.
    """
    check_train(config, has_files=has_files)
    if has_files and (missing := missing_packages(config.report_to)):
        raise ConfigError(missing)
    problem = known_problem(config)
    against = None if problem is None else objective_problem(config, problem)
    if against is not None:
        raise ConfigError(against)
    if not has_files:
        return
    if config.resume_from_checkpoint not in (None, "auto"):
        named_checkpoint(str(config.resume_from_checkpoint))
    if config.lora_r is not None and is_adapter(str(config.model)):
        raise ConfigError(f"--model {config.model}: an adapter cannot have an adapter of its own: give the model "
                          "that it was merged into (--lora_merge), or train without --lora_r")  # fmt: skip
    check_occupied(config)
    if config.push_to_hub:
        check_login()


def known_problem(config: RunConfig) -> Problem | None:
    """The kind of task, as far as the settings alone tell.

    Raises:
        ConfigError: There is no such task.
    """
    if config.task is not None:
        return find_task(config.task).problem
    return None if config.problem_type == "auto" else config.problem_type
