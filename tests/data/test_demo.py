"""The example corpus: the same bytes every time, balanced, without leaks, and hard for a bag of words."""

from __future__ import annotations

import csv
import hashlib
import re
from collections import Counter
from pathlib import Path

import numpy as np
import pytest
from sklearn.feature_extraction.text import CountVectorizer
from sklearn.linear_model import LogisticRegression

from fleetune.data import demo
from fleetune.data.demo import Dice, Event, Fact, paraphrase_pairs, write_demo_corpus
from fleetune.data.demo_grammar import SCENES, Scene
from fleetune.errors import OutputError

# Of the default corpus. A change of the grammar changes them, and every published demo result with them.
SHA256 = {
    "train": "6408088fb1ff26b8381c2289a9514ef5eb1040c27a4605302d8c08c7f8ad923b",
    "validation": "e09a42d04b98bfbbedca95956b5a12cc85ddf420ddb8ccfb75c922ec48e3f3b8",
    "test": "253fdf4dd489f9b642a80048447a7154288a213094e877affd2bef6ddf259fb2",
}


@pytest.fixture(scope="module")
def files(tmp_path_factory: pytest.TempPathFactory) -> demo.DemoFiles:
    return write_demo_corpus(tmp_path_factory.mktemp("demo"))


@pytest.fixture(scope="module")
def drafts() -> list[demo.Draft]:
    """The drafts behind train.csv and validation.csv."""
    dice, seen = Dice(42), set[frozenset[str]]()
    return demo.drafts(3000, dice, seen) + demo.drafts(400, dice, seen)


def rows(path: Path) -> list[dict[str, str]]:
    with path.open(encoding="utf-8", newline="") as file:
        return list(csv.DictReader(file))


# ------------------------------------------------------------------------------------------------- the files


@pytest.mark.parametrize("split", SHA256)
def test_default_corpus_has_the_pinned_bytes(files: demo.DemoFiles, split: str) -> None:
    assert hashlib.sha256(getattr(files, split).read_bytes()).hexdigest() == SHA256[split]


def test_rewriting_gives_the_same_bytes_and_leaves_no_temporary_file(tmp_path: Path) -> None:
    sizes = {"train": 20, "validation": 10, "test": 10}
    first = write_demo_corpus(tmp_path / "new" / "folder", seed=7, **sizes)
    before = first.train.read_bytes()
    second = write_demo_corpus(tmp_path / "new" / "folder", seed=7, **sizes)
    assert first == second
    assert second.train.read_bytes() == before
    assert sorted(p.name for p in first.train.parent.iterdir()) == ["test.csv", "train.csv", "validation.csv"]


def test_csv_reads_back_as_the_pairs(files: demo.DemoFiles) -> None:
    pairs = paraphrase_pairs(3000, seed=42)
    assert any("," in pair.sentence1 for pair in pairs), "nothing here needs quoting"
    assert rows(files.train) == [vars(pair) for pair in pairs]


