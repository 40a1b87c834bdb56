"""The kinds of event in the example corpus, and the sentences that tell them.

A `Scene` is one kind of event. Each of its cores says the whole event, in different words; the two sets of
cores, where there are two, say opposite things. Notation inside a core:

    {buyer}       any way to write that fact          {buyer.0}   its first form, where the others do not fit
    [got|won]     one of these words                  a(n)        the article that the next word needs
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

Cores = tuple[str, ...]


@dataclass(frozen=True, kw_only=True)
class Scene:
    """One kind of event, and the sentences that tell it."""

    name: str
    """What the scene is called in tests and messages."""
    slots: Mapping[str, str]
    """Name of a slot in the cores -> kind of fact that fills it (see `facts.draw_fact`)."""
    cores: tuple[Cores, ...]
    """One set of equivalent cores, or two sets that say opposite things."""
    opposite: str | None = None
    """What the second set of cores is to the first: "negation" or "direction"."""
    swap: tuple[str, str] | None = None
    """Two slots of one kind whose exchange changes the meaning."""
    when: str | None = None
    """Kind of fact of the optional time phrase: "date" or "month"."""
    where: bool = False
    """Whether an optional "in <town>" can follow."""
    reasons: str | None = None
    """Row of `words.REASONS` for the optional reason: plausible for both sets of cores."""
    source: bool = True
    """Whether the event can be put into somebody's mouth."""


