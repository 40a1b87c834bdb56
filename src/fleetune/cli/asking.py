"""What the commands that ask a finished run share: its settings to start from, and ranks to run on."""

from __future__ import annotations

import dataclasses
import os
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from fleetune.cli.arguments import CLUSTER, Parsed
from fleetune.cluster.rank import RankInfo, read_rank
from fleetune.cluster.start import plan_ranks, silence_connections, start_ranks
from fleetune.config import RunConfig
from fleetune.errors import ConfigError
from fleetune.hardware.pinning import Place, take_place
from fleetune.report.record import read_record

SOURCE = frozenset(
    {"task", "data_dir", "train_file", "validation_file", "test_file", "dataset_name", "dataset_config_name"}
)
"""Settings that say which data are meant: giving one replaces all those of the run."""

READING = frozenset({
    "text_column_names", "label_column_name", "label_delimiter", "problem_type", "version_2_with_negative", "encoding",
    "on_bad_row", "max_seq_length", "doc_stride", "n_best_size", "max_answer_length", "null_score_diff_threshold",
    "cache_dir", "tokenizer_name", "trust_remote_code",
})  # fmt: skip
"""Settings of the run that also hold for new data."""

RUNNING = frozenset({
    "model_revision", "per_device_eval_batch_size", "bf16", "base_model", "processes", "threads", "ddp_timeout",
    *CLUSTER,
})  # fmt: skip
EVALUATING = SOURCE | READING | RUNNING | {"max_eval_samples", "overwrite_cache"}
PREDICTING = READING - {"label_column_name", "label_delimiter", "problem_type"} | RUNNING | {"max_predict_samples"}
EXPORTING = SOURCE | READING | {"model_revision", "threads", "max_eval_samples", "overwrite_cache"}
"""Settings that the three commands take."""


def of_finished_run(extra: dict[str, Any], given: frozenset[str]) -> dict[str, Any]:
    """The settings of the run whose folder is the first argument, as far as they hold for other data."""
    folder = Path(extra["model_folder"])
    record = read_record(folder)
    kept = READING if given & SOURCE else READING | SOURCE - {"train_file"}
    told = {} if record is None else {k: v for k, v in record.config.items() if k in kept}
    if "text_column_names" in told and given & SOURCE:
        told.pop("text_column_names")  # the record's task knows them
    known = {f.name for f in dataclasses.fields(RunConfig)}
    return {k: v for k, v in told.items() if k in known and v is not None}


def model_to_ask(extra: dict[str, Any]) -> dict[str, Any]:
    """The first argument as the model, whatever a file of settings names: it may be the file of the run."""
    return {"model": extra["model_folder"]}


def check_output(output: Path) -> None:
    """Refuse, before the work, an output file that cannot be one.

    Raises:
        ConfigError: It is a folder.
    """
    if output.is_dir():
        raise ConfigError(f"--output {output}: it is a folder, a file is expected")


def run_ranks(
    command: str, parsed: Parsed, words: Sequence[str], be_rank: Callable[[RankInfo | None, Place], None]
) -> int:  # fmt: skip
    """Do the work on this process, or start the ranks that do.

    Args:
        command: Name of the command.
        parsed: The command line; every rank gets its settings.
        words: The command's own arguments, for the ranks.
        be_rank: The work of one rank.

    Returns:
        The exit status.
    """
    config = parsed.config
    status = start_ranks([command, *words], config, dry_run=parsed.extra.get("dry_run", False))
    if status is not None:
        return status
    info = read_rank(os.environ)
    plan = plan_ranks(info, processes=config.processes, threads=config.threads)
    silence_connections()
    be_rank(info, take_place(plan, 0 if info is None else info.local_rank))  # which loads torch
    return 0
