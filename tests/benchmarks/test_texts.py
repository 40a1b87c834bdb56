"""The texts of the benchmarks, from small files in the publishers' layouts."""

from __future__ import annotations

import csv
from pathlib import Path

import pytest

from benchmarks.texts import LABELS, MRPC_FOLDER, example_pairs, mrpc_pairs, write_pairs
from fleetune.data.demo import Pair


def test_mrpc_with_a_byte_order_mark_and_open_quotes(tmp_path: Path) -> None:
    path = tmp_path / "train.tsv"
    path.write_text('Quality\t#1 ID\t#2 ID\t#1 String\t#2 String\n1\t7\t8\ta " b\tc\n0\t7\t8\td\te\n', "utf-8-sig")
    assert mrpc_pairs(path) == [
        Pair(sentence1='a " b', sentence2="c", label="equivalent"),
        Pair(sentence1="d", sentence2="e", label="not_equivalent"),
    ]


def test_mrpc_test_pairs_have_no_label(tmp_path: Path) -> None:
    path = tmp_path / "test.tsv"
    path.write_text("index\t#1 ID\t#2 ID\t#1 String\t#2 String\n0\t7\t8\ta\tb\n", "utf-8-sig")
    assert mrpc_pairs(path) == [Pair(sentence1="a", sentence2="b", label="")]


def test_written_pairs_are_read_back(tmp_path: Path) -> None:
    pairs = [Pair(sentence1='a "quoted", one', sentence2="b\nc", label="same")]
    with write_pairs(tmp_path / "new" / "pairs.csv", pairs).open(newline="") as file:
        assert list(csv.reader(file)) == [
            ["sentence1", "sentence2", "label"],
            ['a "quoted", one', "b\nc", "same"],
        ]


def test_example_pairs_bear_the_labels_of_mrpc() -> None:
    assert {pair.label for pair in example_pairs(50)} == set(LABELS)


@pytest.mark.skipif(not MRPC_FOLDER.is_dir(), reason="the shared data are not there")
def test_real_files() -> None:
    assert len(mrpc_pairs(MRPC_FOLDER / "train.tsv")) == 3_667
    assert len(mrpc_pairs(MRPC_FOLDER / "test.tsv")) == 1_725
