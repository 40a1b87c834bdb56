"""Speed of fleetune's training against `transformers.Trainer`: same cores, model, data, batches, hyper-parameters.

All trainers run in this one process and take turns of some updates, so that whatever else the machine does meets them
alike. Each round gives every trainer the same batches and one turn, in an order that rotates; the first round warms
up and is not counted.
"""

from __future__ import annotations

import argparse
import dataclasses
import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import transformers

from benchmarks.arms import Arm, FleetuneArm, TrainerArm, Turn, trainer_arguments
from benchmarks.result_file import REPOSITORY, describe, print_result, shown_path, write_result
from benchmarks.summary import Spread, markdown_table, paired_ratios
from fleetune.cli.demo import MODEL_PACKAGE, packaged_model
from fleetune.comm.ranks import Ranks
from fleetune.config import RunConfig
from fleetune.data.batches import Indices
from fleetune.data.demo import write_demo_corpus
from fleetune.hardware.threads import set_threads
from fleetune.report.record import RunRecord
from fleetune.report.terminal import PlainTerminal
from fleetune.train.program import prepare
from fleetune.train.run import TrainingRun

DESCRIPTION = "Samples per second of fleetune's training and of transformers.Trainer, interleaved in one process."
WARM_UP_ROUNDS = 1
MRPC_FOLDER = REPOSITORY.parent / "shared" / "data" / "glue" / "MRPC"
REFERENCE = FleetuneArm.name
TRAINER_SETTINGS = (
    *("per_device_train_batch_size", "gradient_accumulation_steps", "learning_rate", "lr_scheduler_type", "optim"),
    *("weight_decay", "adam_beta1", "adam_beta2", "adam_epsilon", "max_grad_norm", "bf16", "fp16", "torch_compile"),
    *("gradient_checkpointing", "dataloader_num_workers", "train_sampling_strategy", "logging_steps", "seed"),
)
"""Arguments of `Trainer` that bear on its speed or its losses."""


def main(words: Sequence[str] | None = None) -> None:
    """Measure, write the result and print the table."""
    options = parse_options(words)
    transformers.utils.logging.set_verbosity_error()
    with tempfile.TemporaryDirectory(prefix="fleetune-bench-") as folder:
        run, note = prepare_run(options, Path(folder))
        arguments = trainer_arguments(run, Path(folder) / "trainer")
        result = describe("train_speed", resolved_options(options, run)) | {
            "notes": [note],
            "fleetune_config": shown_config(run, options),
            "trainer_arguments": {name: arguments.to_dict()[name] for name in TRAINER_SETTINGS},
            "warm_up_rounds": WARM_UP_ROUNDS,
        }
        arms = [TrainerArm(run, arguments, run.config.max_seq_length), TrainerArm(run, arguments, None)]
        result["rounds"] = measure([FleetuneArm(run), *arms], run, options.rounds, options.steps)
    result["summary"] = summarise(result["rounds"][WARM_UP_ROUNDS:])
    print_result([note], speed_table(result["summary"]), write_result(result, options.output))


