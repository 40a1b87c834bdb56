"""The example corpus: English sentence pairs, paraphrases and near misses, written by a small grammar.

An event is a scene with its facts. A paraphrase is one event told twice, with another sentence plan, other verbs and
another order of clauses. A near miss tells an event, and then the same event with exactly one fact changed, rewritten
just as much: how many words two sentences share says little about the label.

The same seed gives the same bytes on every platform: all chance comes from `random.Random.random`, the one sequence
that Python promises to keep.
"""

from __future__ import annotations

import csv
import os
import random
import re
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass, fields, replace
from pathlib import Path
from typing import TypeVar

from fleetune.data import demo_grammar as grammar
from fleetune.data.demo_grammar import SCENES, Scene
from fleetune.errors import OutputError

__all__ = ["DemoFiles", "Pair", "paraphrase_pairs", "write_demo_corpus"]

PARAPHRASE, NOT_PARAPHRASE = "paraphrase", "not_paraphrase"

# How often each kind of near miss is taken, among those that an event allows.
NEAR_MISS_WEIGHTS = {
    "name": 6,
    "negation": 5,
    "place": 4,
    "direction": 4,
    "number": 3,
    "role": 2,
    "day": 1,
}
MIN_WORDS, MAX_WORDS = 8, 30
# Chance that a fact is written differently in the second sentence ("12" and "twelve", "Maria Holt" and "Holt"). In
# trials with the 6-layer demo model, 0.25 kept it at chance for an epoch; at 0.07 it begins to learn at about step 160.
RESTYLED = 0.07
# Share of names taken whole from a list; the others are put together from two parts. The fewer whole names, the less a
# bag of words can learn by heart which words are names.
WHOLE_NAMES = 0.4

Key = tuple[str | int, ...]
T = TypeVar("T")


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
class Fact:
    """One thing an event is about."""

    kind: str
    """A row of `FACT_KINDS` or of `grammar.THINGS`, "reason" or "source"."""
    key: Key
    """What tells it apart from other facts of its kind."""
    forms: tuple[str, ...]
    """Ways to write it."""
    form: int = 0
    """The way it is written now."""

    @property
    def text(self) -> str:
        return self.forms[self.form % len(self.forms)]


@dataclass(frozen=True, kw_only=True)
class Event:
    """What happened, apart from any wording. `side` selects one of the scene's sets of cores."""

    scene: Scene
    facts: dict[str, Fact]
    side: int = 0


@dataclass(frozen=True, kw_only=True)
class Draft:
    """A pair and the kind of its near miss (None for a paraphrase)."""

    pair: Pair
    near_miss: str | None


class Dice:
    """Chance that is the same on every platform and Python version."""

    def __init__(self, seed: int) -> None:
        self._random = random.Random(seed).random

    def below(self, stop: int) -> int:
        return int(self._random() * stop)

    def chance(self, probability: float) -> bool:
        return self._random() < probability

    def pick(self, options: Sequence[T]) -> T:
        return options[self.below(len(options))]

    def pick_weighted(self, weights: dict[str, int]) -> str:
        return self.pick([name for name, weight in weights.items() for _ in range(weight)])

    def shuffle(self, items: list[T]) -> None:
        for last in range(len(items) - 1, 0, -1):
            other = self.below(last + 1)
            items[last], items[other] = items[other], items[last]


# ------------------------------------------------------------------------------------------------------ facts

_UNITS = grammar.words(
    "zero one two three four five six seven eight nine ten eleven twelve thirteen fourteen fifteen sixteen "
    "seventeen eighteen nineteen"
)
_TENS = grammar.words("zero ten twenty thirty forty fifty sixty seventy eighty ninety")
_ORDINALS = {
    "one": "first",
    "two": "second",
    "three": "third",
    "five": "fifth",
    "eight": "eighth",
    "nine": "ninth",
    "twelve": "twelfth",
    "twenty": "twentieth",
}


def number_words(number: int) -> str:
    """Spell a number out: 45 -> "forty-five", 1200 -> "twelve hundred"; whole hundreds from 100 to 9,900."""
    if number < 20:
        return _UNITS[number]
    if number < 100:
        tens, units = divmod(number, 10)
        return _TENS[tens] + (f"-{_UNITS[units]}" if units else "")
    scale, name = (1000, "thousand") if number % 1000 == 0 else (100, "hundred")
    assert number % scale == 0, f"no words for {number}"
    return f"{number_words(number // scale)} {name}"


def ordinal_words(number: int) -> str:
    """Spell a day of the month out: 3 -> "third", 21 -> "twenty-first"."""
    head, dash, last = number_words(number).rpartition("-")
    return head + dash + _ORDINALS.get(last, last + "th")


