"""The program of a training run: from settings to a finished output folder."""

from __future__ import annotations

import contextlib
import dataclasses
import math
import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

from fleetune.cluster.outputs import LOG_FOLDER
from fleetune.cluster.rank import RankInfo, read_rank, speaks_for_all
from fleetune.cluster.start import start_ranks, starts_elsewhere
from fleetune.comm.meeting import GLOO_INTERFACE
from fleetune.comm.ranks import Ranks, joined_ranks
from fleetune.config import RunConfig
from fleetune.config.values import nearest
from fleetune.data.loading import load_data
from fleetune.data.tasks import Task
from fleetune.data.tokens import TokenTable
from fleetune.errors import ConfigError, LaunchError
from fleetune.evaluate.outputs import Outputs, outputs_of
from fleetune.hardware.host import read_host
from fleetune.hardware.memory import return_freed_memory
from fleetune.hardware.pinning import Place
from fleetune.hardware.threads import set_threads
from fleetune.hardware.versions import read_versions
from fleetune.kernels import clock as kernel_clock
from fleetune.kernels.contest import kernels_in_use
from fleetune.model.here import with_model_here
from fleetune.model.load import (
    check_tokenizer_fits,
    load_classifier,
    load_model_config,
    load_tokenizer,
    with_model_labels,
)
from fleetune.model.objective import make_objective
from fleetune.model.precision import agreed_precision
from fleetune.model.trained import choose_trained, learning_rates
from fleetune.report.record import RunRecord, read_record
from fleetune.report.terminal import Terminal, open_terminal
from fleetune.report.times import rank_figures, times_of
from fleetune.timing.clocks import OTHER, RankClocks
from fleetune.timing.steps import StepTimes
from fleetune.timing.trace import Tracer
from fleetune.trackers.table import open_trackers
from fleetune.trackers.tracker import TrackedRun
from fleetune.train.checks import check_before_start
from fleetune.train.finish import finish
from fleetune.train.interrupt import Stopped
from fleetune.train.loop import best_metric, stops_early, train
from fleetune.train.optim import AdamW
from fleetune.train.output import check_room, claim, clear_earlier_run, kept_settings, lock
from fleetune.train.plan import TrainPlan, make_plan
from fleetune.train.run import TrainingRun, freeze_unused, make_batches, make_updates
from fleetune.train.saving import earlier_dtype, resume
from fleetune.train.state import TrainState


def finetune(config: RunConfig) -> RunRecord:
    """Fine-tune a model as the settings say, on one or several processes, of this machine or of several hosts.

    Under an outer launcher (torchrun, mpirun, srun) this process is one rank, and all of them call this function.

    Returns:
        The run's record, also in `record.json` of the output folder.

    Raises:
        FleetuneError: The settings, the data, the model or the output folder cannot be used; see `fleetune.errors`.
            With several processes, what a rank finds comes as a `LaunchError`; the rank prints the reason.
        Stopped: A signal asked the run to stop; it has been saved.
    """
    check_before_start(config, has_files=speaks_for_all(os.environ) and not starts_elsewhere(config))
    assert config.output_dir is not None
    status = start_ranks(["train"], config, log_dir=config.output_dir / LOG_FOLDER)
    if status is None:
        return run_rank(config, read_rank(os.environ))
    record = read_record(config.output_dir)
    if status != 0 or record is None:
        raise LaunchError(f"the ranks ended with exit status {status}")
    return record


def run_rank(config: RunConfig, info: RankInfo | None, place: Place | None = None,
             clocks: RankClocks | None = None) -> RunRecord:  # fmt: skip
    """One rank of a training run, start to finish.

    Args:
        config: The settings.
        info: Who this rank is.
        place: The part of the host that this rank has taken, if it has.
        clocks: Those that have run since its process began; None: its time begins now.
    """
    clocks = RankClocks() if clocks is None else clocks
    clocks.main.switch("setup")
    terminal = open_terminal(info is None or info.rank == 0)
    own_threads = None if place is None else place.part.threads
    with (
        joined_ranks(info, config, terminal.say, threads=own_threads, clocks=clocks) as ranks,
        open_output(config, ranks) as record,
    ):
        local_world_size = ranks.local_world_size
        threads = set_threads(config.threads, local_world_size=local_world_size, speaks=ranks.is_first, place=place)
        run = prepare(config, ranks, threads, record, terminal, clocks)
        for line in [*run.plan.lines(), *run.updates.lines(), *host_lines(place)]:
            terminal.say(line)
        record.plan |= {"host": None if place is None else place.plan.to_dict(), "exchange": run.updates.lines()}
        resume(run)
        run.times.tracer = tracer_of(run)
        ranks.on_first(lambda: make_room(run))
        with clocks.during("trackers"):
            ranks.on_first(lambda: start_trackers(run))
        clocks.main.switch(OTHER)
        try:
            with recorded(run), contextlib.closing(run.updates):
                train(run)
                tell_early_stop(run)
                finish(run)
        except Stopped as stop:
            # Outer launchers end all ranks once one has ended: none may before the first has saved and said so.
            words = str(stop)
            ranks.on_first(lambda: terminal.say(words))
            raise
    return record


