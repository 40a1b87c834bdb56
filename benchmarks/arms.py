"""The trainers that are compared, each as an arm that takes some updates when it is its turn."""

from __future__ import annotations

import dataclasses
import time
from abc import ABC, abstractmethod
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import transformers
from numpy.typing import NDArray

from fleetune.bench.features import feature_of
from fleetune.data.batches import Indices
from fleetune.model.quiet import quiet_transformers
from fleetune.report.terminal import Terminal
from fleetune.train.loop import train
from fleetune.train.run import TrainingRun


@dataclasses.dataclass(frozen=True, kw_only=True)
class Turn:
    """What an arm did in one round."""

    seconds: tuple[float, ...]
    """Wall time of each update, from the end of the one before to its own end."""
    computed_tokens: tuple[int, ...]
    """Tokens that the model computed for each update, padding included."""
    mean_loss: float | None
    """Of the turn's updates; None for an arm that only computes what a training would."""
    num_flop: tuple[int, ...] | None = None
    """Floating-point operations of each update, where the arm counts them."""


class Arm(ABC):
    """A trainer with its own model, or a part of one. It goes on where its last turn ended."""

    name: str

    @abstractmethod
    def take(self, batches: Sequence[Indices]) -> Turn:
        """Do one update for each of the batches."""


class Laps:
    """A stopwatch: the time of each lap since the start."""

    def __init__(self) -> None:
        self.seconds: list[float] = []
        self._last = 0.0

    def start(self) -> None:
        """Forget earlier laps and begin the first."""
        self.seconds = []
        self._last = time.perf_counter()

    def lap(self) -> None:
        """End a lap and begin the next."""
        now = time.perf_counter()
        self.seconds.append(now - self._last)
        self._last = now


class LapTerminal(Terminal):
    """Stands where the progress bar stands: the training loop reports each update to it."""

    def __init__(self) -> None:
        self.laps = Laps()

    def say(self, line: str) -> None:
        pass

    @contextmanager
    def bar(self, title: str, total: int | None, unit: str, start: int = 0) -> Iterator[LapTerminal]:
        self.laps.start()
        yield self

    def move_to(self, done: int, note: str = "") -> None:
        self.laps.lap()


class FleetuneArm(Arm):
    """fleetune's own training loop.

    Args:
        run: Put together as for `fleetune train`. It draws the batches itself: `take` is told what they are, and
            asks only for as many updates.
    """

    name = "fleetune"

    def __init__(self, run: TrainingRun) -> None:
        self._run, self._terminal = run, LapTerminal()
        run.terminal = self._terminal

    def take(self, batches: Sequence[Indices]) -> Turn:
        run = self._run
        run.plan = dataclasses.replace(run.plan, total_steps=run.state.step + len(batches))
        train(run)
        logged = [entry["loss"] for entry in run.state.log_history if entry["step"] > run.state.step - len(batches)]
        return Turn(
            seconds=tuple(self._terminal.laps.seconds),
            computed_tokens=tuple(int(run.train_table.lengths[examples].sum()) for examples in batches),
            mean_loss=sum(logged) / len(logged),
        )


class LapCallback(transformers.TrainerCallback):  # type: ignore[misc]  # transformers is untyped to mypy
    """Takes the time of `Trainer`'s updates, the loading of their batches included."""

    def __init__(self) -> None:
        self.laps = Laps()

    def on_epoch_begin(self, *args: Any, **kwargs: Any) -> None:
        self.laps.start()

    def on_step_end(self, *args: Any, **kwargs: Any) -> None:
        self.laps.lap()


class TrainerArm(Arm):
    """`transformers.Trainer` on the same weights, tokens and batches, padded.

    Every turn is a call of `Trainer.train` on the turn's examples; model and optimizer stay from turn to turn.

    Args:
        run: fleetune's run, before its first update.
        arguments: Of `Trainer`.
        pad_to: Tokens that every example is padded to, as run_glue.py does by default; None: to the longest of its
            batch, as it does without --pad_to_max_length.
    """

    def __init__(self, run: TrainingRun, arguments: transformers.TrainingArguments, pad_to: int | None) -> None:
        self.name = "Trainer, longest of batch" if pad_to is None else f"Trainer, padded to {pad_to}"
        self._run, self._pad_to, self._clock = run, pad_to, LapCallback()
        pad_in_batches = transformers.DataCollatorWithPadding(run.tokenizer)
        self._trainer = transformers.Trainer(
            model=copy_of_model(run),
            args=arguments,
            data_collator=pad_in_batches if pad_to is None else transformers.default_data_collator,
            train_dataset=[{}],
            callbacks=[self._clock],
        )
        self._trainer.remove_callback(transformers.PrinterCallback)

    def take(self, batches: Sequence[Indices]) -> Turn:
        self._trainer.train_dataset = [self._feature(int(i)) for examples in batches for i in examples]
        outcome = self._trainer.train()
        return Turn(
            seconds=tuple(self._clock.laps.seconds),
            computed_tokens=tuple(padded_tokens(self._run.train_table.lengths[e], self._pad_to) for e in batches),
            mean_loss=float(outcome.training_loss),
        )

    def _feature(self, example: int) -> dict[str, Any]:
        pad_token_id = self._run.tokenizer.pad_token_id
        return feature_of(self._run.train_table, example, pad_to=self._pad_to, pad_token_id=pad_token_id)


def padded_tokens(lengths: NDArray[np.int64], pad_to: int | None) -> int:
    """Tokens of a padded batch."""
    return len(lengths) * (int(lengths.max()) if pad_to is None else pad_to)


def copy_of_model(run: TrainingRun) -> Any:
    """The model as plain transformers loads it, with the weights that fleetune's has now (the new head's too)."""
    original = run.classifier.hugging_face
    with quiet_transformers():
        model = run.classifier.head.auto_class.from_pretrained(run.config.model, num_labels=run.classifier.num_labels)
    model.load_state_dict(original.state_dict())
    return model


def trainer_arguments(run: TrainingRun, folder: Path) -> transformers.TrainingArguments:
    """The settings of fleetune's run for `Trainer`; what they do not name stays at its default.

    The learning rate is constant, because every turn is a training of its own to `Trainer` and would restart a decay.
    The sampler is sequential, because the examples come in the order in which fleetune's run draws them.
    """
    config = run.config
    return transformers.TrainingArguments(
        output_dir=str(folder),
        per_device_train_batch_size=config.per_device_train_batch_size,
        learning_rate=config.learning_rate,
        lr_scheduler_type=config.lr_scheduler_type,
        num_train_epochs=1,
        seed=config.seed,
        use_cpu=True,
        dataloader_pin_memory=False,
        train_sampling_strategy="sequential",
        save_strategy="no",
        report_to="none",
        disable_tqdm=True,
    )
