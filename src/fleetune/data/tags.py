"""Tags of words, and the spans that they mark: IOB1, IOB2, IOBES and BILOU."""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import NamedTuple

OUTSIDE = "O"
_SPAN_TAG = re.compile(r"([BIESLU])(?:-(.*))?")
_AS_IOBES = {"L": "E", "U": "S"}


class Span(NamedTuple):
    """Words of one kind."""

    kind: str
    """What follows the dash of the tags, as PER; empty where they have none."""
    first: int
    last: int
    """Number of the last word, which is part of the span."""


def mark_spans(labels: Sequence[str]) -> bool:
    """Whether all tags are of spans or outside of them; the tags of parts of speech, say, are not."""
    inside = [label for label in labels if label != OUTSIDE]
    return bool(inside) and all(map(_SPAN_TAG.fullmatch, inside))


def spans_of(tags: Sequence[str]) -> list[Span]:
    """The spans that the tags of a sentence mark, whether these follow their scheme or not, as in conlleval.

    A word goes on with the span of the word before if its tag is I or E, that of the word before B or I, and both are
    of one kind. Every other word with a tag begins a span.
    """
    spans: list[Span] = []
    before, kind_before = OUTSIDE, ""
    for number, tag in enumerate(tags):
        place, kind = _parts(tag)
        if place in ("I", "E") and before in ("B", "I") and kind == kind_before:
            spans[-1] = spans[-1]._replace(last=number)
        elif place != OUTSIDE:
            spans.append(Span(kind, number, number))
        before, kind_before = place, kind
    return spans


def _parts(tag: str) -> tuple[str, str]:
    """(place in the span, kind) of a tag of `mark_spans`."""
    match = _SPAN_TAG.fullmatch(tag)
    if match is None:
        return OUTSIDE, ""
    place = match[1]
    return _AS_IOBES.get(place, place), match[2] or ""
