"""From records to rows: speeds, times, bytes and money by hand."""

from __future__ import annotations

import dataclasses
import json
import shlex
from pathlib import Path

import pytest

from fleetune.errors import ConfigError
from fleetune.report.columns import Cell, aligned, rounded, times
from fleetune.report.files import write_report
from fleetune.report.measures import samples_of_step
from fleetune.report.phases import phases_of, startup_parts_of, step_parts_of
from fleetune.report.rows import Table, make_table
from fleetune.report.spread import Spread
from fleetune.report.turns import read_source
from tests.report.records import (
    STEP_PARTS,
    a_record,
    scaling_bench,
    write_bench,
    write_failure,
    write_run,
    write_turn,
)


def table_of(*paths: Path) -> Table:
    return make_table([read_source(path) for path in paths])


def test_speed_counts_no_discarded_step(tmp_path: Path) -> None:
    """16 examples in 0.5 s, and in 0.55 s in the other round; the first update took five times as long."""
    row = table_of(scaling_bench(tmp_path)).rows[0]
    assert [one.samples_per_s for one in row.measures] == pytest.approx([32.0, 16 / 0.55])
    assert [one.tokens_per_s for one in row.measures] == pytest.approx([1600.0, 50 * 16 / 0.55])
    assert [one.step_s for one in row.measures] == pytest.approx([0.5, 0.55])


def test_a_full_run_is_extrapolated_from_steps(tmp_path: Path) -> None:
    """3 epochs of 100 updates of 0.5 s; 20 s until the first; 3.6 an hour and host are 0.001 a second."""
    first = table_of(scaling_bench(tmp_path)).rows[0].measures[0]
    assert first.training_s == pytest.approx(150.0)
    assert first.startup_s == pytest.approx(20.0)
    assert first.wall_s == pytest.approx(170.0)
    assert first.cost == pytest.approx(0.170)
    assert first.is_extrapolated
    assert first.metrics == {}


def test_speedups_are_taken_within_rounds(tmp_path: Path) -> None:
    """Both rounds have the same ratios, whatever slowed the second down: 2 x 0.5 / 0.6 and 4 x 0.5 / 0.8."""
    rows = table_of(scaling_bench(tmp_path)).rows
    assert [row.speedup.mean for row in rows if row.speedup] == pytest.approx([1.0, 2 * 5 / 6, 4 * 5 / 8])
    assert [row.efficiency.mean for row in rows if row.efficiency] == pytest.approx([1.0, 5 / 6, 5 / 8])
    assert [row.ideal for row in rows] == [1.0, 2.0, 4.0]
    assert [row.speedup.deviation for row in rows if row.speedup] == [None, pytest.approx(0), pytest.approx(0)]


def test_bytes_are_those_of_the_interfaces_by_ranks(tmp_path: Path) -> None:
    """Each host's interface sent 2 MB an update and rank; on one host none was asked, and nothing crossed a network."""
    rows = table_of(scaling_bench(tmp_path)).rows
    assert [row.first("step_bytes") for row in rows] == pytest.approx([0.0, 2e6, 2e6])


def test_a_full_bench_has_metrics_over_seeds_and_measured_times(tmp_path: Path) -> None:
    write_bench(tmp_path, mode="full", steps=None, discarded_steps=0, sizes=["1 host"], rounds=3, seeds=[42, 43, 44])
    for number, accuracy in enumerate((0.80, 0.82, 0.84), start=1):
        write_turn(tmp_path, "1 host", number, a_record(accuracy=accuracy, seed=41 + number))
    table = table_of(tmp_path)
    assert table.metric == "accuracy"
    metric = table.rows[0].metric("accuracy")
    assert metric is not None
    assert [metric.mean, metric.deviation, metric.count] == pytest.approx([0.82, 0.02, 3])
    first = table.rows[0].measures[0]
    assert [first.training_s, first.other_s, first.startup_s] == pytest.approx([7.5, 4.0, 20.0])
    assert first.wall_s == pytest.approx(31.5)


def test_an_epochs_last_update_has_what_is_left() -> None:
    plan = {"steps_per_epoch": 3, "global_batch_size": 32, "num_examples": 90}
    assert [samples_of_step(plan, step) for step in range(5)] == [32, 32, 26, 32, 32]


