"""Answers from logits, by hand."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from fleetune.data.tasks import Columns
from fleetune.data.tokens import TokenTable
from fleetune.evaluate.answers import AnswerRules, FoundAnswer, find_answers

CONTEXT = "red fox ran far"
# [CLS] who [SEP] red fox ran far [SEP]
WINDOW = [(-1, -1)] * 3 + [(0, 3), (4, 7), (8, 11), (12, 15)] + [(-1, -1)]
RULES = {"may_lack_answers": False, "n_best_size": 20, "max_answer_length": 30, "null_score_diff_threshold": 0.0}


def table_of(*windows: list[tuple[int, int]], example_of: tuple[int, ...] = (0,)) -> TokenTable:
    notes: Any = [{"id": f"q{i}", "context": CONTEXT, "row": i + 1} for i in range(max(example_of) + 1)]
    places = np.array([place for window in windows for place in window], np.int32)
    return TokenTable(
        folder=Path(), split="validation", source="x", columns=Columns(texts=("question", "context"), label=None),
        token_ids=np.zeros(len(places), np.int32), type_ids=None,
        offsets=np.cumsum([0, *map(len, windows)]), labels=None, rows=np.arange(len(windows)), num_bad_rows=0,
        bad_rows=(), num_unlabelled=len(windows), places=places, example_of=np.array(example_of), notes=notes,
    )  # fmt: skip


def logits_of(*rows: dict[int, tuple[float, float]]) -> np.ndarray:
    """(T, 2) of windows of 8 tokens: the given tokens' logits, -9 elsewhere."""
    logits = np.full((8 * len(rows), 2), -9.0, np.float32)
    for number, row in enumerate(rows):
        for token, pair in row.items():
            logits[8 * number + token] = pair
    return logits


def answers(logits: np.ndarray, table: TokenTable, **rules: Any) -> list[FoundAnswer]:
    return list(find_answers(logits, table, AnswerRules(**{**RULES, **rules})))


def test_the_likeliest_span_and_the_probabilities() -> None:
    # Starts: fox 2, ran 1; ends: ran 3, fox 0. With two of each: fox-ran 5, fox-fox 2, ran-ran 4; ran-fox is no span.
    (found,) = answers(logits_of({4: (2.0, 0.0), 5: (1.0, 3.0)}), table_of(WINDOW), n_best_size=2)
    assert found.text == "fox ran"
    assert [entry["text"] for entry in found.n_best] == ["fox ran", "ran"]
    assert list(found.n_best[0]) == ["start_logit", "end_logit", "text", "probability"]
    assert (found.n_best[0]["start_logit"], found.n_best[0]["end_logit"]) == (2.0, 3.0)
    assert [e["probability"] for e in found.n_best] == pytest.approx([1 / (1 + math.exp(-1)), 1 / (1 + math.exp(1))])


def test_tokens_of_the_question_and_too_long_spans_are_no_answers() -> None:
    logits = logits_of({1: (9.0, 9.0), 3: (5.0, 0.0), 6: (1.0, 5.0), 7: (0.0, 9.0)})
    (found,) = answers(logits, table_of(WINDOW))
    assert found.text == CONTEXT  # red to far: 10
    (found,) = answers(logits, table_of(WINDOW), max_answer_length=3)
    assert found.text == "far"  # red to far has 4 tokens; far alone scores 6, red alone 5


def test_an_answer_is_the_best_of_all_windows_of_its_question() -> None:
    # The second question has two windows: in its second one "far" is the first of the context's tokens.
    later = [(-1, -1)] * 3 + [(12, 15)] + [(-1, -1)] * 4
    table = table_of(WINDOW, WINDOW, later, example_of=(0, 1, 1))
    logits = logits_of({3: (1.0, 1.0)}, {4: (2.0, 2.0)}, {3: (3.0, 3.0)})
    assert [found.text for found in answers(logits, table)] == ["red", "far"]
    assert [found.note["id"] for found in answers(logits, table)] == ["q0", "q1"]


@pytest.mark.parametrize(("threshold", "text"), [(0.0, ""), (2.0, "fox")])
def test_no_answer_is_the_least_sure_of_all_windows(threshold: float, text: str) -> None:
    # "No answer" scores 6 in the first window and 8 in the second: 6 counts. The best span scores 4, so the odds are 2:
    # above a threshold of 0, not above 2.
    table = table_of(WINDOW, WINDOW, example_of=(0, 0))
    logits = logits_of({0: (3.0, 3.0), 4: (2.0, 2.0)}, {0: (4.0, 4.0)})
    (found,) = answers(logits, table, may_lack_answers=True, null_score_diff_threshold=threshold)
    assert (found.text, found.null_odds) == (text, 2.0)
    assert [entry["text"] for entry in found.n_best[:2]] == ["", "fox"]


def test_no_answer_stays_in_the_list_however_low_it_scores() -> None:
    logits = logits_of({0: (-8.0, -8.0), 4: (2.0, 2.0)})
    (found,) = answers(logits, table_of(WINDOW), may_lack_answers=True, n_best_size=1)
    assert [entry["text"] for entry in found.n_best] == ["fox", ""]
    assert (found.text, found.null_odds) == ("fox", -20.0)


def test_a_question_for_which_no_span_is_left_has_an_empty_answer() -> None:
    logits = logits_of({1: (9.0, 9.0)})
    (found,) = answers(logits, table_of(WINDOW), n_best_size=1)
    assert (found.text, found.n_best) == ("", [])
    (found,) = answers(logits, table_of(WINDOW), n_best_size=1, may_lack_answers=True)
    assert (found.text, found.null_odds) == ("", -18.0)
