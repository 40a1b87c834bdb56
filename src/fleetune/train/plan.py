"""What a training run will do, worked out once before it starts: batch sizes, steps, learning rate."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import asdict, dataclass
from typing import Any

from fleetune.config import RunConfig
from fleetune.train.schedule import Schedule

_LR_SCALES: dict[str, Callable[[int], float]] = {"linear": float, "sqrt": math.sqrt, "none": lambda world_size: 1.0}
"""Policy -> factor on the learning rate for a number of processes (linear: Goyal et al. 2017)."""


@dataclass(frozen=True, kw_only=True)
class TrainPlan:
    """The resolved numbers of a training run."""

    processes: int
    threads: int
    """Threads of each process."""
    micro_batch_size: int
    """Examples a process contributes to a micro-batch, on average."""
    accumulation: int
    """Micro-batches of one update."""
    num_examples: int
    num_tokens: int
    """Tokens of one epoch."""
    longest: int
    """Tokens of the longest example."""
    epochs: float
    steps_per_epoch: int
    total_steps: int
    warmup_steps: int
    lr_scheduler: str
    base_learning_rate: float
    scale_lr: str
    learning_rate: float
    """Peak learning rate after scaling."""
    unpadded: bool
    """Whether the model runs through the flat forward."""
    dtype: str
    """What layers compute in: float32 or bfloat16."""
    kernels: str
    """The first rank's: compiled, or plain PyTorch."""

    @property
    def global_batch_size(self) -> int:
        """Examples of one update, over all processes."""
        return self.processes * self.micro_batch_size * self.accumulation

    @property
    def schedule(self) -> Schedule:
        return Schedule(
            name=self.lr_scheduler,
            peak=self.learning_rate,
            warmup_steps=self.warmup_steps,
            total_steps=self.total_steps,
        )

    def to_dict(self) -> dict[str, Any]:
        return {**asdict(self), "global_batch_size": self.global_batch_size}

    def lines(self) -> list[str]:
        """The plan as text, a line for each thing to know before it starts."""
        warmup = (
            "no warm-up" if self.warmup_steps == 0 else _counted(self.warmup_steps, "warm-up step", "warm-up steps")
        )
        master = "" if self.dtype == "float32" else " with float32 master weights"
        rate = _rate_words(self.base_learning_rate, self.scale_lr, self.processes)
        processes = _counted(self.processes, "process", "processes")
        return [
            f"ranks          {processes} x {_counted(self.threads, 'thread', 'threads')}",
            f"data           {self.num_examples:,} examples, {self.num_tokens:,} tokens, longest {self.longest}",
            f"global batch   {_batch_words(self.processes, self.micro_batch_size, self.accumulation)}",
            f"learning rate  {rate}, {self.lr_scheduler}, {warmup}",
            f"steps          {self.total_steps:,} ({self.epochs:.3g} {'epoch' if self.epochs == 1 else 'epochs'} of "
            f"{self.steps_per_epoch:,})",
            f"arithmetic     {self.dtype}{master}, kernels: {self.kernels}",
            f"batches        {'flat, no padding' if self.unpadded else 'padded to the longest: the slower way'}",
        ]


def known_before(config: RunConfig, processes: int) -> list[tuple[str, str]]:
    """What a plan can say before model and data are read: topic and line.

    Args:
        config: The settings.
        processes: Ranks on all hosts.
    """
    dtype = {
        "false": "float32, as --bf16 says",
        "true": "bfloat16 with float32 master weights, as --bf16 says",
        "auto": "bfloat16 where the CPU has units for it and a probe of the model's layers finds it faster",
    }[config.bf16]
    return [
        ("arithmetic", dtype),
        (
            "global batch",
            _batch_words(processes, config.per_device_train_batch_size, config.gradient_accumulation_steps),
        ),
        (
            "learning rate",
            f"{_rate_words(config.learning_rate, config.scale_lr, processes)}, {config.lr_scheduler_type}",
        ),
    ]


def scaled_rate(config: RunConfig, processes: int) -> float:
    """The peak learning rate of so many processes."""
    return config.learning_rate * _LR_SCALES[config.scale_lr](processes)


def _batch_words(processes: int, micro_batch_size: int, accumulation: int) -> str:
    total = processes * micro_batch_size * accumulation
    words = f"{total} examples = {_counted(processes, 'process', 'processes')} x {micro_batch_size}"
    return f"{words} x {accumulation} accumulation steps" if accumulation > 1 else words


def _rate_words(base: float, policy: str, processes: int) -> str:
    rate = base * _LR_SCALES[policy](processes)
    if processes == 1:
        return f"{rate:g}"
    told = f"--scale_lr {policy}, {_counted(processes, 'process', 'processes')}"
    return f"{base:g} x {_LR_SCALES[policy](processes):g} ({told}) = {rate:g}"


def _counted(count: int, one: str, many: str) -> str:
    return f"{count} {one if count == 1 else many}"


def make_plan(
    config: RunConfig,
    *,
    processes: int,
    threads: int,
    num_examples: int,
    num_tokens: int,
    longest: int,
    unpadded: bool,
    dtype: str,
    kernels: str,
) -> TrainPlan:
    """Resolve a run's settings against its data and its processes."""
    global_batch = processes * config.per_device_train_batch_size * config.gradient_accumulation_steps
    steps_per_epoch = -(-num_examples // global_batch)
    total_steps = config.max_steps or math.ceil(config.num_train_epochs * steps_per_epoch)
    return TrainPlan(
        processes=processes,
        threads=threads,
        micro_batch_size=config.per_device_train_batch_size,
        accumulation=config.gradient_accumulation_steps,
        num_examples=num_examples,
        num_tokens=num_tokens,
        longest=longest,
        epochs=total_steps / steps_per_epoch,
        steps_per_epoch=steps_per_epoch,
        total_steps=total_steps,
        warmup_steps=_warmup_steps(config, total_steps),
        lr_scheduler=config.lr_scheduler_type,
        base_learning_rate=config.learning_rate,
        scale_lr=config.scale_lr,
        learning_rate=scaled_rate(config, processes),
        unpadded=unpadded,
        dtype=dtype,
        kernels=kernels,
    )


def _warmup_steps(config: RunConfig, total_steps: int) -> int:
    if config.lr_scheduler_type == "constant":  # as in transformers, only constant_with_warmup has one
        return 0
    return config.warmup_steps or math.ceil(config.warmup_ratio * total_steps)
