"""The training loop, written once and in the open."""

from __future__ import annotations

import contextlib
import math
import time
from collections.abc import Iterator
from typing import Any, NoReturn

import torch
from torch import Tensor

from fleetune.data.batches import CostModel, pack
from fleetune.errors import PeerError, TrainingError
from fleetune.evaluate.metrics import is_greater_better
from fleetune.evaluate.outputs import outputs_of
from fleetune.evaluate.predict import FloatArray, PredictionStopped, Predictor
from fleetune.evaluate.score import evaluate_splits, metric_text
from fleetune.timing.clocks import FORWARD_BACKWARD, LOOP
from fleetune.train.interrupt import Stopped, StopRequest, listening
from fleetune.train.run import Evaluation, TrainingRun
from fleetune.train.saving import save_checkpoint


def train(run: TrainingRun) -> None:
    """Take all the updates that the plan still has, evaluating, logging and saving when they are due.

    Raises:
        Stopped: A signal asked for it; everything up to the current step is saved.
        TrainingError: The loss is no longer finite.
    """
    pace = Pace(run)
    with (
        pace.recorded(run),
        steps_timed(run),
        listening(speaks=run.ranks.is_first and not run.ranks.has_own_launcher) as request,
        run.terminal.bar("training", run.plan.total_steps, "steps", run.state.step) as bar,
    ):
        if run.state.step > 0:
            evaluate_if_due(run, request)  # a stop may have come between the step and its evaluation
        while run.state.step < run.plan.total_steps and not stops_early(run):
            run.times.begin()
            loss_sum, num_tokens = accumulate_gradients(run)
            # One small sum tells every rank the norm, the loss, whether anybody was asked to stop, and who was slowest.
            own = [run.updates.squared_norm(), loss_sum, float(bool(request)), num_tokens]
            (squared_norm, global_loss_sum, num_stopping, global_tokens), slowest_s = add_up(run, own)
            learning_rate = run.plan.schedule.at(run.state.step)
            norm = run.updates.begin(learning_rate, squared_norm, run.config.max_grad_norm)
            pace.count(run, global_loss_sum, int(global_tokens))
            run.state.step += 1
            run.times.end(slowest_s)
            bar.move_to(run.state.step, pace.note(run))
            if is_due(run, "steps", run.config.logging_steps) or run.state.step == run.plan.total_steps:
                log(run, {"loss": run.state.take_mean_loss(), "grad_norm": norm, "learning_rate": learning_rate})
            if num_stopping:
                stop_here(run, request)
            evaluate_if_due(run, request)
            if is_due(run, run.config.save_strategy, run.config.save_steps):
                save_checkpoint(run)
        run.updates.settle()


@contextlib.contextmanager
def steps_timed(run: TrainingRun) -> Iterator[None]:
    """Take the time of the steps inside of a `with` block, to whose loop belongs what is in no other part."""
    with run.clocks.during(LOOP):
        run.times.open()
        try:
            yield
        finally:
            run.times.close()


def add_up(run: TrainingRun, own: list[float]) -> tuple[list[float], float]:
    """The sums over ranks of a few numbers of this step.

    Args:
        run: The run.
        own: This rank's numbers.

    Returns:
        The sums, and how long the slowest rank took for the step, in seconds.
    """
    own_s = run.times.own_s()
    if run.ranks.world_size == 1:
        return own, own_s
    each_s = [0.0] * run.ranks.world_size  # a rank fills its own place alone: the sum holds those of all
    each_s[run.ranks.rank] = own_s
    with run.clocks.blocked():
        sums = run.ranks.start_sum(torch.tensor([*own, *each_s], dtype=torch.float64))().tolist()
    return sums[: len(own)], max(sums[len(own) :])


def accumulate_gradients(run: TrainingRun) -> tuple[float, int]:
    """Forward and backward of this rank's micro-batches.

    The loss is a sum divided by the count of the *global* batch, so that the split over ranks and micro-batches does
    not matter: gradients are added up over both.

    Returns:
        This rank's share of the summed loss, and its tokens.
    """
    step, ranks = run.state.step, run.ranks
    with run.clocks.during("data"):
        micro_batches = run.batches.micro_batches(step, ranks.rank)
        num_targets = count_targets(run, step)
    total, num_tokens = 0.0, 0
    for i, examples in enumerate(micro_batches):
        with run.clocks.during("data"):
            batch = pack(run.train_table, examples)
        with run.clocks.during(FORWARD_BACKWARD):
            run.classifier.module.begin_micro_batch(run.config.seed, step, micro_batch=i, rank=ranks.rank)
            assert batch.labels is not None
            loss: Tensor = run.objective.loss(run.classifier.module(batch), batch.labels, batch.boundaries)
            if i == len(micro_batches) - 1:
                run.updates.expect(step)
            (loss / num_targets).backward()
            total += loss.item()
        num_tokens += batch.num_tokens
    return total, num_tokens


def count_targets(run: TrainingRun, step: int) -> float:
    """What the loss of an update is a mean over, in the global batch: examples, words that have a tag, or weights."""
    return run.objective.count(run.train_table, run.batches.examples_of(step))


def is_due(run: TrainingRun, strategy: str, interval: int) -> bool:
    """Whether something is due after this step: every `interval` steps, at each epoch's end, or never ("no")."""
    if strategy == "epoch":
        return run.state.step % run.plan.steps_per_epoch == 0 or run.state.step == run.plan.total_steps
    return strategy == "steps" and run.state.step % interval == 0


