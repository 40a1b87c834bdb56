"""The near misses: one fact differs, and in every form of it."""

from __future__ import annotations

import re

import pytest

from fleetune.data.demo import events
from fleetune.data.demo.dice import Dice
from fleetune.data.demo.events import Event, draw_event, near_misses
from fleetune.data.demo.facts import FACT_KINDS, Fact
from fleetune.data.demo.scenes import Scene
from fleetune.data.demo.telling import tell

FIRM = Scene(
    name="firm",
    slots={"buyer": "company", "target": "company", "price": "money"},
    cores=(("{buyer} bought {target} for {price}",), ("{buyer} did not buy {target} for {price}",)),
    opposite="negation",
    swap=("buyer", "target"),
    when="date",
    where=True,
)
PRICE = Scene(
    name="price",
    slots={"town": "town", "share": "percent"},
    cores=(("prices in {town} rose by {share}",), ("prices in {town} fell by {share}",)),
    opposite="direction",
)


def fact(kind: str, *key: str | int) -> Fact:
    return Fact(kind=kind, key=key, forms=FACT_KINDS[kind].forms(key))


DEAL = Event(
    scene=FIRM,
    facts={
        "buyer": fact("company", "Falcon", "Foods"),
        "target": fact("company", "Maple", "Toys"),
        "price": fact("money", 12),
        "when": fact("date", "Monday"),
        "where": fact("town", "Ashford"),
    },
)


def told(event: Event) -> str:
    """The event with each fact in its present form and the extras at the end."""

    class NoChance(Dice):
        def below(self, stop: int) -> int:
            return 0

    return tell(event, NoChance(0))[0]


def changed(near_miss: str) -> Event:
    return events.changed(DEAL, near_miss, Dice(3))


def test_unchanged_example() -> None:
    assert told(DEAL) == "Falcon Foods bought Maple Toys for $12 million in Ashford on Monday."


@pytest.mark.parametrize(
    ("near_miss", "expected"),
    [
        ("role", r"Maple Toys bought Falcon Foods for \$12 million in Ashford on Monday\."),
        ("negation", r"Falcon Foods did not buy Maple Toys for \$12 million in Ashford on Monday\."),
        ("number", r"Falcon Foods bought Maple Toys for \$(?!12 )\d+ million in Ashford on Monday\."),
        ("day", r"Falcon Foods bought Maple Toys for \$12 million in Ashford on (?!Monday)\w+day\."),
        ("place", r"Falcon Foods bought Maple Toys for \$12 million in (?!Ashford)\w+ on Monday\."),
        ("name", r"((?!Falcon)\w+ Foods bought Maple|Falcon Foods bought (?!Maple)\w+) Toys for .* Monday\."),
    ],
)
def test_near_miss_differs_in_one_fact(near_miss: str, expected: str) -> None:
    assert re.fullmatch(expected, told(changed(near_miss)))
    assert near_misses(DEAL)[near_miss] > 0


def test_direction_is_the_opposite_side() -> None:
    event = Event(scene=PRICE, facts={"town": fact("town", "Ashford"), "share": fact("percent", 8)})
    assert told(event) == "Prices in Ashford rose by 8%."
    assert told(events.changed(event, "direction", Dice(0))) == "Prices in Ashford fell by 8%."
    assert events.changed(events.changed(event, "direction", Dice(0)), "direction", Dice(0)) == event


@pytest.mark.parametrize("near_miss", ["number", "name", "day", "place"])
def test_changed_fact_is_new_in_every_form(near_miss: str) -> None:
    """No form of the new fact can be read as the old one, nor as another fact of the event."""
    dice = Dice(5)
    for event in [event for event in (draw_event(dice) for _ in range(300)) if near_miss in near_misses(event)]:
        other = events.changed(event, near_miss, dice)
        [slot] = [slot for slot in event.facts if event.facts[slot] != other.facts[slot]]
        assert set(other.facts[slot].forms).isdisjoint(event.facts[slot].forms)
        for name, old in event.facts.items():
            assert name == slot or set(old.key).isdisjoint(other.facts[slot].key)


def test_facts_of_one_event_share_no_name() -> None:
    dice = Dice(0)
    for _ in range(300):
        keys = [part for fact in draw_event(dice).facts.values() for part in fact.key]
        assert len(set(keys)) == len(keys)
