"""What a bench will run, worked out before the first run: sizes, trainers, rounds, and each run's settings."""

from __future__ import annotations

import shlex
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from fleetune.bench.sizes import Size, make_sizes
from fleetune.cluster.start import named_hosts, plan_ranks, starts_elsewhere, wants_hosts
from fleetune.config import RunConfig
from fleetune.config.run import check_train
from fleetune.errors import ConfigError
from fleetune.report.turns import RUNS_FOLDER, TRAINERS, Bench, Mode

WARM_UP_FOLDER = "warm-up"
WARM_UP_STEPS = 2
_STEADY = {
    "do_eval": False, "eval_strategy": "no", "save_strategy": "no", "load_best_model_at_end": False, "logging_steps": 1,
}  # fmt: skip
"""Settings of a run of which only the speed of some updates is wanted."""
_DECIDED = ("output_dir", "overwrite_output_dir", "resume_from_checkpoint", "report_to", "do_predict", "seed")
"""Settings that the bench decides for each run; not compared when it goes on."""


@dataclass(frozen=True, kw_only=True)
class BenchOptions:
    """A bench's own settings, as they are asked for."""

    nodes: tuple[int, ...] | None = None
    processes: tuple[int, ...] | None = None
    repeat: int = 3
    steps: int | None = None
    """Counted updates of a run; None with `full`."""
    full: bool = False
    seeds: int = 1
    discard_steps: int | None = None
    """Uncounted updates; None: a tenth of the counted ones, at least one."""
    against: str | None = None
    price_per_hour: float | None = None


@dataclass(frozen=True, kw_only=True)
class PlannedTurn:
    """One run that is to be made."""

    name: str
    size: Size
    trainer: str
    round: int
    """Counted from 1; 0 for the warm-up."""
    seed: int
    config: RunConfig
    folder: Path

    @property
    def log(self) -> Path:
        """What the run says."""
        return self.folder.with_name(f"{self.folder.name}.log")


@dataclass(frozen=True, kw_only=True)
class BenchPlan:
    """All that a bench will run."""

    config: RunConfig
    sizes: tuple[Size, ...]
    trainers: tuple[str, ...]
    rounds: int
    seeds: tuple[int, ...]
    mode: Mode
    steps: int | None
    discarded_steps: int
    price_per_hour: float | None
    folder: Path

    def turns(self) -> list[PlannedTurn]:
        """All runs in their order: every round has each size and trainer once, so all meet the same conditions."""
        return [
            self._turn(size, trainer, number)
            for number in range(1, self.rounds + 1)
            for size in self.sizes
            for trainer in self.trainers
        ]

    def warm_ups(self) -> list[PlannedTurn]:
        """Uncounted short runs of the largest size: they compile kernels, tokenise, and fill the page cache."""
        return [self._turn(self.sizes[-1], trainer, 0) for trainer in self.trainers]

    def _turn(self, size: Size, trainer: str, number: int) -> PlannedTurn:
        seed = self.seeds[(number - 1) % len(self.seeds)] if number else self.seeds[0]
        name = f"{size.slug}-{trainer}-round{number}-seed{seed}"
        folder = self.folder / RUNS_FOLDER / name if number else self.folder / WARM_UP_FOLDER / trainer
        short = self.mode == "steps" or not number
        steps = WARM_UP_STEPS if not number else self.discarded_steps + (self.steps or 0)
        changes = {
            "seed": seed,
            "output_dir": folder,
            **size.changes,
            **(_STEADY | {"max_steps": steps} if short else {}),
        }
        return PlannedTurn(
            name=name, size=size, trainer=trainer, round=number, seed=seed, config=self.config.replace(**changes),
            folder=folder,
        )  # fmt: skip

    def for_report(self, command: Sequence[str]) -> Bench:
        """What the report is told of it."""
        kept = {name: value for name, value in self.config.to_dict().items() if name not in _DECIDED}
        return Bench(
            command=shlex.join(command), started=time.strftime("%Y-%m-%dT%H:%M:%S%z"), mode=self.mode, steps=self.steps,
            discarded_steps=self.discarded_steps, rounds=self.rounds, seeds=self.seeds,
            sizes=tuple(size.label for size in self.sizes), trainers=self.trainers,
            price_per_hour=self.price_per_hour, settings=kept,
            plan={size.label: size_lines(self.config.replace(**size.changes), size) for size in self.sizes},
        )  # fmt: skip

    def lines(self) -> Iterator[str]:
        """The plan as text."""
        for size in self.sizes:
            yield size.label
            yield from (f"  {line}" for line in size_lines(self.config.replace(**size.changes), size))
        what = (
            "trained to the end"
            if self.mode == "full"
            else f"{self.steps} updates behind {self.discarded_steps} uncounted"
        )
        yield f"runs           {len(self.turns())}, {what}: {self.rounds} x {' x '.join(self._varied())}"
        yield f"order          {' '.join(map(self._shown, self.turns()))}"
        yield f"seeds          {', '.join(map(str, self.seeds))}"
        yield f"folder         {self.folder}"

    def _shown(self, turn: PlannedTurn) -> str:
        return turn.size.slug + (f"/{turn.trainer}" if len(self.trainers) > 1 else "")

    def _varied(self) -> list[str]:
        sizes = f"({', '.join(size.label for size in self.sizes)})"
        return [sizes, *([f"({', '.join(self.trainers)})"] if len(self.trainers) > 1 else [])]


