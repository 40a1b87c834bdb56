"""The README's table of tasks and families: every cell that it claims is trained and predicted here.

A tiny random model of each family goes through the whole program, from files to predictions, in two updates. What it
computes is right by `tests/model`; that it learns, by `tests/train`.
"""

from __future__ import annotations

import json
import random
import re
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch

from fleetune import RunConfig, finetune
from fleetune.cli import main
from fleetune.model.families import FAMILIES
from tests.conftest import ANIMALS, FILLERS, REPOSITORY, make_tiny_model, read_json
from tests.train.kinds import KINDS

OTHER = "any other"
"""A model without a flat forward."""
CLAIMED, NOT_CLAIMED = "yes", ""
NUM_TRAINED, NUM_PREDICTED = 16, 5


@dataclass(frozen=True, kw_only=True)
class Cell:
    """What stands in a row of the table."""

    suffix: str
    rows: Callable[[random.Random, int], list[str]]
    """(dice, number) -> lines of a file."""
    settings: dict[str, Any]
    metric: str
    prediction: Callable[[Any], bool]
    """Whether a prediction is one of such a task."""

    def write(self, path: Path, seed: int, count: int) -> Path:
        path.write_text("\n".join(self.rows(random.Random(seed), count)) + "\n")
        return path


def _texts(draw: random.Random, count: int, *, pair: bool = False, number: bool = False) -> list[str]:
    lines = ["sentence1,sentence2,label" if pair else "text,label"]
    for i in range(count):
        texts = [" ".join(draw.choices([*ANIMALS, *FILLERS], k=draw.randint(2, 9))) for _ in range(1 + pair)]
        label = f"{draw.random() * 5:.2f}" if number else "cat" if i % 2 else "other"
        lines.append(",".join([*texts, label]))
    return lines


def _of_kind(name: str) -> Callable[[random.Random, int], list[str]]:
    row = KINDS[name].row
    return lambda draw, count: [row(draw, i) for i in range(count)]


def _is_class(found: Any) -> bool:
    return found in ("cat", "other")


CELLS = {
    "class of a text": Cell(
        suffix=".csv", rows=_texts, settings={}, metric="eval_accuracy", prediction=_is_class,
    ),
    "class of a pair": Cell(
        suffix=".csv", rows=lambda draw, count: _texts(draw, count, pair=True), settings={}, metric="eval_accuracy",
        prediction=_is_class,
    ),
    "number": Cell(
        suffix=".csv", rows=lambda draw, count: _texts(draw, count, number=True),
        settings={"problem_type": "regression"}, metric="eval_mse", prediction=lambda found: isinstance(found, float),
    ),
    "several labels": Cell(
        suffix=".jsonl", rows=_of_kind("labels"), settings={}, metric="eval_f1_micro",
        prediction=lambda found: isinstance(found, list) and set(found) <= set(ANIMALS),
    ),
    "tags of words": Cell(
        suffix=".conll", rows=_of_kind("tags"), settings={}, metric="eval_f1",
        prediction=lambda found: isinstance(found, list) and {tag[0] for tag in found} <= {"B", "I", "O"},
    ),
    "answers": Cell(
        suffix=".jsonl", rows=_of_kind("questions"), settings=KINDS["questions"].settings, metric="eval_exact_match",
        prediction=lambda found: isinstance(found, str),
    ),
}  # fmt: skip
"""Row of the table -> its data."""


def table_of_readme() -> dict[tuple[str, str], str]:
    """(task, family) -> what the README's table says."""
    text = (REPOSITORY / "README.md").read_text(encoding="utf-8")
    found = re.search(r"^\| family \|.*?(?=\n\n)", text, flags=re.DOTALL | re.MULTILINE)
    assert found is not None, "the README has no table of families"
    head, _, *rows = [[cell.strip() for cell in line.strip("|").split("|")] for line in found[0].splitlines()]
    return {(task, row[0]): cell for row in rows for task, cell in zip(head[1:], row[1:], strict=True)}


TABLE = table_of_readme()
RUN = [(task, family) for family in (*FAMILIES, OTHER) for task in CELLS]


