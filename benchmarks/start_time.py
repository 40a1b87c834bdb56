"""From the command to the end of the first update on several hosts of a lab: `fleetune train --hosts` for one update.

The time is that of the whole command, so it has the end of the run in it, too: the model written, every process ended.
Needs root. All hosts share this machine's cores, so what each of them imports and reads is paid for as often.
"""

from __future__ import annotations

import argparse
import sys
import tempfile
import time
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

import fleetune
from benchmarks.models import (
    FLOAT32_SETTINGS,
    add_shared_options,
    model_folder,
    settle_shared_options,
    shown_model,
    shown_shared_options,
)
from benchmarks.result_file import describe, print_result, write_result
from benchmarks.summary import Spread, markdown_table
from benchmarks.texts import MRPC_FOLDER, pair_settings
from lab import Lab

DESCRIPTION = "Seconds from `fleetune train --hosts ...` to the end of a run of one update."


def main(words: Sequence[str] | None = None) -> None:
    """Measure, write the result and print the table."""
    options = parse_options(words)
    result: dict[str, Any] = describe("start_time", resolved_options(options)) | {"seconds": {}}
    with tempfile.TemporaryDirectory(prefix="fleetune-start-", dir="/var/tmp") as name:  # which all hosts see
        settings = run_settings(options, Path(name))
        for hosts in options.hosts:
            with Lab.up(hosts, with_ssh=True) as lab:
                times = [measure(lab, settings, Path(name)) for _ in range(options.rounds + 1)]
            result["seconds"][str(hosts)] = times[1:]  # the first one tokenises
            print(f"{hosts} hosts: {', '.join(f'{t:.1f}' for t in times)} s", flush=True)
    result["summary"] = {hosts: asdict(Spread.of(times)) for hosts, times in result["seconds"].items()}
    rows = [[hosts, Spread(**spread).text(1)] for hosts, spread in result["summary"].items()]
    note = f"{shown_model(options.model, options.size)}, one update, {options.rounds} rounds after one that tokenises"
    print_result([note], markdown_table(["hosts", "seconds"], rows), write_result(result, options.output))


def parse_options(words: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.start_time", description=DESCRIPTION)
    parser.add_argument("--hosts", type=int, nargs="+", default=[1, 4], help="numbers of hosts (default: 1 4)")
    parser.add_argument("--rounds", type=int, default=3, help="runs on each number (default: 3)")
    add_shared_options(parser)
    options = parser.parse_args(words)
    settle_shared_options(parser, options, MRPC_FOLDER)
    if reason := Lab.unavailable(with_ssh=True):
        parser.error(reason)
    return options


def resolved_options(options: argparse.Namespace) -> dict[str, object]:
    """The options that repeat this very measurement."""
    return {"hosts": options.hosts, "rounds": options.rounds} | shown_shared_options(options)


def run_settings(options: argparse.Namespace, folder: Path) -> dict[str, Any]:
    return {
        "model": options.model or model_folder(options.size, folder / "model"), "cache_dir": folder / "cache",
        "max_steps": 1, "scale_lr": "none", "do_eval": "false", "save_strategy": "no", "report_to": "none",
        "output_dir": folder / "out", "overwrite_output_dir": "true", "threads": 1,
        **FLOAT32_SETTINGS, **pair_settings(options.data_dir, folder),
    }  # fmt: skip


def measure(lab: Lab, settings: dict[str, Any], folder: Path) -> float:
    """Seconds of one run, started on the first host.

    Raises:
        subprocess.CalledProcessError: It failed.
    """
    words = [word for key, value in settings.items() for word in (f"--{key}", str(value))]
    names = ",".join(host.name for host in lab)
    command = [sys.executable, "-m", "fleetune", "train", "--hosts", names, *words]
    environ = {"HF_HUB_OFFLINE": "1", "PYTHONPATH": str(Path(fleetune.__file__).parents[1])}
    began = time.perf_counter()
    lab.hosts[0].run(command, env=environ, cwd=folder, timeout=300).check_returncode()
    return time.perf_counter() - began


if __name__ == "__main__":
    main()