SCENES: tuple[Scene, ...] = (
    Scene(
        name="takeover",
        slots={"buyer": "company", "target": "company", "price": "money"},
        opposite="negation",
        swap=("buyer", "target"),
        when="date",
        reasons="business",
        cores=(
            (
                "{buyer} [bought|acquired|purchased|took over] {target} for {price}",
                "{target} was [bought|acquired|purchased|taken over] by {buyer} for {price}",
                "the [purchase|acquisition|takeover] of {target} by {buyer} for {price} [went through|was completed]",
                "{buyer} paid {price} to [buy|acquire|take over] {target}",
                "{buyer} completed its [purchase|takeover|acquisition] of {target} for {price}",
            ),
            (
                "{buyer} [dropped|abandoned|gave up] its plan to [buy|acquire|take over] {target} for {price}",
                "the [purchase|acquisition|takeover] of {target} by {buyer} for {price} "
                "[was called off|did not go through|fell through]",
                "{buyer} decided not to [buy|acquire|purchase|take over] {target} for {price}",
                "{buyer} did not go ahead with its [purchase|takeover|acquisition] of {target} for {price}",
                "a plan for {buyer} to [buy|acquire|take over] {target} for {price} was [dropped|abandoned|called off]",
            ),
        ),
    ),
    Scene(
        name="loan",
        slots={"lender": "company", "borrower": "company", "amount": "money"},
        opposite="negation",
        swap=("lender", "borrower"),
        when="date",
        reasons="business",
        cores=(
            (
                "{lender} agreed to lend {borrower} {amount}",
                "{borrower} was [given|granted] a loan of {amount} by {lender}",
                "{lender} [granted|approved] a request from {borrower} for a loan of {amount}",
                "a request by {borrower} to borrow {amount} from {lender} was [granted|approved|accepted]",
                "{lender} [gave|granted] {borrower} the loan of {amount} it had asked for",
            ),
            (
                "{lender} [refused|declined] to lend {borrower} {amount}",
                "{borrower} was [refused|denied|not given] a loan of {amount} by {lender}",
                "{lender} [turned down|rejected] a request from {borrower} for a loan of {amount}",
                "a request by {borrower} to borrow {amount} from {lender} was [turned down|rejected|refused]",
                "{lender} did not [give|grant] {borrower} the loan of {amount} it had asked for",
            ),
        ),
    ),
    Scene(
        name="match",
        slots={"winner": "team", "loser": "team", "score": "score"},
        swap=("winner", "loser"),
        when="date",
        where=True,
        cores=(
            (
                "{winner} [beat|defeated|overcame] {loser} {score}",
                "{loser} [lost to|were beaten by|were defeated by] {winner} {score}",
                "{winner} [celebrated|recorded|claimed] a(n) {score.0} [win|victory] [over|against] {loser}",
                "{loser} [suffered|slumped to] a(n) {score.0} [defeat|loss] [against|at the hands of] {winner}",
                "a(n) {score.0} [win|victory] [over|against] {loser} was [celebrated|recorded|claimed] by {winner}",
            ),
        ),
    ),
    Scene(
        name="race",
        slots={"first": "person", "second": "person", "gap": "few", "race": "race"},
        swap=("first", "second"),
        when="date",
        where=True,
        cores=(
            (
                "{first} finished {gap} seconds [ahead of|in front of] {second} in the {race}",
                "{second} finished {gap} seconds behind {first} in the {race}",
                "{first} beat {second} by {gap} seconds in the {race}",
                "in the {race}, {second} [crossed the line|came home] {gap} seconds [after|later than] {first}",
                "in the {race}, {first} [crossed the line|came home] {gap} seconds [before|earlier than] {second}",
                "{second} was beaten by {first} by {gap} seconds in the {race}",
            ),
        ),
    ),
    Scene(
        name="teaching",
        slots={"teacher": "person", "pupil": "person", "years": "few"},
        swap=("teacher", "pupil"),
        where=True,
        cores=(
            (
                "{teacher} [coached|trained|taught] {pupil} for {years} years",
                "{pupil} was [coached|trained|taught] by {teacher} for {years} years",
                "{pupil} spent {years} years as a [pupil|student] of {teacher}",
                "for {years} years, {pupil} was [a pupil|a student] of {teacher}",
                "{teacher} spent {years} years as the [coach|trainer|teacher] of {pupil}",
                "for {years} years, {teacher} was the [coach|trainer|teacher] of {pupil}",
            ),
        ),
    ),
    Scene(
        name="succession",
        slots={"new": "person", "old": "person", "firm": "company", "job": "job", "years": "few"},
        swap=("new", "old"),
        when="month",
        cores=(
            (
                "{new} [replaced|succeeded|took over from] {old} as {job} at {firm} after {years} years",
                "{old} was [replaced|succeeded] by {new} as {job} at {firm} after {years} years",
                "after {years} years, {old} handed over to {new} as {job} at {firm}",
                "after {years} years, the post of {job} at {firm} [passed|went] from {old} to {new}",
                "after {years} years, {new} took the place of {old} as {job} at {firm}",
            ),
        ),
    ),
    Scene(
        name="workforce",
        slots={"firm": "company", "town": "town", "jobs": "dozens"},
        opposite="direction",
        when="month",
        reasons="business",
        cores=(
            (
                "{firm} [hired|took on|recruited] {jobs} [workers|people|employees] in {town}",
                "a total of {jobs} [workers|people|employees] were [hired|taken on|recruited] by {firm} in {town}",
                "{firm} added {jobs} [workers|people|employees] to its staff in {town}",
                "the number of [workers|employees] at {firm} in {town} [rose|grew|went up] by {jobs}",
            ),
            (
                "{firm} [dismissed|laid off|let go] {jobs} [workers|people|employees] in {town}",
                "a total of {jobs} [workers|people|employees] were [dismissed|laid off|let go] by {firm} in {town}",
                "{firm} cut {jobs} [workers|people|employees] from its staff in {town}",
                "the number of [workers|employees] at {firm} in {town} [fell|dropped|went down] by {jobs}",
            ),
        ),
    ),
    Scene(
        name="profits",
        slots={"firm": "company", "share": "percent"},
        opposite="direction",
        when="month",
        reasons="business",
        cores=(
            (
                "profits at {firm} [rose|climbed|grew|went up] by {share}",
                "{firm} [reported|announced|posted] a(n) {share} [rise|increase|gain] in profits",
                "{firm} saw its profits [rise|climb|grow|go up] by {share}",
                "a(n) {share} [rise|increase|gain] in profits was [reported|announced] by {firm}",
            ),
            (
                "profits at {firm} [fell|dropped|sank|went down] by {share}",
                "{firm} [reported|announced|posted] a(n) {share} [fall|decrease|drop] in profits",
                "{firm} saw its profits [fall|drop|sink|go down] by {share}",
                "a(n) {share} [fall|decrease|drop] in profits was [reported|announced] by {firm}",
            ),
        ),
    ),
    Scene(
        name="temperature",
        slots={"town": "town", "degrees": "few"},
        opposite="direction",
        when="date",
        reasons="weather",
        cores=(
            (
                "temperatures in {town} [rose|climbed|went up] by {degrees} degrees",
                "a [rise|climb] in temperature of {degrees} degrees was [recorded|measured] in {town}",
                "{town} saw temperatures [rise|climb|go up] by {degrees} degrees",
                "it [became|got|grew] {degrees} degrees [warmer|hotter] in {town}",
            ),
            (
                "temperatures in {town} [fell|dropped|went down] by {degrees} degrees",
                "a [fall|drop] in temperature of {degrees} degrees was [recorded|measured] in {town}",
                "{town} saw temperatures [fall|drop|go down] by {degrees} degrees",
                "it [became|got|grew] {degrees} degrees [colder|cooler] in {town}",
            ),
        ),
    ),
    Scene(
        name="prices",
        slots={"town": "town", "good": "good", "share": "percent"},
        opposite="direction",
        when="month",
        reasons="market",
        cores=(
            (
                "the price of {good} in {town} [rose|climbed|went up] by {share}",
                "shoppers in {town} paid {share} more for {good}",
                "in {town}, {good} became {share} [dearer|more expensive]",
                "{town} saw a(n) {share} [rise|increase] in the price of {good}",
            ),
            (
                "the price of {good} in {town} [fell|dropped|went down] by {share}",
                "shoppers in {town} paid {share} less for {good}",
                "in {town}, {good} became {share} [cheaper|less expensive]",
                "{town} saw a(n) {share} [fall|decrease] in the price of {good}",
            ),
        ),
    ),
    Scene(
        name="council",
        slots={"town": "town", "plan": "plan", "votes": "votes"},
        opposite="negation",
        when="date",
        reasons="council",
        cores=(
            (
                "the council in {town} [approved|passed|backed|accepted] {plan} {votes}",
                "{plan} was [approved|passed|backed|accepted] by the council in {town} {votes}",
                "councillors in {town} [voted for|agreed to|said yes to] {plan} {votes}",
                "{plan} [won approval from|found the support of] councillors in {town} {votes}",
            ),
            (
                "the council in {town} [rejected|turned down|threw out|did not approve] {plan} {votes}",
                "{plan} was [rejected|turned down|thrown out|not approved] by the council in {town} {votes}",
                "councillors in {town} [voted against|refused to back|said no to] {plan} {votes}",
                "{plan} [failed to win approval from|did not find the support of] councillors in {town} {votes}",
            ),
        ),
    ),
    Scene(
        name="court",
        slots={"payer": "person", "payee": "person", "sum": "sum", "town": "town"},
        opposite="negation",
        swap=("payer", "payee"),
        when="date",
        reasons="court",
        source=False,
        cores=(
            (
                "a [court|judge] in {town} ordered {payer} to pay {sum} to {payee}",
                "{payer} was ordered to pay {payee} {sum} by a [court|judge] in {town}",
                "a [court|judge] in {town} ruled that {payer} [had to|must] pay {sum} to {payee}",
                "a [court|judge] in {town} [accepted|upheld] a claim by {payee} against {payer} for {sum}",
                "a claim by {payee} for {sum} from {payer} was [accepted|upheld] by a [court|judge] in {town}",
            ),
            (
                "a [court|judge] in {town} [refused|declined] to order {payer} to pay {sum} to {payee}",
                "{payer} was not ordered to pay {payee} {sum} by a [court|judge] in {town}",
                "a [court|judge] in {town} ruled that {payer} [did not have to|need not] pay {sum} to {payee}",
                "a [court|judge] in {town} [dismissed|rejected] a claim by {payee} against {payer} for {sum}",
                "a claim by {payee} for {sum} from {payer} was [dismissed|rejected] by a [court|judge] in {town}",
            ),
        ),
    ),
    Scene(
        name="accusation",
        slots={"accuser": "person", "accused": "person", "sum": "sum", "firm": "company"},
        opposite="negation",
        swap=("accuser", "accused"),
        source=False,
        cores=(
            (
                "{accuser} said that {accused} had [taken|stolen] {sum} from {firm}",
                "{accused} had [taken|stolen] {sum} from {firm}, {accuser} said",
                "according to {accuser}, {accused} had [taken|stolen] {sum} from {firm}",
                "{accuser} accused {accused} of [taking|stealing] {sum} from {firm}",
                "{accused} was accused by {accuser} of [taking|stealing] {sum} from {firm}",
            ),
            (
                "{accuser} said that {accused} had not [taken|stolen] {sum} from {firm}",
                "{accused} had not [taken|stolen] {sum} from {firm}, {accuser} said",
                "according to {accuser}, {accused} had not [taken|stolen] {sum} from {firm}",
                "{accuser} denied that {accused} had [taken|stolen] {sum} from {firm}",
                "{accused} was cleared by {accuser} of [taking|stealing] {sum} from {firm}",
            ),
        ),
    ),
    Scene(
        name="train",
        slots={"origin": "town", "destination": "town", "people": "hundreds", "clock": "clock"},
        swap=("origin", "destination"),
        cores=(
            (
                "the train from {origin} to {destination} [left|departed|set off] {clock} with {people} passengers",
                "a train with {people} [passengers|people] on board [left|departed from] {origin} for "
                "{destination} {clock}",
                "a train to {destination} [left|departed from|set off from] {origin} {clock} with {people} passengers",
                "with {people} [passengers|people] on board, a train for {destination} [left|departed "
                "from] {origin} {clock}",
                "{clock}, a train [took|carried] {people} [passengers|people] from {origin} to {destination}",
            ),
        ),
    ),
    Scene(
        name="museums",
        slots={"giver": "town", "taker": "town", "number": "few", "objects": "objects"},
        swap=("giver", "taker"),
        when="month",
        cores=(
            (
                "the museum in {giver} [lent|loaned] {number} {objects} to the museum in {taker}",
                "the museum in {taker} borrowed {number} {objects} from the museum in {giver}",
                "a total of {number} {objects} were [lent|loaned] to the museum in {taker} by the one in {giver}",
                "the museum in {taker} [received|got] {number} {objects} on loan from the one in {giver}",
            ),
        ),
    ),
    Scene(
        name="species",
        slots={"leader": "person", "number": "few", "animal": "animal", "town": "town"},
        when="month",
        source=False,
        cores=(
            (
                "a team led by {leader} [found|discovered|identified] {number} [new|unknown] species of "
                "{animal} near {town}",
                "a total of {number} [new|unknown] species of {animal} were [found|discovered] near {town} "
                "by a team under {leader}",
                "{leader} led a team that [found|discovered|identified] {number} [new|unknown] species "
                "of {animal} near {town}",
                "near {town}, {leader} and a team came across {number} [new|unknown] species of {animal}",
            ),
        ),
    ),
    Scene(
        name="study",
        slots={"people": "hundreds", "habit": "habit", "illness": "illness", "share": "percent"},
        opposite="direction",
        source=False,
        cores=(
            (
                "a study of {people} [people|adults] [found|showed] that {habit} [raised|increased] "
                "the risk of {illness} by {share}",
                "{habit} [raised|increased] the risk of {illness} by {share} in a study of {people} [people|adults]",
                "in a study of {people} [people|adults], {habit} went with a(n) {share} [higher|greater] "
                "risk of {illness}",
                "a(n) {share} [rise|increase] in the risk of {illness} with {habit} was [seen|found] "
                "in a study of {people} [people|adults]",
            ),
            (
                "a study of {people} [people|adults] [found|showed] that {habit} [lowered|reduced] "
                "the risk of {illness} by {share}",
                "{habit} [lowered|reduced] the risk of {illness} by {share} in a study of {people} [people|adults]",
                "in a study of {people} [people|adults], {habit} went with a(n) {share} [lower|smaller] "
                "risk of {illness}",
                "a(n) {share} [fall|decrease] in the risk of {illness} with {habit} was [seen|found] "
                "in a study of {people} [people|adults]",
            ),
        ),
    ),
    Scene(
        name="strike",
        slots={"firm": "company", "days": "few"},
        opposite="negation",
        when="month",
        where=True,
        reasons="business",
        cores=(
            (
                "[workers|staff|employees] at {firm} [went on strike|walked out|stopped work] for {days} days",
                "[workers|staff|employees] at {firm} went ahead with a(n) {days}-day [strike|walkout]",
                "a(n) {days}-day [strike|walkout] [took place|was held|went ahead] at {firm}",
                "{firm} was hit by a(n) {days}-day [strike|walkout]",
            ),
            (
                "[workers|staff|employees] at {firm} decided not to go on strike for {days} days",
                "[workers|staff|employees] at {firm} [called off|did not hold|cancelled] a(n) {days}-day "
                "[strike|walkout]",
                "a(n) {days}-day [strike|walkout] [did not take place|was called off|was cancelled] at {firm}",
                "{firm} [was spared|avoided] a(n) {days}-day [strike|walkout]",
            ),
        ),
    ),
    Scene(
        name="works",
        slots={"building": "building", "town": "town", "weeks": "few"},
        opposite="direction",
        when="month",
        reasons="work",
        cores=(
            (
                "{building} in {town} [opened|was finished|was completed] {weeks} weeks [early|ahead of schedule]",
                "{building} in {town} was ready {weeks} weeks [sooner|earlier] than planned",
                "builders [finished|completed] {building} in {town} {weeks} weeks [early|before the deadline]",
                "the [opening|completion] of {building} in {town} came {weeks} weeks [early|ahead of time]",
            ),
            (
                "{building} in {town} [opened|was finished|was completed] {weeks} weeks [late|behind schedule]",
                "{building} in {town} was ready {weeks} weeks later than planned",
                "builders [finished|completed] {building} in {town} {weeks} weeks [late|after the deadline]",
                "the [opening|completion] of {building} in {town} came {weeks} weeks [late|behind time]",
            ),
        ),
    ),
    Scene(
        name="towers",
        slots={"high": "town", "low": "town", "metres": "few", "tower": "tower"},
        swap=("high", "low"),
        cores=(
            (
                "the {tower} in {high} is {metres} metres [taller|higher] than the {tower} in {low}",
                "the {tower} in {low} is {metres} metres [shorter|lower] than the {tower} in {high}",
                "the {tower} in {high} is [taller|higher] than the one in {low} by {metres} metres",
                "the {tower} in {low} is [shorter|lower] than the one in {high} by {metres} metres",
            ),
        ),
    ),
    Scene(
        name="harvest",
        slots={"town": "town", "crop": "crop", "tonnes": "hundreds"},
        opposite="direction",
        when="month",
        cores=(
            (
                "farmers [near|around] {town} [harvested|brought in|gathered] [more than|over] {tonnes} "
                "tonnes of {crop}",
                "the harvest of {crop} [near|around] {town} came to [more than|over] {tonnes} tonnes",
                "[more than|over] {tonnes} tonnes of {crop} were [harvested|brought in|gathered] by "
                "farmers [near|around] {town}",
                "a harvest of [more than|over] {tonnes} tonnes of {crop} was [brought in|gathered] "
                "[near|around] {town}",
            ),
            (
                "farmers [near|around] {town} [harvested|brought in|gathered] [less than|under] {tonnes} "
                "tonnes of {crop}",
                "the harvest of {crop} [near|around] {town} came to [less than|under] {tonnes} tonnes",
                "[less than|under] {tonnes} tonnes of {crop} were [harvested|brought in|gathered] by "
                "farmers [near|around] {town}",
                "a harvest of [less than|under] {tonnes} tonnes of {crop} was [brought in|gathered] "
                "[near|around] {town}",
            ),
        ),
    ),
)
