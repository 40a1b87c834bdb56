"""`transformers.Trainer` as run_glue.py uses it, on the data and with the recipe of a bench, to stand beside.

A script for `fleetune launch`, every rank of which runs it; the settings of the run are in a variable. Texts are padded
to the maximum length, as run_glue.py does unless told otherwise; ranks exchange gradients through
DistributedDataParallel over gloo. Nothing of fleetune computes, but for reading the files. The first rank leaves a
record like that of `fleetune train`.
"""

from __future__ import annotations

import dataclasses
import json
import os
import socket
import tempfile
import time
from pathlib import Path
from typing import TYPE_CHECKING, Any

from fleetune.bench.features import feature_of
from fleetune.bench.interfaces import read_sent_bytes
from fleetune.bench.turn import STOCK_SETTINGS
from fleetune.config import RunConfig
from fleetune.errors import ConfigError
from fleetune.files import write_json
from fleetune.hardware.host import read_host
from fleetune.hardware.versions import read_versions
from fleetune.report.record import RECORD_FILE
from fleetune.report.turns import HISTORY_FILE

if TYPE_CHECKING:
    from fleetune.data.dataset import TaskData
    from fleetune.data.tokens import TokenTable
    from fleetune.train.plan import TrainPlan

KINDS = ("classification", "regression")
"""Kinds of task that run_glue.py knows."""
TRAINER = "transformers"


class Clock:
    """Wall time of Trainer's updates, and of its evaluations beside them.

    An update ends with `step_ended`; it began where the one before ended, or where an evaluation did.
    """

    def __init__(self) -> None:
        self.step_s: list[float] = []
        self.evaluation_s = 0.0
        self._last = 0.0
        self._bytes = self.sent_bytes = 0

    def start(self) -> None:
        self._last, self._bytes = time.perf_counter(), read_sent_bytes()

    def step_ended(self) -> None:
        self.step_s.append(self._lap())
        self.sent_bytes = read_sent_bytes() - self._bytes

    def evaluated(self) -> None:
        self.evaluation_s += self._lap()

    def _lap(self) -> float:
        now = time.perf_counter()
        seconds, self._last = now - self._last, now
        return seconds


def main() -> None:
    """One rank, from its settings to its record."""
    import transformers

    config = RunConfig(**json.loads(os.environ[STOCK_SETTINGS]))
    transformers.utils.logging.set_verbosity_error()
    with tempfile.TemporaryDirectory(prefix="fleetune-bench-") as folder:
        arguments = make_arguments(transformers, config, Path(folder))
        tokenizer = transformers.AutoTokenizer.from_pretrained(config.tokenizer_name or config.model)
        with arguments.main_process_first(desc="tokenising"):
            data, config = load(config, tokenizer)
        clock = Clock()
        trainer = make_trainer(transformers, arguments, config, data, tokenizer, clock)
        trainer.train()
        metrics = trainer.evaluate() if config.do_eval else {}
        clock.evaluated()
    if arguments.process_index == 0:
        keep(config, data, arguments, trainer, clock, metrics)


def load(config: RunConfig, tokenizer: Any) -> tuple[TaskData, RunConfig]:
    """The tokens of the splits, from the cache where they are there; and the settings with the length that fits.

    Raises:
        ConfigError: The task is none of run_glue.py's.
    """
    import transformers

    from fleetune.data.dataset import prepare_data
    from fleetune.model.load import check_tokenizer_fits

    model_config = transformers.AutoConfig.from_pretrained(config.model)
    config = config.replace(max_seq_length=check_tokenizer_fits(tokenizer, model_config, config.max_seq_length))
    data = prepare_data(config, tokenizer, splits=["train", *(["validation"] if config.do_eval else [])])
    if data.task.problem not in KINDS:
        raise ConfigError(
            f"--against {TRAINER}: {data.task.problem} is none of {', '.join(KINDS)}, as run_glue.py has them"
        )
    return data, config


def make_arguments(transformers: Any, config: RunConfig, folder: Path) -> Any:
    """The recipe by Trainer's names; what it does not name stays at Trainer's default."""
    from fleetune.train.plan import scaled_rate

    return transformers.TrainingArguments(
        output_dir=str(folder),
        learning_rate=scaled_rate(config, int(os.environ.get("WORLD_SIZE", "1"))),
        warmup_steps=config.warmup_steps or config.warmup_ratio,  # below 1 it is a share of all updates
        bf16=config.bf16 == "true",
        max_steps=config.max_steps or -1,
        eval_strategy="epoch" if config.do_eval and config.eval_strategy == "epoch" else "no",
        **{name: getattr(config, name) for name in SHARED_SETTINGS},
        average_tokens_across_devices=False,  # it multiplies a classifier's loss, which is a mean, by the ranks
        use_cpu=True,
        ddp_backend="gloo",
        dataloader_pin_memory=False,
        save_strategy="no",
        report_to="none",
        disable_tqdm=True,
    )


SHARED_SETTINGS = (
    "per_device_train_batch_size", "per_device_eval_batch_size", "gradient_accumulation_steps", "num_train_epochs",
    "lr_scheduler_type", "weight_decay", "adam_beta1", "adam_beta2", "adam_epsilon", "max_grad_norm", "logging_steps",
    "seed",
)  # fmt: skip
"""Settings that both trainers have under one name."""