def _count_forms(key: Key) -> tuple[str, ...]:
    number = int(key[0])
    plain = (str(number),) if number > 999 else ()
    return (f"{number:,}", number_words(number), *plain)


def _percent_forms(key: Key) -> tuple[str, ...]:
    return (f"{key[0]}%", f"{key[0]} per cent", f"{number_words(int(key[0]))} per cent")


def _money_forms(key: Key) -> tuple[str, ...]:
    return (f"${key[0]} million", f"{key[0]} million dollars", f"{number_words(int(key[0]))} million dollars")


def _sum_forms(key: Key) -> tuple[str, ...]:
    return (f"${key[0]},000", f"{key[0]},000 dollars", f"{number_words(int(key[0]))} thousand dollars")


def _score_forms(key: Key) -> tuple[str, ...]:
    high, low = int(key[0]), int(key[1])
    return (
        f"{high}-{low}",
        f"by {high} goals to {low}",
        f"by {number_words(high)} goals to {number_words(low)}",
    )


def _votes_forms(key: Key) -> tuple[str, ...]:
    high, low = int(key[0]), int(key[1])
    return (
        f"by {high} votes to {low}",
        f"by {number_words(high)} votes to {number_words(low)}",
        f"in a(n) {high}-{low} vote",
        f"in a vote of {number_words(high)} to {number_words(low)}",
    )


def _company_forms(key: Key) -> tuple[str, ...]:
    stem, sector = key
    trade = dict(grammar.SECTORS)[str(sector)]
    return (f"{stem} {sector}", str(stem), f"the {trade} {stem}", f"{stem}, the {trade},")


def _town_forms(key: Key) -> tuple[str, ...]:
    name = str(key[0])
    return (name, name, f"the town of {name}")  # the bare name twice: it reads better, so it comes more often


def _date_forms(key: Key) -> tuple[str, ...]:
    if len(key) == 1:
        return (f"on {key[0]}",)
    day, month = key
    return (f"on {day} {month}", f"on {month} {day}", f"on the {ordinal_words(int(day))} of {month}")


def _clock_forms(key: Key) -> tuple[str, ...]:
    hour = int(key[0])
    half, part = ("am", "morning") if hour < 12 else ("pm", "afternoon" if hour < 18 else "evening")
    short = hour if hour < 13 else hour - 12
    return (f"at {short} {half}", f"at {hour}:00", f"at {number_words(short)} in the {part}")


def _draw_name(whole: Sequence[str], starts: Sequence[str], ends: Sequence[str], dice: Dice) -> str:
    return dice.pick(whole) if dice.chance(WHOLE_NAMES) else dice.pick(starts) + dice.pick(ends)


def _draw_person(dice: Dice) -> Key:
    last = _draw_name(grammar.LAST_NAMES, grammar.LAST_STARTS, grammar.LAST_ENDS, dice)
    return (dice.pick(grammar.FIRST_NAMES), last)


def _draw_town(dice: Dice) -> Key:
    return (_draw_name(grammar.TOWNS, grammar.TOWN_STARTS, grammar.TOWN_ENDS, dice),)


def _draw_company(dice: Dice) -> Key:
    stem = _draw_name(grammar.COMPANY_STEMS, grammar.COMPANY_STARTS, grammar.COMPANY_ENDS, dice)
    return (stem, dice.pick(grammar.SECTORS)[0])


def _draw_date(dice: Dice) -> Key:
    if dice.chance(0.5):
        return (dice.pick(grammar.WEEKDAYS),)
    return (2 + dice.below(27), dice.pick(grammar.MONTHS))


def _draw_tally(dice: Dice) -> Key:
    low = 1 + dice.below(4)
    return (low + 1 + dice.below(5), low)


def _draw_clock(dice: Dice) -> Key:
    return (dice.pick([hour for hour in range(6, 23) if hour != 12]),)


@dataclass(frozen=True, kw_only=True)
class FactKind:
    """How facts of one kind are drawn and written, and what a change of one is called."""

    draw: Callable[[Dice], Key]
    forms: Callable[[Key], tuple[str, ...]]
    near_miss: str
    kept: int | None = None
    """Index of the part of a key that a change may keep, as "Maria" in Maria Holt -> Maria Reed."""


