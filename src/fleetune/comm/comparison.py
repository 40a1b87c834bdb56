"""How the ranks of a run differ: what must not be, and what only slows it or changes its last bits."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

from fleetune.cluster.hosts import parse_hosts, read_hostfile
from fleetune.comm.roster import RankFacts, Roster, ranks_in_words
from fleetune.config import RunConfig
from fleetune.errors import ConfigError, LaunchError

_MUST_AGREE = ("fleetune", "torch", "transformers")


def check_alone(own: RankFacts, config: RunConfig) -> Roster:
    """The roster of a single process.

    Raises:
        LaunchError: The settings ask for more.
    """
    roster = Roster(members=(own,))
    if problems := not_as_asked(roster, config):
        raise LaunchError("\n".join(problems))
    return roster


def check_roster(roster: Roster, config: RunConfig) -> None:
    """Refuse ranks that would not train one model together, or are not as many as were asked for.

    Raises:
        LaunchError: Another world, or other versions; lists all differences.
        ConfigError: Other settings; lists all of them.
    """
    problems = [*_other_world(roster), *not_as_asked(roster, config), *_other_versions(roster)]
    if problems:
        raise LaunchError("\n".join(problems))
    if problems := list(_other_settings(roster)):
        raise ConfigError(problems)


def _told_by_host(roster: Roster, tell: Callable[[RankFacts], str | None]) -> list[str]:
    """One line for each host and thing that is told of its ranks: `node3 (ranks 4-5): ...`."""
    found: dict[tuple[str, str], list[int]] = {}
    for member in roster.members:
        if line := tell(member):
            found.setdefault((roster.host_name(member.rank), line), []).append(member.rank)
    return [f"{host} ({ranks_in_words(ranks)}): {line}" for (host, line), ranks in found.items()]


def _first_in_words(roster: Roster) -> str:
    return f"rank 0 on {roster.host_name(0)}"


def _other_world(roster: Roster) -> list[str]:
    count = len(roster.members)

    def tell(member: RankFacts) -> str | None:
        if member.world_size == count:
            return None
        return f"was told of {member.world_size} ranks, {_first_in_words(roster)} of {count}"

    return _told_by_host(roster, tell)


def not_as_asked(roster: Roster, config: RunConfig) -> list[str]:
    """Where the settings ask for other hosts or ranks than there are."""
    asked = _hosts_asked(config)
    if asked is None:
        return []
    wanted, setting, has_slots = asked
    hosts, names = roster.hosts, ", ".join(roster.host_name(ranks[0]) for ranks in roster.hosts)
    if len(hosts) != wanted:
        alone = ": no launcher started it" if len(roster.members) == 1 else ""
        ranks = "1 rank" if len(roster.members) == 1 else f"{len(roster.members)} ranks"
        return [f"{setting} asks for {wanted} host{'s' if wanted > 1 else ''}, but the run has {ranks} on {len(hosts)} "
                f"({names}){alone}"]  # fmt: skip
    if config.processes is None or has_slots:
        return []
    return [
        f"--processes {config.processes} asks for so many ranks on each host, but {roster.host_name(ranks[0])} has "
        f"{len(ranks)} ({ranks_in_words(ranks)})"
        for ranks in hosts
        if len(ranks) != config.processes
    ]


def _hosts_asked(config: RunConfig) -> tuple[int, str, bool] | None:
    """Count of hosts that the settings ask for, which setting does, and whether hosts have counts of ranks."""
    hosts = parse_hosts(config.hosts) if config.hosts else ()
    if config.hostfile is not None and Path(config.hostfile).is_file():  # it may be on the head alone
        hosts = hosts or read_hostfile(config.hostfile)
    has_slots = any(host.slots is not None for host in hosts)
    if config.num_hosts is not None:
        return config.num_hosts, f"--num_hosts {config.num_hosts}", has_slots
    if not hosts:
        return None
    setting = f"--hosts {','.join(config.hosts)}" if config.hosts else f"--hostfile {config.hostfile}"
    return len(hosts), setting, has_slots


def _other_versions(roster: Roster) -> list[str]:
    first = roster.members[0]

    def tell(member: RankFacts) -> str | None:
        parts = [(name, member.versions[name], first.versions[name]) for name in _MUST_AGREE]
        parts.append(("Python", _minor(member.versions["python"]), _minor(first.versions["python"])))
        differing = [f"{name} {own}, {_first_in_words(roster)} has {its}" for name, own, its in parts if own != its]
        if not differing and member.sources != first.sources:
            differing = [
                f"other kernel sources of fleetune {member.versions['fleetune']} than {_first_in_words(roster)}"
            ]
        return "; ".join(differing) or None

    lines = _told_by_host(roster, tell)
    return (
        [*lines, "All hosts need the same versions: `fleetune setup` copies the environment of this host"]
        if lines
        else []
    )


def _minor(version: str) -> str:
    return ".".join(version.split(".")[:2])


def _other_settings(roster: Roster) -> list[str]:
    first = roster.members[0]

    def tell(member: RankFacts) -> str | None:
        if member.settings_digest == first.settings_digest:
            return None
        names = [
            name
            for name in {**first.settings, **member.settings}
            if member.settings.get(name) != first.settings.get(name)
        ]
        return "; ".join(
            f"--{name} is {member.settings.get(name)!r}, {first.settings.get(name)!r} on rank 0" for name in names
        )

    lines = _told_by_host(roster, tell)
    return [*lines, "Ranks of one run need the same settings: start all with the same command"] if lines else []


# ---- what may differ


def differences_in_words(roster: Roster, config: RunConfig) -> list[str]:
    """One line for each difference that slows a run, or changes its last bits."""
    if len(roster.hosts) == 1:
        return []
    first = roster.members[0]
    compared: list[tuple[str, Callable[[RankFacts], str]]] = [
        ("the slowest decides", lambda m: f"CPU {m.cpu_model}"),
        (
            "the last bits may differ from those on equal hosts",
            lambda m: f"{' '.join(m.isa) or 'none'} of the instruction sets",
        ),
        ("the slowest decides", lambda m: f"{m.threads} threads a rank"),
        ("the slowest decides", lambda m: f"kernels in {m.kernels}" if m.kernels != "compiled" else "compiled kernels"),
    ]
    lines = []
    for consequence, tell in compared:
        others = _told_by_host(roster, lambda m, tell=tell: tell(m) if tell(m) != tell(first) else None)  # type: ignore[misc]
        if others:
            more = f" and {len(others) - 3} more" if len(others) > 3 else ""
            lines.append(
                f"hosts differ: {_first_in_words(roster)}: {tell(first)}; {'; '.join(others[:3])}{more} ({consequence})"
            )
    return lines + _emulated(roster, config)


def _emulated(roster: Roster, config: RunConfig) -> list[str]:
    """Hosts that have no units for bfloat16, where others do and it is wanted."""
    units = {"amx_bf16", "avx512_bf16", "bf16"}
    without = _told_by_host(roster, lambda m: None if units & set(m.isa) else "no bfloat16 units, it is emulated there")
    some = len({bool(units & set(member.isa)) for member in roster.members}) > 1
    return [f"--bf16 {config.bf16}: {'; '.join(without)}"] if some and config.bf16 != "false" else []