def make_trainer(
    transformers: Any, arguments: Any, config: RunConfig, data: TaskData, tokenizer: Any, clock: Clock
) -> Any:
    """Model and Trainer, with a callback that reads the clock."""
    task = data.task
    model = transformers.AutoModelForSequenceClassification.from_pretrained(
        config.model, num_labels=1 if task.labels is None else len(task.labels)
    )
    padding = {"pad_to": config.max_seq_length, "pad_token_id": tokenizer.pad_token_id}
    splits = {
        split: [feature_of(table, i, **padding) for i in range(len(table))] for split, table in data.splits.items()
    }

    class Timing(transformers.TrainerCallback):  # type: ignore[misc]  # transformers is untyped to mypy
        def on_train_begin(self, *args: Any, **kwargs: Any) -> None:
            clock.start()

        def on_step_end(self, *args: Any, **kwargs: Any) -> None:
            clock.step_ended()

        def on_evaluate(self, *args: Any, **kwargs: Any) -> None:
            clock.evaluated()

    return transformers.Trainer(
        model=model,
        args=arguments,
        data_collator=transformers.default_data_collator,
        train_dataset=splits["train"],
        eval_dataset=next((rows for split, rows in splits.items() if split.startswith("validation")), None),
        compute_metrics=lambda prediction: metrics_of(data, prediction),
        callbacks=[Timing()],
    )


def metrics_of(data: TaskData, prediction: Any) -> dict[str, float | None]:
    """The task's metrics, by the same functions as fleetune's."""
    from fleetune.evaluate.metrics import Outcome, compute_metrics

    task, logits = data.task, prediction.predictions
    answers = logits[:, 0] if task.labels is None else logits.argmax(axis=1)
    positive = None if task.labels is None or task.positive_label is None else task.labels.index(task.positive_label)
    return compute_metrics(
        task.metrics, Outcome(predictions=answers, labels=prediction.label_ids, positive_id=positive)
    )


# ---- the record


def keep(
    config: RunConfig, data: TaskData, arguments: Any, trainer: Any, clock: Clock, metrics: dict[str, Any]
) -> None:
    """Write the record and the history of the run into its folder."""
    import torch

    folder, plan = config.output_dir, make_plan(config, data, arguments, torch.get_num_threads())
    assert folder is not None
    local = int(os.environ.get("LOCAL_WORLD_SIZE", "1"))
    record = {
        "status": "finished",
        "trainer": TRAINER,
        "config": config.to_dict(),
        "plan": plan.to_dict(),
        "task": dataclasses.asdict(data.task),
        "versions": read_versions(),
        "host": dataclasses.asdict(read_host()),
        "roster": roster(plan.processes, local, plan.threads),
        "started": time.strftime("%Y-%m-%dT%H:%M:%S%z"),
        "step": len(clock.step_s),
        "seconds": {"training": sum(clock.step_s), "evaluation": clock.evaluation_s},
        "throughput": throughput(plan, clock.step_s),
        "metrics": metrics,
        "time": times(clock, local, has_several_hosts=plan.processes > local),
    }
    write_json(folder / RECORD_FILE, record)
    write_json(folder / HISTORY_FILE, {"log_history": trainer.state.log_history})


def make_plan(config: RunConfig, data: TaskData, arguments: Any, threads: int) -> TrainPlan:
    """The plan as fleetune would make it, which is what Trainer did."""
    from fleetune.train import plan

    table: TokenTable = data.splits["train"]
    return plan.make_plan(
        config, processes=arguments.world_size, threads=threads, num_examples=len(table), num_tokens=table.num_tokens,
        longest=int(table.lengths.max()), unpadded=False, dtype="bfloat16" if arguments.bf16 else "float32",
        kernels=f"PyTorch's, by {TRAINER}, padded to {config.max_seq_length}",
    )  # fmt: skip


def roster(ranks: int, local: int, threads: int) -> list[dict[str, Any]]:
    """All ranks; hosts beside the first are known by their number alone."""
    hosts = [socket.gethostname(), *(f"host {i}" for i in range(2, ranks // local + 1))]
    return [{"rank": rank, "host": hosts[rank // local], "threads": threads} for rank in range(ranks)]


def throughput(plan: TrainPlan, step_s: list[float]) -> dict[str, float]:
    """Samples and tokens a second; a sample's tokens are the mean of the data, without padding."""
    rests = [plan.num_examples - step % plan.steps_per_epoch * plan.global_batch_size for step in range(len(step_s))]
    samples = sum(min(plan.global_batch_size, rest) for rest in rests)
    tokens = samples * plan.num_tokens / plan.num_examples
    counts = {"samples": samples, "tokens": tokens}
    return counts | {f"{name}_per_s": count / sum(step_s) for name, count in counts.items()}


def times(clock: Clock, local: int, *, has_several_hosts: bool) -> dict[str, Any]:
    """The times of the updates, and the bytes that the first host sent, among its ranks."""
    interface = {"name": "all but loopback", "sent_bytes": clock.sent_bytes} if has_several_hosts else None
    first = {"rank": 0, "interface": interface, "sent_bytes": 0}
    return {
        "num_steps": len(clock.step_s),
        "per_rank": [first, *({"rank": rank, "interface": None, "sent_bytes": 0} for rank in range(1, local))],
        "step_s": {"steps_each": 1, "seconds": clock.step_s},
    }


if __name__ == "__main__":
    main()
