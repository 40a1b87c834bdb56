"""The facts of an event: how each kind is drawn, and the ways to write it."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from fleetune.data.demo import words
from fleetune.data.demo.dice import Dice

# Share of names taken whole from a list; the others are put together from two parts. The fewer whole names, the less a
# bag of words can learn by heart which words are names.
WHOLE_NAMES = 0.4

Key = tuple[str | int, ...]


@dataclass(frozen=True, kw_only=True)
class Fact:
    """One thing an event is about."""

    kind: str
    """A row of `FACT_KINDS` or of `words.THINGS`, "reason" or "source"."""
    key: Key
    """What tells it apart from other facts of its kind."""
    forms: tuple[str, ...]
    """Ways to write it."""
    form: int = 0
    """The way it is written now."""

    @property
    def text(self) -> str:
        return self.forms[self.form % len(self.forms)]


def number_words(number: int) -> str:
    """Spell a number out: 45 -> "forty-five", 1200 -> "twelve hundred"; whole hundreds from 100 to 9,900."""
    if number < 20:
        return words.UNITS[number]
    if number < 100:
        tens, units = divmod(number, 10)
        return words.TENS[tens] + (f"-{words.UNITS[units]}" if units else "")
    scale, name = (1000, "thousand") if number % 1000 == 0 else (100, "hundred")
    assert number % scale == 0, f"no words for {number}"
    return f"{number_words(number // scale)} {name}"


def ordinal_words(number: int) -> str:
    """Spell a day of the month out: 3 -> "third", 21 -> "twenty-first"."""
    head, dash, last = number_words(number).rpartition("-")
    return head + dash + words.ORDINALS.get(last, last + "th")


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
    trade = dict(words.SECTORS)[str(sector)]
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
    last = _draw_name(words.LAST_NAMES, words.LAST_STARTS, words.LAST_ENDS, dice)
    return (dice.pick(words.FIRST_NAMES), last)


def _draw_town(dice: Dice) -> Key:
    return (_draw_name(words.TOWNS, words.TOWN_STARTS, words.TOWN_ENDS, dice),)


def _draw_company(dice: Dice) -> Key:
    stem = _draw_name(words.COMPANY_STEMS, words.COMPANY_STARTS, words.COMPANY_ENDS, dice)
    return (stem, dice.pick(words.SECTORS)[0])


def _draw_date(dice: Dice) -> Key:
    if dice.chance(0.5):
        return (dice.pick(words.WEEKDAYS),)
    return (2 + dice.below(27), dice.pick(words.MONTHS))


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
        draw=lambda dice: (*_draw_town(dice), dice.pick(words.TEAM_NAMES)),
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
        draw=lambda dice: (dice.pick(words.MONTHS),),
        forms=lambda key: (f"in {key[0]}", f"during {key[0]}", f"in the month of {key[0]}"),
        near_miss="day",
    ),
    "clock": FactKind(draw=_draw_clock, forms=_clock_forms, near_miss="day"),
}


def draw_fact(kind: str, dice: Dice) -> Fact:
    """Draw a fact of a row of `FACT_KINDS`, or one of `words.THINGS`, which never change."""
    if kind in words.THINGS:
        forms = dice.pick(words.THINGS[kind])
        return Fact(kind=kind, key=forms, forms=forms)
    key = FACT_KINDS[kind].draw(dice)
    return Fact(kind=kind, key=key, forms=FACT_KINDS[kind].forms(key))
