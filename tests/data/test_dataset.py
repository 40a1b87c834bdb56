from __future__ import annotations

import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from fleetune.data.dataset import TaskData, prepare_data
from fleetune.data.tasks import custom_task
from fleetune.errors import ConfigError, DataError

from .conftest import Settings, WordTokenizer

Write = Callable[[str, str | bytes], Path]
Make = Callable[..., Settings]

MRPC_HEADER = "Quality\t#1 ID\t#2 ID\t#1 String\t#2 String\n"


@pytest.fixture
def mrpc(write: Write, tmp_path: Path) -> Path:
    write("glue/MRPC/train.tsv", MRPC_HEADER + '1\t1\t2\ta\tb\n0\t3\t4\tc\t" d\n')
    write("glue/MRPC/dev.tsv", MRPC_HEADER + "0\t5\t6\tgood\tbad\n")
    write("glue/MRPC/test.tsv", "index\t#1 ID\t#2 ID\t#1 String\t#2 String\n0\t7\t8\ta\ta\n")
    return tmp_path / "glue"


def labels_of(data: TaskData, split: str) -> list[float]:
    labels = data.splits[split].labels
    assert labels is not None
    return list(labels.tolist())


class TestGlue:
    @pytest.mark.parametrize("inner", ["", "MRPC"])
    def test_the_splits_of_a_folder(self, mrpc: Path, inner: str, make_settings: Make) -> None:
        data = prepare_data(make_settings(task="MRPC", data_dir=mrpc / inner), WordTokenizer())
        assert {name: len(table) for name, table in data.splits.items()} == {"train": 2, "validation": 1, "test": 1}
        assert (labels_of(data, "train"), labels_of(data, "validation")) == ([1, 0], [0])
        assert data.splits["test"].labels is None
        assert (data.task.labels, data.notices) == (("not_equivalent", "equivalent"), ())

    def test_only_what_is_asked_for_is_read(self, mrpc: Path, make_settings: Make) -> None:
        (mrpc / "MRPC" / "train.tsv").unlink()
        settings = make_settings(task="mrpc", data_dir=mrpc)
        assert list(prepare_data(settings, WordTokenizer(), splits=["validation"]).splits) == ["validation"]
        with pytest.raises(DataError, match=r"no train split: it would be train\.\*"):
            prepare_data(settings, WordTokenizer(), splits=["train", "validation"])
        with pytest.raises(ConfigError, match="no split 'dev': it has train, validation, test"):
            prepare_data(settings, WordTokenizer(), splits=["dev"])

    def test_a_named_file_comes_before_the_folder(self, mrpc: Path, write: Write, make_settings: Make) -> None:
        other = write("other.csv", "sentence1,sentence2,label\na,b,equivalent\nc,d,equivalent\n")
        data = prepare_data(make_settings(task="mrpc", data_dir=mrpc, validation_file=other), WordTokenizer())
        assert labels_of(data, "validation") == [1, 1]
        assert len(data.splits["train"]) == 2

    def test_two_files_for_one_split_are_not_guessed_between(
        self, mrpc: Path, write: Write, make_settings: Make
    ) -> None:
        write("glue/MRPC/validation.csv", "x")
        with pytest.raises(DataError, match=r"dev\.tsv and validation\.csv could each be the validation split"):
            prepare_data(make_settings(task="mrpc", data_dir=mrpc), WordTokenizer())

    def test_mnli_matched_and_mismatched(self, write: Write, tmp_path: Path, make_settings: Make) -> None:
        header = "index\tsentence1\tsentence2\tgold_label\n"
        write("MNLI/dev_matched.tsv", header + "0\ta\tb\tneutral\n")
        write("MNLI/dev_mismatched.tsv", header + "0\ta\tb\tcontradiction\n0\ta\tb\tentailment\n")
        settings = make_settings(task="mnli", data_dir=tmp_path / "MNLI")
        data = prepare_data(settings, WordTokenizer(), splits=["validation"])
        assert {name: labels_of(data, name) for name in data.splits} == {
            "validation_matched": [1],
            "validation_mismatched": [2, 0],
        }
        only = make_settings(task="mnli", validation_file=tmp_path / "MNLI" / "dev_mismatched.tsv")
        assert list(prepare_data(only, WordTokenizer()).splits) == ["validation_mismatched"]

    @pytest.mark.parametrize(
        ("task", "name", "content", "labels"),
        [
            ("cola", "train.tsv", "gj04\t1\t\ta b\ngj04\t0\t*\tb a\n", [1, 0]),
            ("sst2", "train.tsv", "sentence\tlabel\ngood film \t1\n", [1]),
            ("qqp", "train.tsv", "id\tqid1\tqid2\tquestion1\tquestion2\tis_duplicate\n0\t1\t2\ta\tb\t1\n", [1]),
            ("qnli", "train.tsv", "index\tquestion\tsentence\tlabel\n0\ta\tb\tnot_entailment\n", [1]),
            ("rte", "train.tsv", "index\tsentence1\tsentence2\tlabel\n0\ta\tb\tnot_entailment\n", [1]),
            ("wnli", "train.tsv", "index\tsentence1\tsentence2\tlabel\n0\ta\tb\t1\n", [1]),
            (
                "stsb",
                "train.tsv",
                "index\tgenre\tsentence1\tsentence2\tscore\n0\tx\ta\tb\t3.800\n",
                [pytest.approx(3.8)],
            ),
            ("rte", "train.jsonl", '{"sentence1": "a", "sentence2": "b", "label": 0, "idx": 0}\n', [0]),
        ],
    )
    def test_every_layout(
        self, write: Write, make_settings: Make, task: str, name: str, content: str, labels: list[Any]
    ) -> None:
        data = prepare_data(make_settings(task=task, train_file=write(name, content)), WordTokenizer())
        assert labels_of(data, "train") == labels

    def test_columns_named_by_the_user(self, write: Write, make_settings: Make) -> None:
        path = write("train.csv", "left,right,same\na,b,1\n")
        settings = make_settings(
            task="mrpc", train_file=path, text_column_names=("left", "right"), label_column_name="same"
        )
        assert labels_of(prepare_data(settings, WordTokenizer()), "train") == [1]

    def test_minus_one_in_validation(self, mrpc: Path, write: Write, make_settings: Make) -> None:
        write("glue/MRPC/dev.tsv", MRPC_HEADER + "-1\t5\t6\tgood\tbad\n")
        with pytest.raises(DataError, match=r"dev\.tsv, row 2, column 'Quality': the label is -1, as in test splits"):
            prepare_data(make_settings(task="mrpc", data_dir=mrpc), WordTokenizer())

    def test_limits_take_the_first_rows(self, mrpc: Path, make_settings: Make) -> None:
        settings = make_settings(task="mrpc", data_dir=mrpc, max_train_samples=1)
        data = prepare_data(settings, WordTokenizer())
        assert data.splits["train"].rows.tolist() == [2]


