"""Accuracy on MRPC over several seeds, fleetune's against that of `transformers.Trainer` with the same recipe.

One run is one trainer with one seed, in a process of its own, and leaves one file; what has its file is not run again,
so the benchmark can be stopped at any time and goes on where it was. The seed decides the new head's first weights (the
same in both), the order of the data and the dropout (each trainer's own).
"""

from __future__ import annotations

import argparse
import json
import math
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from benchmarks.models import FLOAT32_SETTINGS, shown_model
from benchmarks.result_file import RESULTS, describe, host_facts, print_result, shown_path, versions, write_result
from benchmarks.summary import markdown_table
from benchmarks.texts import MRPC_FOLDER
from fleetune.bench.features import Feature, feature_of
from fleetune.cli.demo import MODEL_PACKAGE, packaged_model
from fleetune.files import write_json

DESCRIPTION = "Accuracy on MRPC over several seeds: fleetune against transformers.Trainer with the same recipe."
NAME = "accuracy"
RUNS = RESULTS / NAME
SEEDS = (1, 2, 3, 4, 5)
RECIPE: dict[str, Any] = {
    "learning_rate": 1e-4,
    "lr_scheduler_type": "linear",
    "warmup_ratio": 0.1,
    "num_train_epochs": 3,
    "per_device_train_batch_size": 16,
    "per_device_eval_batch_size": 32,
    "weight_decay": 0.0,
    "adam_beta1": 0.9,
    "adam_beta2": 0.999,
    "adam_epsilon": 1e-8,
    "max_grad_norm": 1.0,
    "max_seq_length": 128,
}
"""What both trainers are told, by fleetune's names; the dropout is that of the model's config."""
METRICS = ("accuracy", "f1", "loss")

Run = dict[str, Any]
Epochs = list[dict[str, float]]


def main(words: Sequence[str] | None = None) -> None:
    """Do one run, or all that are missing and then the summary."""
    options = parse_options(words)
    if options.arm is not None:
        do_run(options, options.arm, options.seed)
        return
    result = describe(NAME, resolved_options(options))
    for seed in options.seeds:
        for arm in ARMS:
            if not run_file(options.runs, arm, seed).exists():
                start_run(options, arm, seed)
    runs = [read_run(options, arm, seed) for arm in ARMS for seed in options.seeds]
    note = f"MRPC's development split after {runs[0]['recipe']['num_train_epochs']} epochs, {len(options.seeds)} seeds"
    result |= {"notes": [note], "recipe": recipe(options), "runs": runs, "summary": summarise(runs)}
    table = accuracy_table(result["summary"])
    print_result([note, verdict(result["summary"])], table, write_result(result, options.output))


def parse_options(words: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog=f"python -m benchmarks.{NAME}", description=DESCRIPTION)
    parser.add_argument("--seeds", type=int, nargs="+", default=list(SEEDS), help="seeds (default: 1 2 3 4 5)")
    parser.add_argument("--runs", type=Path, default=RUNS, help=f"folder of the runs (default: {shown_path(RUNS)})")
    parser.add_argument("--arm", choices=sorted(ARMS), help="do only one run: of this trainer, with --seed")
    parser.add_argument("--seed", type=int, help="of that one run")
    parser.add_argument("--threads", type=int, help="threads of a run; none: one per usable core")
    parser.add_argument("--data_dir", type=Path, default=MRPC_FOLDER, help="folder of MRPC's files")
    parser.add_argument("--model", type=Path, help=f"folder of the encoder; none: that of {MODEL_PACKAGE}")
    parser.add_argument("--output", type=Path, help="file to write; none: one with the date in benchmarks/results")
    options = parser.parse_args(words)
    if (options.arm is None) != (options.seed is None):
        parser.error("--arm and --seed belong together: one run is one trainer with one seed")
    if options.arm is None and len(set(options.seeds)) < 2:
        parser.error(f"--seeds {options.seeds}: two different ones or more are needed, for a standard error")
    if not options.data_dir.is_dir():
        parser.error(f"--data_dir {options.data_dir}: there is no such folder")
    return options


def resolved_options(options: argparse.Namespace) -> dict[str, object]:
    """The options that repeat this very measurement."""
    return {
        "seeds": options.seeds,
        "runs": shown_path(options.runs),
        "threads": options.threads,
        "data_dir": shown_path(options.data_dir),
        "model": shown_path(options.model) if options.model else None,
    }


def recipe(options: argparse.Namespace) -> dict[str, Any]:
    """All that decides on the accuracy of a run besides its trainer and seed."""
    return RECIPE | {"model": shown_model(options.model), "data_dir": shown_path(options.data_dir)}


# ---- one run


