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
    parsed = parse(parser, words, ("model_folder", "output", "dry_run"), of_finished_run, model_to_ask)
    problems = check_source(parsed.config, needs_train=False, has_files=speaks_for_all(os.environ))
    if problems:
        raise ConfigError(problems)
    output = parsed.extra.get("output")
    if output and speaks_for_all(os.environ):
        check_output(Path(output))
    tell_notices(parsed)
    own = [parsed.extra["model_folder"], *(["--output", output] if output else [])]

    def be_rank(info: RankInfo | None, place: Place) -> None:
        from fleetune.evaluate.program import evaluate_rank

        evaluate_rank(parsed.config, info, Path(output) if output else None, place)

    return run_ranks("evaluate", parsed, own, be_rank)
