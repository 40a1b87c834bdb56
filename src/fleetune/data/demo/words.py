"""The word lists of the example corpus: whom and what its sentences name.

The names are everyday words and names put together at random; a likeness to real ones is chance.
"""

from __future__ import annotations

from collections.abc import Mapping


def words(text: str) -> tuple[str, ...]:
    """Split a line of words."""
    return tuple(text.split())


FIRST_NAMES = words(
    "Maria Peter Helen David Nadia Oscar Laura Simon Thomas Ingrid Marcus Alice Victor Elena Hugo Fiona "
    "Daniel Sofia Martin Clara Adam Ruth Felix Leon Julia Ivan Emma Omar Nina Robert Carla Henry Tessa "
    "Paul Wendy Arthur Lena Frank"
)
LAST_NAMES = words(
    "Holt Reed Carver Benson Tanner Quinn Rowe Thorne Voss Webb Yates Abbott Brandt Crane Dalton Ellis Foster "
    "Hobbs Irving Keller Lowell Mercer Nolan Osborne Ramsey Tully Vance Wolfe Archer Barlow Conway Drake Emery "
    "Fisher Garner Hale Joyce Kemp Moss Norris Rossi Shaw Tate Vega Banks Cole Finch Gould Hart Lopez Meyer Nash "
    "Perry Rao Silva Turner Weiss Lindqvist Okafor Moreau Parrish Sandoval Underhill Jansen Petrov Ibsen Oakes "
    "Zeller Duarte Kovac"
)
TOWNS = words(
    "Ashford Milton Norwood Burton Preston Kingston Clayton Hampton Newport Fairfield Springfield "
    "Riverside Hillside Westfield Easton Clifton Linden Ashland Denton Sutton Fulton Carlton Weston "
    "Langley Grafton Redding Woodstock Mansfield Bedford Camden Dayton Stafford Wakefield Marlborough "
    "Winchester Richmond Concord Oakland Bradford Hartford Lexington Plymouth Bristol Dover Durham "
    "Halifax Ipswich Northampton Peterborough Wellington Greenwich Lincoln Brighton Stanford Lancaster "
    "Windsor Stratford Chester Salisbury Sheffield Kirby Shelby Beverly Wembley Oxford"
)
COMPANY_STEMS = words(
    "Falcon Granite Maple Comet Raven Dolphin Panther Lotus Cedar Willow Coral Amber Copper Cobalt "
    "Emerald Ruby Pearl Meridian Horizon Pioneer Zenith Beacon Anchor Arrow Castle Crown Swan Olive "
    "Aurora Dragon Tiger Orion Lily Harbor Crystal Saturn Summit Phoenix Titan Eagle Silver Diamond "
    "Sapphire Frontier Liberty Victory Omega Sigma Neptune Jupiter Empire Lion Wolf Rose"
)
# Most towns and companies, and many persons, get a name of two parts: too many names to learn by heart.
TOWN_STARTS = words(
    "Ash Brack Cold Dun East Fal Green Hart Kings Lang Mill Nor Oak Pem Red Stan Thorn West White Wood Black "
    "Clear Fair Stone Alder Birch Crow Deep Elm Fern Gold Hazel Iron Kes Lam Marsh Nether Otter Pen Rams Sedge "
    "Thistle Up Wal Yar"
)
TOWN_ENDS = words("bury well field wick haven bridge mere stead ham combe dale gate hurst minster port worth")
COMPANY_STARTS = words(
    "Nor Vel Tar Cal Bel Zan Mar Hel Pol Ver Lum Dor Quan Sil Fen Gal Kar Tel Um Vis Cor Del Bran Cas Dyn Eri Fal "
    "Gren Hal Jun Kel Lor Mon Nim Pal Rin Sol Tri Val Zel"
)
COMPANY_ENDS = words("vane dex tona ria mont lor nova tis bera gate cana max dara fix line mira pex rona sta vio")
LAST_STARTS = words("Al Bren Cas Dor Ed Fal Gar Hol Ken Lan Mar Nor Os Pel Ran Sel Tor Val Wen Har Bick Crom Hen Sten")
LAST_ENDS = words("berg by den der ling low man more ner rick son ter ton wood")
SECTORS = (
    ("Foods", "food company"),
    ("Motors", "carmaker"),
    ("Shipping", "shipping line"),
    ("Energy", "energy supplier"),
    ("Textiles", "textile firm"),
    ("Software", "software firm"),
    ("Airways", "airline"),
    ("Steel", "steelmaker"),
    ("Press", "publisher"),
    ("Telecom", "phone company"),
    ("Toys", "toymaker"),
    ("Glass", "glassmaker"),
)
TEAM_NAMES = words("Rovers United City Wanderers Athletic Rangers Albion Town")
WEEKDAYS = words("Monday Tuesday Wednesday Thursday Friday Saturday Sunday")
MONTHS = words("January February March April May June July August September October November December")
UNITS = words(
    "zero one two three four five six seven eight nine ten eleven twelve thirteen fourteen fifteen sixteen "
    "seventeen eighteen nineteen"
)
TENS = words("zero ten twenty thirty forty fifty sixty seventy eighty ninety")
ORDINALS = {
    "one": "first",
    "two": "second",
    "three": "third",
    "five": "fifth",
    "eight": "eighth",
    "nine": "ninth",
    "twelve": "twelfth",
    "twenty": "twentieth",
}