def run_file(folder: Path, arm: str, seed: int) -> Path:
    return folder / f"{arm}-seed{seed}.json"


def start_run(options: argparse.Namespace, arm: str, seed: int) -> None:
    """Do a run in a process of its own.

    Raises:
        CalledProcessError: It failed; it has said why.
    """
    chosen = {"arm": arm, "seed": seed} | {n: getattr(options, n) for n in ("runs", "threads", "data_dir", "model")}
    words = [word for name, value in chosen.items() if value is not None for word in (f"--{name}", str(value))]
    subprocess.run([sys.executable, "-m", f"benchmarks.{NAME}", *words], check=True)


def do_run(options: argparse.Namespace, arm: str, seed: int) -> None:
    """Train once in this process and write the run's file, unless it is there."""
    path = run_file(options.runs, arm, seed)
    if path.exists():
        print(f"{path} is there: nothing to do")
        return
    if options.threads is not None:
        os.environ["OMP_NUM_THREADS"] = str(options.threads)  # before torch is imported
    began, cpu_began = time.perf_counter(), time.process_time()
    with tempfile.TemporaryDirectory(prefix="fleetune-bench-") as folder:
        epochs = ARMS[arm](options, seed, Path(folder))
    run: Run = {
        "arm": arm,
        "seed": seed,
        "recipe": recipe(options),
        "epochs": epochs,
        "seconds": time.perf_counter() - began,  # whatever held the process up included
        "cpu_seconds": time.process_time() - cpu_began,
        "finished": time.strftime("%Y-%m-%dT%H:%M:%S%z"),
        "host": host_facts(),
        "versions": versions(),
    }
    write_json(path, run)
    last = ", ".join(f"{name} {epochs[-1][name]:.4f}" for name in METRICS)
    print(f"{arm}, seed {seed}: {last} ({run['seconds']:,.0f} s)", flush=True)


def read_run(options: argparse.Namespace, arm: str, seed: int) -> Run:
    """A finished run.

    Raises:
        ValueError: It was of another recipe.
    """
    path = run_file(options.runs, arm, seed)
    run: Run = json.loads(path.read_text(encoding="utf-8"))
    if run["recipe"] != recipe(options):
        changed = [k for k in run["recipe"].keys() | recipe(options) if run["recipe"].get(k) != recipe(options).get(k)]
        raise ValueError(f"{path} is a run of another recipe ({', '.join(sorted(changed))}): move it away or name "
                         "another folder with --runs")  # fmt: skip
    return run


def run_trainer(options: argparse.Namespace, seed: int, folder: Path) -> Epochs:
    """`transformers.Trainer`, padding to the longest of each batch, on the tokens that fleetune reads."""
    import transformers

    from fleetune.evaluate.metrics import Outcome, compute_metrics

    def metrics(prediction: Any) -> dict[str, float | None]:
        answer = prediction.predictions.argmax(axis=1)
        return compute_metrics(
            ("accuracy", "f1"), Outcome(predictions=answer, labels=prediction.label_ids, positive_id=1)
        )

    transformers.utils.logging.set_verbosity_error()
    source = str(options.model or packaged_model())
    tokenizer = transformers.AutoTokenizer.from_pretrained(source)
    splits = mrpc_features(options.data_dir, tokenizer, folder)
    transformers.set_seed(seed)
    model = transformers.AutoModelForSequenceClassification.from_pretrained(source, num_labels=2)
    trainer = transformers.Trainer(
        model=model,
        args=trainer_arguments(transformers, seed, folder),
        data_collator=transformers.DataCollatorWithPadding(tokenizer),
        train_dataset=splits["train"],
        eval_dataset=splits["validation"],
        compute_metrics=metrics,
    )
    trainer.train()
    return epochs_of(trainer.state.log_history)


def trainer_arguments(transformers: Any, seed: int, folder: Path) -> Any:
    """The recipe by `Trainer`'s names; what it does not name stays at `Trainer`'s default."""
    renamed = dict(RECIPE)
    del renamed["max_seq_length"]
    renamed["warmup_steps"] = renamed.pop("warmup_ratio")  # below 1 it is a share of all updates
    return transformers.TrainingArguments(
        output_dir=str(folder),
        **renamed,
        seed=seed,
        use_cpu=True,
        dataloader_pin_memory=False,
        eval_strategy="epoch",
        save_strategy="no",
        report_to="none",
        disable_tqdm=True,
    )