def log(run: TrainingRun, entry: dict[str, Any]) -> None:
    """Add a line to the history and to the tracker."""
    step = run.state.step
    entry = {**entry, "epoch": step / run.plan.steps_per_epoch, "step": step}
    run.state.log_history.append(entry)
    run.tracker.log(step, entry)


def evaluate(run: TrainingRun, request: StopRequest | None = None) -> Evaluation:
    """Metrics of the model as it stands on all validation splits; kept, so that nothing is evaluated twice.

    Raises:
        PredictionStopped: `request` came on some rank.
    """
    run.updates.settle()
    logits: dict[str, FloatArray] = {}
    with run.record.phase("evaluation"), run.clocks.during("evaluation"):
        results = evaluate_splits(
            make_predictor(run, request), run.eval_tables, outputs_of(run.task, run.classifier, run.config),
            keep=logits.__setitem__,
        )  # fmt: skip
    run.last_evaluation = Evaluation(step=run.state.step, results=results, logits=logits)
    return run.last_evaluation


def make_predictor(run: TrainingRun, request: StopRequest | None = None) -> Predictor:
    """What evaluates the run's model as it stands."""
    return Predictor(
        model=run.classifier.module,
        num_labels=run.classifier.num_labels,
        per_token=run.classifier.head.reads_all_tokens,
        ranks=run.ranks,
        batch_size=run.config.per_device_eval_batch_size,
        costs=CostModel(hidden_size=run.classifier.hidden_size),
        should_stop=lambda: bool(request),
    )


def best_metric(run: TrainingRun) -> tuple[str, bool]:
    """The metric that decides which evaluation is best, and whether more is better."""
    name = "eval_" + (run.config.metric_for_best_model or run.task.best_metric).removeprefix("eval_")
    greater = run.config.greater_is_better
    return name, is_greater_better(name) if greater is None else greater


def evaluate_if_due(run: TrainingRun, request: StopRequest) -> None:
    """Evaluate, log, tell, and remember whether it is the best so far."""
    interval = run.config.eval_steps or run.config.logging_steps
    due = run.config.do_eval and is_due(run, run.config.eval_strategy, interval)
    if not due or run.state.has_evaluated():
        return
    try:
        results = evaluate(run, request).results
    except PredictionStopped:
        stop_here(run, request)
    log(run, results)
    run.terminal.say(f"step {run.state.step:,}  {metric_text(results)}")
    name, greater_is_better = best_metric(run)
    run.state.note_evaluation(results[name], greater_is_better, run.config.early_stopping_threshold)
    if run.state.is_new_best(results[name], greater_is_better):
        run.state.best_metric, run.state.best_step = results[name], run.state.step


def stops_early(run: TrainingRun) -> bool:
    """Whether evaluations have been no better than the best before for as long as was to be waited; all ranks agree."""
    patience = run.config.early_stopping_patience
    return patience is not None and run.state.num_stale >= patience


def stop_here(run: TrainingRun, request: StopRequest) -> NoReturn:
    """Save and end, at the same step on every rank."""
    save_checkpoint(run)
    raise Stopped(run.state.step, request.signal)


class Pace:
    """Speed of training since this process began with it, other phases left out."""

    def __init__(self, run: TrainingRun) -> None:
        self._began = time.perf_counter()
        self._elsewhere_s = self._other_phases(run)
        self._num_samples, self._num_tokens, self._num_updates, self._seconds = 0, 0, 0, 0.0

    @staticmethod
    def _other_phases(run: TrainingRun) -> float:
        return run.record.seconds.get("evaluation", 0.0) + run.record.seconds.get("checkpoints", 0.0)

    def count(self, run: TrainingRun, loss_sum: float, num_tokens: int) -> None:
        """Take the sums of an update over all ranks.

        Raises:
            TrainingError: The loss is not finite.
        """
        num_examples = len(run.batches.examples_of(run.state.step))
        if not math.isfinite(loss_sum):
            raise _diverged(run)
        run.state.recent_losses.append(loss_sum / count_targets(run, run.state.step))
        self._num_samples += num_examples
        self._num_tokens += num_tokens
        self._num_updates += 1
        self._seconds = time.perf_counter() - self._began - (self._other_phases(run) - self._elsewhere_s)

    def note(self, run: TrainingRun) -> str:
        """Loss and speed for the progress bar."""
        return f"loss {run.state.recent_losses[-1]:.3f}, {self._num_samples / self._seconds:,.1f} samples/s"

    @contextlib.contextmanager
    def recorded(self, run: TrainingRun) -> Iterator[None]:
        """Put the speed into the record after a `with` block, however it ends."""
        try:
            yield
        finally:
            self._write(run)

    def _write(self, run: TrainingRun) -> None:
        seconds = self._seconds or math.inf
        run.record.seconds["training"] = self._seconds
        run.record.throughput |= {
            "samples": self._num_samples,
            "tokens": self._num_tokens,
            "samples_per_s": self._num_samples / seconds,
            "tokens_per_s": self._num_tokens / seconds,
            "gradient_bytes_per_update": run.updates.bytes_packed / max(1, self._num_updates),
        }


def _diverged(run: TrainingRun) -> Exception:
    if not run.ranks.is_first:
        return PeerError("the loss is not finite")
    rate = run.plan.schedule.at(run.state.step)
    return TrainingError(f"the loss of step {run.state.step + 1} is not finite at a learning rate of {rate:.3g}: "
                         "lower --learning_rate, or give --warmup_ratio 0.1")  # fmt: skip
