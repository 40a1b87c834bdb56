"""The benchmark of a host's shapes: its arithmetic by hand."""

from __future__ import annotations

import pytest

from benchmarks import host_shapes


def test_speeds_are_compared_within_a_round() -> None:
    rounds = [{"1 x 2": 40.0, "2 x 1": 50.0}, {"2 x 1": 25.0, "1 x 2": 20.0}, {"1 x 2": 30.0, "2 x 1": 33.0}]
    one, two = host_shapes.summarise(rounds, "1 x 2")
    assert (one["shape"], one["samples_per_s"]["median"], one["times_as_fast"]["maximum"]) == ("1 x 2", 30.0, 1.0)
    assert (two["samples_per_s"]["median"], two["times_as_fast"]["median"]) == (33.0, pytest.approx(1.25))
    assert "2 x 1           | 33.0 (25.0 to 50.0) | 1.25 (1.10 to 1.25)" in host_shapes.table([two])


def test_shapes_that_cannot_be_are_refused(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        host_shapes.parse_options(["--processes", "3"])
    assert "each must divide 32, and have a core for every rank" in capsys.readouterr().err