@contextmanager
def open_output(config: RunConfig, ranks: Ranks) -> Iterator[RunRecord]:
    """Claim the output folder for the time of the run, and make the record that will be written into it."""
    assert config.output_dir is not None
    record = RunRecord(
        config=kept_settings(config), versions=read_versions(), host=dataclasses.asdict(read_host()),
        roster=[member.for_record() for member in ranks.roster.members],
    )  # fmt: skip
    release: list[Callable[[], None]] = []

    def take() -> None:
        claim(config)
        assert config.output_dir is not None
        release.append(lock(config.output_dir))

    ranks.on_first(take)
    try:
        yield record
    finally:
        for give_back in release:
            give_back()


def prepare(config: RunConfig, ranks: Ranks, threads: int, record: RunRecord, terminal: Terminal,
            clocks: RankClocks | None = None) -> TrainingRun:  # fmt: skip
    """Load model and data, make the plan, and put the run together; nothing is written yet."""
    clocks = RankClocks() if clocks is None else clocks
    with record.phase("model"), clocks.during("model"):
        found = with_model_here(config, ranks, terminal.say)
        model_config = load_model_config(found)
        tokenizer = load_tokenizer(found)
        config = shortened(config, check_tokenizer_fits(tokenizer, model_config, config.max_seq_length), record)
    with record.phase("data"), clocks.during("tokens"):
        data = load_data(config, tokenizer, ranks, terminal, splits=wanted_splits(config))
    with record.phase("model"), clocks.during("model"):
        classifier = load_classifier(found, model_config, data.task, tokenizer.pad_token_id or 0)
    tables = {name: with_model_labels(table, classifier) for name, table in data.splits.items()}
    train_table = tables["train"]
    earlier = earlier_dtype(config) if ranks.is_first else None
    with clocks.during("compiling"):
        kernels = kernels_in_use()
    precision = agreed_precision(config, classifier, ranks, earlier=earlier)
    plan = make_plan(
        config, processes=ranks.world_size, threads=threads, num_examples=len(train_table),
        num_tokens=train_table.num_tokens, longest=int(train_table.lengths.max()), unpadded=classifier.unpadded,
        dtype=precision.dtype, kernels=kernels,
    )  # fmt: skip
    check_best_metric(config, data.task)
    lines = choose_trained(classifier, config)
    objective, told = make_objective(config, data.task, classifier.labels, train_table)
    outputs = outputs_of(data.task, classifier, config)
    ranks.on_first(lambda: rehearse(outputs, tables))
    record.notices += [*data.notices, *classifier.notices, *precision.notices, *lines, *told]
    for notice in record.notices:
        terminal.say(notice)
    record.plan, record.task = plan.to_dict(), dataclasses.asdict(data.task)
    record.bad_rows = {name: bad_rows_of(table) for name, table in data.splits.items() if table.num_bad_rows}
    record.throughput |= padding_avoided(train_table, config.max_seq_length)
    parameters = freeze_unused(classifier.module, train_table)
    batches = make_batches(train_table, plan, config.seed, classifier.hidden_size)
    optimizer = AdamW(classifier.owner, config, learning_rates(classifier, config.layerwise_lr_decay))
    return_freed_memory()
    return TrainingRun(
        config=config,
        plan=plan,
        ranks=ranks,
        task=data.task,
        train_table=train_table,
        eval_tables={n: t for n, t in tables.items() if n.startswith("validation")},
        test_tables={n: t for n, t in tables.items() if n.startswith("test")},
        tokenizer=tokenizer,
        classifier=classifier,
        objective=objective,
        optimizer=optimizer,
        updates=make_updates(classifier, train_table, batches, optimizer, ranks, parameters, config, plan,
                             clocks),
        batches=batches,
        state=TrainState(),
        record=record,
        terminal=terminal,
        clocks=clocks,
        times=StepTimes(clocks, kernel_clock.kernel_ns, traffic_interface(ranks)),
    )  # fmt: skip


def traffic_interface(ranks: Ranks) -> str | None:
    """The interface that leads to the other hosts, on the first rank of each host; None elsewhere."""
    if not ranks.has_several_hosts or ranks.roster.lead_of(ranks.rank) != ranks.rank:
        return None
    return os.environ.get(GLOO_INTERFACE, "").partition(",")[0] or None


def tracer_of(run: TrainingRun) -> Tracer | None:
    """What keeps the steps that `--profile` asks for."""
    if run.config.profile is None:
        return None
    step = run.state.step
    return Tracer(
        run.clocks, kernel_clock, num_steps=run.config.profile, steps_left=run.plan.total_steps - step, step=step,
        interface=traffic_interface(run.ranks),
    )  # fmt: skip