@pytest.mark.parametrize(("split", "count"), [("train", 3000), ("validation", 400), ("test", 400)])
def test_each_split_is_balanced(files: demo.DemoFiles, split: str, count: int) -> None:
    labels = Counter(row["label"] for row in rows(getattr(files, split)))
    assert labels == {"paraphrase": count // 2, "not_paraphrase": count // 2}


def test_no_pair_is_in_two_splits_in_either_order(files: demo.DemoFiles) -> None:
    pairs = [
        frozenset((row["sentence1"], row["sentence2"]))
        for path in (files.train, files.validation, files.test)
        for row in rows(path)
    ]
    assert len(set(pairs)) == len(pairs) == 3800
    assert all(len(pair) == 2 for pair in pairs)


def test_another_seed_gives_other_pairs() -> None:
    assert not set(paraphrase_pairs(50, seed=1)) & set(paraphrase_pairs(50, seed=2))


def test_odd_and_empty_counts() -> None:
    assert paraphrase_pairs(0, seed=1) == []
    assert Counter(pair.label for pair in paraphrase_pairs(3, seed=1)) == {"not_paraphrase": 2, "paraphrase": 1}


def test_folder_that_is_a_file_is_an_output_error(tmp_path: Path) -> None:
    (tmp_path / "taken").write_text("")
    with pytest.raises(OutputError, match=r"train\.csv"):
        write_demo_corpus(tmp_path / "taken", train=2, validation=2, test=2)


# --------------------------------------------------------------------------------------------- the sentences


def test_sentences_are_well_formed(drafts: list[demo.Draft]) -> None:
    for text in (s for draft in drafts for s in (draft.pair.sentence1, draft.pair.sentence2)):
        assert demo.MIN_WORDS <= len(text.split()) <= demo.MAX_WORDS, text
        assert re.match(r"[A-Z].*[^,]\.$", text), text
        assert not re.search(r"[][{}|()]|\s{2}|,,|, ,|,\.| ,|\s$", text), text
        assert not re.search(r"\b(\w+) \1\b", text, flags=re.IGNORECASE), text
        assert not re.search(r"\ba (?:[aeiou](?!ne\b)|8|11\b|18\b)|\ban (?![aeiou]|8|11\b|18\b)", text, re.I), text


@pytest.mark.parametrize("scene", SCENES, ids=lambda scene: scene.name)
def test_every_core_says_every_fact(scene: Scene) -> None:
    assert all(len(side) >= 4 for side in scene.cores)
    assert {len(side) for side in scene.cores} == {len(scene.cores[0])}
    assert (len(scene.cores) == 2) == (scene.opposite is not None)
    for core in (core for side in scene.cores for core in side):
        assert set(re.findall(r"\{(\w+)", core)) == set(scene.slots), core


@pytest.mark.parametrize(
    ("number", "words"),
    [
        (2, "two"),
        (19, "nineteen"),
        (40, "forty"),
        (45, "forty-five"),
        (300, "three hundred"),
        (1200, "twelve hundred"),
        (2000, "two thousand"),
        (3700, "thirty-seven hundred"),
    ],
)
def test_number_words(number: int, words: str) -> None:
    assert demo.number_words(number) == words


@pytest.mark.parametrize(
    ("day", "words"),
    [
        (2, "second"),
        (5, "fifth"),
        (12, "twelfth"),
        (13, "thirteenth"),
        (20, "twentieth"),
        (21, "twenty-first"),
        (28, "twenty-eighth"),
    ],
)
def test_ordinal_words(day: int, words: str) -> None:
    assert demo.ordinal_words(day) == words


@pytest.mark.parametrize(
    ("word", "article"), [("8-2", "an"), ("11%", "an"), ("18", "an"), ("12-day", "a"), ("eight-day", "an"), ("3%", "a")]
)
def test_article_before_numbers(word: str, article: str) -> None:
    assert demo._article(word) == article


# ------------------------------------------------------------------------------------------- the near misses

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
    return Fact(kind=kind, key=key, forms=demo.FACT_KINDS[kind].forms(key))


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

    return demo.tell(event, NoChance(0))[0]


def changed(near_miss: str) -> Event:
    return demo.changed(DEAL, near_miss, Dice(3))


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
    assert demo.near_misses(DEAL)[near_miss] > 0


def test_direction_is_the_opposite_side() -> None:
    event = Event(scene=PRICE, facts={"town": fact("town", "Ashford"), "share": fact("percent", 8)})
    assert told(event) == "Prices in Ashford rose by 8%."
    assert told(demo.changed(event, "direction", Dice(0))) == "Prices in Ashford fell by 8%."
    assert demo.changed(demo.changed(event, "direction", Dice(0)), "direction", Dice(0)) == event


@pytest.mark.parametrize("near_miss", ["number", "name", "day", "place"])
def test_changed_fact_is_new_in_every_form(near_miss: str) -> None:
    """No form of the new fact can be read as the old one, nor as another fact of the event."""
    dice = Dice(5)
    for event in [
        event for event in (demo.draw_event(dice) for _ in range(300)) if near_miss in demo.near_misses(event)
    ]:
        other = demo.changed(event, near_miss, dice)
        [slot] = [slot for slot in event.facts if event.facts[slot] != other.facts[slot]]
        assert set(other.facts[slot].forms).isdisjoint(event.facts[slot].forms)
        for name, old in event.facts.items():
            assert name == slot or set(old.key).isdisjoint(other.facts[slot].key)


def test_facts_of_one_event_share_no_name() -> None:
    dice = Dice(0)
    for _ in range(300):
        keys = [part for fact in demo.draw_event(dice).facts.values() for part in fact.key]
        assert len(set(keys)) == len(keys)


def test_roles_are_swapped_between_like_kinds() -> None:
    swaps = [scene for scene in SCENES if scene.swap]
    assert len(swaps) >= 8
    for scene in swaps:
        first, second = scene.swap
        assert scene.slots[first] == scene.slots[second]


def test_each_kind_of_near_miss_occurs(drafts: list[demo.Draft]) -> None:
    counts = Counter(draft.near_miss for draft in drafts if draft.near_miss)
    assert set(counts) == set(demo.NEAR_MISS_WEIGHTS)
    assert min(counts.values()) >= 50, counts


# --------------------------------------------------------------------------------- what a bag of words can do


def words(text: str) -> set[str]:
    return set(re.findall(r"\w+", text.lower()))


def test_word_overlap_does_not_give_the_label_away(drafts: list[demo.Draft]) -> None:
    """The best threshold on the Jaccard index; 0.61 when this was written."""
    overlaps = np.array(
        [len(a & b) / len(a | b) for d in drafts for a, b in [(words(d.pair.sentence1), words(d.pair.sentence2))]]
    )
    same = np.array([draft.near_miss is None for draft in drafts])
    train, validation = slice(3000), slice(3000, None)
    threshold = max(np.unique(overlaps[train]), key=lambda t: ((overlaps[train] >= t) == same[train]).mean())
    assert ((overlaps[validation] >= threshold) == same[validation]).mean() < 0.65


@pytest.mark.parametrize("longest", [1, 2])
def test_word_differences_do_not_give_the_label_away(drafts: list[demo.Draft], longest: int) -> None:
    """Logistic regression on words (and word pairs) that only one sentence has; 0.68 (0.63) when this was written."""
    first, second = ([getattr(d.pair, name) for d in drafts] for name in ("sentence1", "sentence2"))
    counter = CountVectorizer(ngram_range=(1, longest), min_df=2, token_pattern=r"\w+")
    counter.fit(first[:3000] + second[:3000])
    differences = abs(counter.transform(first) - counter.transform(second))
    same = np.array([draft.near_miss is None for draft in drafts])
    model = LogisticRegression(max_iter=2000).fit(differences[:3000], same[:3000])
    assert model.score(differences[3000:], same[3000:]) < 0.72