class TestOwnFiles:
    def test_classes_come_from_the_training_file(self, write: Write, make_settings: Make) -> None:
        settings = make_settings(
            train_file=write("train.csv", "text,label\na,pos\nb,neg\n"),
            validation_file=write("dev.tsv", "label\ttext\npos\tc\n"),
        )
        data = prepare_data(settings, WordTokenizer())
        assert (data.task.labels, data.task.metrics) == (("neg", "pos"), ("accuracy", "f1_macro"))
        assert (labels_of(data, "train"), labels_of(data, "validation")) == ([1, 0], [1])
        assert "text from 'text', label from 'label'" in data.notices[0]
        assert "has 2 classes: neg, pos" in data.notices[1]

    def test_classes_do_not_depend_on_how_many_rows_are_used(self, write: Write, make_settings: Make) -> None:
        train = write("train.csv", "text,label\na,pos\nb,neg\n")
        data = prepare_data(make_settings(train_file=train, max_train_samples=1), WordTokenizer())
        assert (data.task.labels, labels_of(data, "train")) == (("neg", "pos"), [1])

    def test_a_validation_label_that_training_lacks(self, write: Write, make_settings: Make) -> None:
        settings = make_settings(
            train_file=write("train.csv", "text,label\na,positive\nb,negative\n"),
            validation_file=write("dev.csv", "text,label\na,positive\nb,positve\n"),
        )
        with pytest.raises(DataError, match=r"dev\.csv, row 3, column 'label': .*'positve'.*nearest: 'positive'"):
            prepare_data(settings, WordTokenizer())

    def test_validation_must_have_the_same_columns(self, write: Write, make_settings: Make) -> None:
        settings = make_settings(
            train_file=write("train.csv", "text,label\na,1\nb,0\n"),
            validation_file=write("dev.csv", "texts,label\na,1\n"),
        )
        with pytest.raises(DataError, match=r"dev\.csv: there is no column 'text': .*nearest: 'texts'"):
            prepare_data(settings, WordTokenizer())

    def test_regression(self, write: Write, make_settings: Make) -> None:
        data = prepare_data(make_settings(train_file=write("train.csv", "text,label\na,1\nb,2.5\n")), WordTokenizer())
        assert (data.task.problem, data.task.labels, labels_of(data, "train")) == ("regression", None, [1.0, 2.5])

    def test_regression_that_is_asked_for(self, write: Write, make_settings: Make) -> None:
        train = write("train.csv", "text,label\na,1\nb,high\n")
        with pytest.raises(DataError, match=r"row 3, column 'label': the score 'high' is not a number"):
            prepare_data(make_settings(train_file=train, problem_type="regression"), WordTokenizer())

    def test_skipped_rows_are_counted_and_listed(self, write: Write, make_settings: Make) -> None:
        train = write("train.csv", "text,label\na,1\n,0\nb,0\n")
        data = prepare_data(make_settings(train_file=train, on_bad_row="skip"), WordTokenizer())
        assert data.splits["train"].rows.tolist() == [2, 4]
        assert data.notices[-1].endswith("1 bad row left out: row 3, column 'text': the text is empty")

    def test_an_unlabelled_test_file(self, write: Write, make_settings: Make) -> None:
        settings = make_settings(
            train_file=write("train.csv", "text,label\na,1\nb,0\n"), test_file=write("test.csv", "text\na\n")
        )
        assert prepare_data(settings, WordTokenizer()).splits["test"].labels is None

    def test_a_finished_runs_task_needs_no_training_file(self, write: Write, make_settings: Make) -> None:
        task = custom_task("classification", text_columns=("text",), label_column="label", labels=("pos", "neg"))
        settings = make_settings(validation_file=write("dev.csv", "text,label\na,neg\n"))
        assert labels_of(prepare_data(settings, WordTokenizer(), task=task), "validation") == [1]
        with pytest.raises(DataError, match="no train split"):
            prepare_data(settings, WordTokenizer())

    def test_no_data_and_too_many_columns(self, make_settings: Make) -> None:
        with pytest.raises(ConfigError, match="no data is named"):
            prepare_data(make_settings(), WordTokenizer())
        with pytest.raises(ConfigError, match="one or two columns"):
            prepare_data(make_settings(text_column_names=("a", "b", "c")), WordTokenizer())

    def test_a_folder_that_is_not_there(self, make_settings: Make, tmp_path: Path) -> None:
        with pytest.raises(DataError, match="nowhere: there is no such folder"):
            prepare_data(make_settings(data_dir=tmp_path / "nowhere", task="mrpc"), WordTokenizer())


def test_a_longer_length_than_the_models_is_lowered_and_told(mrpc: Path, make_settings: Make) -> None:
    data = prepare_data(make_settings(task="mrpc", data_dir=mrpc, max_seq_length=1000), WordTokenizer())
    assert "lowered to 512" in data.notices[0]


def test_another_process_opens_the_same_tables_without_the_sources(mrpc: Path, make_settings: Make) -> None:
    data = prepare_data(make_settings(task="mrpc", data_dir=mrpc), WordTokenizer())
    text = data.to_json()
    for path in (mrpc / "MRPC").iterdir():
        path.unlink()
    opened = TaskData.from_json(text)
    assert (opened.task, opened.notices, list(opened.splits)) == (data.task, data.notices, list(data.splits))
    for name, table in data.splits.items():
        assert opened.splits[name].token_ids.tolist() == table.token_ids.tolist()
        assert opened.splits[name].source == table.source


def test_the_room_imports_no_torch() -> None:
    code = "import sys, fleetune.data.dataset; print('torch' in sys.modules, 'transformers' in sys.modules)"
    out = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True, timeout=60)
    assert out.stdout.split() == ["False", "False"]
