"""What freezing, low-rank updates and recomputed layers save: memory of a rank, bytes of an update, time of an update.

Every run is a `fleetune train` of its own, of 2 ranks on this machine, that trains on the same texts in the same
batches; the ways to train take turns. Peaks are read from outside, bytes and time from the record of the run.
"""

from __future__ import annotations

import argparse
import dataclasses
import os
import subprocess
import sys
import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from benchmarks.memory_watch import MemoryWatch
from benchmarks.models import (
    add_shared_options,
    kernels_in_use,
    model_folder,
    settle_shared_options,
    shown_model,
    shown_shared_options,
)
from benchmarks.result_file import describe, print_result, write_result
from benchmarks.rotation import rotated
from benchmarks.summary import Spread, markdown_table, paired_ratios
from benchmarks.texts import MRPC_FOLDER, write_pairs
from benchmarks.train_memory import BATCH_SIZE, chosen_batches, fleetune_settings
from fleetune.report.record import read_record

DESCRIPTION = "Memory, bytes and time of an update, training all of a model, parts of it, or an adapter beside it."
NAME = "tuning"
RANKS = 2
FULL = "all weights"


@dataclass(frozen=True, kw_only=True)
class Measurement:
    """One run."""

    arm: str
    repeat: int
    peak_rss_bytes: int
    """Most memory that the larger of the ranks had resident, mapped files and shared libraries included."""
    gradient_bytes: float
    """Of a rank's gradients, added up over ranks in an update; its mean."""
    seconds: float
    """Of an update; their mean."""
    losses: tuple[float, ...]
    """Of the first and the last update: that all of them train."""


def main(words: Sequence[str] | None = None) -> None:
    """Measure, write the result and print the table."""
    options = parse_options(words)
    with tempfile.TemporaryDirectory(prefix="fleetune-bench-") as name:
        result = describe(NAME, resolved_options(options))
        model = options.model or model_folder(options.size, Path(name) / "model")
        batches = chosen_batches(options, model, Path(name))
        train_file = write_pairs(Path(name) / "train.csv", batches.in_file_order())
        arms, measurements = arms_of(model), []
        for repeat in range(options.repeats):
            for arm in rotated(list(arms), repeat):
                measurements.append(measure(options, arm, arms[arm], repeat, model, train_file))
                print(told(measurements[-1]), flush=True)
    notes = [
        f"{shown_model(options.model, options.size)}; {len(batches)} updates of {BATCH_SIZE} pairs, "
        f"{batches.tokens.min():,} to {batches.tokens.max():,} tokens, longest pair {batches.longest}; "
        f"{RANKS} ranks of {options.threads} threads",
        kernels_in_use(),
    ]
    result |= {
        "notes": notes,
        "arms": arms,
        "measurements": [dataclasses.asdict(measurement) for measurement in measurements],
        "summary": summarise(measurements),
    }
    print_result(notes, tuning_table(result["summary"]), write_result(result, options.output))


