"""Peak memory of a training process: fleetune's against `transformers.Trainer`'s, padded to 128 and as short as it can.

Every run is a process of its own that trains on the same texts in the same batches, writes the model and ends; its
peak is read from outside. The batches are those of one epoch's beginning with the epoch's largest ones among them.
"""

from __future__ import annotations

import argparse
import dataclasses
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from benchmarks.memory_watch import MemoryWatch
from benchmarks.models import (
    FLOAT32_SETTINGS,
    add_shared_options,
    kernels_in_use,
    longest_input,
    model_folder,
    settle_shared_options,
    shown_model,
    shown_shared_options,
)
from benchmarks.result_file import describe, print_result, write_result
from benchmarks.rotation import rotated
from benchmarks.summary import Spread, markdown_table, paired_ratios
from benchmarks.texts import MRPC_FOLDER, training_pairs, write_pairs
from fleetune.bench.features import feature_of
from fleetune.data.demo import Pair

DESCRIPTION = "Peak memory of fleetune's training process and of transformers.Trainer's, with the same batches."
NAME = "train_memory"
REFERENCE = "fleetune"
PEERS: Mapping[str, bool] = {"trainer-padded": True, "trainer-longest": False}
"""Arms of `Trainer` -> whether every example is padded to the maximum length, or to the longest of its batch."""
ARMS = (REFERENCE, *PEERS)
MAX_SEQ_LENGTH = 128
BATCH_SIZE = 16
LEARNING_RATE = 2e-5
SEED = 42


@dataclass(frozen=True, kw_only=True)
class Measurement:
    """One training process."""

    arm: str
    repeat: int
    peak_rss_bytes: int
    """Most memory that the process had resident, mapped files and shared libraries included."""
    seconds: float
    """From its start to its end."""


def main(words: Sequence[str] | None = None) -> None:
    """Measure, write the result and print the table; or, with --arm, be one of the processes that are measured."""
    options = parse_options(words)
    if options.arm is not None:
        train_peer(options)
        return
    with tempfile.TemporaryDirectory(prefix="fleetune-bench-") as name:
        result = describe(NAME, resolved_options(options))
        model = options.model or model_folder(options.size, Path(name) / "model")
        batches = chosen_batches(options, model, Path(name))
        note = (
            f"{shown_model(options.model, options.size)}; {len(batches)} updates of {BATCH_SIZE} pairs, "
            f"{batches.tokens.min():,} to {batches.tokens.max():,} tokens, longest pair {batches.longest}; "
            f"{options.threads} threads"
        )
        notes = [note, kernels_in_use()]
        train_file = write_pairs(Path(name) / "train.csv", batches.in_file_order())
        measurements = []
        for repeat in range(options.repeats):
            for arm in rotated(ARMS, repeat):
                measurements.append(watch(options, arm, repeat, model, train_file))
                print(told(measurements[-1]), flush=True)
    result |= {
        "notes": notes,
        "tokens_of_updates": batches.tokens.tolist(),
        "measurements": [dataclasses.asdict(measurement) for measurement in measurements],
        "summary": summarise(measurements),
    }
    print_result(notes, memory_table(result["summary"]), write_result(result, options.output))


def parse_options(words: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog=f"python -m benchmarks.{NAME}", description=DESCRIPTION)
    parser.add_argument("--repeats", type=int, default=3, help="processes of each trainer (default: 3)")
    parser.add_argument("--steps", type=int, default=40, help="updates of a process (default: 40)")
    parser.add_argument("--threads", type=int, default=2, help="threads of a process (default: 2)")
    add_shared_options(parser)
    parser.add_argument("--arm", choices=tuple(PEERS), help=argparse.SUPPRESS)
    parser.add_argument("--train_file", type=Path, help=argparse.SUPPRESS)
    parser.add_argument("--output_dir", type=Path, help=argparse.SUPPRESS)
    options = parser.parse_args(words)
    if options.repeats < 1 or options.steps < 2:
        parser.error(f"--repeats {options.repeats} --steps {options.steps}: 1 repeat of 2 steps or more is needed")
    settle_shared_options(parser, options, MRPC_FOLDER)
    return options


def resolved_options(options: argparse.Namespace) -> dict[str, object]:
    """The options that repeat this very measurement."""
    return {
        "repeats": options.repeats,
        "steps": options.steps,
        "threads": options.threads,
    } | shown_shared_options(options)


