"""An event as one English sentence: which core tells it, in which words, and in which order of clauses."""

from __future__ import annotations

import re
from dataclasses import replace

from fleetune.data.demo.dice import Dice
from fleetune.data.demo.events import Event
from fleetune.data.demo.facts import Fact

_OPENERS = {"in", "for", "after", "at", "with", "near", "according"}


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
    text = re.sub(r"\ba\(n\) (\S+)", lambda match: f"{article(match[1])} {match[1]}", text)
    text = re.sub(r",(\s*,)+", ",", text).rstrip(",")
    return text[0].upper() + text[1:] + "."


def article(word: str) -> str:
    """The article before a word or a number, by its sound: an 8-2 win, a 12-day strike."""
    number = re.match(r"\d+", word)
    spoken_with_vowel = number and (number[0].startswith("8") or number[0] in {"11", "18"})
    return "an" if spoken_with_vowel or word[0] in "aeiou" else "a"