def arms_of(model: Path) -> dict[str, dict[str, str]]:
    """The ways to train, with their settings: the lower half of the layers is frozen, where some are."""
    from transformers import AutoConfig

    half = max(1, AutoConfig.from_pretrained(model).num_hidden_layers // 2)
    recompute, lora = {"gradient_checkpointing": "true"}, {"lora_r": "8"}
    return {
        FULL: {},
        "--freeze embeddings": {"freeze": "embeddings"},
        f"--freeze embeddings,layers:{half}": {"freeze": f"embeddings,layers:{half}"},
        "--lora_r 8": lora,
        "--lora_r 8 --lora_target_modules all-linear": lora | {"lora_target_modules": "all-linear"},
        "--gradient_checkpointing": recompute,
        "--lora_r 8 --gradient_checkpointing": lora | recompute,
    }


def parse_options(words: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog=f"python -m benchmarks.{NAME}", description=DESCRIPTION)
    parser.add_argument("--repeats", type=int, default=5, help="runs of each way to train (default: 5)")
    parser.add_argument("--steps", type=int, default=40, help="updates of a run (default: 40)")
    parser.add_argument("--threads", type=int, default=1, help="threads of a rank (default: 1)")
    add_shared_options(parser)
    options = parser.parse_args(words)
    if options.repeats < 1 or options.steps < 2:
        parser.error(f"--repeats {options.repeats} --steps {options.steps}: 1 repeat of 2 steps or more is needed")
    settle_shared_options(parser, options, MRPC_FOLDER)
    return options


def resolved_options(options: argparse.Namespace) -> dict[str, object]:
    """The options that repeat this very measurement."""
    names = ("repeats", "steps", "threads")
    return {name: getattr(options, name) for name in names} | shown_shared_options(options)


# ---- the runs


def measure(options: argparse.Namespace, arm: str, changes: Mapping[str, str], repeat: int, model: Path,
            train_file: Path) -> Measurement:  # fmt: skip
    """Train once, with the memory of the ranks watched.

    Raises:
        RuntimeError: The run failed; with what it printed.
    """
    with tempfile.TemporaryDirectory(prefix="fleetune-bench-") as name:
        folder = Path(name)
        settings = fleetune_settings(options) | {
            "processes": RANKS, "per_device_train_batch_size": BATCH_SIZE // RANKS, "scale_lr": "none",
            "logging_steps": 1, "model": model, "train_file": train_file, "output_dir": folder / "out",
            "cache_dir": folder / "cache", **changes,
        }  # fmt: skip
        words = [word for key, value in settings.items() for word in (f"--{key}", str(value))]
        with (folder / "told.txt").open("w", encoding="utf-8") as file:
            process = subprocess.Popen(
                [sys.executable, "-m", "fleetune", "train", *words], stdout=file, stderr=subprocess.STDOUT,
                env=os.environ | {"HF_HUB_OFFLINE": "1"},
            )  # fmt: skip
            with process, MemoryWatch(process.pid, "launcher") as memory:
                process.wait()
        record = read_record(folder / "out")
        if process.returncode != 0 or record is None:
            raise RuntimeError(f"{arm}: ended with status {process.returncode}:\n{(folder / 'told.txt').read_text()}")
        losses = losses_in(folder / "out")
    return Measurement(
        arm=arm,
        repeat=repeat,
        peak_rss_bytes=max(peak.peak_rss_bytes for peak in memory.peaks() if peak.role.startswith("rank")),
        gradient_bytes=record.throughput["gradient_bytes_per_update"],
        seconds=record.seconds["training"] / record.step,
        losses=(losses[0], losses[-1]),
    )


def losses_in(output: Path) -> list[float]:
    """The loss of every update of a run."""
    from transformers import TrainerState

    history: list[dict[str, Any]] = TrainerState.load_from_json(str(output / "trainer_state.json")).log_history
    return [entry["loss"] for entry in history if "loss" in entry]


# ---- what is told of them


def told(found: Measurement) -> str:
    """One line on a run that has ended."""
    return (f"repeat {found.repeat + 1}, {found.arm}: peak {found.peak_rss_bytes / 1e6:,.0f} MB, "
            f"{found.gradient_bytes / 1e6:,.2f} MB and {1e3 * found.seconds:,.0f} ms an update")  # fmt: skip


_QUANTITIES = ("peak_rss_bytes", "gradient_bytes", "seconds")


def summarise(measurements: Sequence[Measurement]) -> dict[str, Any]:
    """Each way's memory, bytes and time, and these as shares of those of all weights in the same repeat."""
    return {
        arm: {name: dataclasses.asdict(Spread.of(values_of(measurements, arm, name))) for name in _QUANTITIES}
        | {
            f"{name}_share": dataclasses.asdict(
                Spread.of(paired_ratios(values_of(measurements, arm, name), values_of(measurements, FULL, name)))
            )
            for name in _QUANTITIES
        }
        for arm in sorted({m.arm for m in measurements}, key=[m.arm for m in measurements].index)
    }


def values_of(measurements: Sequence[Measurement], arm: str, name: str) -> list[float]:
    """A quantity of a way to train, by repeat."""
    mine = sorted((m for m in measurements if m.arm == arm), key=lambda measurement: measurement.repeat)
    return [getattr(measurement, name) for measurement in mine]


def tuning_table(summary: Mapping[str, Any]) -> str:
    """The summary as Markdown."""
    header = ("what learns", "peak of a rank, MB", "share", "bytes of an update, MB", "share", "update, ms", "share")
    return markdown_table(header, [row_of(arm, entry) for arm, entry in summary.items()])


def row_of(arm: str, entry: Mapping[str, Any]) -> list[str]:
    cells = [arm if arm == FULL else f"`{arm}`"]
    for name, unit, digits in zip(_QUANTITIES, (1e-6, 1e-6, 1e3), (0, 2, 1), strict=True):
        spread = Spread(**{key: value * unit for key, value in entry[name].items()})
        cells += [spread.text(digits), f"{entry[f'{name}_share']['median']:.2f}"]
    return cells


if __name__ == "__main__":
    main()