SOURCES = (
    "officials",
    "a spokeswoman",
    "the local newspaper",
    "two witnesses",
    "a public radio station",
    "several residents",
    "an official report",
    "the evening news",
)

# Each row: a clause and a noun phrase that say the same.
REASONS: Mapping[str, tuple[tuple[str, str], ...]] = {
    "business": (
        ("the tax rules had changed", "a change in the tax rules"),
        ("the market had shifted", "a shift in the market"),
        ("interest rates had moved", "a move in interest rates"),
        ("the management had been replaced", "a change of management"),
    ),
    "market": (
        ("the tax rules had changed", "a change in the tax rules"),
        ("the market had shifted", "a shift in the market"),
        ("a new shop had opened", "the opening of a new shop"),
        ("transport costs had changed", "a change in transport costs"),
    ),
    "council": (
        ("the budget had been revised", "a revised budget"),
        ("residents had sent a petition", "a petition from residents"),
        ("the law had been amended", "an amendment to the law"),
        ("experts had written a report", "a report by experts"),
    ),
    "weather": (
        ("the wind had turned", "a change in the wind"),
        ("the pressure had changed", "a change in pressure"),
        ("a weather front had passed", "a passing weather front"),
    ),
    "work": (
        ("the plans had been redrawn", "redrawn plans"),
        ("the contractor had been changed", "a change of contractor"),
        ("the crew had been reorganised", "a reorganised crew"),
    ),
    "court": (
        ("new evidence had appeared", "new evidence"),
        ("a witness had come forward", "a statement by a new witness"),
        ("the contract had been read again", "a second reading of the contract"),
    ),
}

# Facts that never change inside a pair; the forms of one row mean the same.
THINGS: Mapping[str, tuple[tuple[str, ...], ...]] = {
    "plan": (
        ("a plan to build a new library", "a plan for a new library"),
        ("a proposal to widen the main road", "a proposal for a wider main road"),
        ("a plan to plant trees by the river", "a plan for trees along the river"),
        ("a scheme to light the park at night", "a scheme for lights in the park at night"),
        ("a proposal to extend the tram line", "a proposal for a longer tram line"),
        ("a plan to close the old swimming pool", "a plan for the closure of the old swimming pool"),
    ),
    "race": (("marathon",), ("downhill race",), ("hill climb",), ("rowing final",), ("cross-country race",)),
    "job": (
        ("head of sales",),
        ("chief engineer",),
        ("finance director",),
        ("head of design",),
        ("chief pilot",),
    ),
    "objects": (
        ("paintings", "pictures"),
        ("statues", "sculptures"),
        ("old maps",),
        ("gold coins",),
        ("masks",),
    ),
    "animal": (("beetle",), ("orchid",), ("frog",), ("moth",), ("spider",), ("moss",)),
    "habit": (
        ("drinking coffee", "coffee drinking"),
        ("working at night", "night work"),
        ("living by a busy road", "life by a busy road"),
        ("keeping a dog", "dog ownership"),
        ("sleeping in the afternoon", "an afternoon sleep"),
    ),
    "illness": (("migraine", "bad headaches"), ("back pain", "a sore back"), ("hay fever", "pollen allergy")),
    "building": (
        ("the bridge",),
        ("the theatre",),
        ("the sports hall",),
        ("the tram depot",),
        ("the concert hall",),
    ),
    "tower": (("clock tower",), ("radio mast",), ("lighthouse",), ("church spire",), ("water tower",)),
    "crop": (("potatoes",), ("wheat",), ("apples",), ("barley",), ("onions",), ("grapes",)),
    "good": (("bread",), ("milk",), ("firewood",), ("bus tickets",), ("coal",), ("rice",)),
}
