"""What it costs to know where the time goes: the counters that are always on, against the step that they count.

A short run of two ranks leaves its trace, which has a span for every time that a part was come to; what one of these
costs is measured by itself, many times over. Their product is what a step pays, whatever else the machine does.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
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
from benchmarks.summary import markdown_table
from benchmarks.texts import MRPC_FOLDER, pair_settings

DESCRIPTION = "Cost of the counters of time, as a share of a step."
PROCESSES, TRACED = 2, 4
LIMIT = 0.01
"""Share of a step that the counters may cost."""
KERNELS = ("matrix products", "attention", "other kernels")
_ROUNDS, _TIMES = 7, 20_000


def main(words: Sequence[str] | None = None) -> None:
    """Run, count, measure, and print the table."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.clock_cost", description=DESCRIPTION)
    add_shared_options(parser)
    options = parser.parse_args(words)
    settle_shared_options(parser, options, MRPC_FOLDER)
    result = describe("clock_cost", shown_shared_options(options))
    with tempfile.TemporaryDirectory(prefix="fleetune-clock-cost-") as name:
        output = train(options, Path(name))
        trace = json.loads((output / "trace_rank_0.json").read_text())["traceEvents"]
        step_s = json.loads((output / "record.json").read_text())["time"]["step_s"]["seconds"]
    result |= {"counts": counts_of(trace), "costs_ns": costs_ns(), "step_s": statistics.median(step_s)}
    result["share_of_step"] = share_of_step(result["counts"], result["costs_ns"], result["step_s"])
    notes = [f"{shown_model(options.model, options.size)}, {PROCESSES} ranks, 8 pairs each"]
    print_result(notes, table(result), write_result(result, options.output))


def train(options: argparse.Namespace, folder: Path) -> Path:
    """A short run with a trace; its output folder."""
    settings = {
        "model": (options.model or model_folder(options.size, folder / "model")).absolute(),
        "cache_dir": folder / "cache", "output_dir": folder / "out", "processes": PROCESSES, "do_eval": "false",
        "save_strategy": "no", "report_to": "none", "per_device_train_batch_size": 8, "max_steps": TRACED + 4,
        "profile": TRACED, **FLOAT32_SETTINGS, **pair_settings(options.data_dir, folder),
    }  # fmt: skip
    words = [word for name, value in settings.items() for word in (f"--{name}", str(value))]
    subprocess.run([sys.executable, "-m", "fleetune", "train", *words], check=True, env=dict(os.environ))
    return folder / "out"


def counts_of(events: Sequence[Mapping[str, Any]]) -> dict[str, float]:
    """How often, in a step, a part, a kernel and an exchange are come to."""
    spans = [event for event in events if event["ph"] == "X"]
    steps = [event for event in spans if event["name"].startswith("step ")]
    threads = {e["args"]["name"]: e["tid"] for e in events if e["name"] == "thread_name"}
    of_training = [event for event in spans if event["tid"] == threads["training"]]
    kernels = sum(event["name"] in KERNELS for event in of_training)
    exchanges = sum(event["tid"] == threads["gradients"] for event in spans)
    num_steps = len(steps)
    return {
        "steps": 1.0,
        "parts": (len(of_training) - kernels) / num_steps,
        "kernels": kernels / num_steps,
        "exchanges": exchanges / num_steps,
    }


def costs_ns() -> dict[str, float]:
    """What each of these costs, ns: the least of several rounds."""
    from fleetune.kernels.clock import kernel_ns, stay_ns
    from fleetune.timing.clocks import RankClocks
    from fleetune.timing.steps import StepTimes

    clocks = RankClocks()
    times = StepTimes(clocks, kernel_ns)

    def step() -> None:
        times.begin()
        times.own_s()
        times.end(0.0)

    def exchange() -> None:
        with clocks.exchange.working("reduce 0"):
            pass

    return {
        "steps": least_ns(step, 1000),
        "parts": least_ns(lambda: clocks.main.switch("data"), _TIMES),
        "kernels": min(stay_ns() for _ in range(_ROUNDS)),
        "exchanges": least_ns(exchange, _TIMES),
    }


def least_ns(work: Callable[[], object], times: int) -> float:
    """Nanoseconds that some work takes, in the fastest of several rounds of so many times."""
    rounds = []
    for _ in range(_ROUNDS):
        began = time.perf_counter_ns()
        for _ in range(times):
            work()
        rounds.append((time.perf_counter_ns() - began) / times)
    return min(rounds)


def share_of_step(counts: Mapping[str, float], costs: Mapping[str, float], step_s: float) -> float:
    """What all of them cost, as a share of a step."""
    return sum(counts[name] * costs[name] for name in counts) / 1e9 / step_s


def table(result: Mapping[str, Any]) -> str:
    """Counts and costs as Markdown, with their share of a step."""
    rows = [
        [name, f"{count:,.0f}", f"{result['costs_ns'][name]:,.0f}", f"{count * result['costs_ns'][name] / 1e3:,.1f}"]
        for name, count in result["counts"].items()
    ]
    verdict = "below" if result["share_of_step"] < LIMIT else "NOT below"
    total = f"{result['share_of_step']:.3%} of {1e3 * result['step_s']:,.1f} ms: {verdict} {LIMIT:.0%}"
    header = ("what is counted", "times a step", "ns each", "us a step")
    return markdown_table(header, [*rows, ["all", "", "", total]])


if __name__ == "__main__":
    main()
