"""`fleetune plan` on this machine."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Callable

import pytest

from fleetune.cli import main
from tests.conftest import environment

Run = Callable[..., int]


@pytest.fixture(autouse=True)
def _no_launcher(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in set(os.environ) - set(environment()):
        monkeypatch.delenv(name)


def test_it_prints_a_table_and_the_reasons(capsys: pytest.CaptureFixture[str]) -> None:
    assert main.run(["plan"]) == 0
    told = capsys.readouterr()
    assert told.err == ""
    lines = told.out.splitlines()
    assert lines[0].split("  ")[0] == "rank"
    assert lines[1].startswith("0 ")
    topics = [line.split()[0] for line in lines[lines.index("") + 1 :]]
    assert topics[:5] == ["ranks", "threads", "cores", "memory", "allocator"]


def test_settings_of_training_are_taken(capsys: pytest.CaptureFixture[str]) -> None:
    assert main.run(["plan", "--model", "x", "--train_file", "none.csv", "--processes", "3", "--threads", "2"]) == 0
    told = capsys.readouterr().out
    assert [line.split()[0] for line in told.splitlines()[1:4]] == ["0", "1", "2"]
    assert "threads        2 a rank, as --threads says\n" in told


@pytest.mark.parametrize(
    ("words", "line"),
    [
        (["--processes", "0"], "error: --processes '0': a value at least 1 is expected\n"),
        (["--thread", "2"], "error: --thread is not a setting (did you mean threads?)\n"),
    ],
)
def test_unusable_settings(words: list[str], line: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main.run(["plan", *words]) == 2
    assert capsys.readouterr() == ("", line)


def test_an_unusable_variable(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setenv("OMP_NUM_THREADS", "many")
    assert main.run(["plan"]) == 2
    assert capsys.readouterr().err.startswith("error: OMP_NUM_THREADS=many is not a number")


def launched(monkeypatch: pytest.MonkeyPatch, rank: int) -> None:
    """This process as one of two ranks of torchrun's."""
    told = {"RANK": str(rank), "WORLD_SIZE": "2", "LOCAL_RANK": str(rank), "LOCAL_WORLD_SIZE": "2"}
    told |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "29500"}
    for name, value in told.items():
        monkeypatch.setenv(name, value)


def test_a_launcher_decides_the_ranks_and_one_speaks(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    launched(monkeypatch, 0)
    assert main.run(["plan"]) == 0
    assert "ranks          2, as the settings or the launcher say\n" in capsys.readouterr().out
    launched(monkeypatch, 1)
    assert main.run(["plan"]) == 0
    assert capsys.readouterr() == ("", "")


def test_another_number_than_the_launchers_is_refused(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    launched(monkeypatch, 0)
    assert main.run(["plan", "--processes", "3"]) == 2
    assert "--processes 3: env started 2 ranks; leave it out" in capsys.readouterr().err


def test_it_imports_nothing_heavy() -> None:
    script = (
        "import sys\n"
        "from fleetune.cli import main\n"
        "assert main.run(['plan']) == 0\n"
        "assert not {'torch', 'numpy', 'transformers'} & set(sys.modules)\n"
    )
    subprocess.run([sys.executable, "-c", script], check=True, capture_output=True, timeout=60, env=environment())


def test_what_follows_from_the_ranks_is_told(capsys: pytest.CaptureFixture[str]) -> None:
    words = ["--processes", "3", "--learning_rate", "1e-5", "--gradient_accumulation_steps", "2", "--bf16", "auto"]
    assert main.run(["plan", *words]) == 0
    told = capsys.readouterr().out.splitlines()[-3:]
    assert told == [
        "arithmetic     bfloat16 where the CPU has units for it and a probe of the model's layers finds it faster",
        "global batch   96 examples = 3 processes x 16 x 2 accumulation steps",
        "learning rate  1e-05 x 3 (--scale_lr linear, 3 processes) = 3e-05, linear",
    ]
