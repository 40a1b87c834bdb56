from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from fleetune.data.sources import MISSING, open_source
from fleetune.data.sources.squad import COLUMNS
from fleetune.errors import DataError

Write = Callable[[str, str | bytes], Path]


def question(number: int, **more: Any) -> dict[str, Any]:
    return {"id": f"q{number}", "question": f"who {number}?", "answers": [], **more}


def test_a_row_is_a_question(write: Write) -> None:
    articles = [
        {"title": "A", "paragraphs": [{"context": "c1", "qas": [question(1), question(2, is_impossible=True)]}]},
        {"paragraphs": [{"context": "c2", "qas": []}, {"context": "c3", "qas": [question(3)]}]},
    ]
    source = open_source(write("dev.json", json.dumps({"version": "v2.0", "data": articles})))
    assert (source.columns, source.total_rows()) == (COLUMNS, 3)
    assert [(row.number, *row.cells) for row in source.rows(("id", "context", "title", "is_impossible"))] == [
        (1, "q1", "c1", "A", MISSING), (2, "q2", "c1", "A", True), (3, "q3", "c3", MISSING, MISSING),
    ]  # fmt: skip


def test_parts_that_are_not_as_they_should_be_are_named(write: Write) -> None:
    articles = [{"paragraphs": [{"context": "c", "qas": ["x"]}, {"context": "c"}]}, {"paragraphs": 3}]
    source = open_source(write("dev.json", json.dumps({"data": articles})))
    assert [row.problem for row in source.rows(("id",))] == [
        "a question of paragraph 1 of article 1 is no object",
        'paragraph 2 of article 1 is no object with "context" and "qas"',
        "article 2 has no list of paragraphs",
    ]


def test_a_file_without_questions(write: Write) -> None:
    with pytest.raises(DataError, match="holds no question"):
        open_source(write("dev.json", json.dumps({"data": [{"paragraphs": []}]})))