FACT_KINDS = {
    "person": FactKind(
        draw=_draw_person,
        forms=lambda key: (f"{key[0]} {key[1]}", str(key[1])),
        near_miss="name",
        kept=0,
    ),
    "company": FactKind(draw=_draw_company, forms=_company_forms, near_miss="name", kept=1),
    "team": FactKind(
        draw=lambda dice: (*_draw_town(dice), dice.pick(grammar.TEAM_NAMES)),
        forms=lambda key: (f"{key[0]} {key[1]}", str(key[0])),
        near_miss="name",
        kept=1,
    ),
    "town": FactKind(draw=_draw_town, forms=_town_forms, near_miss="place"),
    "few": FactKind(draw=lambda dice: (2 + dice.below(18),), forms=_count_forms, near_miss="number"),
    "dozens": FactKind(draw=lambda dice: (20 + 5 * dice.below(16),), forms=_count_forms, near_miss="number"),
    "hundreds": FactKind(draw=lambda dice: (200 + 100 * dice.below(38),), forms=_count_forms, near_miss="number"),
    "percent": FactKind(draw=lambda dice: (2 + dice.below(38),), forms=_percent_forms, near_miss="number"),
    "money": FactKind(draw=lambda dice: (2 + dice.below(48),), forms=_money_forms, near_miss="number"),
    "sum": FactKind(draw=lambda dice: (2 + dice.below(48),), forms=_sum_forms, near_miss="number"),
    "score": FactKind(draw=_draw_tally, forms=_score_forms, near_miss="number"),
    "votes": FactKind(draw=_draw_tally, forms=_votes_forms, near_miss="number"),
    "date": FactKind(draw=_draw_date, forms=_date_forms, near_miss="day"),
    "month": FactKind(
        draw=lambda dice: (dice.pick(grammar.MONTHS),),
        forms=lambda key: (f"in {key[0]}", f"during {key[0]}", f"in the month of {key[0]}"),
        near_miss="day",
    ),
    "clock": FactKind(draw=_draw_clock, forms=_clock_forms, near_miss="day"),
}


def draw_fact(kind: str, dice: Dice) -> Fact:
    """Draw a fact of a row of `FACT_KINDS`, or one of `grammar.THINGS`, which never change."""
    if kind in grammar.THINGS:
        forms = dice.pick(grammar.THINGS[kind])
        return Fact(kind=kind, key=forms, forms=forms)
    key = FACT_KINDS[kind].draw(dice)
    return Fact(kind=kind, key=key, forms=FACT_KINDS[kind].forms(key))


# ----------------------------------------------------------------------------------------------------- events


def draw_event(dice: Dice) -> Event:
    """Draw a scene, a side of it, and facts of which no two share a name or a number."""
    scene = dice.pick(SCENES)
    kinds = dict(scene.slots)
    if scene.when and dice.chance(0.5):
        kinds["when"] = scene.when
    if scene.where and dice.chance(0.4):
        kinds["where"] = "town"
    facts: dict[str, Fact] = {}
    for slot, kind in kinds.items():
        facts[slot] = _draw_unlike(kind, facts.values(), dice)
    if scene.reasons and dice.chance(0.2):
        clause, noun = dice.pick(grammar.REASONS[scene.reasons])
        forms = (f"because {clause}", f"as {clause}", f"because of {noun}", f"owing to {noun}")
        facts["reason"] = Fact(kind="reason", key=(clause,), forms=forms)
    elif scene.source and dice.chance(0.25):
        source = dice.pick(grammar.SOURCES)
        facts["source"] = Fact(kind="source", key=(source,), forms=(source,))
    return Event(scene=scene, facts=facts, side=dice.below(len(scene.cores)))


def _draw_unlike(kind: str, others: Iterable[Fact], dice: Dice) -> Fact:
    taken = {part for other in others for part in other.key}
    while True:
        fact = draw_fact(kind, dice)
        if taken.isdisjoint(fact.key):
            return fact


def near_misses(event: Event) -> dict[str, int]:
    """The kinds of near miss that an event allows, with their weights."""
    allowed = {_near_miss_of(fact) for fact in event.facts.values()} | {event.scene.opposite}
    if event.scene.swap:
        allowed.add("role")
    return {name: weight for name, weight in NEAR_MISS_WEIGHTS.items() if name in allowed}


def _near_miss_of(fact: Fact) -> str | None:
    return FACT_KINDS[fact.kind].near_miss if fact.kind in FACT_KINDS else None


def changed(event: Event, near_miss: str, dice: Dice) -> Event:
    """The event with one fact changed: another value, two roles swapped, or the opposite side."""
    if near_miss == event.scene.opposite:
        return replace(event, side=1 - event.side)
    if near_miss == "role":
        assert event.scene.swap, f"{event.scene.name} has no roles to swap"
        first, second = event.scene.swap
        return replace(event, facts={**event.facts, first: event.facts[second], second: event.facts[first]})
    slot = dice.pick([slot for slot, fact in event.facts.items() if _near_miss_of(fact) == near_miss])
    others = [fact for name, fact in event.facts.items() if name != slot]
    return replace(event, facts={**event.facts, slot: _changed_fact(event.facts[slot], others, dice)})


