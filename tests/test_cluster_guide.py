"""The commands of docs/cluster.md, word for word, on four hosts of a lab."""

from __future__ import annotations

import csv
import re
import shutil
import sys
from pathlib import Path

import pytest

import fleetune
from lab import Lab
from tests.conftest import REPOSITORY, make_tiny_model

PAGE = (REPOSITORY / "docs" / "cluster.md").read_text(encoding="utf-8")
COMMANDS = [line for block in re.findall(r"```sh\n(.*?)```", PAGE, re.DOTALL) for line in block.splitlines()]


def write_mrpc(folder: Path) -> None:
    """Files in the layout of GLUE's MRPC, with sentences of the tiny model's words."""
    folder.mkdir(parents=True)
    for name, count in (("train", 32), ("dev", 16)):
        with (folder / f"{name}.tsv").open("w", encoding="utf-8", newline="") as file:
            writer = csv.writer(file, delimiter="\t", lineterminator="\n")
            writer.writerow(["Quality", "#1 ID", "#2 ID", "#1 String", "#2 String"])
            for i in range(count):
                writer.writerow([i % 2, i, i + 1, "the cat sees the house", f"the {('dog', 'cat')[i % 2]} runs"])


def test_the_page_has_commands() -> None:
    assert [line.split()[1] for line in COMMANDS if line.startswith("fleetune")] == [
        "setup", "doctor", "plan", "train", "train", "launch"
    ]  # fmt: skip


@pytest.mark.slow
def test_every_command_of_the_guide_works(tmp_path: Path) -> None:
    if reason := Lab.unavailable(with_ssh=True):
        pytest.skip(reason)
    write_mrpc(tmp_path / "glue_data" / "MRPC")
    make_tiny_model(tmp_path / "encoder")
    (tmp_path / "script.py").write_text("import os, sys; print('rank', os.environ['RANK'], sys.argv[1:])")
    base = Path(*tmp_path.parts[:3])
    with Lab.up(4, with_ssh=True, keep=[base] if tmp_path.is_relative_to("/tmp") else []) as lab:
        environ = {
            "PATH": f"{Path(sys.executable).parent}:/usr/bin:/bin:/usr/sbin:/sbin",
            "HF_HUB_OFFLINE": "1",
            "PYTHONPATH": str(Path(fleetune.__file__).parents[1]),
        }
        said = {}
        for line in COMMANDS:
            result = lab["node1"].run(["bash", "-c", line], env=environ, cwd=tmp_path, timeout=200)
            assert result.returncode == 0, f"{line}\n{result.stdout}\n{result.stderr}"
            said[line] = result.stdout
            if "--dry_run" in line:
                assert not (tmp_path / "out").exists()
    train = next(line for line in COMMANDS if line.startswith("fleetune train") and "--dry_run" not in line)
    assert "global batch   64 examples = 4 processes x 16" in said[train]
    assert sorted(path.name for path in (tmp_path / "out" / "logs").iterdir()) == [
        f"node{i + 1}.{i}.log" for i in range(4)
    ]
    assert said[COMMANDS[-1]].splitlines() == ["rank 0 ['--some', 'argument']"]
    shutil.rmtree(tmp_path / "out")
