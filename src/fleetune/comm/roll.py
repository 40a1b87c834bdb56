"""The call of the roll: the first rank waits for all, and stops a run whose ranks are not what was asked for."""

from __future__ import annotations

import json
import time
from collections.abc import Sequence
from dataclasses import asdict

from torch.distributed import Store  # type: ignore[attr-defined]

from fleetune.comm.comparison import check_roster
from fleetune.comm.roster import RankFacts, Roster, facts_from, ranks_in_words
from fleetune.config import RunConfig
from fleetune.errors import ConfigError, LaunchError, PeerError

_GLANCE_S = 0.02
_FAREWELL_S = 3.0
"""How long a first rank that gives up lets the others hear of it."""


def call_roll(store: Store, own: RankFacts, config: RunConfig, patience_s: float) -> Roster:
    """Tell the first rank who this is, and hear from it who all are.

    Args:
        store: Of all ranks.
        own: This rank.
        config: The settings, which say what was asked for.
        patience_s: How long the first rank waits for the others.

    Raises:
        LaunchError: On the first rank: a rank is missing or another than it should be. On another: its number is taken.
        ConfigError: On the first rank: a rank has other settings.
        PeerError: On the others, when the first rank gave up.
    """
    if store.add(f"came/{own.rank}", 1) > 1:
        raise LaunchError(
            f"{own.host}: rank {own.rank} has come already. Two processes were given the same number, or another run "
            "uses this port: give another MASTER_PORT"
        )
    store.set(f"facts/{own.rank}", json.dumps(asdict(own)))
    if own.rank == 0:
        return _judge(store, own, config, patience_s)
    # Longer than the first rank waits: torchrun's agent may serve the store before the first rank comes.
    if wait_for(store, ["roster"], 2 * patience_s + _FAREWELL_S):
        raise LaunchError(f"{own.host} (rank {own.rank}): rank 0 did not answer for {2 * patience_s:g} s")
    told = json.loads(store.get("roster"))
    if "failed" in told:
        let_hear(store, "heard", own.world_size, is_first=False)
        raise PeerError(told["failed"])
    roster = Roster.from_json(told["members"])
    if own.world_size != len(roster.members):
        raise LaunchError(
            f"{own.host}: rank {own.rank} was told of {own.world_size} ranks, rank 0 on {roster.members[0].host} of "
            f"{len(roster.members)}: start all with the same number"
        )
    return roster


def _judge(store: Store, own: RankFacts, config: RunConfig, patience_s: float) -> Roster:
    """The first rank's part: wait for all, compare, and tell the others."""
    missing = wait_for(store, [f"facts/{rank}" for rank in range(own.world_size)], patience_s)
    came = [rank for rank in range(own.world_size) if f"facts/{rank}" not in missing]
    facts = store.multi_get([f"facts/{rank}" for rank in came])
    roster = Roster(members=tuple(facts_from(json.loads(text)) for text in facts))
    try:
        if missing:
            raise LaunchError(_missing(roster, own.world_size, patience_s))
        check_roster(roster, config)
    except (ConfigError, LaunchError) as error:
        store.set("roster", json.dumps({"failed": str(error)}))
        let_hear(store, "heard", len(came), is_first=True)
        raise
    store.set("roster", json.dumps({"members": roster.to_json()}))
    return roster


def let_hear(store: Store, key: str, count: int, *, is_first: bool) -> None:
    """Say that this rank has heard why the run ends; the first rank, which may hold the store, waits until all have.

    Args:
        store: Of all ranks.
        key: Counts those that have heard.
        count: Of ranks.
        is_first: Whether this is the first rank.
    """
    deadline = time.monotonic() + _FAREWELL_S
    heard = store.add(key, 1)
    while is_first and heard < count and time.monotonic() < deadline:
        time.sleep(_GLANCE_S)
        heard = store.add(key, 0)


def wait_for(store: Store, keys: Sequence[str], patience_s: float) -> list[str]:
    """Wait until keys are there; gives those that did not come in time.

    Asks again and again: a wait inside the store that ends without success prints torch's own warnings.
    """
    deadline, pause_s, left = time.monotonic() + patience_s, _GLANCE_S, list(keys)
    while True:
        while left and store.check([left[0]]):
            left.pop(0)
        if not left:
            return []
        if time.monotonic() > deadline:
            return [key for key in left if not store.check([key])]
        time.sleep(pause_s)
        pause_s = min(0.2, 1.2 * pause_s)


def _missing(roster: Roster, world_size: int, patience_s: float) -> str:
    came = {member.rank for member in roster.members}
    absent = [rank for rank in range(world_size) if rank not in came]
    places = dict.fromkeys((member.place, member.host) for member in roster.members)
    there = ", ".join(
        f"{host} ({ranks_in_words([m.rank for m in roster.members if m.place == place])})" for place, host in places
    )
    return (
        f"{ranks_in_words(absent)} of {world_size} did not come within {patience_s:g} s. There are: {there}. "
        "See what the output of the missing ranks says; --timeout_s waits longer"
    )
