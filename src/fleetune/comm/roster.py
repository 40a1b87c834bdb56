"""Who takes part in a run: what every rank tells of itself when it starts, and what the first makes of it.

own_facts(...)        what this rank tells
call_roll(...)        waits for all, and stops a run whose ranks are not what was asked for
Roster                the ranks that came, and which of them share a host
"""

from __future__ import annotations

import hashlib
import json
import os
import platform
import socket
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from importlib import metadata
from typing import Any

import torch

from fleetune.cluster.rank import RankInfo
from fleetune.comm.hosts import place_of_process
from fleetune.config import RunConfig
from fleetune.hardware.host import read_host
from fleetune.kernels.build import SOURCES, read_sources
from fleetune.kernels.facts import sources_digest

OF_ONE_HOST = frozenset({
    "threads", "processes", "cache_dir", "overwrite_cache", "data_dir", "train_file", "validation_file", "test_file",
    "output_dir", "overwrite_output_dir", "report_to", "hosts", "hostfile", "launcher", "num_hosts", "network",
    "port_range", "timeout_s",
})  # fmt: skip
"""Settings that may differ between ranks: they are of a host, or the first rank's alone."""

_WHO_AND_WHERE = ("rank", "world_size", "host", "place", "address", "pid")


@dataclass(frozen=True, kw_only=True)
class RankFacts:
    """What a rank tells of itself."""

    rank: int
    world_size: int
    """As its launcher told it."""
    host: str
    """Name of its host."""
    place: str
    """Equal for ranks of one host."""
    address: str | None
    """By which its host is known to the others; None with one host."""
    pid: int
    versions: Mapping[str, str]
    """Of python, fleetune, torch and transformers."""
    cpu_model: str
    isa: tuple[str, ...]
    threads: int | None
    """None where that is decided later."""
    sources: str
    """Digest of the kernels' sources."""
    settings: Mapping[str, Any]
    """Those that must be equal on all ranks."""
    kernels: str | None = None
    """What computes; None before they are loaded."""

    @property
    def settings_digest(self) -> str:
        """Equal for equal settings."""
        return hashlib.sha256(json.dumps(self.settings, sort_keys=True).encode()).hexdigest()[:16]

    def for_record(self) -> dict[str, Any]:
        """Without what the run's record has anyway."""
        told = {name: value for name, value in asdict(self).items() if name not in ("settings", "world_size", "place")}
        return {**told, "settings": self.settings_digest}


def own_facts(info: RankInfo | None, config: RunConfig, *, address: str | None, threads: int | None) -> RankFacts:
    """The facts of this rank."""
    host = read_host()
    return RankFacts(
        rank=0 if info is None else info.rank,
        world_size=1 if info is None else info.world_size,
        host=socket.gethostname(),
        place=place_of_process(),
        address=address,
        pid=os.getpid(),
        versions=own_versions(),
        cpu_model=host.cpu_model,
        isa=host.isa,
        threads=config.threads if threads is None else threads,
        sources=sources_digest(read_sources(SOURCES)),
        settings=shared_settings(config),
    )


def own_versions() -> dict[str, str]:
    """Versions of what decides about a run's numbers."""
    installed = {name: metadata.version(name) for name in ("fleetune", "transformers")}
    return {"python": platform.python_version(), "torch": str(torch.__version__), **installed}


def shared_settings(config: RunConfig) -> dict[str, Any]:
    """The settings that must be equal on all ranks: without those of one host, and without paths."""
    told = {name: value for name, value in config.to_dict().items() if name not in OF_ONE_HOST}
    for name in ("model", "tokenizer_name"):  # whatever is there: the first rank's counts
        if str(told[name]).startswith(("/", ".", "~")):
            told[name] = "(a folder)"
    told["resume_from_checkpoint"] = config.resume_from_checkpoint is not None
    return told


@dataclass(frozen=True, kw_only=True)
class Roster:
    """The ranks of a run, in their order. On other ranks than the first: who is where, and nothing else of them."""

    members: tuple[RankFacts, ...]

    @property
    def hosts(self) -> tuple[tuple[int, ...], ...]:
        """The ranks of every host, ascending; the first host is that of rank 0."""
        places = dict.fromkeys(member.place for member in self.members)
        return tuple(tuple(m.rank for m in self.members if m.place == place) for place in places)

    @property
    def leads(self) -> tuple[int, ...]:
        """The first rank of every host."""
        return tuple(ranks[0] for ranks in self.hosts)

    def lead_of(self, rank: int) -> int:
        """The first rank of a rank's host."""
        return next(ranks[0] for ranks in self.hosts if rank in ranks)

    def host_name(self, rank: int) -> str:
        """A name of a rank's host that no other host of the run has."""
        member = self.members[rank]
        shared = any(other.host == member.host and other.place != member.place for other in self.members)
        return f"{member.host} ({member.address})" if shared and member.address else member.host

    def to_json(self) -> list[dict[str, Any]]:
        """What `from_json` reads: who is where. The rest is the first rank's alone, or large worlds would hear much."""
        return [{name: getattr(member, name) for name in _WHO_AND_WHERE} for member in self.members]

    @classmethod
    def from_json(cls, told: Iterable[Mapping[str, Any]]) -> Roster:
        """Of `to_json`."""
        nothing: dict[str, Any] = {
            "versions": {},
            "cpu_model": "",
            "isa": (),
            "threads": None,
            "sources": "",
            "settings": {},
        }
        return cls(members=tuple(facts_from({**nothing, **fields}) for fields in told))

    def with_kernels(self, names: Sequence[str]) -> Roster:
        """With what computes on every rank."""
        return Roster(
            members=tuple(replace(member, kernels=name) for member, name in zip(self.members, names, strict=True))
        )


def facts_from(fields: Mapping[str, Any]) -> RankFacts:
    """The facts of a rank, from JSON."""
    return RankFacts(**{**fields, "isa": tuple(fields["isa"])})


def ranks_in_words(ranks: Sequence[int]) -> str:
    """`rank 3`, or `ranks 0-3, 7`."""
    runs: list[list[int]] = []
    for rank in sorted(ranks):
        if runs and rank == runs[-1][-1] + 1:
            runs[-1].append(rank)
        else:
            runs.append([rank])
    words = [str(run[0]) if len(run) == 1 else f"{run[0]}-{run[-1]}" for run in runs]
    return f"rank{'s' if len(ranks) > 1 else ''} {', '.join(words)}"
