"""Gradient sync between real processes: any ranks on any hosts get the sum, all of them the same, bit for bit.

The processes meet on loopback. Which of them count as one host is told them, so that all ways are taken: memory within
a host, the network between hosts, and both. 2 to 4 ranks, as a test says.
"""

from __future__ import annotations

import json
import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from safetensors.numpy import load_file

from tests.comm.sync_rank import DENSE, ROWS, WIDTH, expected_gradients
from tests.conftest import REPOSITORY, environment

HOSTS = {
    "two hosts": [[0], [1]],
    "one host of two": [[0, 1]],
    "three hosts": [[0], [1], [2]],
    "a host of two and one of one": [[0, 1], [2]],
    "two hosts of two": [[0, 1], [2, 3]],
    "ranks that alternate between hosts": [[0, 2], [1, 3]],
    "one host of three": [[0, 1, 2]],
}

Start = Callable[..., list[subprocess.Popen[str]]]


@pytest.fixture
def start(tmp_path: Path) -> Iterator[Start]:
    """Starts the ranks of some hosts with some settings; they leave `rank-N.safetensors` in the test's folder."""
    started: list[subprocess.Popen[str]] = []

    def start(hosts: list[list[int]], **settings: Any) -> list[subprocess.Popen[str]]:
        with socket.socket() as probe:
            probe.bind(("127.0.0.1", 0))
            port = probe.getsockname()[1]
        for rank in sorted(rank for ranks in hosts for rank in ranks):
            told = {"hosts": hosts, "rank": rank, "port": port, "folder": str(tmp_path), **settings}
            started.append(
                subprocess.Popen(
                    [sys.executable, "-m", "tests.comm.sync_rank", json.dumps(told)],
                    cwd=REPOSITORY, env=environment(OMP_NUM_THREADS="1", GLOO_SOCKET_IFNAME="lo"),
                    stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True,
                )
            )  # fmt: skip
        return started

    yield start
    for process in started:
        process.kill()
        process.communicate()


def finish(ranks: list[subprocess.Popen[str]], folder: Path) -> list[dict[str, np.ndarray]]:
    """What the ranks found: gradient of every parameter and update, by "update/name"."""
    for process in ranks:
        said, _ = process.communicate(timeout=120)
        assert process.returncode == 0, said
    return [load_file(folder / f"rank-{rank}.safetensors") for rank in range(len(ranks))]


def check(found: list[dict[str, np.ndarray]], world_size: int, updates: int, micro_batches: int, rtol: float) -> None:
    """All ranks have the same numbers, and these are the sums in float64."""
    for update in range(updates):
        expected, rows = expected_gradients(world_size, update, micro_batches)
        for name, gradient in expected.items():
            key = f"{update}/{name}"
            limit = rtol * np.abs(gradient).max()
            np.testing.assert_allclose(found[0][key], gradient, rtol=0, atol=limit, err_msg=key)
            for other in found[1:]:
                np.testing.assert_array_equal(other[key], found[0][key], err_msg=key)
        assert found[0][f"{update}/rows"].tolist() == rows
        squares = sum(float(np.square(found[0][f"{update}/{name}"].astype(np.float64)).sum()) for name in expected)
        assert found[0][f"{update}/squared_norm"].item() == pytest.approx(squares, rel=1e-5)


@pytest.mark.parametrize("hosts", HOSTS.values(), ids=HOSTS)
def test_ranks_get_the_sum(start: Start, tmp_path: Path, hosts: list[list[int]]) -> None:
    """Three updates of two micro-batches, small buckets; one parameter has a gradient in the first of them only."""
    found = finish(start(hosts, updates=3, micro_batches=2, bucket_bytes=256), tmp_path)
    check(found, world_size=len(found), updates=3, micro_batches=2, rtol=1e-6)


