"""What ranks print, on its way to the head."""

from __future__ import annotations

import contextlib
import json
import socket
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from fleetune.cluster.outputs import OUTPUT_VARIABLE, RankOutputs

PORTS = range(20000, 30000)


FakeRank = Callable[..., socket.socket]


@pytest.fixture
def fake_rank() -> Iterator[FakeRank]:
    """Makes connections as ranks do."""
    opened = contextlib.ExitStack()

    def connect(outputs: RankOutputs, rank: int, stream: str, /, **changes: object) -> socket.socket:
        told = json.loads(outputs.variable()[OUTPUT_VARIABLE])
        hello = {"word": told["word"], "rank": rank, "host": "other", "stream": stream, "pid": 77, **changes}
        connection = opened.enter_context(socket.create_connection((told["address"], told["port"]), timeout=10))
        connection.sendall(json.dumps(hello).encode() + b"\n")
        return connection

    with opened:
        yield connect


def test_each_ranks_output_is_kept_and_the_firsts_is_shown(
    fake_rank: FakeRank, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    with RankOutputs("127.0.0.1", PORTS, tmp_path / "logs", {0: "node1"}) as outputs:
        for rank in (0, 1):
            out, err = fake_rank(outputs, rank, "stdout"), fake_rank(outputs, rank, "stderr")
            out.sendall(f"result {rank}\n".encode())
            outputs.drain()
            err.sendall(b"a warning\n")
            outputs.drain()
            out.close()
            outputs.drain()
            assert outputs.ended == list(range(rank)), "its standard error is open yet"
            err.close()
            outputs.drain()
        assert outputs.ended == [0, 1]
        assert outputs.ranks[1].last_lines(1) == ["a warning"]
    said = capfd.readouterr()
    assert (said.out, said.err) == ("result 0\n", "a warning\n")
    assert {path.name: path.read_text() for path in (tmp_path / "logs").iterdir()} == {
        "node1.0.log": "result 0\na warning\n", "other.1.log": "result 1\na warning\n",
    }  # fmt: skip


def test_a_hello_may_come_in_pieces(tmp_path: Path) -> None:
    with RankOutputs("127.0.0.1", PORTS, tmp_path, {}) as outputs:
        told = json.loads(outputs.variable()[OUTPUT_VARIABLE])
        line = json.dumps({"word": told["word"], "rank": 3, "host": "h", "stream": "stdout", "pid": 1}) + "\nafter"
        with socket.create_connection((told["address"], told["port"])) as connection:
            for piece in (line[:10], line[10:]):
                connection.sendall(piece.encode())
                outputs.drain()
        outputs.drain()
        assert outputs.ranks[3].tail == b"after"


@pytest.mark.parametrize("changes", [{"word": "guessed"}, {"rank": "none"}], ids=["no password", "no rank"])
def test_strangers_are_turned_away(changes: dict[str, object], fake_rank: FakeRank, tmp_path: Path) -> None:
    with RankOutputs("127.0.0.1", PORTS, tmp_path, {}) as outputs:
        fake_rank(outputs, 0, "stdout", **changes)
        outputs.drain()
        assert outputs.ranks == {}


def test_exit_statuses_in_the_order_of_time(fake_rank: FakeRank, tmp_path: Path) -> None:
    with RankOutputs("127.0.0.1", PORTS, tmp_path, {}, wants_status=True) as outputs:
        ranks = {rank: fake_rank(outputs, rank, "status") for rank in (0, 1, 2)}
        outputs.drain()
        for rank, status in ((2, 5), (0, 76)):
            ranks[rank].sendall(str(status).encode())
            ranks[rank].close()
            outputs.drain()
        assert list(outputs.statuses.items()) == [(2, 5), (0, 76)]


def test_it_listens_within_the_ports_and_on_the_address(tmp_path: Path) -> None:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    with RankOutputs("127.0.0.1", range(port, port + 1), tmp_path, {}) as outputs:
        told = json.loads(outputs.variable()[OUTPUT_VARIABLE])
        assert (told["address"], told["port"]) == ("127.0.0.1", port)
