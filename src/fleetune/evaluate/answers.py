"""From logits of windows to answers: the best spans of each question, over all its windows.

The rules, and the layout of what they give, are those of transformers' `run_qa.py`.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from fleetune.data.tokens import TokenTable
from fleetune.evaluate.predict import FloatArray


class Candidate(NamedTuple):
    """A span of the context, or none."""

    start: int
    """First character; 0 for "no answer", as is the end."""
    end: int
    start_logit: float
    end_logit: float

    @property
    def score(self) -> float:
        return self.start_logit + self.end_logit


@dataclass(frozen=True, kw_only=True)
class AnswerRules:
    """Which spans are answers."""

    may_lack_answers: bool
    """Whether "no answer" is an answer."""
    n_best_size: int
    max_answer_length: int
    """Tokens."""
    null_score_diff_threshold: float


@dataclass(frozen=True, kw_only=True)
class FoundAnswer:
    """What is predicted for a question."""

    note: dict[str, Any]
    """Of the question: `id`, `context`, `row`, and `answers` where they are known."""
    text: str
    """Empty for "no answer"."""
    n_best: list[dict[str, Any]]
    """`text`, `probability`, `start_logit` and `end_logit` of the best spans, the best first."""
    null_odds: float
    """How much better "no answer" scores than the best span; 0 where it is no answer."""


def find_answers(logits: FloatArray, table: TokenTable, rules: AnswerRules) -> Iterator[FoundAnswer]:
    """The answer to each question, in the split's order.

    Args:
        logits: (T, 2), of each token to be the first and the last of the answer.
        table: The windows.
        rules: See `AnswerRules`.
    """
    assert table.notes is not None
    assert table.example_of is not None
    ends = np.searchsorted(table.example_of, np.arange(table.num_examples), side="right")
    first = 0
    for number, end in enumerate(ends.tolist()):
        candidates, nulls = list[Candidate](), list[Candidate]()
        for window in range(first, end):
            tokens = slice(int(table.offsets[window]), int(table.offsets[window + 1]))
            assert table.places is not None
            candidates += _spans(logits[tokens], table.places[tokens], rules)
            nulls.append(Candidate(0, 0, *map(float, logits[tokens.start])))
        first = end
        yield _choose(table.notes[number], candidates, min(nulls, key=lambda null: null.score), rules)


def _spans(logits_L2: FloatArray, places_L2: NDArray[np.int32], rules: AnswerRules) -> Iterator[Candidate]:
    """The spans of a window between its likeliest first and last tokens, the likeliest first tokens first."""
    starts, ends = (np.argsort(-logits_L2[:, i], kind="stable")[: rules.n_best_size] for i in (0, 1))
    starts, ends = (tokens[places_L2[tokens, 0] >= 0] for tokens in (starts, ends))
    lengths = ends[None, :] - starts[:, None] + 1
    for i, j in zip(*np.nonzero((lengths >= 1) & (lengths <= rules.max_answer_length)), strict=True):
        start, end = starts[i], ends[j]
        yield Candidate(
            int(places_L2[start, 0]), int(places_L2[end, 1]), float(logits_L2[start, 0]), float(logits_L2[end, 1])
        )


def _choose(note: dict[str, Any], candidates: list[Candidate], null: Candidate, rules: AnswerRules) -> FoundAnswer:
    context = note["context"]
    ranked = sorted([*candidates, *([null] if rules.may_lack_answers else [])], key=lambda c: -c.score)
    kept = ranked[: rules.n_best_size]
    if rules.may_lack_answers and null not in kept:
        kept.append(null)
    n_best = _with_probabilities(kept, context)
    texts = [(c, context[c.start : c.end]) for c in kept]
    best = next(((c, text) for c, text in texts if text), (None, ""))
    # Without any span, "no answer" is compared with a score of 0, as run_qa.py does.
    odds = null.score - (0.0 if best[0] is None else best[0].score) if rules.may_lack_answers else 0.0
    text = "" if rules.may_lack_answers and odds > rules.null_score_diff_threshold else best[1]
    return FoundAnswer(note=note, text=text, n_best=n_best, null_odds=odds)


def _with_probabilities(kept: Sequence[Candidate], context: str) -> list[dict[str, Any]]:
    """The candidates in run_qa.py's layout; probabilities are among them alone."""
    if not kept:
        return []
    largest = max(c.score for c in kept)
    shares = [math.exp(c.score - largest) for c in kept]
    return [
        {
            "start_logit": c.start_logit,
            "end_logit": c.end_logit,
            "text": context[c.start : c.end],
            "probability": share / sum(shares),
        }
        for c, share in zip(kept, shares, strict=True)
    ]
