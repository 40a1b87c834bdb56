"""Checks of what is between hosts: whether they reach each other, and how fast."""

from __future__ import annotations

import statistics
from collections.abc import Iterable, Mapping, Sequence

from fleetune.doctor.examine import Examination, Pair
from fleetune.doctor.finding import Finding, Verdict, about, failure, ok, warning
from fleetune.doctor.meter import Attempt, Transfer, is_slow

_LITTLE_MBIT = 100.0
_FAR_S = 0.005
_MOST_NAMED = 4


# ---- connections


def connections(examination: Examination) -> list[Finding]:
    """Every pair on every port that was tried, and each host to itself."""
    failed: dict[str, dict[Pair, list[Attempt]]] = {}
    for source, one in examination.attempts:
        if one.outcome != "reached":
            failed.setdefault(one.outcome, {}).setdefault((source, one.target), []).append(one)
    names = list(dict.fromkeys(source for source, _ in examination.attempts))
    if not names:
        return []
    if not failed:
        tried = {one.port for _, one in examination.attempts}
        what = f"each reaches every other and itself, on {len(tried)} ports" if len(names) > 1 else "reaches itself"
        return [about(ok(what), "connections", *names)]
    ports = examination.scope.ports
    return [
        about(_unreached(outcome, pairs, ports), "connections", *_blamed(pairs, names))
        for outcome, pairs in failed.items()
    ]


def _blamed(pairs: Mapping[Pair, list[Attempt]], names: Sequence[str]) -> list[str]:
    """The hosts that none of the others reaches; else those that somebody does not."""
    targets = list(dict.fromkeys(target for _, target in pairs))
    shunned = [target for target in targets if all((source, target) in pairs for source in names if source != target)]
    return shunned or targets


def _unreached(outcome: str, pairs: Mapping[Pair, list[Attempt]], chosen: range) -> Verdict:
    attempts = [one for some in pairs.values() for one in some]
    tried = sorted({one.port for one in attempts})
    where = f"{_pairs(list(pairs))} on port{'s' if len(tried) > 1 else ''} {', '.join(map(str, tried[:_MOST_NAMED]))}"
    if outcome == "timeout" and not set(tried) & set(chosen):
        return failure(
            f"timed out: {where}. The port range is open, but ranks' own connections take any port above 32768: a "
            "firewall drops them",
            _OPEN,
        )
    reason, fix = _REASONS.get(outcome, ("{where}: {said}", "ip route; ip neigh"))
    said = attempts[0].said or outcome
    return failure(reason.format(where=where, said=said, address=attempts[0].address), fix)


_SAME_MTU = "the same MTU on all hosts: ip link"
_OPEN = "let the hosts talk on all TCP ports: a rule of the cloud's security group, or sudo ufw allow from NETWORK"
_REASONS = {
    "timeout": ("timed out: {where}. Packets are dropped without a word, as firewalls do", _OPEN),
    "refused": (
        "refused: {where}. The doctor was listening there: a firewall rejects, or {address} is another machine's",
        _OPEN,
    ),
    "unreachable": (
        "{said}: {where}. The address cannot be reached, or a firewall rejects (firewalld does)", _OPEN,
    ),
    "stalled": (
        "it connects, but no data come back: {where}. Large packets may be lost on the way",
        _SAME_MTU,
    ),
    "other host": (
        "another machine answers: {where}: {said}. Two hosts have the address {address}",
        "give each host an address of its own; --network chooses among several",
    ),
}  # fmt: skip


def _pairs(pairs: Sequence[Pair]) -> str:
    shown = [f"{source} to {target if target != source else 'itself'}" for source, target in pairs[:_MOST_NAMED]]
    return ", ".join([*shown, *([f"{len(pairs) - _MOST_NAMED} more"] if len(pairs) > _MOST_NAMED else [])])


def _names(pairs: Iterable[Pair]) -> list[str]:
    return sorted({name for pair in pairs for name in pair})


# ---- round trips


