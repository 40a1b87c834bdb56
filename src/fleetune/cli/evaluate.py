"""`fleetune evaluate`."""

from __future__ import annotations

import os
from collections.abc import Sequence
from pathlib import Path

from fleetune.cli.arguments import add_dry_run, make_parser, parse, tell_notices
from fleetune.cli.asking import EVALUATING, check_output, model_to_ask, of_finished_run, run_ranks
from fleetune.cluster.rank import RankInfo, speaks_for_all
from fleetune.config.run import check_source
from fleetune.errors import ConfigError
from fleetune.hardware.pinning import Place

DESCRIPTION = """Metrics of a finished run on labelled data. Which data and columns, where not given, is taken from
the run's record."""


def run(words: Sequence[str]) -> int:
    """Evaluate, on this process or on ranks started for it."""
    parser = add_dry_run(make_parser("evaluate", DESCRIPTION, EVALUATING))
    parser.add_argument("model_folder", help="output folder of a run, or any folder of a classifier")
    parser.add_argument("--output", metavar="FILE", help="write the metrics to this JSON file too")
    parser.add_argument(
        "--output_dir", "--output-dir", metavar="FOLDER",
        help="write metrics and predictions there, in the files that training leaves; of questions those of run_qa.py",
    )  # fmt: skip
    parsed = parse(parser, words, ("model_folder", "output", "output_dir", "dry_run"), of_finished_run, model_to_ask)
    problems = check_source(parsed.config, needs_train=False, has_files=speaks_for_all(os.environ))
    if problems:
        raise ConfigError(problems)
    output, output_dir = parsed.extra.get("output"), parsed.extra.get("output_dir")
    if output and speaks_for_all(os.environ):
        check_output(Path(output))
    if output_dir and Path(output_dir).is_file():
        raise ConfigError(f"--output_dir {output_dir}: it is a file, a folder is expected")
    tell_notices(parsed)
    own = [parsed.extra["model_folder"], *(["--output", output] if output else [])]
    own += ["--output_dir", output_dir] if output_dir else []

    def be_rank(info: RankInfo | None, place: Place) -> None:
        from fleetune.evaluate.program import evaluate_rank

        evaluate_rank(
            parsed.config, info, Path(output) if output else None, place, Path(output_dir) if output_dir else None
        )

    return run_ranks("evaluate", parsed, own, be_rank)
