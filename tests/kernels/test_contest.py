"""Whose products are taken: measured once, kept, and read again."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from torch import Tensor

from fleetune.kernels import contest
from fleetune.kernels.library import load_kernels
from fleetune.kernels.linear import product


@pytest.fixture(autouse=True)
def _forgets(monkeypatch: pytest.MonkeyPatch) -> None:
    if not load_kernels().compiled:
        pytest.skip(load_kernels().reason)
    monkeypatch.setattr(contest, "_known", {})


def rigged(monkeypatch: pytest.MonkeyPatch, times_as_fast: float, share: float = 1.0) -> list[object]:
    """A contest with that outcome, whose threads got that share of their cores; gives the list of its rounds."""
    rounds: list[object] = []
    wall = cpu = 0.0

    def outcome(*arms: object) -> float:
        nonlocal wall, cpu
        rounds.append(arms)
        wall, cpu = wall + 0.5, cpu + 0.5 * share
        return times_as_fast

    monkeypatch.setattr(contest, "contest", outcome)
    monkeypatch.setattr(contest.time, "perf_counter", lambda: wall)
    monkeypatch.setattr(contest.time, "process_time", lambda: cpu)
    return rounds


@pytest.mark.parametrize(("times_as_fast", "wins"), [(0.8, False), (1.04, False), (1.06, True), (2.0, True)])
def test_torch_must_be_clearly_faster(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, times_as_fast: float, wins: bool
) -> None:
    rounds = rigged(monkeypatch, times_as_fast)
    assert contest._kept(tmp_path, 1) == wins
    assert contest._kept(tmp_path, 1) == wins
    assert len(rounds) == 1, "the second one read what the first wrote"
    assert json.loads((tmp_path / "products-1.json").read_text()) == {
        "times_as_fast": times_as_fast, "threads": 1, "share_of_cores": 1.0,
    }  # fmt: skip


def test_what_a_busy_machine_shows_does_not_count(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """Two threads, one of which shares its core with another program."""
    rounds = rigged(monkeypatch, 10.5, share=1.5)
    assert not contest._kept(tmp_path, 2)
    assert not contest._kept(tmp_path, 2)
    assert len(rounds) == 2, "nothing was written"
    rigged(monkeypatch, 1.2, share=1.9)
    assert contest._kept(tmp_path, 2)


def test_each_number_of_threads_has_its_own_answer(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    rounds = rigged(monkeypatch, 2.0, share=2.0)
    contest._kept(tmp_path, 1)
    contest._kept(tmp_path, 2)
    assert len(rounds) == 2


@pytest.mark.parametrize(
    "content", ["", "{", "[]", '{"times_as_fast": "fast"}', '{"times_as_fast": -1}', '{"times_as_fast": 2}']
)
def test_a_spoiled_file_is_written_anew(monkeypatch: pytest.MonkeyPatch, tmp_path: Path, content: str) -> None:
    (tmp_path / "products-2.json").write_text(content)
    assert len(rigged(monkeypatch, 2.0, share=2.0)) == 0
    assert contest._kept(tmp_path, 2)
    assert json.loads((tmp_path / "products-2.json").read_text())["times_as_fast"] == 2.0


def test_a_folder_that_cannot_be_written_does_no_harm(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    rounds = rigged(monkeypatch, 2.0, share=2.0)
    assert contest._kept(tmp_path / "gone", 2)
    assert len(rounds) == 1


def test_the_slower_of_two_loses(monkeypatch: pytest.MonkeyPatch) -> None:
    """By a clock that only the products move: 9 products a round, the one three times as slow as the other."""
    now = 0.0

    def product(seconds: float) -> contest.Product:
        def takes(a: Tensor, b: Tensor) -> Tensor:
            nonlocal now
            now += seconds
            return a

        return takes

    monkeypatch.setattr(contest.time, "perf_counter", lambda: now)
    assert contest.contest(product(0.01), product(0.03)) == pytest.approx(3.0)
    assert contest.contest(product(0.03), product(0.01)) == pytest.approx(1 / 3)


@pytest.mark.parametrize("wins", [False, True])
def test_both_give_the_product(monkeypatch: pytest.MonkeyPatch, wins: bool) -> None:
    monkeypatch.setattr(contest, "_known", {torch.get_num_threads(): wins})
    a, b, bias = torch.randn(5, 7), torch.randn(9, 7), torch.randn(9)
    torch.testing.assert_close(product(a, b.t(), bias), a @ b.t() + bias)
    torch.testing.assert_close(product(a, b.t()), a @ b.t())
