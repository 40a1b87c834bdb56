"""Speed of fleetune's training against `transformers.Trainer`: same cores, model, data, batches, hyper-parameters.

All trainers run in this one process and take turns of some updates, so that whatever else the machine does meets them
alike. Each round gives every trainer the same batches and one turn, in an order that rotates; the first round warms
up and is not counted. Two more arms take turns: the matrix products of the same updates and nothing else, by fleetune's
function and by torch's, which are the roofline. After the rounds a few of fleetune's updates are profiled, to see where
their time goes.
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
from benchmarks.breakdown import breakdown_table, profile, to_json
from benchmarks.models import (
    FLOAT32_SETTINGS,
    add_shared_options,
    kernels_in_use,
    model_folder,
    settle_shared_options,
    shown_model,
    shown_shared_options,
)
from benchmarks.products import PRODUCTS, EncoderShape, ProductsArm
from benchmarks.result_file import describe, print_result, shown_path, write_result
from benchmarks.rotation import rotated
from benchmarks.summary import Spread, markdown_table, paired_ratios
from benchmarks.texts import MRPC_FOLDER, SQUAD_FOLDER, pair_settings
from fleetune.comm.ranks import Ranks
from fleetune.config import RunConfig
from fleetune.data.batches import Indices
from fleetune.hardware.threads import set_threads
from fleetune.report.record import RunRecord
from fleetune.report.terminal import PlainTerminal
from fleetune.train.program import prepare
from fleetune.train.run import TrainingRun

DESCRIPTION = "Samples per second of fleetune's training and of transformers.Trainer, interleaved in one process."
WARM_UP_ROUNDS = 1
DATA_FOLDERS = {"mrpc": MRPC_FOLDER, "squad": SQUAD_FOLDER}
MAX_SEQ_LENGTHS = {"mrpc": 128, "squad": 384}
"""By --lengths: tokens that an example may have, and to which one arm pads."""
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
            "notes": [note, kernels_in_use()],
            "fleetune_config": shown_config(run, options),
            "trainer_arguments": {name: arguments.to_dict()[name] for name in TRAINER_SETTINGS},
            "warm_up_rounds": WARM_UP_ROUNDS,
        }
        fleetune = FleetuneArm(run)
        result["rounds"] = measure([fleetune, *other_arms(run, arguments)], run, options.rounds, options.steps)
        counted = result["rounds"][WARM_UP_ROUNDS:]
        result |= {"summary": summarise(counted), "roofline": {arm: roofline(counted, arm) for arm in PRODUCTS}}
        breakdown = profile(fleetune, batches_of(run, options.rounds * options.steps, options.profile_steps))
        result["breakdown"] = to_json(breakdown)
    tables = f"{speed_table(result['summary'])}\n\n{breakdown_table(breakdown)}"
    notes = [note, kernels_in_use(), *(roofline_text(arm, entry) for arm, entry in result["roofline"].items())]
    print_result(notes, tables, write_result(result, options.output))


def other_arms(run: TrainingRun, arguments: transformers.TrainingArguments) -> list[Arm]:
    """All that fleetune's arm is compared with."""
    table, classifier = run.train_table, run.classifier
    encoder = EncoderShape.of(classifier.hugging_face.config, head_reads_all_tokens=classifier.head.reads_all_tokens)
    return [
        TrainerArm(run, arguments, run.config.max_seq_length),
        TrainerArm(run, arguments, None),
        *(ProductsArm(name, encoder, table.lengths, run.plan.global_batch_size) for name in PRODUCTS),
    ]


