"""Exact match and F1 of answers, as the scripts of SQuAD 1.1 and 2.0 define them (Rajpurkar et al. 2016, 2018)."""

from __future__ import annotations

import re
import string
from collections import Counter
from collections.abc import Mapping, Sequence

_ARTICLE = re.compile(r"\b(a|an|the)\b")
_NO_PUNCTUATION = str.maketrans("", "", string.punctuation)

Texts = Mapping[str, str]
"""Question id -> predicted answer; empty for "no answer"."""
Answers = Mapping[str, Sequence[str]]
"""Question id -> right answers; none for a question without one."""
Scores = dict[str, float]
"""Question id -> score from 0 to 1."""


def normalised(text: str) -> str:
    """An answer as it is compared: lower case, without punctuation and articles, single blanks."""
    return " ".join(_ARTICLE.sub(" ", text.lower().translate(_NO_PUNCTUATION)).split())


def exact_match(predicted: str, right: str) -> float:
    """1 if both are the same once normalised, else 0."""
    return float(normalised(predicted) == normalised(right))


def token_f1(predicted: str, right: str, *, of_nothing: float = 1.0) -> float:
    """Harmonic mean of precision and recall over words.

    Args:
        predicted: An answer.
        right: An answer.
        of_nothing: The value where neither has a word: 1 in version 2.0, 0 in version 1.1.
    """
    predicted_words, right_words = normalised(predicted).split(), normalised(right).split()
    if not predicted_words or not right_words:
        return of_nothing if predicted_words == right_words else 0.0
    num_common = (Counter(predicted_words) & Counter(right_words)).total()
    return 2 * num_common / (len(predicted_words) + len(right_words))


def answer_scores(predicted: Texts, answers: Answers) -> tuple[Scores, Scores]:
    """Exact match and F1 of every question in version 2.0: of the right answer that is nearest, or of "no answer"."""
    exact: Scores = {}
    f1: Scores = {}
    for question, right in answers.items():
        gold = [text for text in right if normalised(text)] or [""]
        exact[question] = max(exact_match(predicted[question], text) for text in gold)
        f1[question] = max(token_f1(predicted[question], text) for text in gold)
    return exact, f1


def squad_metrics(predicted: Texts, answers: Answers) -> dict[str, float | None]:
    """Metrics of version 1.1, in percent."""
    exact = {q: max(exact_match(predicted[q], text) for text in right) for q, right in answers.items()}
    f1 = {q: max(token_f1(predicted[q], text, of_nothing=0.0) for text in right) for q, right in answers.items()}
    return {"exact_match": _percent(exact), "f1": _percent(f1)}


def squad_v2_metrics(predicted: Texts, answers: Answers, null_odds: Mapping[str, float]) -> dict[str, float | None]:
    """Metrics of version 2.0, in percent; None for the mean over no question.

    Args:
        predicted: Answers, empty where the question was said to have none.
        answers: The right ones.
        null_odds: How much better "no answer" scored than the best answer.
    """
    exact, f1 = answer_scores(predicted, answers)
    metrics: dict[str, float | None] = {"exact": _percent(exact), "f1": _percent(f1), "total": float(len(answers))}
    for prefix, has_answer in (("HasAns", True), ("NoAns", False)):
        chosen = [question for question, right in answers.items() if _has_answer(right) == has_answer]
        metrics |= {
            f"{prefix}_exact": _percent({q: exact[q] for q in chosen}),
            f"{prefix}_f1": _percent({q: f1[q] for q in chosen}),
            f"{prefix}_total": float(len(chosen)),
        }
    for name, scores in (("exact", exact), ("f1", f1)):
        metrics[f"best_{name}"], metrics[f"best_{name}_thresh"] = best_threshold(predicted, scores, answers, null_odds)
    return metrics


def best_threshold(
    predicted: Texts, scores: Scores, answers: Answers, null_odds: Mapping[str, float]
) -> tuple[float, float]:
    """The best mean score, in percent, if questions count as without an answer whose odds are above a threshold.

    Returns:
        The score, and the smallest threshold that gives it; 0 if no question is to be answered.
    """
    current = best = float(sum(not _has_answer(right) for right in answers.values()))
    threshold = 0.0
    for question in sorted(answers, key=lambda q: null_odds[q]):
        if _has_answer(answers[question]):
            current += scores[question]
        elif predicted[question]:
            current -= 1.0
        if current > best:
            best, threshold = current, null_odds[question]
    return 100.0 * best / max(1, len(answers)), threshold


def _has_answer(right: Sequence[str]) -> bool:
    return len(right) > 0


def _percent(scores: Scores) -> float | None:
    return 100.0 * sum(scores.values()) / len(scores) if scores else None
