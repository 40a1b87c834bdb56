from __future__ import annotations

import importlib.util
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from fleetune.data.dataset import prepare_data
from fleetune.data.sources.hub import HubSplit, open_hub
from fleetune.errors import ConfigError, DataError
from tests.data.conftest import Settings, WordTokenizer

Write = Callable[[str, str | bytes], Path]
Make = Callable[..., Settings]

with_datasets = pytest.mark.skipif(
    importlib.util.find_spec("datasets") is None, reason="the optional package `datasets` is not installed"
)

# A data set card declares the class names, as those of the hub do.
CARD = """---
dataset_info:
  features:
  - name: text
    dtype: string
  - name: label
    dtype:
      class_label:
        names:
          '0': negative
          '1': positive
configs:
- config_name: default
  data_files:
  - split: train
    path: train.csv
  - split: test
    path: test.csv
---
"""


@pytest.fixture
def hub_folder(write: Write, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("HF_DATASETS_CACHE", str(tmp_path / "hub_cache"))
    write("reviews/README.md", CARD)
    write("reviews/train.csv", "text,label\ngood film,1\nbad,0\n")
    write("reviews/test.csv", "text,label\na,-1\n")
    return tmp_path / "reviews"


@pytest.mark.parametrize("task", [None, "mrpc"])
def test_without_the_package_it_is_told_how_to_get_it(
    make_settings: Make, monkeypatch: pytest.MonkeyPatch, task: str | None
) -> None:
    monkeypatch.setitem(sys.modules, "datasets", None)
    settings = make_settings(task=task, dataset_name=None if task else "imdb")
    with pytest.raises(ConfigError, match=r"pip install 'fleetune\[hub\]'"):
        prepare_data(settings, WordTokenizer())


@with_datasets
def test_class_ids_become_names(hub_folder: Path) -> None:
    splits = open_hub(str(hub_folder))
    rows = list(splits["train"].rows(["label", "text"]))
    assert [(row.number, row.cells) for row in rows] == [(1, ("positive", "good film")), (2, ("negative", "bad"))]
    assert (splits["train"].columns, splits["train"].total_rows()) == (("text", "label"), 2)


@with_datasets
def test_a_hub_data_set_is_tokenised_and_cached(hub_folder: Path, make_settings: Make) -> None:
    settings, tokenizer = make_settings(dataset_name=str(hub_folder)), WordTokenizer()
    data = prepare_data(settings, tokenizer)
    assert data.task.labels == ("negative", "positive")
    assert data.splits["train"].labels is not None
    assert data.splits["train"].labels.tolist() == [1, 0]
    assert data.splits["test"].labels is None
    prepare_data(settings, tokenizer)
    assert tokenizer.num_calls == 2


@with_datasets
def test_a_data_set_that_cannot_be_loaded(tmp_path: Path) -> None:
    with pytest.raises(DataError, match="nowhere: cannot be loaded from the hub"):
        open_hub(str(tmp_path / "nowhere"))


@with_datasets
def test_lists_of_class_ids_are_given_as_names() -> None:
    import datasets

    names = datasets.ClassLabel(names=["O", "B-X"])
    features = datasets.Features({"tokens": datasets.List(datasets.Value("string")), "ner_tags": datasets.List(names)})
    rows = [{"tokens": ["a", "b"], "ner_tags": [1, 0]}, {"tokens": ["c"], "ner_tags": [-1]}]
    split = HubSplit(datasets.Dataset.from_list(rows, features=features), "x:train")
    assert [row.cells for row in split.rows(("tokens", "ner_tags"))] == [(["a", "b"], ["B-X", "O"]), (["c"], [-1])]
