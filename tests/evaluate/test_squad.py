"""Metrics of SQuAD on fixed predictions, worked out by hand from the definitions of the official scripts."""

from __future__ import annotations

import pytest

from fleetune.evaluate.squad import best_threshold, exact_match, normalised, squad_metrics, squad_v2_metrics, token_f1


@pytest.mark.parametrize(
    ("text", "plain"),
    [
        ("The  Cat's\tpaw!", "cats paw"),  # lower case, no punctuation, no article, single blanks
        ("an apple a day", "apple day"),
        ("theatre", "theatre"),  # articles are whole words
        ("U.S.A.", "usa"),
        ("the", ""),
        ("“Zoë”", "“zoë”"),  # punctuation is that of ASCII
    ],
)
def test_normalising(text: str, plain: str) -> None:
    assert normalised(text) == plain


@pytest.mark.parametrize(
    ("predicted", "right", "exact", "f1"),
    [
        ("the Denver Broncos", "Denver Broncos!", 1.0, 1.0),
        ("Denver", "Denver Broncos", 0.0, 2 / 3),  # precision 1, recall 1/2
        ("in Denver", "Denver Broncos", 0.0, 1 / 2),
        ("cat cat dog", "cat dog dog", 0.0, 2 / 3),  # common: one cat, one dog of 3 and 3
        ("red", "blue", 0.0, 0.0),
        ("", "blue", 0.0, 0.0),
        ("", "", 1.0, 1.0),
    ],
)
def test_scores_of_one_answer(predicted: str, right: str, exact: float, f1: float) -> None:
    assert exact_match(predicted, right) == exact
    assert token_f1(predicted, right) == pytest.approx(f1)


def test_version_1_takes_the_nearest_of_several_answers() -> None:
    # a: "Denver" meets the second answer; b: best F1 is 2/3, against "blue sky" (1 of 1 and 2 words); c: nothing.
    predicted = {"a": "Denver", "b": "the sky", "c": "x"}
    answers = {"a": ["Denver Broncos", "denver"], "b": ["red", "blue sky"], "c": ["y"]}
    assert squad_metrics(predicted, answers) == pytest.approx({"exact_match": 100 / 3, "f1": 100 * (1 + 2 / 3) / 3})


def test_version_1_of_an_answer_without_words() -> None:
    # "the" and "a" are both nothing once normalised: the same, but without a common word, so F1 is 0 in version 1.1.
    assert squad_metrics({"a": "a"}, {"a": ["the"]}) == {"exact_match": 100.0, "f1": 0.0}


def test_version_2_by_hand() -> None:
    # has1 right; has2 said to have none; no1 right; no2 answered.
    predicted = {"has1": "Denver", "has2": "", "no1": "", "no2": "red"}
    answers = {"has1": ["Denver"], "has2": ["blue sky"], "no1": [], "no2": []}
    odds = {"has1": -5.0, "has2": 3.0, "no1": 2.0, "no2": -1.0}
    found = squad_v2_metrics(predicted, answers, odds)
    # Threshold: none answered gives 2 right (no1, no2). By ascending odds: has1 is right as answered: 3, the best, at
    # -5; no2 was answered: 2; no1 stays without: 2; has2 has no answer to offer: 2. So 3 of 4.
    assert found == {
        "exact": 50.0, "f1": 50.0, "total": 4.0,
        "HasAns_exact": 50.0, "HasAns_f1": 50.0, "HasAns_total": 2.0,
        "NoAns_exact": 50.0, "NoAns_f1": 50.0, "NoAns_total": 2.0,
        "best_exact": 75.0, "best_exact_thresh": -5.0, "best_f1": 75.0, "best_f1_thresh": -5.0,
    }  # fmt: skip


def test_version_2_of_a_partly_right_answer() -> None:
    # F1 of "sky" against "blue sky" is 2/3; the answer "the" counts as none, so the question's right answer is "".
    predicted, answers = {"a": "sky", "b": ""}, {"a": ["red", "blue sky"], "b": ["the"]}
    found = squad_v2_metrics(predicted, answers, {"a": 0.0, "b": 1.0})
    assert (found["exact"], found["f1"]) == (50.0, pytest.approx(100 * (2 / 3 + 1) / 2))
    assert (found["NoAns_total"], found["NoAns_exact"]) == (0.0, None)


def test_the_best_threshold_is_zero_where_nothing_should_be_answered() -> None:
    predicted, answers = {"a": "x", "b": "y"}, {"a": ["z"], "b": []}
    assert best_threshold(predicted, {"a": 0.0, "b": 0.0}, answers, {"a": -9.0, "b": -8.0}) == (50.0, 0.0)
