"""The programs of `fleetune evaluate` and `fleetune predict`: a finished run, new data, one or several ranks."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from fleetune.cluster.rank import RankInfo
from fleetune.comm.ranks import joined_ranks
from fleetune.config import RunConfig
from fleetune.data.loading import load_data
from fleetune.data.tokens import TokenTable
from fleetune.evaluate.finished import FinishedModel, open_model
from fleetune.evaluate.predict import FloatArray
from fleetune.evaluate.score import evaluate_splits, metric_text, write_predictions
from fleetune.evaluate.stream import predict_file
from fleetune.files import write_files, write_json
from fleetune.hardware.pinning import Place
from fleetune.model.load import with_model_labels
from fleetune.report.terminal import open_terminal


def evaluate_rank(
    config: RunConfig,
    info: RankInfo | None,
    output: Path | None,
    place: Place | None = None,
    output_dir: Path | None = None,
) -> dict[str, Any]:
    """Metrics of a model on the validation splits of the settings, the same on every rank.

    Args:
        config: The settings; `model` is the folder of the finished run.
        info: Who this rank is.
        output: File for the metrics as JSON; None writes none.
        place: The part of the host that this rank has taken, if it has.
        output_dir: Folder for metrics and predictions, in the files that training leaves; None writes none.
    """
    terminal = open_terminal(info is None or info.rank == 0)
    with joined_ranks(info, config, terminal.say, threads=None if place is None else place.part.threads) as ranks:
        model = open_model(config, ranks, terminal, place)
        data = load_data(model.config, model.tokenizer, ranks, model.terminal, splits=["validation"], task=model.task)
        for notice in data.notices:
            model.terminal.say(notice)
        tables = {name: with_model_labels(table, model.classifier) for name, table in data.splits.items()}
        kept: dict[str, FloatArray] = {}
        with model.terminal.bar("evaluating", sum(len(t) for t in tables.values()), "examples") as bar:
            results = evaluate_splits(model.predictor, tables, model.outputs, bar.move_to, kept.__setitem__)
        model.terminal.say(metric_text(results))
        if output is not None:
            ranks.on_first(lambda: write_json(output, results))
        if output_dir is not None:
            ranks.on_first(lambda: write_evaluation(output_dir, model, results, tables, kept))
            model.terminal.say(f"metrics and predictions are in {output_dir}")
    return results


def write_evaluation(
    folder: Path, model: FinishedModel, results: dict[str, Any], tables: dict[str, TokenTable],
    logits: dict[str, FloatArray],
) -> None:  # fmt: skip
    """Write the files that training writes of an evaluation, each whole or not at all.

    Raises:
        OutputError: The disk is full or cannot be written.
    """

    def write(unfinished: Path) -> None:
        write_json(unfinished / "eval_results.json", results)
        for split, values in logits.items():
            write_predictions(unfinished / f"predictions_{split}.jsonl", values, tables[split], model.outputs)
            model.outputs.write_files(unfinished, split, values, tables[split])

    write_files(folder, write)


def predict_rank(
    config: RunConfig, info: RankInfo | None, source: Path, output: Path, place: Place | None = None
) -> None:
    """Predict every row of a file, in the file's order; see `predict_file`.

    Args:
        config: The settings; `model` is the folder of the finished run.
        info: Who this rank is.
        source: File of texts; labels in it are not looked at.
        output: File for the predictions, one JSON object a line.
        place: The part of the host that this rank has taken, if it has.
    """
    terminal = open_terminal(info is None or info.rank == 0)
    with joined_ranks(info, config, terminal.say, threads=None if place is None else place.part.threads) as ranks:
        predict_file(open_model(config, ranks, terminal, place), source, output)
