"""The record of a run: written whole, read back, and its phases add up."""

from __future__ import annotations

import dataclasses
import json
import time
from datetime import datetime
from pathlib import Path

import pytest

from fleetune.errors import OutputError
from fleetune.report.record import RECORD_FILE, RunRecord, read_record

FULL = RunRecord(
    status="interrupted", config={"model": "ä", "text_column_names": ["a", "b"]}, plan={"total_steps": 5},
    task={"name": "mrpc"}, versions={"torch": "2"}, host={"cores": 2}, started="2026-01-02T03:04:05+0000",
    resumed_at_step=3, step=4, seconds={"training": 1.5}, throughput={"samples_per_s": 2.5},
    metrics={"eval_f1": 0.5, "eval_pearson": None}, notices=["a line"], bad_rows={"train": {"count": 1, "first": []}},
)  # fmt: skip


def test_it_is_read_back_as_it_was(tmp_path: Path) -> None:
    FULL.write(tmp_path)
    assert read_record(tmp_path) == FULL
    assert [p.name for p in tmp_path.iterdir()] == ["record.json"]


def test_it_is_readable_json_with_every_field(tmp_path: Path) -> None:
    FULL.write(tmp_path)
    text = (tmp_path / RECORD_FILE).read_text(encoding="utf-8")
    assert '"model": "ä"' in text
    assert list(json.loads(text)) == [f.name for f in dataclasses.fields(RunRecord)]


def test_a_record_of_a_newer_version_is_read_as_far_as_it_is_known(tmp_path: Path) -> None:
    (tmp_path / RECORD_FILE).write_text(json.dumps({"config": {"seed": 1}, "status": "finished", "invented": 1}))
    found = read_record(tmp_path)
    assert found is not None
    assert (found.config, found.status, found.step) == ({"seed": 1}, "finished", 0)


@pytest.mark.parametrize("content", [b"", b"{", b"[]", b"null", b"{}", b'{"status": "finished"}', b"\xff\xfe{", b"5"])
def test_what_is_no_record_is_none(tmp_path: Path, content: bytes) -> None:
    (tmp_path / RECORD_FILE).write_bytes(content)
    assert read_record(tmp_path) is None


def test_no_file_no_folder_no_record(tmp_path: Path) -> None:
    assert read_record(tmp_path) is None
    assert read_record(tmp_path / "gone") is None
    (tmp_path / RECORD_FILE).mkdir()
    assert read_record(tmp_path) is None


def test_a_record_that_cannot_be_written_leaves_the_one_before(tmp_path: Path) -> None:
    FULL.write(tmp_path)
    with pytest.raises(TypeError):
        dataclasses.replace(FULL, plan={"bad": object()}).write(tmp_path)
    assert read_record(tmp_path) == FULL
    assert [p.name for p in tmp_path.iterdir()] == ["record.json"]


def test_a_folder_that_is_a_file(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(OutputError, match=r"record\.json cannot be written"):
        FULL.write(tmp_path / "file")


def test_times_of_a_phase_add_up(monkeypatch: pytest.MonkeyPatch) -> None:
    clock = iter([10.0, 12.5, 100.0, 101.0, 200.0, 200.25, 300.0, 304.0])
    monkeypatch.setattr(time, "perf_counter", lambda: next(clock))
    record = RunRecord(config={})
    with record.phase("training"):
        pass
    with record.phase("evaluation"):
        pass
    with record.phase("training"):
        pass
    with pytest.raises(RuntimeError), record.phase("training"):
        raise RuntimeError  # what failed took its time too
    assert record.seconds == {"training": 2.5 + 0.25 + 4.0, "evaluation": 1.0}


def test_phases_are_wall_time() -> None:
    record = RunRecord(config={})
    with record.phase("sleep"):
        time.sleep(0.02)
    assert 0.02 <= record.seconds["sleep"] < 5


def test_the_start_is_now_with_its_time_zone() -> None:
    started = datetime.strptime(RunRecord(config={}).started, "%Y-%m-%dT%H:%M:%S%z")
    assert abs((datetime.now().astimezone() - started).total_seconds()) < 60


def test_records_do_not_share_what_they_collect() -> None:
    one, other = RunRecord(config={}), RunRecord(config={})
    one.notices.append("a line")
    one.seconds["x"] = 1.0
    assert (other.notices, other.seconds) == ([], {})