def round_trips(examination: Examination) -> list[Finding]:
    """The latency between hosts, and the pair that is furthest apart."""
    times: dict[Pair, float] = {}
    for source, one in examination.attempts:
        if one.round_trip_s is not None and source != one.target:
            pair = (source, one.target)
            times[pair] = min(times.get(pair, one.round_trip_s), one.round_trip_s)
    if not times:
        return []
    names = _names(times)
    (source, target), longest = max(times.items(), key=lambda item: item[1])
    told = f"{statistics.median(times.values()) * 1e3:.2f} ms"
    if longest > _FAR_S:
        return [about(warning(
            f"{longest * 1e3:.1f} ms there and back between {source} and {target} (median of all pairs {told}): every "
            "update waits for several of them",
            "hosts of one data centre and zone",
        ), "round trip", source, target)]  # fmt: skip
    return [about(ok(f"{told} there and back, longest {longest * 1e3:.2f} ms ({source} to {target})"),
                  "round trip", *names)]  # fmt: skip


# ---- rates


def rates(examination: Examination) -> list[Finding]:
    """The bandwidth between hosts: slow hosts, slow pairs, and pairs that are slow one way."""
    found = [
        about(failure(f"no data from {source}: {one.said}", _SAME_MTU), "bandwidth", one.target)
        for source, one in examination.transfers
        if one.mbit_per_s is None
    ]
    measured = _measured(examination.transfers)
    if not measured:
        return found
    names = _names(measured)
    best = max(measured.values())
    slow_hosts = [name for name in names if len(names) > 2 and is_slow(_best_of(name, measured), best)]
    found += [about(_slow_host(name, measured, best), "bandwidth", name) for name in slow_hosts]
    rest = {pair: rate for pair, rate in measured.items() if not set(pair) & set(slow_hosts)}
    slow_pairs = [pair for pair, rate in rest.items() if is_slow(rate, best)]
    found += [about(_slow_pair(pair, measured, best), "bandwidth", *pair) for pair in slow_pairs]
    if best < _LITTLE_MBIT:
        found.append(about(warning(
            f"{_rate(best)} at best: training will mostly wait for the network",
            "--grad_dtype bfloat16 halves what travels, --local_steps 4 quarters it",
        ), "bandwidth", *names))  # fmt: skip
    return found or [about(ok(_spread(measured)), "bandwidth", *names)]


def _measured(transfers: Sequence[tuple[str, Transfer]]) -> dict[Pair, float]:
    return {(source, one.target): one.mbit_per_s for source, one in transfers if one.mbit_per_s is not None}


def _best_of(name: str, measured: Mapping[Pair, float]) -> float:
    return max(rate for pair, rate in measured.items() if name in pair)


def _slow_host(name: str, measured: Mapping[Pair, float], best: float) -> Verdict:
    own = _best_of(name, measured)
    return warning(
        f"{_rate(own)} at best, to and from every other host; the fastest pair has {_rate(best)}, and all wait for it",
        f"ssh {name} 'ethtool INTERFACE | grep Speed'; another cable, port or size of machine; or leave {name} out",
    )


def _slow_pair(pair: Pair, measured: Mapping[Pair, float], best: float) -> Verdict:
    source, target = pair
    back = measured.get((target, source))
    told = f"{_rate(measured[pair])} from {source} to {target}"
    if back is not None and not is_slow(back, best):
        told += f", but {_rate(back)} back"
    return warning(f"{told}; the fastest pair has {_rate(best)}", "look at the way between the two: `mtr`, `ethtool`")


def _spread(measured: Mapping[Pair, float]) -> str:
    (source, target), lowest = min(measured.items(), key=lambda item: item[1])
    fastest = max(measured.values())
    slowest = f"slowest {source} to {target}"
    return f"{_rate(fastest)} ({slowest})" if _rate(lowest) == _rate(fastest) else (
        f"{_rate(lowest)} to {_rate(fastest)} ({slowest})"
    )  # fmt: skip


def _rate(mbit: float) -> str:
    return f"{mbit / 1000:.1f} Gbit/s" if mbit >= 1000 else f"{mbit:.0f} Mbit/s" if mbit >= 10 else f"{mbit:.1f} Mbit/s"
