"""Spans and their scores, by hand from the rules of conlleval, and against seqeval where that is installed."""

from __future__ import annotations

import random

import pytest

from fleetune.data.tags import Span, mark_spans, spans_of
from fleetune.evaluate.spans import span_metrics, word_accuracy


@pytest.mark.parametrize(
    ("tags", "spans"),
    [
        ("B-PER I-PER O B-LOC", [("PER", 0, 1), ("LOC", 3, 3)]),  # IOB2
        ("I-PER I-PER O I-LOC B-LOC", [("PER", 0, 1), ("LOC", 3, 3), ("LOC", 4, 4)]),  # IOB1: B only where it parts two
        ("S-PER B-LOC I-LOC E-LOC", [("PER", 0, 0), ("LOC", 1, 3)]),  # IOBES
        ("U-PER B-LOC I-LOC L-LOC", [("PER", 0, 0), ("LOC", 1, 3)]),  # BILOU
        ("B-PER I-LOC", [("PER", 0, 0), ("LOC", 1, 1)]),  # another kind is another span
        ("E-PER I-PER", [("PER", 0, 0), ("PER", 1, 1)]),  # nothing goes on behind an end
        ("B-PER O I-PER", [("PER", 0, 0), ("PER", 2, 2)]),
        ("B I O B", [("", 0, 1), ("", 3, 3)]),  # one kind, without a name
        ("B-a-b I-a-b", [("a-b", 0, 1)]),
        ("O O", []),
        ("", []),
    ],
)
def test_spans_of_every_scheme(tags: str, spans: list[tuple[str, int, int]]) -> None:
    assert spans_of(tags.split()) == [Span(*span) for span in spans]


@pytest.mark.parametrize(
    ("labels", "marks"),
    [
        (("O", "B-A", "I-A"), True), (("I-A", "O"), True), (("S-A", "U-B", "L-B"), True), (("B", "I", "O"), True),
        (("NOUN", "O"), False), (("O",), False), (("0", "1"), False), (("B-A", "X"), False), ((), False),
    ],
)  # fmt: skip
def test_which_tags_mark_spans(labels: tuple[str, ...], marks: bool) -> None:
    assert mark_spans(labels) == marks


def test_scores_by_hand() -> None:
    # True spans: PER 0-1, LOC 3, ORG 0. Predicted: PER 0-1 (right), LOC 2-3 (its end alone is right), PER 0 (the kind
    # is wrong), PER 2. One of 4 predicted and of 3 true: precision 1/4, recall 1/3, F1 = 2 * 1 / (4 + 3) = 2/7.
    labels = [["B-PER", "I-PER", "O", "B-LOC"], ["B-ORG", "O", "O"]]
    predicted = [["B-PER", "I-PER", "B-LOC", "I-LOC"], ["B-PER", "O", "B-PER"]]
    # Words: 0 and 1 of the first sentence, 1 of the second are right: 3 of 7.
    assert span_metrics(labels, predicted) == pytest.approx(
        {"precision": 1 / 4, "recall": 1 / 3, "f1": 2 / 7, "accuracy": 3 / 7}
    )


def test_where_there_is_no_span_scores_are_zero() -> None:
    assert span_metrics([["O", "O"]], [["O", "O"]]) == {"precision": 0.0, "recall": 0.0, "f1": 0.0, "accuracy": 1.0}
    assert span_metrics([], []) == {"precision": 0.0, "recall": 0.0, "f1": 0.0, "accuracy": 0.0}


def test_accuracy_counts_words_not_sentences() -> None:
    assert word_accuracy([["A"], ["A", "B", "B"]], [["A"], ["B", "A", "B"]]) == 2 / 4


@pytest.mark.filterwarnings("ignore")
def test_scores_equal_those_of_seqeval() -> None:
    seqeval = pytest.importorskip("seqeval.metrics", reason="the package `seqeval` is not installed")
    draw = random.Random(3)
    tags = ["O", *(f"{place}-{kind}" for place in "BIES" for kind in ("A", "B"))]
    for _ in range(200):
        lengths = [draw.randint(1, 9) for _ in range(4)]
        labels, predicted = ([[draw.choice(tags) for _ in range(n)] for n in lengths] for _ in range(2))
        expected = {
            "precision": seqeval.precision_score(labels, predicted),
            "recall": seqeval.recall_score(labels, predicted),
            "f1": seqeval.f1_score(labels, predicted),
            "accuracy": seqeval.accuracy_score(labels, predicted),
        }
        assert span_metrics(labels, predicted) == pytest.approx(expected)
