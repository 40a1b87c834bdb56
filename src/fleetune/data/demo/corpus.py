"""Pairs of sentences, half of them paraphrases, and the three files that hold them."""

from __future__ import annotations

import csv
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, fields
from functools import partial
from pathlib import Path

from fleetune.data.demo.dice import Dice
from fleetune.data.demo.events import changed, draw_event, near_misses
from fleetune.data.demo.telling import restyled, tell
from fleetune.files import write_whole

PARAPHRASE, NOT_PARAPHRASE = "paraphrase", "not_paraphrase"
MIN_WORDS, MAX_WORDS = 8, 30
# Chance that a fact is written differently in the second sentence ("12" and "twelve", "Maria Holt" and "Holt"). In
# trials with the 6-layer demo model, 0.25 kept it at chance for an epoch; at 0.07 it begins to learn at about step 160.
RESTYLED = 0.07


@dataclass(frozen=True, kw_only=True)
class Pair:
    """Two sentences, and whether they say the same."""

    sentence1: str
    sentence2: str
    label: str
    """"paraphrase" or "not_paraphrase"."""


@dataclass(frozen=True, kw_only=True)
class DemoFiles:
    """Where the three splits are: CSV files in UTF-8 with the columns sentence1, sentence2, label."""

    train: Path
    validation: Path
    test: Path


@dataclass(frozen=True, kw_only=True)
class Draft:
    """A pair and the kind of its near miss (None for a paraphrase)."""

    pair: Pair
    near_miss: str | None


def drafts(count: int, dice: Dice, seen: set[frozenset[str]]) -> list[Draft]:
    """Draft `count` shuffled pairs, half of them paraphrases, none of them in `seen`, and add them to it."""
    result: list[Draft] = []
    for i in range(count):
        draft = next(d for d in _stream(i < count // 2, dice) if _sentences(d.pair) not in seen)
        seen.add(_sentences(draft.pair))
        result.append(draft)
    dice.shuffle(result)
    return result


def _sentences(pair: Pair) -> frozenset[str]:
    return frozenset((pair.sentence1, pair.sentence2))


def _stream(same: bool, dice: Dice) -> Iterator[Draft]:
    """Drafts of one label without end; tellings that are too short or too long are dropped."""
    while True:
        event = restyled(draw_event(dice), dice, 1.0)
        near_miss = None if same else dice.pick_weighted(near_misses(event))
        other = changed(event, near_miss, dice) if near_miss else event
        first, core = tell(event, dice)
        # Opposite sides have parallel cores, so that one index forbids the same wording on both.
        second, _ = tell(restyled(other, dice, RESTYLED), dice, unlike_core=core)
        if not all(MIN_WORDS <= len(text.split()) <= MAX_WORDS for text in (first, second)):
            continue
        if dice.chance(0.5):
            first, second = second, first
        label = NOT_PARAPHRASE if near_miss else PARAPHRASE
        yield Draft(pair=Pair(sentence1=first, sentence2=second, label=label), near_miss=near_miss)


def paraphrase_pairs(count: int, seed: int) -> list[Pair]:
    """Make `count` different pairs in random order, half of them paraphrases (rounded down)."""
    return [draft.pair for draft in drafts(count, Dice(seed), set())]


def write_demo_corpus(
    folder: Path, *, seed: int = 42, train: int = 3000, validation: int = 400, test: int = 400
) -> DemoFiles:
    """Write train.csv, validation.csv and test.csv; the same arguments give the same bytes.

    Args:
        folder: Where to write; made if missing. Files of these names are replaced.
        seed: Decides every word.
        train: Number of pairs to train on.
        validation: Number of pairs to validate on.
        test: Number of pairs to test on.

    Returns:
        The paths. No pair is in two of the files, nor with its sentences swapped.

    Raises:
        OutputError: A file cannot be written.
    """
    files = DemoFiles(**{name: folder / f"{name}.csv" for name in ("train", "validation", "test")})
    dice, seen = Dice(seed), set[frozenset[str]]()
    for path, count in ((files.train, train), (files.validation, validation), (files.test, test)):
        pairs = [draft.pair for draft in drafts(count, dice, seen)]
        write_whole(path, partial(_write_csv, pairs))
    return files


def _write_csv(pairs: Sequence[Pair], path: Path) -> None:
    columns = [field.name for field in fields(Pair)]
    with path.open("w", encoding="utf-8", newline="") as file:
        writer = csv.writer(file, lineterminator="\n")
        writer.writerow(columns)
        writer.writerows([getattr(pair, column) for column in columns] for pair in pairs)