# ---- the batches


@dataclass(frozen=True, kw_only=True)
class Batches:
    """What all processes train on, in this order."""

    pairs: Sequence[Pair]
    """Of the first batch, then of the second, and so on."""
    tokens: NDArray[np.int64]
    """Of each batch."""
    longest: int
    """Tokens of the longest pair."""

    def __len__(self) -> int:
        return len(self.tokens)

    def in_file_order(self) -> list[Pair]:
        """The pairs laid out in a file so that fleetune, which draws its own order, draws them in ours."""
        places = drawn_order(len(self.pairs))
        return [self.pairs[i] for i in np.argsort(places)]


def drawn_order(num_examples: int) -> NDArray[np.int64]:
    """Rows of the file in the order in which fleetune's first epoch takes them."""
    from fleetune.data.batches import epoch_order

    return epoch_order(SEED, 0, num_examples)


def chosen_batches(options: argparse.Namespace, model: Path, folder: Path) -> Batches:
    """Some of the whole batches of an epoch."""
    pairs = training_pairs(options.data_dir)
    table = tokenised(model, write_pairs(folder / "all.csv", pairs), folder)
    assert len(table) == len(pairs)
    order = drawn_order(len(pairs))
    epoch = order[: len(order) // BATCH_SIZE * BATCH_SIZE].reshape(-1, BATCH_SIZE)
    chosen = epoch[with_the_largest(table.lengths[epoch], options.steps)]
    lengths = table.lengths[chosen]
    return Batches(pairs=[pairs[i] for i in chosen.ravel()], tokens=lengths.sum(axis=1), longest=int(lengths.max()))


def with_the_largest(lengths: NDArray[np.int64], count: int) -> NDArray[np.int64]:
    """Indices of the first batches, among them the one of most tokens and the one of the longest example.

    Args:
        lengths: (batches, examples): tokens of each.
        count: Batches to take, at least 2; all if there are fewer.
    """
    largest = dict.fromkeys((int(lengths.sum(axis=1).argmax()), int(lengths.max(axis=1).argmax())))
    others = [i for i in range(len(lengths)) if i not in largest]
    return np.sort(np.array([*largest, *others][:count], dtype=np.int64))


def tokenised(model: Path, train_file: Path, folder: Path) -> Any:
    """The file's tokens, by fleetune's reading."""
    from transformers import AutoTokenizer

    from fleetune.config import RunConfig
    from fleetune.data.dataset import prepare_data

    longest = longest_input(model, MAX_SEQ_LENGTH)
    settings = RunConfig(train_file=train_file, cache_dir=folder / "cache", max_seq_length=longest)
    return prepare_data(settings, AutoTokenizer.from_pretrained(str(model)), splits=["train"]).splits["train"]


# ---- the processes


def watch(options: argparse.Namespace, arm: str, repeat: int, model: Path, train_file: Path) -> Measurement:
    """Let a process train, with its memory watched.

    Raises:
        RuntimeError: It failed; with what it printed.
    """
    with tempfile.TemporaryDirectory(prefix="fleetune-bench-") as folder:
        words = command_of(options, arm, model, train_file, Path(folder))
        environment = os.environ | {"HF_HUB_OFFLINE": "1", "OMP_NUM_THREADS": str(options.threads)}
        began, told = time.perf_counter(), Path(folder) / "told.txt"
        with told.open("w", encoding="utf-8") as file:
            process = subprocess.Popen(
                [sys.executable, "-m", *words], env=environment, stdout=file, stderr=subprocess.STDOUT
            )
            with process, MemoryWatch(process.pid, arm) as memory:
                process.wait()
        seconds = time.perf_counter() - began
        if process.returncode != 0:
            raise RuntimeError(f"{' '.join(words)}\nended with status {process.returncode}:\n{told.read_text()}")
    peak = next(peak.peak_rss_bytes for peak in memory.peaks() if peak.role == arm)
    return Measurement(arm=arm, repeat=repeat, peak_rss_bytes=peak, seconds=seconds)


def command_of(options: argparse.Namespace, arm: str, model: Path, train_file: Path, folder: Path) -> list[str]:
    """The module and its arguments."""
    if arm == REFERENCE:
        settings = fleetune_settings(options) | {
            "model": model, "train_file": train_file, "output_dir": folder / "out", "cache_dir": folder / "cache",
        }  # fmt: skip
        module = ["fleetune", "train"]
    else:
        settings = {"arm": arm, "model": model, "train_file": train_file, "output_dir": folder / "out"}
        module = [f"benchmarks.{NAME}"]
    return [*module, *(word for name, value in settings.items() for word in (f"--{name}", str(value)))]


def fleetune_settings(options: argparse.Namespace) -> dict[str, object]:
    """One epoch, as `Trainer` is told too."""
    return {
        "per_device_train_batch_size": BATCH_SIZE,
        "learning_rate": LEARNING_RATE,
        "num_train_epochs": 1,
        "max_seq_length": MAX_SEQ_LENGTH,
        "seed": SEED,
        "processes": 1,
        "threads": options.threads,
        "do_eval": "false",
        "save_strategy": "no",
        "report_to": "none",
        **FLOAT32_SETTINGS,
    }


def train_peer(options: argparse.Namespace) -> None:
    """`transformers.Trainer` in this process: read, train an epoch in the order of the file's drawing, save."""
    import transformers

    transformers.utils.logging.set_verbosity_error()
    source = str(options.model)
    pad_to = longest_input(options.model, MAX_SEQ_LENGTH) if PEERS[options.arm] else None
    tokenizer = transformers.AutoTokenizer.from_pretrained(source)
    options.output_dir.mkdir()
    table = tokenised(options.model, options.train_file, options.output_dir)
    pad_in_batches = transformers.DataCollatorWithPadding(tokenizer)
    trainer = transformers.Trainer(
        model=transformers.AutoModelForSequenceClassification.from_pretrained(source, num_labels=2),
        args=transformers.TrainingArguments(
            output_dir=str(options.output_dir),
            per_device_train_batch_size=BATCH_SIZE,
            learning_rate=LEARNING_RATE,
            num_train_epochs=1,
            seed=SEED,
            use_cpu=True,
            dataloader_pin_memory=False,
            train_sampling_strategy="sequential",
            save_strategy="no",
            report_to="none",
            disable_tqdm=True,
        ),
        data_collator=pad_in_batches if pad_to is None else transformers.default_data_collator,
        train_dataset=[
            feature_of(table, int(i), pad_to=pad_to, pad_token_id=tokenizer.pad_token_id)
            for i in drawn_order(len(table))
        ],
    )
    trainer.train()
    trainer.save_model()


# ---- what is told of them


def told(found: Measurement) -> str:
    """One line on a process that has ended."""
    peak = found.peak_rss_bytes / 1e6
    return f"repeat {found.repeat + 1}, {found.arm}: peak {peak:,.0f} MB, {found.seconds:.0f} s in all"


def summarise(measurements: Sequence[Measurement]) -> dict[str, Any]:
    """Each arm's peak, and fleetune's as a share of it in the same repeat."""
    ours = peaks_of(measurements, REFERENCE)
    return {
        arm: {
            "peak_rss_bytes": dataclasses.asdict(Spread.of(peaks_of(measurements, arm))),
            "fleetune_share": dataclasses.asdict(Spread.of(paired_ratios(ours, peaks_of(measurements, arm)))),
        }
        for arm in dict.fromkeys(measurement.arm for measurement in measurements)
    }


def peaks_of(measurements: Sequence[Measurement], arm: str) -> list[float]:
    """Peaks of an arm's processes, by repeat."""
    mine = sorted((m for m in measurements if m.arm == arm), key=lambda measurement: measurement.repeat)
    return [measurement.peak_rss_bytes for measurement in mine]


def memory_table(summary: Mapping[str, Any]) -> str:
    """The summary as Markdown, the largest first."""
    largest_first = sorted(summary.items(), key=lambda item: -float(item[1]["peak_rss_bytes"]["median"]))
    return markdown_table(
        ("trainer", "peak memory, MB", "fleetune's share of it"),
        [memory_row(arm, entry) for arm, entry in largest_first],
    )


def memory_row(arm: str, entry: Mapping[str, Any]) -> list[str]:
    megabytes = {name: value / 1e6 for name, value in entry["peak_rss_bytes"].items()}
    share = "" if arm == REFERENCE else Spread(**entry["fleetune_share"]).text(2)
    return [arm, Spread(**megabytes).text(0), share]


if __name__ == "__main__":
    main()
