"""Ranks that are not what was asked for are told by host, rank and difference, before anything else happens."""

from __future__ import annotations

import json
import re
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import Any

import pytest

from fleetune.cluster.network import free_port
from fleetune.comm.comparison import check_alone, check_roster, differences_in_words
from fleetune.comm.roster import RankFacts, Roster, own_facts, ranks_in_words, shared_settings
from fleetune.config import RunConfig
from fleetune.errors import ConfigError, LaunchError, PeerError
from tests.conftest import REPOSITORY, environment

CONFIG = RunConfig(model="/models/tiny", seed=7)


def member(rank: int, host: str) -> RankFacts:
    return RankFacts(
        rank=rank, world_size=4, host=host, place=host, address=f"10.0.0.{host[-1]}", pid=100 + rank,
        versions={"python": "3.11.2", "fleetune": "0.1.0", "torch": "2.13.0", "transformers": "5.1.0"},
        cpu_model="Xeon 8375C", isa=("avx2", "avx512f"), threads=8, sources="abc", settings=shared_settings(CONFIG),
        kernels="compiled",
    )  # fmt: skip


def four(**changed: dict[str, Any]) -> Roster:
    """Two ranks on each of node1 and node2; `node2={...}` changes those of a host."""
    members = (
        replace(member(rank, host), **changed.get(host, {})) for rank, host in enumerate(["node1"] * 2 + ["node2"] * 2)
    )
    return Roster(members=tuple(members))


def versions(**changes: str) -> dict[str, Any]:
    return {"versions": {**member(0, "node1").versions, **changes}}


def test_hosts_and_their_first_ranks() -> None:
    roster = four()
    assert (roster.hosts, roster.leads, roster.lead_of(3)) == (((0, 1), (2, 3)), (0, 2), 2)
    heard = Roster.from_json(json.loads(json.dumps(roster.to_json())))
    assert (heard.hosts, heard.leads, heard.host_name(3)) == (roster.hosts, roster.leads, "node2")


def test_hosts_of_the_same_name_are_told_apart_by_address() -> None:
    roster = four(node2={"host": "node1"})
    assert [roster.host_name(rank) for rank in (0, 3)] == ["node1 (10.0.0.1)", "node1 (10.0.0.2)"]


@pytest.mark.parametrize(
    ("ranks", "words"), [([3], "rank 3"), ([4, 5], "ranks 4-5"), ([7, 0, 1, 2], "ranks 0-2, 7")], ids=str
)
def test_ranks_in_words(ranks: list[int], words: str) -> None:
    assert ranks_in_words(ranks) == words


def test_equal_ranks_pass_and_have_nothing_to_tell() -> None:
    check_roster(four(), CONFIG)
    assert differences_in_words(four(), CONFIG) == []


def test_another_version_is_refused_by_host_and_ranks() -> None:
    with pytest.raises(LaunchError) as told:
        check_roster(four(node2=versions(torch="2.12.0", python="3.12.1")), CONFIG)
    assert str(told.value).splitlines()[0] == (
        "node2 (ranks 2-3): torch 2.12.0, rank 0 on node1 has 2.13.0; Python 3.12, rank 0 on node1 has 3.11"
    )


def test_another_release_of_the_same_python_is_fine() -> None:
    check_roster(four(node2=versions(python="3.11.9")), CONFIG)


def test_other_sources_of_the_same_version_are_refused() -> None:
    with pytest.raises(LaunchError, match=r"node2 \(ranks 2-3\): other kernel sources of fleetune 0.1.0 than rank 0"):
        check_roster(four(node2={"sources": "def"}), CONFIG)


def test_other_settings_are_named_with_both_values() -> None:
    other = shared_settings(CONFIG.replace(seed=8, num_train_epochs=1, threads=3))
    with pytest.raises(ConfigError) as told:
        check_roster(four(node2={"settings": other}), CONFIG)
    assert told.value.problems[0] == (
        "node2 (ranks 2-3): --num_train_epochs is 1.0, 3.0 on rank 0; --seed is 8, 7 on rank 0"
    )


def test_settings_of_one_host_may_differ() -> None:
    other = CONFIG.replace(model="/elsewhere/tiny", threads=3, cache_dir="/scratch", output_dir="/x", train_file="/y")
    assert shared_settings(other) == shared_settings(CONFIG)
    assert shared_settings(CONFIG.replace(model="bert-base-uncased")) != shared_settings(CONFIG)


def test_a_world_that_ranks_were_told_otherwise_is_refused() -> None:
    with pytest.raises(LaunchError, match=r"node2 \(ranks 2-3\): was told of 8 ranks, rank 0 on node1 of 4"):
        check_roster(four(node2={"world_size": 8}), CONFIG)


@pytest.mark.parametrize(
    ("asked", "told"),
    [
        ({"num_hosts": 4}, "--num_hosts 4 asks for 4 hosts, but the run has 4 ranks on 2 (node1, node2)"),
        ({"hosts": "node[1-3]"}, "--hosts node[1-3] asks for 3 hosts, but the run has 4 ranks on 2 (node1, node2)"),
        ({"num_hosts": 2, "processes": 3},
         "--processes 3 asks for so many ranks on each host, but node1 has 2 (ranks 0-1)"),
    ],
    ids=["num_hosts", "hosts", "processes"],
)  # fmt: skip
def test_a_world_that_was_not_asked_for_is_refused(asked: dict[str, Any], told: str) -> None:
    with pytest.raises(LaunchError, match=re.escape(told)):
        check_roster(four(), CONFIG.replace(**asked))


def test_the_world_that_was_asked_for_passes() -> None:
    check_roster(four(), CONFIG.replace(num_hosts=2, processes=2))
    check_roster(four(), CONFIG.replace(hosts="node1:2,node2:2"))


