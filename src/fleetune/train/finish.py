"""After the last step: the chosen weights, the last evaluation, the predictions, and the files that stay."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from fleetune.evaluate.predict import FloatArray
from fleetune.evaluate.score import evaluate_splits, metric_text, write_glue_predictions, write_predictions
from fleetune.files import write_json
from fleetune.model.load import save_model
from fleetune.train.loop import log, make_predictor
from fleetune.train.output import write_files
from fleetune.train.run import TrainingRun
from fleetune.train.saving import TRAINER_STATE_FILE, load_best, trainer_state


def finish(run: TrainingRun) -> None:
    """Evaluate, predict and write the output folder."""
    if run.config.load_best_model_at_end:
        load_best(run)
    logits: dict[str, FloatArray] = {}
    results = evaluate_last(run, logits)
    predict_test(run, logits)
    run.record.metrics = results
    run.ranks.on_first(lambda: write_output(run, results, logits))
    run.terminal.say(f"final  {metric_text(results)}" if results else "finished without an evaluation")
    tell(run)


def evaluate_last(run: TrainingRun, logits: dict[str, FloatArray]) -> dict[str, Any]:
    """Metrics of the weights that are kept; each split's logits are put into `logits` on the first rank."""
    if not run.config.do_eval:
        return {}
    with run.record.phase("evaluation"):
        results = evaluate_splits(
            make_predictor(run), run.eval_tables, run.task, run.classifier, keep=logits.__setitem__
        )
    if not run.state.has_evaluated():
        log(run, results)
    return results


def predict_test(run: TrainingRun, logits: dict[str, FloatArray]) -> None:
    """Predict the test splits, where asked for."""
    with run.record.phase("prediction"):
        for split, table in run.test_tables.items():
            found = make_predictor(run).logits(table)
            if found is not None:
                logits[split] = found


def write_output(run: TrainingRun, results: dict[str, Any], logits: dict[str, FloatArray]) -> None:
    """Write what stays: the model as `save_pretrained` writes it, the results, the predictions."""
    assert run.config.output_dir is not None
    with run.record.phase("output"):
        write_files(run.config.output_dir, lambda folder: _write(run, folder, results, logits))


def _write(run: TrainingRun, folder: Path, results: dict[str, Any], logits: dict[str, FloatArray]) -> None:
    save_model(run.classifier, run.tokenizer, folder)
    trained = train_results(run)
    write_json(folder / TRAINER_STATE_FILE, trainer_state(run.state, run.plan, run.config.output_dir))
    write_json(folder / "train_results.json", trained)
    if results:
        write_json(folder / "eval_results.json", results)
    write_json(folder / "all_results.json", {**trained, **results})
    tables = run.eval_tables | run.test_tables
    for split, values in logits.items():
        write_predictions(folder / f"predictions_{split}.jsonl", values, tables[split], run.task, run.classifier)
        if split in run.test_tables:
            name = run.task.name + ("-mm" if split.endswith("_mismatched") else "")
            write_glue_predictions(folder / f"predict_results_{name}.txt", values, run.task, run.classifier)


def train_results(run: TrainingRun) -> dict[str, Any]:
    """The numbers of `train_results.json`, named as transformers names them."""
    losses = [entry["loss"] for entry in run.state.log_history if "loss" in entry]
    seconds = run.record.seconds.get("training", 0.0)
    return {
        "epoch": run.state.step / run.plan.steps_per_epoch,
        "train_loss": sum(losses) / len(losses) if losses else None,
        "train_runtime": seconds,
        "train_samples": run.plan.num_examples,
        "train_samples_per_second": run.record.throughput.get("samples_per_s"),
        "train_tokens_per_second": run.record.throughput.get("tokens_per_s"),
    }


def tell(run: TrainingRun) -> None:
    """Say how fast it was, and where everything is."""
    speed, folder = run.record.throughput, run.config.output_dir
    run.terminal.say(
        f"trained {int(speed['samples']):,} examples in {run.record.seconds['training']:,.1f} s: "
        f"{speed['samples_per_s']:,.1f} samples/s, {speed['tokens_per_s']:,.0f} tokens/s; "
        f"{speed['padding_avoided']:.0%} of a batch padded to the maximum length would have been padding"
    )
    run.terminal.say(f"model, results and predictions are in {folder}, the record of the run is {folder}/record.json")
