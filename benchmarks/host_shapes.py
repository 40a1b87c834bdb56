"""One host, shared out to ranks in several ways: `fleetune train` as it is, the same work each time, interleaved.

Each round trains with every shape (ranks x threads) in an order that rotates, for some updates of the same global
batch. What counts is the speed that the run's record tells, without its start.
"""

from __future__ import annotations

import argparse
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

from benchmarks.models import (
    FLOAT32_SETTINGS,
    add_shared_options,
    model_folder,
    settle_shared_options,
    shown_model,
    shown_shared_options,
)
from benchmarks.result_file import describe, print_result, write_result
from benchmarks.rotation import rotated
from benchmarks.summary import Spread, markdown_table, paired_ratios
from benchmarks.texts import MRPC_FOLDER, pair_settings
from fleetune.hardware.host import usable_cores
from fleetune.report.record import read_record

DESCRIPTION = "Samples per second of fleetune train on one host, by the number of ranks that share its cores."
GLOBAL_BATCH = 32


def main(words: Sequence[str] | None = None) -> None:
    """Measure, write the result and print the table."""
    options = parse_options(words)
    result = describe("host_shapes", resolved_options(options)) | {"rounds": []}
    with tempfile.TemporaryDirectory(prefix="fleetune-shapes-") as name:
        settings = run_settings(options, Path(name))
        for number in range(options.rounds):
            speeds = {shown(p): measure(options, p, settings, Path(name)) for p in rotated(options.processes, number)}
            result["rounds"].append(speeds)
            print(speeds, flush=True)
    result["summary"] = summarise(result["rounds"], shown(options.processes[0]))
    note = f"{shown_model(options.model, options.size)}, {GLOBAL_BATCH} pairs an update, {usable_cores()} cores"
    print_result([note], table(result["summary"]), write_result(result, options.output))


def parse_options(words: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.host_shapes", description=DESCRIPTION)
    parser.add_argument("--processes", type=int, nargs="+", default=[1, 2], help="ranks of each shape (default: 1 2)")
    parser.add_argument("--rounds", type=int, default=3, help="runs of each shape (default: 3)")
    parser.add_argument("--steps", type=int, default=25, help="updates of a run (default: 25)")
    add_shared_options(parser)
    options = parser.parse_args(words)
    settle_shared_options(parser, options, MRPC_FOLDER)
    if any(GLOBAL_BATCH % p or p > usable_cores() for p in options.processes):
        parser.error(
            f"--processes {options.processes}: each must divide {GLOBAL_BATCH}, and have a core for every rank"
        )
    return options


def resolved_options(options: argparse.Namespace) -> dict[str, object]:
    """The options that repeat this very measurement."""
    names = ("processes", "rounds", "steps")
    return {name: getattr(options, name) for name in names} | shown_shared_options(options)


def run_settings(options: argparse.Namespace, folder: Path) -> dict[str, Any]:
    return {
        "model": options.model or model_folder(options.size, folder / "model"), "cache_dir": folder / "cache",
        "max_steps": options.steps, "scale_lr": "none", "do_eval": "false", "save_strategy": "no", "report_to": "none",
        **FLOAT32_SETTINGS, **pair_settings(options.data_dir, folder),
    }  # fmt: skip


def shown(processes: int) -> str:
    """The name of a shape."""
    return f"{processes} x {max(1, usable_cores() // processes)}"


def measure(options: argparse.Namespace, processes: int, settings: dict[str, Any], folder: Path) -> float:
    """Samples a second of one run.

    Raises:
        subprocess.CalledProcessError: It failed.
    """
    output = folder / "out"
    chosen = {**settings, "processes": processes, "per_device_train_batch_size": GLOBAL_BATCH // processes,
              "output_dir": output, "overwrite_output_dir": "true"}  # fmt: skip
    words = [word for key, value in chosen.items() for word in (f"--{key}", str(value))]
    subprocess.run([sys.executable, "-m", "fleetune", "train", *words], check=True, stdout=subprocess.DEVNULL)
    record = read_record(output)
    assert record is not None
    return float(record.throughput["samples_per_s"])


def summarise(rounds: Sequence[dict[str, float]], reference: str) -> list[dict[str, Any]]:
    """For each shape its speed, and how many times as fast as the first it is in the same round."""
    speeds = {shape: [r[shape] for r in rounds] for shape in sorted(rounds[0])}
    return [
        {"shape": shape, "samples_per_s": asdict(Spread.of(own)),
         "times_as_fast": asdict(Spread.of(paired_ratios(own, speeds[reference])))}
        for shape, own in speeds.items()
    ]  # fmt: skip


def table(summary: Sequence[dict[str, Any]]) -> str:
    """The summary for people."""
    rows = [
        [line["shape"], Spread(**line["samples_per_s"]).text(1), Spread(**line["times_as_fast"]).text(2)]
        for line in summary
    ]
    return markdown_table(["ranks x threads", "samples/s", "times as fast"], rows)


if __name__ == "__main__":
    main()