def test_parts_of_an_update_leave_the_first_out_and_add_up(tmp_path: Path) -> None:
    row = table_of(scaling_bench(tmp_path)).rows[0]
    parts = dict(step_parts_of(row))
    assert parts["matrix products"] == pytest.approx(STEP_PARTS["products"] * (0.5 + 0.55) / 2)
    assert sum(parts.values()) == pytest.approx((0.5 + 0.55) / 2)


def test_phases_of_a_full_run_add_up_to_its_wall_time(tmp_path: Path) -> None:
    write_bench(tmp_path, mode="full", steps=None, discarded_steps=0, sizes=["1 host"])
    write_turn(tmp_path, "1 host", 1, a_record())
    row = table_of(tmp_path).rows[0]
    assert sum(seconds for _, seconds in phases_of(row)) == pytest.approx(row.first("wall_s"))


def test_parts_of_the_start_up_add_up_with_the_launcher(tmp_path: Path) -> None:
    """Of 20 seconds the ranks tell 6."""
    row = table_of(scaling_bench(tmp_path)).rows[0]
    assert dict(startup_parts_of(row)) == pytest.approx({"launcher": 14.0, "imports": 2.0, "model": 3.0, "tokens": 1.0})


def test_a_failed_size_leaves_the_others(tmp_path: Path) -> None:
    scaling_bench(tmp_path)
    for number in (1, 2):
        write_failure(tmp_path, "4 hosts", number, "node4 does not answer")
    rows = table_of(tmp_path).rows
    assert [len(row.turns) for row in rows] == [2, 2, 0]
    assert rows[2].failures[0].endswith("node4 does not answer")
    assert rows[2].speedup is None


def test_the_smallest_that_finished_is_the_base(tmp_path: Path) -> None:
    scaling_bench(tmp_path)
    for number in (1, 2):
        write_failure(tmp_path, "1 host", number, "no memory")
    rows = table_of(tmp_path).rows
    assert rows[1].speedup is not None
    assert rows[1].speedup.mean == 1.0
    assert rows[2].speedup is not None
    assert rows[2].speedup.mean == pytest.approx(2 * 6 / 8)


def test_trainers_have_bases_of_their_own(tmp_path: Path) -> None:
    write_bench(tmp_path, sizes=["1 host", "2 hosts"], trainers=["fleetune", "transformers"], rounds=1)
    for trainer, factor in (("fleetune", 1.0), ("transformers", 3.0)):
        for hosts, size in ((1, "1 host"), (2, "2 hosts")):
            record = a_record(hosts=hosts, step_s=factor * (0.5 if hosts == 1 else 0.4 + 0.1 * factor))
            write_turn(tmp_path, size, 1, record, trainer=trainer)
    rows = table_of(tmp_path).rows
    told = {(row.size, row.trainer): row.speedup.mean for row in rows if row.speedup is not None}
    assert told["2 hosts", "fleetune"] == pytest.approx(2.0)
    assert told["2 hosts", "transformers"] == pytest.approx(2 * 1.5 / 2.1)
    against = [row.against.mean if row.against is not None else None for row in rows]
    assert against == [pytest.approx(3.0), None, pytest.approx(4.2), None]


def test_runs_by_themselves(tmp_path: Path) -> None:
    """Equal settings but for the seed are repetitions; the other is a size of its own, compared by means."""
    paths = [write_run(tmp_path / f"a{i}", a_record(seed=i)) for i in range(2)]
    paths.append(write_run(tmp_path / "b", a_record(local=2, step_s=0.6)))
    rows = table_of(*reversed(paths)).rows
    assert [(row.size, len(row.turns)) for row in rows] == [("a1, a0", 2), ("b", 1)]
    assert rows[1].speedup is not None
    assert rows[1].speedup.mean == pytest.approx(2 * 5 / 6)
    assert rows[1].speedup.deviation is None
    assert rows[0].first("startup_s") == 6.0
    assert rows[0].first("cost") is None


def test_an_older_record_has_fewer_numbers(tmp_path: Path) -> None:
    row = table_of(write_run(tmp_path / "old", a_record(parts=False))).rows[0]
    assert row.first("startup_s") == 4.0
    assert row.first("samples_per_s") == pytest.approx(16 * 11 / 7.5)
    assert row.first("step_bytes") is None
    assert step_parts_of(row) == ()


