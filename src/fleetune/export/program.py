"""The program of `fleetune export`: write a finished model for another runtime, and compare what both compute."""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from fleetune.comm.ranks import joined_ranks
from fleetune.config import RunConfig
from fleetune.data.loading import load_data
from fleetune.data.tokens import TokenTable
from fleetune.errors import OutputError
from fleetune.evaluate.finished import FinishedModel, open_model
from fleetune.evaluate.predict import FloatArray
from fleetune.evaluate.score import metric_text, score
from fleetune.export.formats import FORMATS, Format, PlainForward, Signature, check_installed, signature_of
from fleetune.export.parity import compare, examples_to_follow, logits_of
from fleetune.files import disk_errors, write_files, write_json
from fleetune.hardware.pinning import Place
from fleetune.hardware.versions import read_versions
from fleetune.model.load import with_model_labels
from fleetune.model.quiet import quiet_transformers
from fleetune.report.terminal import open_terminal

CHECKED_ROWS = 32
RECORD = "export.json"


@dataclass(frozen=True, kw_only=True)
class ExportOptions:
    """What is to be written, and where."""

    format: str
    """A key of `FORMATS`."""
    output_dir: Path
    quantize: bool = False
    """Whether matrix products are to be of int8."""


def export_model(config: RunConfig, options: ExportOptions, place: Place | None = None) -> dict[str, Any]:
    """Write the model of a finished run in another format; what computes something else is not kept.

    Args:
        config: The settings; `model` is the folder of the finished run, and the validation data are what is compared.
        options: See `ExportOptions`.
        place: The part of the host that this process has taken, if it has.

    Returns:
        What `export.json` holds.

    Raises:
        ConfigError: Packages of the format are missing, or it cannot be quantised.
        ModelError: The model cannot be written so, or does not compute the same.
        OutputError: The folder holds something else, or cannot be written.
    """
    check_installed(options.format)
    check_folder(options.output_dir)
    terminal = open_terminal(True)
    with joined_ranks(None, config, terminal.say, threads=None if place is None else place.part.threads) as ranks:
        model = open_model(config, ranks, terminal, place)
        data = load_data(model.config, model.tokenizer, ranks, terminal, splits=["validation"], task=model.task)
        table = with_model_labels(next(iter(data.splits.values())), model.classifier)
        record: dict[str, Any] = {}
        write_files(options.output_dir, lambda folder: record.update(_write(model, options, table, folder)))
    terminal.say(f"{FORMATS[options.format].file} is in {options.output_dir}, with configuration and tokenizer")
    return record


def check_folder(folder: Path) -> None:
    """Refuse to write among files of something else.

    Raises:
        OutputError: There are some.
    """
    if folder.is_dir() and any(folder.iterdir()) and not (folder / RECORD).is_file():
        raise OutputError(f"--output_dir {folder}: it is not empty and holds no export of fleetune; choose another")


def _write(model: FinishedModel, options: ExportOptions, table: TokenTable, folder: Path) -> dict[str, Any]:
    """Fill a folder, and give what there is to tell of it."""
    chosen, classifier, say = FORMATS[options.format], model.classifier, model.terminal.say
    signature, padding = signature_of(classifier, model.tokenizer), model.tokenizer.pad_token_id or 0
    with disk_errors(folder):
        chosen.write(PlainForward(classifier.hugging_face, signature), examples_to_follow(signature, padding), folder)
    sample = dataclasses.replace(table.head(CHECKED_ROWS))
    parity = compare(chosen.open(folder, signature), sample, classifier, signature, padding)
    say(
        f"logits of {parity.num_sequences} rows differ by up to {parity.largest_difference:.2g} "
        f"({parity.limit:.2g} is tolerated)"
    )
    parity.require(chosen.file)
    with quiet_transformers():
        classifier.hugging_face.config.save_pretrained(folder)
        model.tokenizer.save_pretrained(folder)
    record = {
        "format": options.format, "file": chosen.file, "model": model.config.model,
        "inputs": signature.inputs, "outputs": signature.outputs, "rows_compared": parity.num_sequences,
        "largest_difference": parity.largest_difference, "tolerated": parity.limit, "versions": read_versions(),
    }  # fmt: skip
    if options.quantize:
        record["int8"] = _quantize(model, chosen, table, folder, signature)
    write_json(folder / RECORD, record)
    return record


def _quantize(
    model: FinishedModel, chosen: Format, table: TokenTable, folder: Path, signature: Signature
) -> dict[str, Any]:  # fmt: skip
    """Make it int8, and say what that costs on the validation data."""
    padding, say = model.tokenizer.pad_token_id or 0, model.terminal.say
    before = _scores(model, model.predictor.logits(table), table)
    size = _size(folder, chosen)
    chosen.quantize(folder)
    logits = logits_of(chosen.open(folder, signature), table, model.classifier, signature, padding)
    after = _scores(model, logits, table)
    say(f"float32  {metric_text(before)}")
    say(f"int8     {metric_text(after)}  ({table.num_examples:,} rows of {table.split})")
    say(f"{chosen.file}: {size / 1e6:,.1f} MB in float32, {_size(folder, chosen) / 1e6:,.1f} MB in int8")
    return {"rows": table.num_examples, "float32": before, "int8": after}


def _scores(model: FinishedModel, logits: FloatArray | None, table: TokenTable) -> dict[str, float | None]:
    assert logits is not None
    return score(logits, table, model.outputs)


def _size(folder: Path, chosen: Format) -> int:
    stem = chosen.file.rpartition(".")[0]
    return sum(path.stat().st_size for path in folder.glob(f"{stem}*"))
