"""The texts that are measured on: MRPC, or the generated example corpus; and where files of SQuAD are."""

from __future__ import annotations

import csv
import dataclasses
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Literal

from benchmarks.result_file import REPOSITORY
from fleetune.data.demo import Pair, paraphrase_pairs, write_demo_corpus

Lengths = Literal["mrpc", "squad"]

MRPC_FOLDER = REPOSITORY.parent / "shared" / "data" / "glue" / "MRPC"
SQUAD_FOLDER = REPOSITORY.parent / "shared" / "data" / "squad"
LABELS = ("not_equivalent", "equivalent")
"""Of all pairs written here, in the order of their ids; the first name in the alphabet is not the first id."""
MADE_UP_SEED = 42
NUM_EXAMPLE_PAIRS = 2_000
"""Pairs of the example corpus where MRPC is not to be had."""


def mrpc_pairs(path: Path) -> list[Pair]:
    """The pairs of one of MRPC's files in GLUE's layout; pairs of the test file have an empty label."""
    with path.open(encoding="utf-8-sig", newline="") as file:
        rows = list(csv.DictReader(file, delimiter="\t", quoting=csv.QUOTE_NONE))
    labels = [LABELS[int(row["Quality"])] if "Quality" in row else "" for row in rows]
    return [
        Pair(sentence1=row["#1 String"], sentence2=row["#2 String"], label=label)
        for row, label in zip(rows, labels, strict=True)
    ]


def pair_settings(mrpc_folder: Path | None, folder: Path) -> dict[str, Any]:
    """Settings that name MRPC as the data of a run, or the example corpus, written under `folder`."""
    if mrpc_folder:
        return {"task": "mrpc", "data_dir": mrpc_folder.absolute()}
    return {"train_file": write_demo_corpus(folder / "data").train}


def example_pairs(count: int = NUM_EXAMPLE_PAIRS) -> list[Pair]:
    """Pairs of the generated example corpus, under MRPC's labels."""
    names = {"paraphrase": LABELS[1], "not_paraphrase": LABELS[0]}
    return [dataclasses.replace(pair, label=names[pair.label]) for pair in paraphrase_pairs(count, MADE_UP_SEED)]


def training_pairs(mrpc_folder: Path | None) -> list[Pair]:
    """MRPC's training pairs, or the example corpus where there is no folder of MRPC."""
    return example_pairs() if mrpc_folder is None else mrpc_pairs(mrpc_folder / "train.tsv")


def write_pairs(path: Path, pairs: Sequence[Pair]) -> Path:
    """Write a CSV file that `fleetune train` takes as a task of one's own."""
    path.parent.mkdir(parents=True, exist_ok=True)
    with path.open("w", encoding="utf-8", newline="") as file:
        writer = csv.writer(file, lineterminator="\n")
        writer.writerow(field.name for field in dataclasses.fields(Pair))
        writer.writerows(dataclasses.astuple(pair) for pair in pairs)
    return path
