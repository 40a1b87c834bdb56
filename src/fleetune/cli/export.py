"""`fleetune export`."""

from __future__ import annotations

import os
from collections.abc import Sequence
from pathlib import Path

from fleetune.cli.arguments import make_parser, parse, tell_notices
from fleetune.cli.asking import EXPORTING, model_to_ask, of_finished_run
from fleetune.cluster.rank import read_rank
from fleetune.cluster.start import plan_ranks
from fleetune.config.run import check_source
from fleetune.errors import ConfigError
from fleetune.hardware.pinning import take_place

DESCRIPTION = """A finished model as a file for another runtime, for any batch size and length. Rows of the validation
data go through both; a file that computes something else is not kept."""
NAMES = ("onnx", "openvino", "torch")
OWN = ("model_folder", "format", "output_dir", "quantize")


def run(words: Sequence[str]) -> int:
    """Export, on this process."""
    parser = make_parser("export", DESCRIPTION, EXPORTING)
    parser.add_argument("model_folder", help="output folder of a run, or any folder of a classifier")
    parser.add_argument(
        "--format", required=True, metavar="|".join(NAMES), choices=NAMES,
        help="onnx (onnxruntime), openvino, or torch (a program of torch.export)",
    )  # fmt: skip
    parser.add_argument(
        "--output_dir", "--output-dir", metavar="FOLDER",
        help="where to write; none: a folder of the format's name in the run's",
    )  # fmt: skip
    parser.add_argument(
        "--quantize", metavar="int8", choices=["int8"],
        help="matrix products of int8, scaled batch by batch; tells the validation data's metrics before and after",
    )  # fmt: skip
    parsed = parse(parser, words, OWN, of_finished_run, model_to_ask)
    if read_rank(os.environ) is not None:
        raise ConfigError("fleetune export is for one process: start it without a launcher")
    if problems := check_source(parsed.config, needs_train=False, has_files=True):
        raise ConfigError(problems)
    folder = Path(parsed.extra["model_folder"])
    output = parsed.extra.get("output_dir")
    if output is None and not folder.is_dir():
        raise ConfigError(f"--output_dir is missing: {folder} is no folder to write into")
    tell_notices(parsed)
    place = take_place(plan_ranks(None, processes=1, threads=parsed.config.threads), 0)  # before torch is loaded
    from fleetune.export.program import ExportOptions, export_model

    options = ExportOptions(
        format=parsed.extra["format"],
        output_dir=folder / parsed.extra["format"] if output is None else Path(output),
        quantize=parsed.extra.get("quantize") is not None,
    )
    export_model(parsed.config, options, place)
    return 0
