"""After the last step: the chosen weights, the last evaluation, the predictions, and the files that stay."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch

from fleetune.evaluate.outputs import outputs_of
from fleetune.evaluate.predict import FloatArray
from fleetune.evaluate.score import metric_text, write_predictions
from fleetune.files import disk_errors, write_files, write_json, write_whole
from fleetune.hub.card import CARD, write_card
from fleetune.hub.upload import upload
from fleetune.model.load import drop_other_weights, save_model
from fleetune.report.times import rank_figures, time_line, times_of
from fleetune.train.loop import evaluate, log, make_predictor
from fleetune.train.output import kept_settings
from fleetune.train.run import Evaluation, TrainingRun
from fleetune.train.saving import TRAINER_STATE_FILE, load_best, trainer_state


def finish(run: TrainingRun) -> None:
    """Evaluate, predict and write the output folder."""
    evaluated_step = load_best(run) if run.config.load_best_model_at_end else run.state.step
    evaluation = evaluate_last(run, evaluated_step)
    results = evaluation.results if evaluation is not None else {}
    logits = (evaluation.logits if evaluation is not None else {}) | predict_test(run)
    run.record.metrics = results
    with run.clocks.during("output"):
        run.ranks.on_first(lambda: write_output(run, results, logits))
        write_traces(run)
    run.terminal.say(f"final  {metric_text(results)}" if results else "finished without an evaluation")
    run.record.time = gather_times(run)
    tell(run)
    run.ranks.on_first(lambda: publish(run))


def publish(run: TrainingRun) -> None:
    """Write the model card, and upload the model where that is asked for; a failed upload ends nothing."""
    config, record = run.config, run.record
    assert config.output_dir is not None
    record.step = run.state.step
    name = (config.hub_model_id or config.output_dir.absolute().name).rpartition("/")[2]
    with disk_errors(config.output_dir / CARD):
        told = write_card(config.output_dir, record, name)
    if told is not None:
        run.terminal.say(told)
    if config.push_to_hub:
        with record.phase("upload"):
            line = upload(config.output_dir, config.hub_model_id or name, private=config.hub_private_repo,
                          message=f"fine-tuned by fleetune for {record.task['name']}")  # fmt: skip
        record.notices.append(line)
        run.terminal.say(line)


def evaluate_last(run: TrainingRun, weights_of_step: int) -> Evaluation | None:
    """The evaluation of the weights that are kept, unless it was the last thing done."""
    if not run.config.do_eval:
        return None
    if run.last_evaluation is not None and run.last_evaluation.step == weights_of_step == run.state.step:
        return run.last_evaluation
    evaluation = evaluate(run)
    if not run.state.has_evaluated():
        log(run, evaluation.results)
    return evaluation


def predict_test(run: TrainingRun) -> dict[str, FloatArray]:
    """Logits of the test splits, on the first rank."""
    with run.record.phase("prediction"), run.clocks.during("prediction"):
        found = {split: make_predictor(run).logits(table) for split, table in run.test_tables.items()}
    return {split: logits for split, logits in found.items() if logits is not None}


def write_output(run: TrainingRun, results: dict[str, Any], logits: dict[str, FloatArray]) -> None:
    """Write what stays: the model as `save_pretrained` writes it, the results, the predictions."""
    assert run.config.output_dir is not None
    with run.record.phase("output"):
        write_files(run.config.output_dir, lambda folder: _write(run, folder, results, logits))
        drop_other_weights(run.config.output_dir)


def _write(run: TrainingRun, folder: Path, results: dict[str, Any], logits: dict[str, FloatArray]) -> None:
    base = str(kept_settings(run.config)["model"])
    save_model(run.classifier, run.tokenizer, folder, base=base, merge=run.config.lora_merge)
    trained = train_results(run)
    write_json(folder / TRAINER_STATE_FILE, trainer_state(run.state, run.plan, run.config))
    write_json(folder / "train_results.json", trained)
    if results:
        write_json(folder / "eval_results.json", results)
    write_json(folder / "all_results.json", {**trained, **results})
    tables, outputs = run.eval_tables | run.test_tables, outputs_of(run.task, run.classifier, run.config)
    for split, values in logits.items():
        write_predictions(folder / f"predictions_{split}.jsonl", values, tables[split], outputs)
        outputs.write_files(folder, split, values, tables[split])


def write_traces(run: TrainingRun) -> None:
    """Write the traces of all ranks, which come here together; nothing where none was asked for."""
    if run.times.tracer is None:
        return
    roster, rank, folder = run.ranks.roster, run.ranks.rank, run.config.output_dir
    assert folder is not None
    text = run.times.tracer.to_json(rank, roster.host_name(rank) if roster.members else "this host")
    traces = run.ranks.gather(torch.frombuffer(bytearray(text.encode()), dtype=torch.uint8))
    found = [trace.numpy().tobytes() for trace in traces or ()]
    run.ranks.on_first(lambda: _write_traces(folder, found))
    run.terminal.say(f"traces of {len(run.times.tracer.steps)} steps are in {folder}/trace_rank_*.json")


def _write_traces(folder: Path, traces: Sequence[bytes]) -> None:
    for rank, trace in enumerate(traces):

        def write(path: Path, trace: bytes = trace) -> None:
            path.write_bytes(trace)

        write_whole(folder / f"trace_rank_{rank}.json", write)


def gather_times(run: TrainingRun) -> dict[str, Any]:
    """Where the time of all ranks went; they call this together."""
    figures = rank_figures(run.clocks, run.times)
    return times_of(run.ranks.tell_all(figures), run.times)


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
    run.terminal.say(time_line(run.record.time))
    run.terminal.say(f"model, results and predictions are in {folder}, the record of the run is {folder}/record.json")
