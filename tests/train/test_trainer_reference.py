"""The same batches through transformers' own Trainer and through fleetune give the same losses."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import numpy as np
import pytest
import torch
from torch.utils.data import Dataset, Sampler

from fleetune import RunConfig, finetune
from fleetune.data.batches import epoch_order
from fleetune.data.demo import write_demo_corpus
from tests.conftest import losses_of

STEPS, BATCH = 20, 16


@pytest.fixture
def model_without_dropout(packaged_model: Path, tmp_path: Path) -> Path:
    """The pretrained encoder with a fixed new head."""
    from transformers import AutoModelForSequenceClassification, AutoTokenizer

    folder = tmp_path / "model"
    torch.manual_seed(0)
    model = AutoModelForSequenceClassification.from_pretrained(
        packaged_model, num_labels=2, hidden_dropout_prob=0.0, attention_probs_dropout_prob=0.0
    )
    model.save_pretrained(folder)
    AutoTokenizer.from_pretrained(packaged_model).save_pretrained(folder)
    return folder


class FixedOrder(Sampler[int]):
    """The order of fleetune's first epoch."""

    def __init__(self, count: int) -> None:
        self._order = epoch_order(42, 0, count).tolist()

    def __iter__(self):  # type: ignore[no-untyped-def]
        return iter(self._order)

    def __len__(self) -> int:
        return len(self._order)


class Pairs(Dataset):  # type: ignore[type-arg]
    def __init__(self, path: Path, folder: Path) -> None:
        import csv

        from transformers import AutoTokenizer

        tokenizer = AutoTokenizer.from_pretrained(folder)
        with path.open(newline="") as file:
            rows = list(csv.DictReader(file))
        names = {"not_paraphrase": 0, "paraphrase": 1}
        self.features = [
            {**tokenizer(r["sentence1"], r["sentence2"], truncation=True, max_length=128), "labels": names[r["label"]]}
            for r in rows
        ]

    def __len__(self) -> int:
        return len(self.features)

    def __getitem__(self, index: int) -> dict[str, object]:
        return self.features[index]


def trainer_losses(folder: Path, train_file: Path, tmp_path: Path) -> list[float]:
    """Losses of 20 steps of Trainer as its example scripts set it up."""
    from transformers import (
        AutoModelForSequenceClassification,
        AutoTokenizer,
        DataCollatorWithPadding,
        Trainer,
        TrainingArguments,
    )

    class OrderedTrainer(Trainer):
        def _get_train_sampler(self, train_dataset: object = None) -> Sampler[int]:
            return FixedOrder(len(self.train_dataset))

    arguments = TrainingArguments(
        output_dir=str(tmp_path / "trainer"), per_device_train_batch_size=BATCH, max_steps=STEPS, learning_rate=1e-4,
        logging_steps=1, report_to="none", save_strategy="no", use_cpu=True, seed=42, dataloader_pin_memory=False,
        disable_tqdm=True,
    )  # fmt: skip
    trainer = OrderedTrainer(
        model=AutoModelForSequenceClassification.from_pretrained(folder),
        args=arguments,
        train_dataset=Pairs(train_file, folder),
        data_collator=DataCollatorWithPadding(AutoTokenizer.from_pretrained(folder)),
    )
    trainer.train()
    return [entry["loss"] for entry in trainer.state.log_history if "loss" in entry]


def test_twenty_steps_give_the_losses_of_the_trainer(
    model_without_dropout: Path, tmp_path: Path, cache_dir: Path
) -> None:
    """Trainer prints four decimals: 5e-5 is the resolution of the comparison."""
    files = write_demo_corpus(tmp_path / "data", train=400, validation=20, test=20)
    expected = trainer_losses(model_without_dropout, files.train, tmp_path)
    finetune(
        RunConfig(
            model=str(model_without_dropout), train_file=files.train, do_eval=False, cache_dir=cache_dir,
            output_dir=tmp_path / "ours", max_steps=STEPS, learning_rate=1e-4, logging_steps=1, report_to="none",
            save_strategy="no", per_device_train_batch_size=BATCH,
        )
    )  # fmt: skip
    ours = losses_of(tmp_path / "ours")
    assert len(ours) == len(expected) == STEPS
    np.testing.assert_allclose(ours, expected, atol=1e-4)
    assert max(expected) - min(expected) > 0.02, "the losses must move for the comparison to mean anything"
    shutil.rmtree(tmp_path / "ours")
    assert json.loads((model_without_dropout / "config.json").read_text())["hidden_dropout_prob"] == 0.0
