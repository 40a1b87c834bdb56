"""Memory and start-up time of `fleetune train` on a large file of text pairs, with an empty and with a filled cache.

Writes the file, then trains a few updates on it with one and with two processes, each twice: the first run tokenises,
the second finds the tokens in the cache. Every run is a command of its own, watched from outside.
"""

from __future__ import annotations

import argparse
import csv
import dataclasses
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from benchmarks.memory_watch import MemoryWatch, ProcessPeak
from benchmarks.result_file import describe, print_result, shown_path, write_result
from benchmarks.summary import Spread, markdown_table
from fleetune.cli.demo import MODEL_PACKAGE, packaged_model
from fleetune.data.demo import Pair, paraphrase_pairs
from fleetune.report.record import RunRecord, read_record

DESCRIPTION = "Peak memory and start-up time of fleetune on a large file, with an empty and with a filled cache."
NUM_SEED_PAIRS = 4_000
SEED = 42
NUM_UPDATES = 3
PLAN_BEGINS = "ranks "
"""First word of the plan, which rank 0 prints when model and data are ready and training starts."""


@dataclass(frozen=True, kw_only=True)
class Measurement:
    """One run of the command."""

    repeat: int
    processes: int
    threads: int
    """Of each process."""
    cache: str
    """"empty": this run tokenises; "filled": it finds the tokens."""
    seconds_to_training: float
    """From the start of the command until model and data are ready."""
    seconds_to_first_update: float
    """The same and one update, of average duration."""
    seconds_in_all: float
    """Until the command ended, the model written."""
    phases: Mapping[str, float]
    """Seconds of each phase, from the run's own record."""
    tokens: int
    """Of the whole file."""
    peaks: Sequence[ProcessPeak]

    @property
    def largest_peak_bytes(self) -> int:
        """Peak of the process that needed most."""
        return max(peak.peak_rss_bytes for peak in self.peaks)


def main(words: Sequence[str] | None = None) -> None:
    """Measure, write the result and print the table."""
    options = parse_options(words)
    with tempfile.TemporaryDirectory(prefix="fleetune-bench-") as name:
        folder = Path(name)
        result = describe("data_memory", resolved_options(options))
        table = write_large_table(folder / "pairs.csv", options.rows)
        note = f"{options.rows:,} rows, {table.stat().st_size / 1e6:,.0f} MB; {NUM_UPDATES} updates a run"
        measurements = list(measure(options, table, folder))
        result |= {
            "notes": [note],
            "fleetune_settings": shown_settings(options),
            "file_bytes": table.stat().st_size,
            "measurements": [dataclasses.asdict(measurement) for measurement in measurements],
        }
    result["summary"] = summarise(measurements)
    print_result([note], memory_table(result["summary"]), write_result(result, options.output))