def test_a_single_process_is_no_cluster() -> None:
    facts = own_facts(None, CONFIG, address=None, threads=1)
    assert check_alone(facts, CONFIG).hosts == ((0,),)
    with pytest.raises(LaunchError, match=r"asks for 4 hosts, but the run has 1 rank on 1 .*: no launcher started it"):
        check_alone(facts, CONFIG.replace(num_hosts=4))


def test_what_slows_a_run_is_told_in_one_line_each() -> None:
    changed = {"cpu_model": "EPYC 7763", "isa": ("avx2",), "threads": 4, "kernels": "plain PyTorch"}
    lines = differences_in_words(four(node2=changed), CONFIG)
    assert lines == [
        "hosts differ: rank 0 on node1: CPU Xeon 8375C; node2 (ranks 2-3): CPU EPYC 7763 (the slowest decides)",
        "hosts differ: rank 0 on node1: avx2 avx512f of the instruction sets; node2 (ranks 2-3): avx2 of the "
        "instruction sets (the last bits may differ from those on equal hosts)",
        "hosts differ: rank 0 on node1: 8 threads a rank; node2 (ranks 2-3): 4 threads a rank (the slowest decides)",
        "hosts differ: rank 0 on node1: compiled kernels; node2 (ranks 2-3): kernels in plain PyTorch (the slowest "
        "decides)",
    ]


def test_bfloat16_units_on_some_hosts_are_told_where_it_is_wanted() -> None:
    roster = four(node1={"isa": ("avx2", "amx_bf16")}, node2={"isa": ("avx2",)})
    assert "--bf16 auto: node2 (ranks 2-3): no bfloat16 units, it is emulated there" in differences_in_words(
        roster, CONFIG.replace(bf16="auto")
    )
    assert not any("bfloat16" in line for line in differences_in_words(roster, CONFIG))


# ---- real ranks


Start = Callable[..., subprocess.Popen[str]]
PEER_FAILED = PeerError.exit_status


@pytest.fixture
def start() -> Iterator[Start]:
    """Starts one of two ranks, which meet on loopback."""
    port, started = free_port("127.0.0.1"), []

    def start(rank: int, *, main_port: int | None = None, **told: Any) -> subprocess.Popen[str]:
        started.append(
            subprocess.Popen(
                [sys.executable, "-m", "tests.comm.roster_rank", json.dumps(told)], cwd=REPOSITORY,
                env=environment(
                    RANK=str(rank), WORLD_SIZE="2", LOCAL_RANK=str(rank), LOCAL_WORLD_SIZE="2",
                    MASTER_ADDR="127.0.0.1", MASTER_PORT=str(main_port or port), OMP_NUM_THREADS="1",
                    FLEETUNE_KERNELS="reference",
                ), stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True,
            )
        )  # fmt: skip
        return started[-1]

    yield start
    for process in started:
        process.kill()
        process.communicate()


def said_by(*ranks: subprocess.Popen[str]) -> list[tuple[int, str]]:
    """Exit status and output of each."""
    found = [rank.communicate(timeout=120)[0] for rank in ranks]
    return [(rank.returncode, said) for rank, said in zip(ranks, found, strict=True)]


def test_two_ranks_meet_on_loopback_alone(start: Start) -> None:
    second = start(1)
    time.sleep(0.5)  # it comes first, and waits
    (status, said), (other_status, other_said) = said_by(start(0), second)
    assert (status, other_status) == (0, 0), said + other_said
    first = json.loads(said)
    assert first["hosts"] == [[0, 1]]
    assert first["interface"] == "lo"
    assert [place.rpartition(":")[0] for place in first["listening"]] == ["127.0.0.1"]
    assert [facts["rank"] for facts in first["record"]] == [0, 1]
    assert {facts["kernels"] for facts in first["record"]} == {"plain PyTorch"}
    assert json.loads(other_said)["hosts"] == [[0, 1]]


def test_another_version_ends_both_and_one_speaks(start: Start) -> None:
    (status, said), other = said_by(start(0), start(1, versions={"torch": "2.12.0"}))
    assert status == LaunchError.exit_status
    assert re.search(r"^error: \S+ \(rank 1\): torch 2.12.0, rank 0 on \S+ has \S+$", said, re.MULTILINE), said
    assert other == (PEER_FAILED, "")


def test_other_settings_end_both_and_one_speaks(start: Start) -> None:
    (status, said), other = said_by(start(0), start(1, settings={"seed": 7}))
    assert status == ConfigError.exit_status
    assert "(rank 1): --seed is 7, 42 on rank 0" in said
    assert other == (PEER_FAILED, "")


def test_a_missing_rank_is_named(start: Start) -> None:
    ((status, said),) = said_by(start(0, settings={"timeout_s": 2}))
    assert status == LaunchError.exit_status
    assert re.search(r"^error: rank 1 of 2 did not come within 2 s. There are: \S+ \(rank 0\)\.", said), said


def test_nobody_listening_is_told_as_refused(start: Start) -> None:
    ((status, said),) = said_by(start(1, settings={"timeout_s": 1}))
    assert status == LaunchError.exit_status
    assert re.search(r"\(rank 1\) could not reach rank 0 for 1 s. 127.0.0.1:\d+: refused: the host is there", said), (
        said
    )


def test_the_same_rank_twice_is_refused(start: Start) -> None:
    first, second = start(0, settings={"timeout_s": 30}), start(0, settings={"timeout_s": 30})
    deadline = time.monotonic() + 60
    while first.poll() is None and second.poll() is None:
        assert time.monotonic() < deadline
        time.sleep(0.1)
    loser = first if first.poll() is not None else second
    ((status, said),) = said_by(loser)
    assert status == LaunchError.exit_status
    assert "the port is taken by process" in said