def _changed_fact(old: Fact, others: Sequence[Fact], dice: Dice) -> Fact:
    kind = FACT_KINDS[old.kind]
    while True:
        new = _draw_unlike(old.kind, others, dice)
        if len(new.key) != len(old.key) or not set(new.key).isdisjoint(old.key):
            continue
        if kind.kept is None:
            return replace(new, form=old.form)
        key = tuple(old.key[i] if i == kind.kept else part for i, part in enumerate(new.key))
        return replace(old, key=key, forms=kind.forms(key))


# ---------------------------------------------------------------------------------------------------- wording


def restyled(event: Event, dice: Dice, probability: float) -> Event:
    """The same event, each fact with this probability in a form drawn anew."""

    def restyle(fact: Fact) -> Fact:
        return replace(fact, form=dice.below(len(fact.forms))) if dice.chance(probability) else fact

    return replace(event, facts={slot: restyle(fact) for slot, fact in event.facts.items()})


def tell(event: Event, dice: Dice, *, unlike_core: int | None = None) -> tuple[str, int]:
    """Write an event as one sentence.

    Args:
        event: What to tell.
        dice: Chooses the words.
        unlike_core: A core that must not be used, because the other sentence has it.

    Returns:
        The sentence, and the index of the core it uses.
    """
    cores = event.scene.cores[event.side]
    index = dice.pick([i for i in range(len(cores)) if i != unlike_core])
    core = expand(cores[index], event.facts, dice)
    return _finish(_arrange(core, event.facts, dice)), index


def expand(template: str, facts: dict[str, Fact], dice: Dice) -> str:
    """Fill a core's `{slots}` and `[choices]`; `a(n)` is left for later, when its next word is known."""
    text = re.sub(r"\[([^]]*)\]", lambda match: dice.pick(match[1].split("|")), template)

    def fill(match: re.Match[str]) -> str:
        fact = facts[match[1]]
        return fact.forms[int(match[2])] if match[2] else fact.text

    return re.sub(r"\{(\w+)(?:\.(\d))?\}", fill, text)


_OPENERS = {"in", "for", "after", "at", "with", "near", "according"}


def _arrange(core: str, facts: dict[str, Fact], dice: Dice) -> str:
    """Put time, place and reason before or after the core, at most one of them before."""
    optional = [name for name in ("where", "when", "reason", "source") if name in facts]
    extras = {name: facts[name].text for name in optional}
    if "where" in extras:
        extras["where"] = f"in {extras['where']}"
    front = dice.pick([None, *extras]) if core.split()[0] not in _OPENERS else None
    source = extras.pop("source", None)
    opening = ""
    if front is not None and front != "source":
        opening = f"{extras.pop(front)}, "
    text = " ".join([opening + core, *extras.values()])
    if source is None:
        return text
    if front == "source":
        return dice.pick((f"according to {source}, {text}", f"{source} said that {text}"))
    return dice.pick((f"{text}, {source} said", f"{text}, according to {source}"))


def _finish(text: str) -> str:
    """Settle articles, commas, the capital and the full stop."""
    text = re.sub(r"\ba\(n\) (\S+)", lambda match: f"{_article(match[1])} {match[1]}", text)
    text = re.sub(r",(\s*,)+", ",", text).rstrip(",")
    return text[0].upper() + text[1:] + "."


def _article(word: str) -> str:
    number = re.match(r"\d+", word)
    spoken_with_vowel = number and (number[0].startswith("8") or number[0] in {"11", "18"})
    return "an" if spoken_with_vowel or word[0] in "aeiou" else "a"


# ----------------------------------------------------------------------------------------------------- corpus


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
        _write_csv(path, [draft.pair for draft in drafts(count, dice, seen)])
    return files


def _write_csv(path: Path, pairs: Sequence[Pair]) -> None:
    """Write under a temporary name, then rename: a reader finds the old file or the new one, never half."""
    unfinished = path.with_name(f"{path.name}.{os.getpid()}.tmp")
    columns = [field.name for field in fields(Pair)]
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        with unfinished.open("w", encoding="utf-8", newline="") as file:
            writer = csv.writer(file, lineterminator="\n")
            writer.writerow(columns)
            writer.writerows([getattr(pair, column) for column in columns] for pair in pairs)
        os.replace(unfinished, path)
    except OSError as error:
        raise OutputError(f"The example data cannot be written to {path}: {error}") from error
    finally:
        with suppress(OSError):  # gone after the rename; never there if the folder is at fault
            unfinished.unlink()