def parse_options(words: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.data_memory", description=DESCRIPTION)
    parser.add_argument("--rows", type=int, default=400_000, help="rows of the file (default: 400000)")
    parser.add_argument("--repeats", type=int, default=3, help="runs of each kind (default: 3)")
    parser.add_argument(
        "--processes", type=int, nargs="+", default=[1, 2], help="numbers of processes to try (default: 1 2)"
    )
    parser.add_argument("--model", type=Path, help=f"folder of the encoder; none: that of {MODEL_PACKAGE}")
    parser.add_argument("--output", type=Path, help="file to write; none: one with the date in benchmarks/results")
    options = parser.parse_args(words)
    if not 1 <= options.rows <= NUM_SEED_PAIRS**2 or options.repeats < 1:
        parser.error(f"--rows {options.rows} --repeats {options.repeats}: at least one of both is needed")
    return options


def resolved_options(options: argparse.Namespace) -> dict[str, object]:
    """The options that repeat this very measurement."""
    model = shown_path(options.model) if options.model else None
    return {"rows": options.rows, "repeats": options.repeats, "processes": options.processes, "model": model}


# ---- the file


def write_large_table(path: Path, num_rows: int) -> Path:
    """Write a CSV file of sentence pairs with a label; the same number of rows gives the same bytes."""
    with path.open("w", encoding="utf-8", newline="") as file:
        writer = csv.writer(file, lineterminator="\n")
        writer.writerow(field.name for field in dataclasses.fields(Pair))
        writer.writerows(dataclasses.astuple(pair) for pair in large_table(num_rows))
    return path


def large_table(num_rows: int) -> Iterator[Pair]:
    """Pairs, no two alike: the example corpus' sentences, each first one beside another second one in every pass.

    Real sentences in number of words and of tokens; what they mean together is of no use, nor of any here.
    """
    seeds = paraphrase_pairs(NUM_SEED_PAIRS, SEED)
    for row in range(num_rows):
        shift, first = divmod(row, NUM_SEED_PAIRS)
        second = seeds[(first + shift) % NUM_SEED_PAIRS]
        yield Pair(sentence1=seeds[first].sentence1, sentence2=second.sentence2, label=second.label)


# ---- the runs


def measure(options: argparse.Namespace, table: Path, folder: Path) -> Iterator[Measurement]:
    """All runs: of every repeat, for each number of processes, one with an empty cache and one after it."""
    for repeat in range(options.repeats):
        for processes in options.processes:
            with tempfile.TemporaryDirectory(dir=folder) as name:
                for cache in ("empty", "filled"):
                    output = Path(name) / f"out-{cache}"
                    settings = run_settings(options.model or packaged_model(), table) | {
                        "processes": processes,
                        "cache_dir": Path(name) / "cache",
                        "output_dir": output,
                    }
                    found = watch(settings, processes=processes, repeat=repeat, cache=cache)
                    print(told(found), flush=True)
                    yield found


def run_settings(model: Path, table: Path) -> dict[str, object]:
    """Settings that all runs have in common."""
    return {
        "model": model,
        "train_file": table,
        "max_steps": NUM_UPDATES,
        "do_eval": "false",
        "save_strategy": "no",
        "report_to": "none",
    }


def shown_settings(options: argparse.Namespace) -> dict[str, object]:
    """The same, without the folders of this machine."""
    model = Path(shown_path(options.model)) if options.model else Path(MODEL_PACKAGE)
    return {name: str(value) for name, value in run_settings(model, Path("pairs.csv")).items()}


def watch(settings: Mapping[str, object], *, processes: int, repeat: int, cache: str) -> Measurement:
    """Run `fleetune train`, take the times of what it says, and read its record.

    Raises:
        RuntimeError: The command failed; with what it printed.
    """
    flags = [word for name, value in settings.items() for word in (f"--{name}", str(value))]
    command, environment = [sys.executable, "-m", "fleetune", "train", *flags], os.environ | {"HF_HUB_OFFLINE": "1"}
    began, lines, training_at = time.perf_counter(), list[str](), 0.0
    process = subprocess.Popen(
        command, env=environment, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, encoding="utf-8"
    )
    with process, MemoryWatch(process.pid, "rank 0" if processes == 1 else "launcher") as memory:
        assert process.stdout is not None
        for line in process.stdout:
            lines.append(line)
            if line.startswith(PLAN_BEGINS):
                training_at = time.perf_counter() - began
    ended_at = time.perf_counter() - began
    record = read_record(Path(str(settings["output_dir"])))
    if process.returncode != 0 or record is None or training_at == 0.0:
        raise RuntimeError(f"{' '.join(command)}\nended with status {process.returncode}:\n{''.join(lines)}")
    return Measurement(
        repeat=repeat,
        processes=processes,
        threads=record.plan["threads"],
        cache=cache,
        seconds_to_training=training_at,
        seconds_to_first_update=training_at + update_seconds(record),
        seconds_in_all=ended_at,
        phases=record.seconds,
        tokens=record.plan["num_tokens"],
        peaks=memory.peaks(),
    )


def update_seconds(record: RunRecord) -> float:
    """Mean duration of an update."""
    return record.seconds["training"] / record.step


def told(found: Measurement) -> str:
    """One line on a run that has ended."""
    peaks = ", ".join(f"{peak.role} {peak.peak_rss_bytes / 1e6:,.0f} MB" for peak in found.peaks)
    return (
        f"repeat {found.repeat + 1}, {found.processes} process(es), cache {found.cache}: "
        f"training after {found.seconds_to_training:.1f} s; {peaks}"
    )


# ---- what is told of them


def summarise(measurements: Sequence[Measurement]) -> list[dict[str, Any]]:
    """Spreads over the repeats of each kind of run."""
    kinds = dict.fromkeys((m.processes, m.cache) for m in measurements)
    return [summary_of([m for m in measurements if (m.processes, m.cache) == kind]) for kind in kinds]


def summary_of(alike: Sequence[Measurement]) -> dict[str, Any]:
    """Spreads over runs of one kind."""
    spreads = {
        "seconds_to_training": Spread.of([m.seconds_to_training for m in alike]),
        "seconds_to_first_update": Spread.of([m.seconds_to_first_update for m in alike]),
        "largest_peak_bytes": Spread.of([m.largest_peak_bytes for m in alike]),
    }
    head: dict[str, Any] = {"processes": alike[0].processes, "cache": alike[0].cache}
    return head | {name: dataclasses.asdict(spread) for name, spread in spreads.items()}


def memory_table(summary: Sequence[Mapping[str, Any]]) -> str:
    """The summary as Markdown."""
    header = (
        "processes",
        "token cache",
        "until training starts, s",
        "until the first update, s",
        "largest process, MB",
    )
    return markdown_table(header, [memory_row(entry) for entry in summary])


def memory_row(entry: Mapping[str, Any]) -> list[str]:
    in_megabytes = {name: value / 1e6 for name, value in entry["largest_peak_bytes"].items()}
    return [
        str(entry["processes"]),
        entry["cache"],
        Spread(**entry["seconds_to_training"]).text(1),
        Spread(**entry["seconds_to_first_update"]).text(1),
        Spread(**in_megabytes).text(0),
    ]


if __name__ == "__main__":
    main()