def make_plan(config: RunConfig, options: BenchOptions) -> BenchPlan:
    """The plan of a bench.

    Args:
        config: Settings of all runs; its output folder is the bench's.
        options: What to measure.

    Raises:
        ConfigError: Lists what cannot be used, before anything starts.
    """
    problems = _problems(config, options)
    if problems:
        raise ConfigError(problems)
    check_train(config)
    if config.task is not None:
        from fleetune.data.tasks import find_task

        find_task(config.task)
    sizes = make_sizes(config, options.nodes, options.processes)
    if starts_elsewhere(config):
        raise ConfigError("--hosts: the first host must be this machine, where the bench keeps its records")
    steps = None if options.full else options.steps or 50
    discarded = 0 if steps is None else max(1, steps // 10) if options.discard_steps is None else options.discard_steps
    assert config.output_dir is not None
    return BenchPlan(
        config=config.replace(report_to="none", do_predict=False, overwrite_output_dir=False, output_dir=None),
        sizes=sizes, trainers=TRAINERS[: 2 if options.against else 1], rounds=max(options.repeat, options.seeds),
        seeds=tuple(config.seed + i for i in range(options.seeds)), mode="full" if options.full else "steps",
        steps=steps, discarded_steps=discarded, price_per_hour=options.price_per_hour,
        folder=config.output_dir.absolute(),
    )  # fmt: skip


def _problems(config: RunConfig, options: BenchOptions) -> list[str]:
    """Settings that cannot be used, or not together."""
    problems = []
    if options.full and options.steps is not None:
        problems.append(f"--full trains to the end, --steps {options.steps} does not: give one")
    if options.full and options.discard_steps is not None:
        problems.append("--discard_steps goes with --steps: with --full all updates count")
    if not options.full and options.seeds > 1:
        problems.append(f"--seeds {options.seeds} needs --full: a metric after some updates says nothing")
    if options.against not in (None, TRAINERS[1]):
        problems.append(f"--against {options.against}: {TRAINERS[1]} is expected")
    if config.resume_from_checkpoint is not None:
        problems.append("--resume_from_checkpoint: a bench goes on by itself, with the same command")
    counts = {"repeat": options.repeat, "seeds": options.seeds, "steps": options.steps}
    problems += [
        f"--{name} {value}: 1 or more is expected" for name, value in counts.items() if value is not None and value < 1
    ]
    if options.discard_steps is not None and options.discard_steps < 0:
        problems.append(f"--discard_steps {options.discard_steps}: 0 or more is expected")
    if options.price_per_hour is not None and options.price_per_hour < 0:
        problems.append(f"--price_per_hour {options.price_per_hour:g}: 0 or more is expected")
    return problems


def size_lines(config: RunConfig, size: Size) -> list[str]:
    """What is known of a size before it runs: ranks, global batch, learning rate."""
    from fleetune.train.plan import known_before

    ranks, is_known = _ranks(config, size)
    told = f"{ranks} on {size.num_hosts} host{'' if size.num_hosts == 1 else 's'}"
    lines = [f"ranks          {told}" + ("" if is_known else ", if all hosts divide themselves as this one does")]
    return lines + [f"{topic:<15}{line}" for topic, line in known_before(config, ranks) if topic != "arithmetic"]


def _ranks(config: RunConfig, size: Size) -> tuple[int, bool]:
    """How many ranks a size has, and whether that is certain before its hosts have been asked."""
    slots = [host.slots for host in named_hosts(config)] if config.hosts is not None else []
    if slots and None not in slots:
        return sum(slot or 0 for slot in slots), True
    if config.processes is not None:
        return config.processes * size.num_hosts, True
    here = len(plan_ranks(None, processes=None, threads=config.threads).parts)
    return here * size.num_hosts, not wants_hosts(config)


def differences(before: Bench, now: Bench) -> list[str]:
    """What makes another bench of it, a line each; rounds, seeds and sizes may grow."""
    told = [
        f"--{name} was {before.settings.get(name)!r}, is {value!r}"
        for name, value in now.settings.items()
        if before.settings.get(name) != _as_read(value)
    ]
    names: Mapping[str, tuple[Any, Any]] = {
        "mode": (before.mode, now.mode), "--steps": (before.steps, now.steps),
        "--discard_steps": (before.discarded_steps, now.discarded_steps),
    }  # fmt: skip
    return told + [f"{name} was {old}, is {new}" for name, (old, new) in names.items() if old != new]


def _as_read(value: Any) -> Any:
    """A value as it comes back from JSON."""
    return list(value) if isinstance(value, tuple) else value
