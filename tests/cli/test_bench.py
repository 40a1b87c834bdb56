"""The flags of `fleetune bench` and `fleetune report`, and that docs/report.md has them as they are."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from fleetune.cli import bench, report
from fleetune.cli.arguments import parse
from fleetune.errors import ConfigError
from tests.conftest import REPOSITORY

GUIDE = (REPOSITORY / "docs" / "report.md").read_text(encoding="utf-8")


def test_every_flag_of_the_guide_is_one() -> None:
    helps = bench.make_bench_parser().format_help() + report.make_report_parser().format_help()
    flags = set(re.findall(r"--[a-z_]+", GUIDE))
    assert {flag for flag in flags if not re.search(rf"{flag}\b", helps)} == set()
    assert {f"--{name}" for name in (*bench.OWN, *bench.FLAGS)} <= flags


def test_processes_are_several_here_and_have_their_other_names() -> None:
    for flag in ("--processes", "--nproc_per_node", "--num-processes"):
        parsed = parse(bench.make_bench_parser(), [flag, "1,2", "--learning_rate", "1e-3"], tuple(bench.OWN))
        assert bench.own_values(parsed.extra) == {"processes": (1, 2)}
        assert (parsed.config.processes, parsed.config.learning_rate) == (None, 1e-3)


def test_values_are_converted() -> None:
    words = ["--nodes=1,2", "--steps", "20", "--price_per_hour", "2.72", "--full", "--against", "transformers"]
    parsed = parse(bench.make_bench_parser(), words, (*bench.OWN, *bench.FLAGS))
    told = {"nodes": (1, 2), "steps": 20, "price_per_hour": 2.72, "full": True, "against": "transformers"}
    assert bench.own_values(parsed.extra) == told


def test_where_a_report_goes(tmp_path: Path) -> None:
    run, other = tmp_path / "run", tmp_path / "other"
    run.mkdir()
    other.mkdir()
    record = run / "record.json"
    record.write_text("{}")
    assert report.folder_of(None, [run]) == run
    assert report.folder_of(None, [record]) == run
    assert report.folder_of(None, [run, other]) == Path()
    assert report.folder_of(str(tmp_path / "new"), [run]) == tmp_path / "new"
    with pytest.raises(ConfigError, match="a file of that name is in the way"):
        report.folder_of(str(record), [run])