def mrpc_features(data_dir: Path, tokenizer: Any, folder: Path) -> dict[str, list[Feature]]:
    """The examples of the training and the development split as a tokenised data set holds them."""
    from fleetune.config import RunConfig
    from fleetune.data.dataset import prepare_data

    settings = RunConfig(
        task="mrpc", data_dir=data_dir, cache_dir=folder / "cache", max_seq_length=RECIPE["max_seq_length"]
    )
    data = prepare_data(settings, tokenizer, splits=["train", "validation"])
    return {name: [feature_of(table, i) for i in range(len(table))] for name, table in data.splits.items()}


def run_fleetune(options: argparse.Namespace, seed: int, folder: Path) -> Epochs:
    """`fleetune train` in this process."""
    from fleetune.config import RunConfig
    from fleetune.train.program import finetune

    config = RunConfig(
        task="mrpc",
        data_dir=options.data_dir,
        model=str(options.model or packaged_model()),
        output_dir=folder / "out",
        cache_dir=folder / "cache",
        **RECIPE,
        **FLOAT32_SETTINGS,
        seed=seed,
        threads=options.threads,
        eval_strategy="epoch",
        save_strategy="no",
        report_to=("none",),
    )
    finetune(config)
    state = json.loads((folder / "out" / "trainer_state.json").read_text(encoding="utf-8"))
    return epochs_of(state["log_history"])


def epochs_of(log_history: Sequence[Mapping[str, float]]) -> Epochs:
    """The evaluation at each epoch's end; both trainers log it under the same names."""
    evaluations = {float(entry["epoch"]): entry for entry in log_history if "eval_accuracy" in entry}
    return [{"epoch": at} | {name: entry[f"eval_{name}"] for name in METRICS} for at, entry in evaluations.items()]


ARMS: dict[str, Callable[[argparse.Namespace, int, Path], Epochs]] = {"trainer": run_trainer, "fleetune": run_fleetune}
"""Name -> trainer."""


# ---- what is told of them


def summarise(runs: Sequence[Run]) -> dict[str, Any]:
    """Each arm's metrics after the last epoch, and how far apart the means are."""
    arms = {arm: {name: moments(last_values(runs, arm, name)) for name in METRICS} for arm in ARMS}
    differences = {name: difference(arms["fleetune"][name], arms["trainer"][name]) for name in METRICS}
    return {"arms": arms, "difference": differences}


def last_values(runs: Sequence[Run], arm: str, metric: str) -> list[float]:
    """A metric after the last epoch, by seed."""
    return [run["epochs"][-1][metric] for run in runs if run["arm"] == arm]


def moments(values: Sequence[float]) -> dict[str, float]:
    """Mean, standard deviation of a run, and standard error of the mean."""
    deviation = statistics.stdev(values)
    return {
        "mean": statistics.fmean(values),
        "standard_deviation": deviation,
        "standard_error": deviation / math.sqrt(len(values)),
    }


def difference(ours: Mapping[str, float], theirs: Mapping[str, float]) -> dict[str, float | None]:
    """Our mean less theirs, also in standard errors: of the difference (both arms vary), and of their mean alone."""
    by = ours["mean"] - theirs["mean"]
    of_difference = math.hypot(ours["standard_error"], theirs["standard_error"])
    return {
        "of_means": by,
        "in_standard_errors": by / of_difference if of_difference else None,
        "in_standard_errors_of_trainer": by / theirs["standard_error"] if theirs["standard_error"] else None,
    }


def accuracy_table(summary: Mapping[str, Any]) -> str:
    """The summary as Markdown: mean and standard error, and the standard deviation of one run."""
    header = ("trainer", *(f"{name}: mean ± standard error (deviation)" for name in METRICS))
    rows = [[arm, *(moments_text(entry[name]) for name in METRICS)] for arm, entry in summary["arms"].items()]
    gaps = [f"{gap['of_means']:+.4f} = {errors_text(gap)}" for gap in summary["difference"].values()]
    return markdown_table(header, [*rows, ["fleetune - trainer", *gaps]])


def moments_text(entry: Mapping[str, float]) -> str:
    return f"{entry['mean']:.4f} ± {entry['standard_error']:.4f} ({entry['standard_deviation']:.4f})"


def errors_text(gap: Mapping[str, float | None]) -> str:
    errors = gap["in_standard_errors"]
    return "no spread" if errors is None else f"{errors:+.2f} standard errors"


def verdict(summary: Mapping[str, Any]) -> str:
    """Whether the means of the accuracy agree, in words."""
    gap = summary["difference"]["accuracy"]
    error = summary["arms"]["trainer"]["accuracy"]["standard_error"]
    held = "within" if abs(gap["of_means"]) <= error else "NOT within"
    return f"fleetune's mean accuracy is {held} one standard error of Trainer's ({gap['of_means']:+.4f}, {error:.4f})"


if __name__ == "__main__":
    main()