def rehearse(outputs: Outputs, tables: dict[str, TokenTable]) -> None:
    """Make something of logits before there are any, so that what cannot be done is not found after training."""
    for name, table in tables.items():
        if name != "train":
            outputs.rehearse(table)


def host_lines(place: Place | None) -> list[str]:
    """How the ranks of this host share its cores; `fleetune plan` says why."""
    return [] if place is None else [f"cores          {place.plan.cores_in_short()}"]


def wanted_splits(config: RunConfig) -> list[str]:
    """The roles of the splits that a run reads."""
    return ["train", *(["validation"] if config.do_eval else []), *(["test"] if config.do_predict else [])]


def shortened(config: RunConfig, usable_length: int, record: RunRecord) -> RunConfig:
    """The settings with the sequence length that the model can take, and a notice where that is less."""
    if usable_length == config.max_seq_length:
        return config
    record.notices.append(f"max_seq_length is lowered to {usable_length}: the model has no more positions")
    return config.replace(max_seq_length=usable_length)


def check_best_metric(config: RunConfig, task: Task) -> None:
    """Refuse a metric that no evaluation of the task will give.

    Raises:
        ConfigError: Names the metrics there are.
    """
    known = ("loss", *task.metrics)
    asked = (config.metric_for_best_model or "loss").removeprefix("eval_")
    if asked not in known:
        raise ConfigError(f"--metric_for_best_model {asked}: the task has {', '.join(known)}{nearest(asked, known)}")


def bad_rows_of(table: TokenTable) -> dict[str, Any]:
    """The rows of a split that were left out, for the record."""
    return {"count": table.num_bad_rows, "first": [dataclasses.asdict(row) for row in table.bad_rows]}


def padding_avoided(table: TokenTable, max_seq_length: int) -> dict[str, float]:
    """What padding every example to the maximum length would have added, as a share of the padded tokens."""
    padded = len(table) * max_seq_length
    return {"padding_avoided": 1.0 - table.num_tokens / padded}


def tell_early_stop(run: TrainingRun) -> None:
    """Say that training ended before its last step, and why; the record keeps it."""
    if not stops_early(run):
        return
    state, (name, _) = run.state, best_metric(run)
    best = "" if state.best_step is None else f": {state.best_metric:.4f} at step {state.best_step:,}"
    line = (f"stopped early at step {state.step:,} of {run.plan.total_steps:,}: {state.num_stale} evaluations in a row "
            f"were no better than the best {name}{best}")  # fmt: skip
    if not run.config.load_best_model_at_end:
        line += "; the weights of the last step are kept (--load_best_model_at_end keeps the best)"
    run.record.notices.append(line)
    run.terminal.say(line)


def make_room(run: TrainingRun) -> None:
    """Last checks of the output folder, then the first write into it; only now is an old run cleared away."""
    config = run.config
    assert config.output_dir is not None
    own = run.classifier.owner
    trained_bytes = sum(p.numel() * p.element_size() for p in own.parameters() if p.requires_grad)
    is_whole = run.classifier.adapter is None or config.lora_merge
    model_bytes = sum(p.numel() * p.element_size() for p in own.parameters()) if is_whole else trained_bytes
    check_room(config.output_dir, model_bytes, most_checkpoints(config, run.plan), 2 * trained_bytes)
    if config.resume_from_checkpoint is None:  # an abandoned run, or one that is to be replaced
        clear_earlier_run(config.output_dir)
    run.record.write(config.output_dir)


def most_checkpoints(config: RunConfig, plan: TrainPlan) -> int:
    """How many checkpoints lie in the output folder at the same time, the one that is being written too."""
    if config.save_strategy == "no":
        return 0
    written = math.ceil(plan.epochs) if config.save_strategy == "epoch" else plan.total_steps // config.save_steps
    if config.save_total_limit is None:
        return written
    return min(written, max(2, config.save_total_limit) + 1)


def start_trackers(run: TrainingRun) -> None:
    """Open what `--report_to` names; the first rank alone does."""
    assert run.config.output_dir is not None
    run.tracker = open_trackers(
        run.config.report_to,
        TrackedRun(
            name=run.config.output_dir.resolve().name, folder=run.config.output_dir, config=run.record.config,
            resumed_at_step=run.record.resumed_at_step,
        ),
        run.terminal.say,
    )  # fmt: skip


@contextmanager
def recorded(run: TrainingRun) -> Iterator[None]:
    """Keep the record on disk, and what trackers are told of it, true to what happens to the run."""
    folder, outcome = run.config.output_dir, "failed"
    assert folder is not None
    try:
        yield
        outcome = "finished"
    except Stopped:
        outcome = "interrupted"
        raise
    finally:
        run.record.status, run.record.step = outcome, run.state.step  # type: ignore[assignment]
        if run.ranks.is_first:
            if not run.record.time:  # the ranks have not come to telling each other
                run.record.time = times_of([rank_figures(run.clocks, run.times)], run.times)
            run.record.write(folder)
            run.tracker.close(dataclasses.asdict(run.record))