def test_the_readme_claims_what_is_run_here_and_nothing_else() -> None:
    assert {cell for cell, said in TABLE.items() if said == CLAIMED} == set(RUN)
    assert set(TABLE.values()) <= {CLAIMED, NOT_CLAIMED}


WIDTH = {"hidden_size": 32, "num_attention_heads": 2, "intermediate_size": 48, "num_hidden_layers": 2,
         "max_position_embeddings": 64, "type_vocab_size": 2}  # fmt: skip
OF_FAMILY: dict[str, dict[str, Any]] = {
    "distilbert": {"dim": 32, "n_heads": 2, "n_layers": 2, "hidden_dim": 48, "max_position_embeddings": 64},
    "electra": {**WIDTH, "embedding_size": 24},
    "albert": {**WIDTH, "embedding_size": 24, "num_hidden_groups": 1},
    "modernbert": {**{k: v for k, v in WIDTH.items() if k != "type_vocab_size"}, "local_attention": 8,
                   "global_attn_every_n_layers": 2, "bos_token_id": 2, "eos_token_id": 3, "cls_token_id": 2,
                   "sep_token_id": 3},
}  # fmt: skip
TYPED = ("bert", "electra", "albert", OTHER)
"""Families whose models tell the texts of a pair apart."""


def make_model(name: str, folder: Path) -> Path:
    """A random model of a family with the tokenizer of the tiny model."""
    if name == OTHER:
        return make_tiny_model(folder, position_embedding_type="relative_key")
    from transformers import AutoConfig, AutoModel

    make_tiny_model(folder)
    told = read_json(folder / "tokenizer_config.json")
    if name not in TYPED:
        told["model_input_names"] = ["input_ids", "attention_mask"]
        (folder / "tokenizer_config.json").write_text(json.dumps(told))
    torch.manual_seed(0)
    config = AutoConfig.for_model(name, **{**OF_FAMILY.get(name, WIDTH), "vocab_size": 21, "pad_token_id": 0})
    (folder / "config.json").unlink()
    (folder / "model.safetensors").unlink()
    AutoModel.from_config(config).save_pretrained(folder)
    return folder


@pytest.fixture(scope="module", params=[*FAMILIES, OTHER])
def family(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> tuple[str, Path]:
    return request.param, make_model(request.param, tmp_path_factory.mktemp("family") / "model")


@pytest.fixture(autouse=True)
def _one_thread() -> Iterator[None]:
    before = torch.get_num_threads()
    yield
    torch.set_num_threads(before)


@pytest.mark.slow
@pytest.mark.parametrize("task", CELLS)
def test_a_cell(task: str, family: tuple[str, Path], cache_dir: Path, tmp_path: Path) -> None:
    (name, model), cell = family, CELLS[task]
    files = {split: cell.write(tmp_path / f"{split}{cell.suffix}", seed, count)
             for seed, (split, count) in enumerate({"train": NUM_TRAINED, "validation": 6}.items())}  # fmt: skip
    settings = {"max_seq_length": 24, **cell.settings}
    record = finetune(RunConfig(
        model=str(model), train_file=files["train"], validation_file=files["validation"], cache_dir=cache_dir,
        output_dir=tmp_path / "out", max_steps=2, per_device_train_batch_size=4, learning_rate=1e-3, scale_lr="none",
        save_strategy="no", eval_strategy="no", report_to="none", threads=1, **settings,
    ))  # fmt: skip
    assert (record.status, record.step) == ("finished", 2)
    assert record.plan["unpadded"] is (name != OTHER)
    assert record.metrics[cell.metric] is not None
    source = cell.write(tmp_path / f"new{cell.suffix}", 9, NUM_PREDICTED)
    words = ["predict", tmp_path / "out", "--input", source, "--output", tmp_path / "p.jsonl", "--threads", 1]
    assert main.run([str(word) for word in words]) == 0
    found = [json.loads(line)["prediction"] for line in (tmp_path / "p.jsonl").read_text().splitlines()]
    assert len(found) == NUM_PREDICTED
    assert all(map(cell.prediction, found)), found
