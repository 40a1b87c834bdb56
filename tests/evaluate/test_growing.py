"""Files of predictions that grow: whole rows, and what a run that was killed leaves."""

from __future__ import annotations

import json
import os
from dataclasses import replace
from pathlib import Path

import pytest

from fleetune.errors import OutputError
from fleetune.evaluate.growing import (
    GrowingFile,
    Progress,
    differences,
    partial_of,
    progress_file_of,
    read_progress,
)

EMPTY = Progress(made_by={"the input": "1f"})


def test_what_is_behind_the_last_whole_rows_is_cut_off(tmp_path: Path) -> None:
    output = tmp_path / "sub" / "p.jsonl"
    file = GrowingFile(output, EMPTY)
    file.append(b"one\ntwo\n", replace(EMPTY, num_rows=3, last_row=4, num_predictions=2, num_bytes=8, num_bad_rows=1,
                                      bad_rows=("row 3 (it is empty)",)))  # fmt: skip
    file.close()
    with partial_of(output).open("ab") as rest:
        rest.write(b"thr")  # a run was killed while it wrote
    found = read_progress(output)
    assert found == file.progress
    assert found is not None
    file = GrowingFile(output, found)
    assert partial_of(output).read_bytes() == b"one\ntwo\n"
    file.append(b"three\n", replace(found, num_rows=4, num_bytes=14))
    assert not output.exists()
    file.complete()
    file.close()
    assert output.read_bytes() == b"one\ntwo\nthree\n"
    assert [path.name for path in output.parent.iterdir()] == ["p.jsonl"]
    assert read_progress(output) is None


def test_an_earlier_output_stays_until_the_new_one_is_complete(tmp_path: Path) -> None:
    output = tmp_path / "p.jsonl"
    output.write_text("old\n")
    file = GrowingFile(output, EMPTY)
    file.append(b"new\n", replace(EMPTY, num_bytes=4))
    assert output.read_text() == "old\n"
    file.complete()
    file.close()
    assert output.read_text() == "new\n"


@pytest.mark.parametrize("damage", ["no file", "shorter", "no JSON", "another format", "another field"])
def test_progress_that_cannot_be_trusted_is_none(tmp_path: Path, damage: str) -> None:
    output = tmp_path / "p.jsonl"
    file = GrowingFile(output, EMPTY)
    file.append(b"one\n", replace(EMPTY, num_bytes=4))
    file.close()
    told = progress_file_of(output)
    content = json.loads(told.read_text())
    if damage == "no file":
        partial_of(output).unlink()
    if damage == "shorter":
        os.truncate(partial_of(output), 3)
    if damage == "no JSON":
        told.write_text("{")
    if damage == "another format":
        told.write_text(json.dumps({**content, "format": 99}))
    if damage == "another field":
        told.write_text(json.dumps({**content, "rows": 4}))
    assert read_progress(output) is None


def test_two_processes_do_not_write_one_file(tmp_path: Path) -> None:
    first = GrowingFile(tmp_path / "p.jsonl", EMPTY)
    first.append(b"one\n", replace(EMPTY, num_bytes=4))
    with pytest.raises(OutputError, match=r"p\.jsonl: another process is writing it"):
        GrowingFile(tmp_path / "p.jsonl", EMPTY)
    assert partial_of(tmp_path / "p.jsonl").read_bytes() == b"one\n"
    first.close()
    GrowingFile(tmp_path / "p.jsonl", EMPTY).close()


def test_a_folder_that_cannot_be_written(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(OutputError, match="cannot be written"):
        GrowingFile(tmp_path / "file" / "p.jsonl", EMPTY)


def test_differences_in_words() -> None:
    before, now = {"the model": "a", "--max_seq_length": 128, "gone": 1}, {"the model": "a", "--max_seq_length": 64}
    assert differences(before, now) == ["--max_seq_length was 128, is 64", "gone was 1, is None"]
    assert differences(now, now) == []