def parse_options(words: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.train_speed", description=DESCRIPTION)
    parser.add_argument("--rounds", type=int, default=7, help="turns of each trainer; the first warms up (default: 7)")
    parser.add_argument("--steps", type=int, default=10, help="updates of a turn (default: 10)")
    parser.add_argument("--threads", type=int, help="threads of the process; none: one per usable core")
    parser.add_argument("--data_dir", type=Path, help="folder of MRPC's files; none: the usual place, or the example")
    parser.add_argument("--model", type=Path, help=f"folder of the encoder; none: that of {MODEL_PACKAGE}")
    parser.add_argument("--output", type=Path, help="file to write; none: one with the date in benchmarks/results")
    options = parser.parse_args(words)
    if options.rounds <= WARM_UP_ROUNDS or options.steps < 1:
        parser.error(
            f"--rounds {options.rounds} --steps {options.steps}: 2 rounds or more of 1 step or more are needed"
        )
    if options.data_dir is None and MRPC_FOLDER.is_dir():
        options.data_dir = MRPC_FOLDER
    return options


def prepare_run(options: argparse.Namespace, folder: Path) -> tuple[TrainingRun, str]:
    """fleetune's run, put together by the functions of `fleetune train`, and one line on its data."""
    config = RunConfig(
        model=str(options.model or packaged_model()),
        output_dir=folder / "fleetune",
        cache_dir=folder / "cache",
        lr_scheduler_type="constant",  # see `trainer_arguments`
        logging_steps=500,  # as `Trainer`
        do_eval=False,
        save_strategy="no",
        report_to="none",
        threads=options.threads,
        **data_settings(options, folder),
    )
    run = load(config)
    whole = len(run.train_table) // run.plan.global_batch_size * run.plan.global_batch_size
    if whole < len(run.train_table):  # a smaller last batch would shift all that `Trainer` draws after it
        run = load(config.replace(max_train_samples=whole))
    name = "MRPC" if options.data_dir else "the generated example corpus (no folder of MRPC was found or given)"
    return run, (
        f"{name}: {whole:,} training pairs of {run.train_table.num_tokens / whole:.1f} tokens on average, batches of "
        f"{run.plan.global_batch_size}, {run.plan.threads} threads"
    )


def load(config: RunConfig) -> TrainingRun:
    """Model, tokens, optimizer and plan of a run."""
    assert config.output_dir is not None
    config.output_dir.mkdir(exist_ok=True)
    threads = set_threads(config.threads, local_world_size=1, speaks=True)
    return prepare(config, Ranks(None, None), threads, RunRecord(config=config.to_dict()), PlainTerminal())


def data_settings(options: argparse.Namespace, folder: Path) -> dict[str, Any]:
    if options.data_dir:
        return {"task": "mrpc", "data_dir": options.data_dir}
    return {"train_file": write_demo_corpus(folder / "data").train}


def resolved_options(options: argparse.Namespace, run: TrainingRun) -> dict[str, object]:
    """The options that repeat this very measurement."""
    return {
        "rounds": options.rounds,
        "steps": options.steps,
        "threads": run.plan.threads,
        "data_dir": shown_path(options.data_dir) if options.data_dir else None,
        "model": shown_path(options.model) if options.model else None,
    }


def shown_config(run: TrainingRun, options: argparse.Namespace) -> dict[str, Any]:
    """The run's settings, without the folders of this machine."""
    config = run.config.to_dict()
    for name in ("output_dir", "cache_dir", "train_file"):
        del config[name]
    config["model"] = shown_path(options.model) if options.model else MODEL_PACKAGE
    config["data_dir"] = shown_path(options.data_dir) if options.data_dir else None
    return config


def measure(arms: Sequence[Arm], run: TrainingRun, num_rounds: int, num_steps: int) -> list[dict[str, Any]]:
    """Raw samples of every round: its batches, and what each arm did with them."""
    rounds = []
    for i in range(num_rounds):
        batches = [run.batches.examples_of(step) for step in range(i * num_steps, (i + 1) * num_steps)]
        turns = {arm.name: arm.take(batches) for arm in rotated(arms, i)}
        rounds.append(raw_round(batches, run, turns))
        told = ", ".join(f"{name} {sum(turn.seconds):.1f} s" for name, turn in turns.items())
        print(f"round {i + 1}/{num_rounds}{' (warm-up)' if i < WARM_UP_ROUNDS else ''}: {told}", flush=True)
    return rounds


def rotated(arms: Sequence[Arm], by: int) -> list[Arm]:
    """The arms in the order of a round: each is first, second and last equally often."""
    first = by % len(arms)
    return [*arms[first:], *arms[:first]]


def raw_round(batches: Sequence[Indices], run: TrainingRun, turns: Mapping[str, Turn]) -> dict[str, Any]:
    return {
        "order": list(turns),
        "examples": [len(examples) for examples in batches],
        "tokens": [int(run.train_table.lengths[examples].sum()) for examples in batches],
        "arms": {name: dataclasses.asdict(turn) for name, turn in sorted(turns.items())},
    }


def summarise(rounds: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """Speed of each arm, and how many times as fast fleetune was in the same round."""
    reference = turn_seconds(rounds, REFERENCE)
    return {name: summary_of(rounds, name, reference) for name in rounds[0]["arms"]}


def summary_of(rounds: Sequence[Mapping[str, Any]], arm: str, reference: Sequence[float]) -> dict[str, Any]:
    """One arm's speed.

    Args:
        rounds: The counted rounds.
        arm: Its name.
        reference: Seconds of fleetune's turn in each of the rounds.
    """
    seconds = turn_seconds(rounds, arm)
    updates = [second for r in rounds for second in r["arms"][arm]["seconds"]]
    spreads = {
        "update_s": Spread.of(updates),
        "samples_per_s": Spread.of(paired_ratios([sum(r["examples"]) for r in rounds], seconds)),
        "tokens_per_s": Spread.of(paired_ratios([sum(r["tokens"]) for r in rounds], seconds)),
        "fleetune_speedup": Spread.of(paired_ratios(seconds, reference)),
    }
    losses = [r["arms"][arm]["mean_loss"] for r in rounds]
    return {name: dataclasses.asdict(spread) for name, spread in spreads.items()} | {
        "fleetune_speedup_by_round": paired_ratios(seconds, reference),
        "mean_loss_of_first_round": losses[0],
        "mean_loss_of_last_round": losses[-1],
    }


def turn_seconds(rounds: Sequence[Mapping[str, Any]], arm: str) -> list[float]:
    return [sum(r["arms"][arm]["seconds"]) for r in rounds]


def speed_table(summary: Mapping[str, Any]) -> str:
    """The summary as Markdown, the slowest first."""
    header = ("trainer", "samples/s", "tokens/s", "update, ms", "fleetune is faster by", "loss, first to last round")
    slowest_first = sorted(summary.items(), key=lambda item: float(item[1]["samples_per_s"]["median"]))
    return markdown_table(header, [speed_row(name, entry) for name, entry in slowest_first])


def speed_row(name: str, entry: Mapping[str, Any]) -> list[str]:
    return [
        name,
        Spread(**entry["samples_per_s"]).text(1),
        Spread(**entry["tokens_per_s"]).text(0),
        f"{1e3 * entry['update_s']['median']:,.0f}",
        "" if name == REFERENCE else Spread(**entry["fleetune_speedup"]).text(2),
        f"{entry['mean_loss_of_first_round']:.3f} to {entry['mean_loss_of_last_round']:.3f}",
    ]


if __name__ == "__main__":
    main()