@pytest.mark.parametrize("status", ["failed", "interrupted", "running"])
def test_a_run_that_did_not_finish(status: str, tmp_path: Path) -> None:
    row = table_of(write_run(tmp_path / "out", a_record(status=status))).rows[0]
    assert (len(row.turns), row.failures) == (0, (f"out: the run is {status}, at step 11",))


def test_what_is_no_run(tmp_path: Path) -> None:
    (tmp_path / "empty").mkdir()
    for name, content in (("list", "[]"), ("torn", "{"), ("other", "{}")):
        (tmp_path / f"{name}.json").write_text(content)
    told = {
        "gone": "there is no such run",
        "empty": "holds neither record.json nor bench.json",
        "torn.json": "cannot be read",
        "list.json": "a JSON object is expected, not list",
        "other.json": "no record of a run of fleetune",
    }
    for name, expected in told.items():
        with pytest.raises(ConfigError, match=expected):
            read_source(tmp_path / name)


def test_a_bench_file_of_a_newer_version_is_read_as_far_as_it_is_known(tmp_path: Path) -> None:
    write_bench(tmp_path, invented=1)
    source = read_source(tmp_path)
    assert source.bench is not None
    assert source.bench.sizes == ("1 host", "2 hosts", "4 hosts")
    content = json.loads((tmp_path / "bench.json").read_text())
    del content["sizes"]
    (tmp_path / "bench.json").write_text(json.dumps(content))
    with pytest.raises(ConfigError, match="not as `fleetune bench` writes it"):
        read_source(tmp_path)


def test_a_bench_is_read_back_as_it_was_written(tmp_path: Path) -> None:
    bench = read_source(write_bench(tmp_path)).bench
    assert bench is not None
    again = dataclasses.replace(bench, rounds=5)
    again.write(tmp_path)
    assert read_source(tmp_path).bench == again


def test_the_command_of_a_run_gives_its_settings_back(tmp_path: Path) -> None:
    from fleetune.cli.arguments import make_parser, parse
    from fleetune.config import RunConfig
    from fleetune.report.turns import train_command

    config = RunConfig(
        task="mrpc", model="a model", hosts=("node1:2", "node2"), learning_rate=1e-4, do_eval=False, max_steps=7,
        text_column_names=("a", "b"), output_dir=tmp_path / "the output", cache_dir=tmp_path, bf16="auto",
    )  # fmt: skip
    words = shlex.split(train_command(config.to_dict()))
    assert words[:2] == ["fleetune", "train"]
    assert parse(make_parser("train", ""), words[2:]).config == config


def test_files_of_a_bench_where_nothing_finished(tmp_path: Path) -> None:
    write_bench(tmp_path)
    write_failure(tmp_path, "1 host", 1, "no memory")
    paths = write_report(table_of(tmp_path), tmp_path / "report")
    assert [path.name for path in paths] == ["report.html", "report.md", "report.csv", "report.json"]
    assert "- 1 host: round 1: no memory" in paths[1].read_text()
    assert paths[2].read_text().splitlines()[1].startswith("failed,1 host,1,")
    assert json.loads(paths[3].read_text())["rows"][0]["failures"] == ["round 1: no memory"]


def test_deviations_are_as_exact_as_means() -> None:
    def told(cell: Cell) -> str:
        return cell.whole_text

    assert told(times(Spread(mean=12.34, deviation=0.5678, count=3))) == "12.3 s ± 0.6 s"
    assert told(times(Spread(mean=279.4, deviation=3.6, count=3))) == "4:39 min ± 4 s"
    assert told(times(Spread(mean=13860.0, deviation=None, count=1))) == "3:51:00 h"
    assert told(aligned(Spread(mean=1234.5, deviation=0.4, count=3), 4)) == "1,234 ± 0"
    assert told(aligned(Spread(mean=1.666, deviation=0.012, count=3))) == "1.67 ± 0.01"
    assert [rounded(x) for x in (0.0, 0.0081234, 55.123, 1234.0)] == ["0", "0.00812", "55.1", "1,234"]
