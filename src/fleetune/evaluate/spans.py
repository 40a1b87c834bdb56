"""Precision, recall and F1 of the spans that tags mark, counted as conlleval and seqeval count."""

from __future__ import annotations

from collections.abc import Sequence

from fleetune.data.tags import spans_of

Sentences = Sequence[Sequence[str]]


def span_metrics(labels: Sentences, predictions: Sentences) -> dict[str, float]:
    """Scores over all sentences: a span is right if its kind and both its ends are.

    Args:
        labels: The tags of each word of each sentence.
        predictions: The same, predicted.

    Returns:
        `precision`, `recall` and `f1` of spans, 0 where there is nothing to divide by, and `accuracy` of words.
    """
    num_right = num_predicted = num_true = 0
    for true_tags, predicted_tags in zip(labels, predictions, strict=True):
        true, predicted = set(spans_of(true_tags)), set(spans_of(predicted_tags))
        num_right += len(true & predicted)
        num_true += len(true)
        num_predicted += len(predicted)
    return {
        "precision": _ratio(num_right, num_predicted),
        "recall": _ratio(num_right, num_true),
        "f1": _ratio(2 * num_right, num_predicted + num_true),
        "accuracy": word_accuracy(labels, predictions),
    }


def word_accuracy(labels: Sentences, predictions: Sentences) -> float:
    """The share of words with the right tag."""
    pairs = [pair for sentences in zip(labels, predictions, strict=True) for pair in zip(*sentences, strict=True)]
    return _ratio(sum(label == prediction for label, prediction in pairs), len(pairs))


def _ratio(part: int, whole: int) -> float:
    return part / whole if whole else 0.0
