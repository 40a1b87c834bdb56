"""What happened, apart from any wording: events, and near misses, which change exactly one fact of an event."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace

from fleetune.data.demo import words
from fleetune.data.demo.dice import Dice
from fleetune.data.demo.facts import FACT_KINDS, Fact, draw_fact
from fleetune.data.demo.scenes import SCENES, Scene

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


@dataclass(frozen=True, kw_only=True)
class Event:
    """What happened, apart from any wording. `side` selects one of the scene's sets of cores."""

    scene: Scene
    facts: dict[str, Fact]
    side: int = 0


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
        clause, noun = dice.pick(words.REASONS[scene.reasons])
        forms = (f"because {clause}", f"as {clause}", f"because of {noun}", f"owing to {noun}")
        facts["reason"] = Fact(kind="reason", key=(clause,), forms=forms)
    elif scene.source and dice.chance(0.25):
        source = dice.pick(words.SOURCES)
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
