"""The program of `fleetune bench scaling`: all runs that are missing, then the report."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from pathlib import Path

from fleetune.bench.plan import BenchPlan, PlannedTurn, differences
from fleetune.bench.turn import BenchStopped, finished_turn, make_turn
from fleetune.errors import OutputError
from fleetune.files import remove
from fleetune.report.columns import clock, columns_of
from fleetune.report.files import write_report
from fleetune.report.rows import Table, make_table
from fleetune.report.tables import cells_of, failures_of, markdown_table
from fleetune.report.turns import BENCH_FILE, Bench, Turn, read_bench, read_source

Say = Callable[[str], None]

IN_TERMINAL = (
    "size", "trainer", "ranks", "threads", "samples_per_s", "speedup", "efficiency", "against", "startup_s",
    "training_s", "cost",
)  # fmt: skip
"""Columns that the terminal shows; the files have all."""


def run_bench(plan: BenchPlan, command: Sequence[str], say: Say, *, anew: bool = False) -> int:
    """Make all runs that have not been made, and write the report.

    Args:
        plan: What to run.
        command: Repeats it.
        say: Prints a line.
        anew: Whether runs of an earlier bench in the folder are removed.

    Returns:
        0; 1 when a size failed; 128 + n when signal n stopped it.

    Raises:
        OutputError: The folder holds something else, or another bench.
    """
    bench = plan.for_report(command)
    claim(plan.folder, bench, anew=anew)
    missing = [turn for turn in plan.turns() if finished_turn(turn) is None]
    done = len(plan.turns()) - len(missing)
    if done:
        say(f"{done} of {len(plan.turns())} runs are there already")
    try:
        if missing:
            warm_up(plan, say)
            make_turns(missing, say)
    except BenchStopped as stop:
        left = sum(finished_turn(turn) is None for turn in plan.turns())
        say(f"stopped: {left} of {len(plan.turns())} runs are missing; the same command goes on")
        return 128 + stop.number
    return tell(plan.folder, say)


def claim(folder: Path, bench: Bench, *, anew: bool) -> None:
    """Make the folder the bench's, or find it to be.

    Raises:
        OutputError: It holds something else, or a bench with other settings.
    """
    is_bench = (folder / BENCH_FILE).is_file()
    if folder.exists() and not is_bench and (not folder.is_dir() or any(folder.iterdir())):
        raise OutputError(f"--output_dir {folder}: it is not empty and holds no bench: choose another folder")
    if is_bench and anew:
        remove(folder)
    elif is_bench and (changed := differences(read_bench(folder), bench)):
        listed = "".join(f"\n  {line}" for line in changed)
        raise OutputError(
            f"--output_dir {folder}: it holds a bench with other settings:{listed}\nChoose another folder, or give "
            "--overwrite_output_dir to start anew"
        )
    bench.write(folder)


def warm_up(plan: BenchPlan, say: Say) -> None:
    """What the first run of all would pay for the others: compiled kernels, tokens, a cold page cache."""
    for turn in plan.warm_ups():
        made = make_turn(turn)
        words = "not counted" if made.status == "finished" else f"failed: {made.reason}"
        say(f"warm-up of {turn.trainer}, {turn.size.label}: {clock(made.wall_s or 0.0)}, {words}")
        remove(turn.folder)


def make_turns(turns: Sequence[PlannedTurn], say: Say) -> None:
    """Make runs one after the other. What has failed once is left out of the rounds to come."""
    failed: set[tuple[str, str]] = set()
    began = time.monotonic()
    for i, turn in enumerate(turns):
        size = (turn.size.label, turn.trainer)
        if size in failed:
            continue
        made = make_turn(turn)
        left_s = (time.monotonic() - began) / (i + 1) * (len(turns) - i - 1)
        say(f"run {i + 1}/{len(turns)}  {told(turn, made)}" + (f", about {clock(left_s)} left" if left_s else ""))
        if made.status == "failed":
            failed.add(size)
            say(f"  {turn.size.label} by {turn.trainer} is left out of the rounds to come; see {turn.log}")


def told(turn: PlannedTurn, made: Turn) -> str:
    """One run in a line."""
    name = f"{turn.size.label}, {turn.trainer}, round {turn.round}, seed {turn.seed}"
    if made.status == "failed":
        return f"{name}: failed: {made.reason}"
    speed = made.record.get("throughput", {}).get("samples_per_s")
    return f"{name}: {clock(made.wall_s or 0.0)}" + (f", {speed:,.1f} samples/s" if speed else "")


def tell(folder: Path, say: Say) -> int:
    """Write the report, and print what matters most of it.

    Returns:
        0, or 1 when a size failed.
    """
    table = make_table([read_source(folder)])
    paths = write_report(table, folder)
    say("\n" + in_short(table) + "\n")
    failures = failures_of(table)
    for line in failures:
        say(f"failed  {line}")
    say(f"report: {paths[0]} (and {', '.join(path.name for path in paths[1:])})")
    return 1 if failures else 0


def in_short(table: Table) -> str:
    """The table for a terminal."""
    columns = [column for column in columns_of(table) if column.name in (*IN_TERMINAL, table.metric)]
    return markdown_table([column.title for column in columns], cells_of(table, columns))