@pytest.mark.parametrize("hosts", [[[0], [1]], [[0], [1], [2]], [[0, 1], [2, 3]]], ids=str)
def test_bfloat16_loses_nothing_in_the_long_run(start: Start, tmp_path: Path, hosts: list[list[int]]) -> None:
    """Every update rounds by up to 2^-9, twice; what is lost is added to the next, so the sum of many is exact."""
    updates = 40
    found = finish(start(hosts, updates=updates, dtype="bfloat16", repeats=True), tmp_path)
    world_size = len(found)
    expected, _ = expected_gradients(world_size, 0, 1)
    for name in DENSE:
        per_update = np.stack([found[0][f"{i}/{name}"] for i in range(updates)]).astype(np.float64)
        scale = np.abs(expected[name]).max()
        one_off = np.abs(per_update[0] - expected[name]).max() / scale
        assert 1e-6 < one_off < 2 * world_size * 2**-8, "rounded, but not more than two roundings of each part"
        mean_off = np.abs(per_update.mean(axis=0) - expected[name]).max() / scale
        assert mean_off < one_off / 8, f"{name}: {mean_off:.2e} after {updates} updates, {one_off:.2e} after one"
    for other in found[1:]:
        for key in found[0]:
            if not key.endswith("squared_norm"):
                np.testing.assert_array_equal(other[key], found[0][key], err_msg=key)


def test_the_table_is_never_rounded(start: Start, tmp_path: Path) -> None:
    found = finish(start([[0], [1]], updates=2, dtype="bfloat16"), tmp_path)
    for update in range(2):
        expected, _ = expected_gradients(2, update, 1)
        np.testing.assert_allclose(found[0][f"{update}/table"], expected["table"], rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_only_the_touched_rows_are_sent(start: Start, tmp_path: Path, dtype: str) -> None:
    """Two hosts exchange half of every number twice: the bytes that a rank hands to the network."""
    finish(start([[0], [1]], updates=1, dtype=dtype), tmp_path)
    sent = json.loads((tmp_path / "sent-0.json").read_text())
    _, rows = expected_gradients(2, 0, 1)
    assert len(rows) < ROWS / 2
    of_stages = DENSE["sometimes"] + DENSE["second.weight"], DENSE["first.bias"] + DENSE["first.weight"]
    bytes_each = 2 if dtype == "bfloat16" else 4
    assert [sent["0"], sent["1"]] == [bytes_each * padded_to_lines(count) for count in of_stages]
    assert sent["2"] == 4 * padded_to_lines(len(rows) * WIDTH)


@pytest.mark.parametrize("hosts", ["three hosts", "two hosts of two", "one host of two"])
def test_sent_bytes_are_counted(start: Start, tmp_path: Path, hosts: str) -> None:
    """What the clocks of a rank say it sent is what it has handed to the network; nothing, where it does not cross it.

    2 to 4 ranks.
    """
    ranks = start(HOSTS[hosts], updates=3)
    finish(ranks, tmp_path)
    leaders = {ranks[0] for ranks in HOSTS[hosts]} if len(HOSTS[hosts]) > 1 else set()
    for rank in range(len(ranks)):
        sent = json.loads((tmp_path / f"sent-{rank}.json").read_text())
        counted = json.loads((tmp_path / f"clocks-{rank}.json").read_text())
        assert counted["sent_bytes"] == sum(sent.values())
        assert (counted["sent_bytes"] > 0) == (rank in leaders)
        assert 0 <= counted["hidden_ns"] <= counted["worked_ns"]
        assert counted["worked_ns"] > 0


def padded_to_lines(count: int) -> int:
    return -(-count // 32) * 32


@pytest.mark.parametrize("hosts", [[[0, 1]], [[0], [1]]], ids=["one host", "two hosts"])
def test_a_lost_rank_is_noticed_by_the_others(start: Start, tmp_path: Path, hosts: list[list[int]]) -> None:
    """The second rank is killed between two updates: the first neither hangs nor goes on."""
    ranks = start(hosts, updates=10_000, pause_s=0.01)
    deadline = time.monotonic() + 60
    while not (tmp_path / "began-1").exists():
        assert time.monotonic() < deadline
        assert ranks[1].poll() is None, ranks[1].communicate()[0]
        time.sleep(0.05)
    os.kill(ranks[1].pid, signal.SIGKILL)
    said, _ = ranks[0].communicate(timeout=60)
    assert ranks[0].returncode != 0
    told = ["rank 1 of this host is gone"] if hosts == [[0, 1]] else ["closed by peer", "reset by peer", "Broken pipe"]
    assert any(word in said for word in told), said
