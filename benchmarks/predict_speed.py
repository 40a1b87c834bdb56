"""Speed of fleetune's prediction against transformers' text-classification pipeline, on the same texts.

Both start with the texts and end with a class and its probability for each. All arms live in this one process and take
turns over all the texts, in an order that rotates; the first round warms up and is not counted.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import os
import tempfile
import time
from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

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
from benchmarks.texts import LABELS, MRPC_FOLDER, example_pairs, mrpc_pairs, write_pairs
from fleetune.data.demo import Pair
from fleetune.model.quiet import quiet_transformers

DESCRIPTION = "Samples per second of fleetune's prediction and of transformers' pipeline, interleaved in one process."
NAME = "predict_speed"
WARM_UP_ROUNDS = 1
BATCH_SIZE = 32
MAX_SEQ_LENGTH = 128
SEED = 42


@dataclass(frozen=True, kw_only=True)
class Answer:
    """The class that a model gives a pair, with its probability."""

    label: str
    score: float


class Arm(ABC):
    """Something that predicts; its model is loaded and ready."""

    name: str

    @abstractmethod
    def prepare(self) -> None:
        """Get ready for a turn; not timed."""

    @abstractmethod
    def predict(self) -> Any:
        """Predict all texts; this is what is timed."""

    @abstractmethod
    def answers(self, outcome: Any) -> list[Answer]:
        """What `predict` gave, in the order of the texts; not timed."""


class PipelineArm(Arm):
    """transformers' pipeline on texts in memory.

    Args:
        model: Folder of the classifier.
        pairs: The texts.
    """

    name = "pipeline"

    def __init__(self, model: Path, pairs: Sequence[Pair]) -> None:
        import transformers

        with quiet_transformers():
            self._pipeline = transformers.pipeline(
                "text-classification", model=str(model), device="cpu", batch_size=BATCH_SIZE
            )
        self._max_length = longest_input(model, MAX_SEQ_LENGTH)
        self._texts = [{"text": pair.sentence1, "text_pair": pair.sentence2} for pair in pairs]

    def prepare(self) -> None:
        pass

    def predict(self) -> Any:
        return self._pipeline(self._texts, truncation=True, max_length=self._max_length)

    def answers(self, outcome: Any) -> list[Answer]:
        return [Answer(label=entry["label"], score=entry["score"]) for entry in outcome]


class FleetuneArm(Arm):
    """What `fleetune predict` does once its model is loaded: read the file, tokenise, predict, write the predictions.

    Args:
        model: Folder of the classifier.
        source: File of the texts.
        folder: For caches and the output.
        threads: Of this process.
        bf16: Compute in bfloat16.
    """

    def __init__(self, model: Path, source: Path, folder: Path, threads: int, *, bf16: bool = False) -> None:
        from fleetune.comm.ranks import Ranks
        from fleetune.config import RunConfig
        from fleetune.evaluate.finished import open_model
        from fleetune.report.terminal import SilentTerminal

        self.name = "fleetune" + (", bfloat16" if bf16 else "")
        self._source, self._output = source, folder / "predictions.jsonl"
        config = RunConfig(
            model=str(model),
            text_column_names=("sentence1", "sentence2"),
            max_seq_length=MAX_SEQ_LENGTH,
            per_device_eval_batch_size=BATCH_SIZE,
            cache_dir=folder / "cache",
            threads=threads,
            **({"bf16": "true"} if bf16 else FLOAT32_SETTINGS),
        )
        self._model = open_model(config, Ranks(None, None), SilentTerminal())

    def prepare(self) -> None:
        pass

    def predict(self) -> Any:
        from fleetune.evaluate.stream import predict_file

        predict_file(self._model, self._source, self._output)
        return self._output

    def answers(self, outcome: Any) -> list[Answer]:
        lines = outcome.read_text(encoding="utf-8").splitlines()
        return [most_probable(json.loads(line)["probabilities"]) for line in lines]


def most_probable(probabilities: Mapping[str, float]) -> Answer:
    label = max(probabilities, key=lambda name: probabilities[name])
    return Answer(label=label, score=probabilities[label])


REFERENCE = PipelineArm.name


def main(words: Sequence[str] | None = None) -> None:
    """Measure, write the result and print the table."""
    options = parse_options(words)
    import torch
    import transformers

    torch.set_num_threads(options.threads)
    transformers.utils.logging.set_verbosity_error()
    with tempfile.TemporaryDirectory(prefix="fleetune-bench-") as name:
        folder = Path(name)
        result = describe(NAME, resolved_options(options))
        pairs, texts = texts_of(options)
        encoder = options.model or model_folder(options.size, folder / "encoder")
        model = write_classifier(encoder, folder / "classifier")
        note = (
            f"{shown_model(options.model, options.size)} with a new head; {texts}: {len(pairs):,} pairs, batches of "
            f"{BATCH_SIZE}, {options.threads} threads"
        )
        notes = [note, kernels_in_use()]
        result |= {"notes": notes, "examples": len(pairs), "warm_up_rounds": WARM_UP_ROUNDS}
        result["rounds"] = measure(arms_of(model, pairs, folder, options.threads), options.rounds, len(pairs))
    result["summary"] = summarise(result["rounds"][WARM_UP_ROUNDS:], len(pairs))
    print_result(notes, speed_table(result["summary"]), write_result(result, options.output))


def parse_options(words: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog=f"python -m benchmarks.{NAME}", description=DESCRIPTION)
    parser.add_argument("--rounds", type=int, default=5, help="turns of each arm; the first warms up (default: 5)")
    parser.add_argument("--examples", type=int, help="predict only the first so many pairs; none: all")
    parser.add_argument("--threads", type=int, default=2, help="threads of the process (default: 2)")
    add_shared_options(parser)
    options = parser.parse_args(words)
    if options.rounds <= WARM_UP_ROUNDS or (options.examples is not None and options.examples < 1):
        parser.error(f"--rounds {options.rounds} --examples {options.examples}: 2 rounds or more of a pair are needed")
    settle_shared_options(parser, options, MRPC_FOLDER)
    return options


def resolved_options(options: argparse.Namespace) -> dict[str, object]:
    """The options that repeat this very measurement."""
    return {
        "rounds": options.rounds,
        "examples": options.examples,
        "threads": options.threads,
    } | shown_shared_options(options)


def texts_of(options: argparse.Namespace) -> tuple[list[Pair], str]:
    """The pairs to predict, and what they are."""
    if options.data_dir is None:
        pairs, name = example_pairs(), "the generated example corpus (no folder of MRPC was found or given)"
    else:
        splits = [mrpc_pairs(options.data_dir / f"{split}.tsv") for split in ("dev", "test")]
        pairs, name = [pair for split in splits for pair in split], "MRPC's development and test pairs"
    return pairs[: options.examples], name


def write_classifier(encoder: Path, folder: Path) -> Path:
    """Save a classifier as a fine-tuning would leave it: the encoder, a new head with named labels, the tokenizer."""
    import torch
    from transformers import AutoModelForSequenceClassification, AutoTokenizer

    torch.manual_seed(SEED)
    with quiet_transformers():
        model = AutoModelForSequenceClassification.from_pretrained(
            encoder, id2label=dict(enumerate(LABELS)), label2id={name: i for i, name in enumerate(LABELS)}
        )
        model.save_pretrained(folder)
        AutoTokenizer.from_pretrained(encoder).save_pretrained(folder)
    return folder


def arms_of(model: Path, pairs: Sequence[Pair], folder: Path, threads: int) -> list[Arm]:
    """All that is compared."""
    source = write_pairs(folder / "texts.csv", pairs)
    ours = []
    for number, bf16 in enumerate((False, True)):
        own = folder / f"arm-{number}"
        own.mkdir()
        ours.append(FleetuneArm(model, source, own, threads, bf16=bf16))
    return [PipelineArm(model, pairs), *ours]


def measure(arms: Sequence[Arm], num_rounds: int, num_examples: int) -> list[dict[str, Any]]:
    """Raw samples of every round, and how far the answers lie from the pipeline's.

    Raises:
        RuntimeError: An arm gave more or fewer answers than there are texts.
    """
    rounds = []
    for i in range(num_rounds):
        seconds, answers = {}, {}
        for arm in rotated(arms, i):
            arm.prepare()
            began = time.perf_counter()
            outcome = arm.predict()
            seconds[arm.name] = time.perf_counter() - began
            answers[arm.name] = arm.answers(outcome)
            if len(answers[arm.name]) != num_examples:
                raise RuntimeError(f"{arm.name}: {len(answers[arm.name])} answers for {num_examples} texts")
        rounds.append(
            {
                "order": list(seconds),
                "seconds": dict(sorted(seconds.items())),
                "largest_difference": {
                    name: largest_difference(found, answers[REFERENCE]) for name, found in sorted(answers.items())
                },
                "load_average_1_min": os.getloadavg()[0],
            }
        )
        told = ", ".join(f"{name} {value:.1f} s" for name, value in seconds.items())
        print(f"round {i + 1}/{num_rounds}{' (warm-up)' if i < WARM_UP_ROUNDS else ''}: {told}", flush=True)
    return rounds


def largest_difference(ours: Sequence[Answer], theirs: Sequence[Answer]) -> float:
    """Of the probabilities of the classes that the pipeline gave, over all texts (two classes)."""
    return max(
        abs((mine.score if mine.label == other.label else 1.0 - mine.score) - other.score)
        for mine, other in zip(ours, theirs, strict=True)
    )


def summarise(rounds: Sequence[Mapping[str, Any]], num_examples: int) -> dict[str, Any]:
    """Speed of each arm, and how many times as fast as the pipeline it was in the same round."""
    reference = [r["seconds"][REFERENCE] for r in rounds]
    return {name: summary_of(rounds, name, reference, num_examples) for name in rounds[0]["seconds"]}


def summary_of(
    rounds: Sequence[Mapping[str, Any]], arm: str, reference: Sequence[float], num_examples: int
) -> dict[str, Any]:
    """One arm's speed; `reference` are the pipeline's seconds in each of the rounds."""
    seconds = [r["seconds"][arm] for r in rounds]
    speedups = paired_ratios(reference, seconds)
    return {
        "samples_per_s": dataclasses.asdict(Spread.of([num_examples / second for second in seconds])),
        "speedup": dataclasses.asdict(Spread.of(speedups)),
        "speedup_by_round": speedups,
        "largest_difference": max(r["largest_difference"][arm] for r in rounds),
    }


def speed_table(summary: Mapping[str, Any]) -> str:
    """The summary as Markdown, the slowest first."""
    header = ("arm", "samples/s", "times the pipeline's speed", "largest difference of a probability")
    slowest_first = sorted(summary.items(), key=lambda item: float(item[1]["samples_per_s"]["median"]))
    return markdown_table(header, [speed_row(name, entry) for name, entry in slowest_first])


def speed_row(name: str, entry: Mapping[str, Any]) -> list[str]:
    is_reference = name == REFERENCE
    return [
        name,
        Spread(**entry["samples_per_s"]).text(1),
        "" if is_reference else Spread(**entry["speedup"]).text(2),
        "" if is_reference else f"{entry['largest_difference']:.1e}",
    ]


if __name__ == "__main__":
    main()
