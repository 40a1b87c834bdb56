"""Where results go, and what they say of the machine and of how to repeat them."""

from __future__ import annotations

import json
import socket
from pathlib import Path

from benchmarks.result_file import REPOSITORY, command, describe, shown_path, unused_path, write_result


def test_an_earlier_result_of_the_day_is_kept(tmp_path: Path) -> None:
    first = unused_path(tmp_path, "speed", "2030-01-31")
    assert first.name == "speed-2030-01-31.json"
    first.touch()
    second = unused_path(tmp_path, "speed", "2030-01-31")
    assert second.name == "speed-2030-01-31-2.json"
    second.touch()
    assert unused_path(tmp_path, "speed", "2030-01-31").name == "speed-2030-01-31-3.json"


def test_command_leaves_out_what_is_not_set_and_quotes_the_rest() -> None:
    options = {"rows": 10, "processes": [1, 2], "model": None, "data_dir": "my data"}
    assert command("speed", options) == "python -m benchmarks.speed --rows 10 --processes 1 2 --data_dir 'my data'"


def test_paths_are_shown_from_the_repository() -> None:
    assert shown_path(REPOSITORY / "benchmarks" / "results") == "benchmarks/results"
    assert shown_path(REPOSITORY.parent / "data") == "../data"


def test_description_names_versions_but_not_the_host(tmp_path: Path) -> None:
    head = describe("speed", {})
    assert {"torch", "transformers", "accelerate", "fleetune"} <= set(head["versions"])
    assert head["host"]["usable_cores"] >= 1
    assert "hostname" not in head["host"]
    path = write_result(head, tmp_path / "result.json")
    assert json.loads(path.read_text())["command"] == "python -m benchmarks.speed"
    assert f'"{socket.gethostname()}"' not in path.read_text()