def parse_options(words: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.train_speed", description=DESCRIPTION)
    parser.add_argument("--rounds", type=int, default=7, help="turns of each trainer; the first warms up (default: 7)")
    parser.add_argument("--steps", type=int, default=10, help="updates of a turn (default: 10)")
    parser.add_argument("--profile_steps", type=int, default=5, help="updates that are profiled (default: 5)")
    parser.add_argument("--threads", type=int, help="threads of the process; none: one per usable core")
    parser.add_argument(
        "--lengths", choices=tuple(DATA_FOLDERS), default="mrpc",
        help="mrpc: sentence pairs, up to 128 tokens; squad: windows of SQuAD v1.1, up to 384 (default: mrpc)",
    )  # fmt: skip
    parser.add_argument("--doc_stride", type=int, default=128, help="tokens that windows share (default: 128)")
    add_shared_options(parser, "their")
    options = parser.parse_args(words)
    if options.rounds <= WARM_UP_ROUNDS or options.steps < 1 or options.profile_steps < 1:
        parser.error(
            f"--rounds {options.rounds} --steps {options.steps} --profile_steps {options.profile_steps}: 2 rounds or "
            "more of 1 step or more are needed"
        )
    settle_shared_options(parser, options, DATA_FOLDERS[options.lengths])
    if options.data_dir is None and options.lengths == "squad":
        parser.error(f"--lengths squad needs files of SQuAD: there is no {SQUAD_FOLDER}, name one with --data_dir")
    return options


def prepare_run(options: argparse.Namespace, folder: Path) -> tuple[TrainingRun, str]:
    """fleetune's run, put together by the functions of `fleetune train`, and one line on its data."""
    config = RunConfig(
        model=str(options.model or model_folder(options.size, folder / "model")),
        max_seq_length=MAX_SEQ_LENGTHS[options.lengths],
        output_dir=folder / "fleetune",
        cache_dir=folder / "cache",
        lr_scheduler_type="constant",  # see `trainer_arguments`
        logging_steps=500,  # as `Trainer`
        do_eval=False,
        save_strategy="no",
        report_to=("none",),
        threads=options.threads,
        **FLOAT32_SETTINGS,
        **data_settings(options, folder),
    )
    run = load(config)
    whole = len(run.train_table) // run.plan.global_batch_size * run.plan.global_batch_size
    if whole < len(run.train_table):  # a smaller last batch would shift all that `Trainer` draws after it
        run = load(config.replace(max_train_samples=whole))
    sequences = "windows" if options.lengths == "squad" else "pairs"
    tokens = f"{run.train_table.num_tokens / whole:.1f} tokens on average"
    data = f"{data_name(options)}: {whole:,} training {sequences} of {tokens}"
    model = shown_model(options.model, options.size)
    return run, f"{model}; {data}, batches of {run.plan.global_batch_size}, {run.plan.threads} threads"


def load(config: RunConfig) -> TrainingRun:
    """Model, tokens, optimizer and plan of a run."""
    assert config.output_dir is not None
    config.output_dir.mkdir(exist_ok=True)
    threads = set_threads(config.threads, local_world_size=1, speaks=True)
    return prepare(config, Ranks(None, None), threads, RunRecord(config=config.to_dict()), PlainTerminal())


def data_settings(options: argparse.Namespace, folder: Path) -> dict[str, Any]:
    if options.lengths == "squad":
        return {"task": "squad", "data_dir": options.data_dir, "doc_stride": options.doc_stride}
    return pair_settings(options.data_dir, folder)


def data_name(options: argparse.Namespace) -> str:
    if options.lengths == "squad":
        return "SQuAD v1.1, answers as spans"
    return "MRPC" if options.data_dir else "the generated example corpus (no folder of MRPC was found or given)"


def resolved_options(options: argparse.Namespace, run: TrainingRun) -> dict[str, object]:
    """The options that repeat this very measurement."""
    return {
        "rounds": options.rounds,
        "steps": options.steps,
        "profile_steps": options.profile_steps,
        "threads": run.plan.threads,
        "lengths": options.lengths,
        "doc_stride": options.doc_stride,
    } | shown_shared_options(options)


def shown_config(run: TrainingRun, options: argparse.Namespace) -> dict[str, Any]:
    """The run's settings, without the folders of this machine."""
    config = run.config.to_dict()
    for name in ("output_dir", "cache_dir", "train_file"):
        del config[name]
    config["model"] = shown_model(options.model, options.size)
    config["data_dir"] = shown_path(options.data_dir) if options.data_dir else None
    return config


def measure(arms: Sequence[Arm], run: TrainingRun, num_rounds: int, num_steps: int) -> list[dict[str, Any]]:
    """Raw samples of every round: its batches, and what each arm did with them."""
    rounds = []
    for i in range(num_rounds):
        batches = batches_of(run, i * num_steps, num_steps)
        turns = {arm.name: arm.take(batches) for arm in rotated(arms, i)}
        rounds.append(raw_round(batches, run, turns))
        told = ", ".join(f"{name} {sum(turn.seconds):.1f} s" for name, turn in turns.items())
        print(f"round {i + 1}/{num_rounds}{' (warm-up)' if i < WARM_UP_ROUNDS else ''}: {told}", flush=True)
    return rounds


def batches_of(run: TrainingRun, first_step: int, num_steps: int) -> list[Indices]:
    """The batches of consecutive updates of fleetune's run."""
    return [run.batches.examples_of(step) for step in range(first_step, first_step + num_steps)]


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


def roofline(rounds: Sequence[Mapping[str, Any]], arm: str) -> dict[str, Any]:
    """Share of fleetune's time that the matrix products alone need, taken within each round, and their speed.

    Args:
        rounds: The counted rounds.
        arm: Name of the arm that does the products.
    """
    shares = paired_ratios(turn_seconds(rounds, arm), turn_seconds(rounds, REFERENCE))
    num_flop = [sum(r["arms"][arm]["num_flop"]) for r in rounds]
    speeds = [1e-9 * speed for speed in paired_ratios(num_flop, turn_seconds(rounds, arm))]
    return {
        "share": dataclasses.asdict(Spread.of(shares)),
        "share_by_round": shares,
        "gflop_per_s": dataclasses.asdict(Spread.of(speeds)),
    }


def roofline_text(arm: str, entry: Mapping[str, Any]) -> str:
    share, speed = Spread(**entry["share"]), Spread(**entry["gflop_per_s"])
    return f"roofline: {arm} alone take {share.text(2)} of fleetune's time, at {speed.text(0)} GFLOP/s"


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
        losses_text(entry["mean_loss_of_first_round"], entry["mean_loss_of_last_round"]),
    ]


def losses_text(first: float | None, last: float | None) -> str:
    """Empty for an arm that trains nothing."""
    return "" if first is None or last is None else f"{first:.3f} to {last:.3f}"


if __name__ == "__main__":
    main()
