"""`fleetune predict`."""

from __future__ import annotations

import os
import sys
from collections.abc import Sequence
from pathlib import Path

from fleetune.cli.arguments import add_dry_run, make_parser, parse, tell_notices
from fleetune.cli.asking import PREDICTING, check_output, model_to_ask, of_finished_run, run_ranks
from fleetune.cluster.rank import RankInfo, read_rank, speaks_for_all
from fleetune.errors import ConfigError
from fleetune.hardware.pinning import Place

DESCRIPTION = """Predictions of a finished run for a file of texts, in the file's order, one JSON object a line. The
file may be of any size. A command that was ended goes on where it was when it is given again."""


def run(words: Sequence[str]) -> int:
    """Predict, on this process or on ranks started for it."""
    parser = add_dry_run(make_parser("predict", DESCRIPTION, PREDICTING))
    parser.add_argument("model_folder", help="output folder of a run, or any folder of a classifier")
    parser.add_argument("--input", metavar="FILE", required=True, help="tsv, csv, json, jsonl or parquet file of texts")
    parser.add_argument("--output", metavar="FILE", required=True, help="JSONL file for the predictions")
    parsed = parse(parser, words, ("model_folder", "input", "output", "dry_run"), of_finished_run, model_to_ask)
    source, output = Path(parsed.extra["input"]), Path(parsed.extra["output"])
    if speaks_for_all(os.environ):
        check_files(source, output)
    tell_notices(parsed)

    def be_rank(info: RankInfo | None, place: Place) -> None:
        from fleetune.evaluate.program import predict_rank

        predict_rank(parsed.config, info, source, output, place)

    own = [parsed.extra["model_folder"], "--input", str(source), "--output", str(output)]
    is_done = False
    try:
        status = run_ranks("predict", parsed, own, be_rank)
        is_done = status == 0
    finally:
        if not is_done and _speaks():
            tell_what_is_kept(output)
    return status


def _speaks() -> bool:
    """Whether no other process of the run tells the user how it ended."""
    info = read_rank(os.environ)
    return info is None or (info.rank == 0 and not info.is_ours)


def tell_what_is_kept(output: Path) -> None:
    """Say how to go on with predictions that were not finished, if some were made."""
    from fleetune.evaluate.growing import partial_of, read_progress

    if (progress := read_progress(output)) is not None and progress.num_rows:
        print(
            f"predictions up to row {progress.last_row:,} are kept in {partial_of(output)}: the same command goes on "
            "behind it",
            file=sys.stderr,
            flush=True,
        )


def check_files(source: Path, output: Path) -> None:
    """Refuse, before the work, files that cannot be read or written.

    Raises:
        ConfigError: Says which.
    """
    if not source.is_file():
        raise ConfigError(f"--input {source}: there is no such file")
    if output.exists() and source.samefile(output):
        raise ConfigError(f"--output {output}: it is the input file")
    check_output(output)
