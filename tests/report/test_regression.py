"""What counts as a regression against a baseline."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from fleetune.errors import ConfigError
from fleetune.report.regression import Comparison, compare, comparison_cells, has_regression
from fleetune.report.rows import make_table
from fleetune.report.turns import read_source
from tests.conftest import fleetune
from tests.report.records import a_record, write_bench, write_run, write_turn


def a_bench(folder: Path, *steps_s: float, accuracy: tuple[float, ...] = (), megabytes: float = 2.0) -> Path:
    """Two hosts, a round for each time of an update."""
    mode = {"mode": "full", "steps": None, "discarded_steps": 0} if accuracy else {}
    write_bench(folder, sizes=["2 hosts"], rounds=len(steps_s), **mode)
    for i, step_s in enumerate(steps_s):
        record = a_record(hosts=2, step_s=step_s, accuracy=accuracy[i] if accuracy else None)
        for rank in record["time"]["per_rank"]:
            rank["interface"]["sent_bytes"] = int(megabytes * 1e6 * 11)
        write_turn(folder, "2 hosts", i + 1, record)
    return folder


def compared(now: Path, baseline: Path) -> dict[str, Comparison]:
    found = compare(make_table([read_source(now)]), make_table([read_source(baseline)]))
    return {comparison.quantity.name: comparison for comparison in found}


def test_slower_than_the_noise_is_a_regression(tmp_path: Path) -> None:
    before, now = a_bench(tmp_path / "a", 0.50, 0.51, 0.49), a_bench(tmp_path / "b", 0.60, 0.61, 0.59)
    told = compared(now, before)
    assert told["samples/s"].verdict == "regression"
    assert told["samples/s"].worse_by > 0
    assert told["start-up"].verdict == told["bytes/step, rank"].verdict == "within noise"
    assert compared(before, now)["samples/s"].verdict == "better"


def test_slower_within_the_noise_is_none(tmp_path: Path) -> None:
    before, now = a_bench(tmp_path / "a", 0.40, 0.50, 0.60), a_bench(tmp_path / "b", 0.45, 0.55, 0.65)
    assert compared(now, before)["samples/s"].verdict == "within noise"


def test_a_single_run_is_judged_by_the_noise_of_the_other(tmp_path: Path) -> None:
    before, now = a_bench(tmp_path / "a", 0.50, 0.51, 0.49), a_bench(tmp_path / "b", 0.70)
    assert compared(now, before)["samples/s"].verdict == "regression"


def test_more_bytes_are_a_regression(tmp_path: Path) -> None:
    """They do not vary, so any more are."""
    before, now = a_bench(tmp_path / "a", 0.5, 0.6), a_bench(tmp_path / "b", 0.5, 0.6, megabytes=2.1)
    assert compared(now, before)["bytes/step, rank"].verdict == "regression"


def test_a_worse_metric_is_a_regression(tmp_path: Path) -> None:
    before = a_bench(tmp_path / "a", 0.5, 0.5, 0.5, accuracy=(0.90, 0.91, 0.92))
    now = a_bench(tmp_path / "b", 0.5, 0.5, 0.5, accuracy=(0.80, 0.81, 0.82))
    assert compared(now, before)["accuracy"].verdict == "regression"
    assert compared(before, now)["accuracy"].verdict == "better"


def test_where_no_noise_is_known_nothing_is_judged(tmp_path: Path) -> None:
    before, now = a_bench(tmp_path / "a", 0.5), a_bench(tmp_path / "b", 0.7)
    with pytest.raises(ConfigError, match="every size was run once"):
        compared(now, before)


def test_nothing_in_common(tmp_path: Path) -> None:
    write_run(tmp_path / "a", a_record())
    with pytest.raises(ConfigError, match="no size and trainer in common"):
        compared(tmp_path / "a", a_bench(tmp_path / "b", 0.5))


def test_the_table_has_every_number(tmp_path: Path) -> None:
    told = compared(a_bench(tmp_path / "b", 0.6, 0.61), a_bench(tmp_path / "a", 0.5, 0.51))
    (cells,) = comparison_cells([told["samples/s"]])
    assert [cell.text for cell in cells[:2]] == ["2 hosts", "samples/s"]
    assert cells[2].value == told["samples/s"].before.mean
    assert cells[4].text.startswith("+")
    assert not has_regression([told["start-up"]])


def test_exit_status(tmp_path: Path) -> None:
    """0 when nothing is worse, 1 when something is, 2 when it cannot be judged; the table is printed."""
    good, bad = a_bench(tmp_path / "a", 0.50, 0.51, 0.49), a_bench(tmp_path / "b", 0.60, 0.61, 0.59)
    once = a_bench(tmp_path / "c", 0.5)
    worse = fleetune("report", bad, "--baseline", good, check=False)
    assert worse.returncode == 1, worse.stderr
    assert "regression" in worse.stdout
    assert worse.stdout.split("\n\n")[-2] == "Worse than the baseline"
    assert "Against the baseline" in (bad / "report.html").read_text()
    assert "| regression" in (bad / "report.md").read_text()
    told = json.loads((bad / "report.json").read_text())["baseline"]
    assert {one["number"] for one in told if one["verdict"] == "regression"} == {"samples/s"}
    assert fleetune("report", good, "--baseline", bad, check=False).returncode == 0
    unknown = fleetune("report", once, "--baseline", once, check=False)
    assert unknown.returncode == 2
    assert "was run once" in unknown.stderr
