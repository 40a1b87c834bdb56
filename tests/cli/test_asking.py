"""`fleetune evaluate` and `fleetune predict`: settings from the run's record, and what is refused before the work."""

from __future__ import annotations

from pathlib import Path

import pytest

from fleetune.cli import main
from fleetune.cli.arguments import make_parser, parse
from fleetune.cli.asking import EVALUATING, PREDICTING, READING, SOURCE, model_to_ask, of_finished_run
from fleetune.config import RunConfig
from fleetune.report.record import RunRecord


@pytest.fixture(autouse=True)
def _no_launcher(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT"):
        monkeypatch.delenv(name, raising=False)


@pytest.fixture
def rows(tmp_path: Path) -> Path:
    path = tmp_path / "rows.csv"
    path.write_text("text,label\n")
    return path


@pytest.fixture
def finished(tmp_path: Path, rows: Path) -> Path:
    """The folder of a finished run."""
    folder = tmp_path / "out"
    folder.mkdir()
    config = RunConfig(
        task="mrpc", data_dir=tmp_path, model="bert", output_dir=folder, max_seq_length=99, encoding="cp1252", seed=7,
        text_column_names=("a", "b"), learning_rate=1.0,
    )  # fmt: skip
    RunRecord(config=config.to_dict(), status="finished").write(folder)
    return folder


def error_of(line: list[object], capsys: pytest.CaptureFixture[str]) -> str:
    assert main.run([str(word) for word in line]) == 2
    told = capsys.readouterr()
    assert told.out == ""
    assert "Traceback" not in told.err
    return told.err.removeprefix("error: ").rstrip("\n")


def config_of(folder: Path, *words: str) -> RunConfig:
    parser = make_parser("evaluate", "", EVALUATING)
    parser.add_argument("model_folder")
    return parse(parser, [str(folder), *words], ("model_folder",), of_finished_run, model_to_ask).config


def test_what_is_not_given_is_the_runs(finished: Path, tmp_path: Path) -> None:
    found = config_of(finished)
    assert (found.task, found.data_dir, found.max_seq_length, found.encoding) == ("mrpc", tmp_path, 99, "cp1252")
    assert found.text_column_names == ("a", "b")
    assert found.model == str(finished)
    # what only concerns training is not taken over
    assert (found.output_dir, found.seed, found.learning_rate) == (None, 42, 2e-5)


def test_other_data_replace_all_that_the_run_says_of_its_data(finished: Path, rows: Path) -> None:
    found = config_of(finished, "--validation_file", str(rows))
    assert (found.task, found.data_dir, found.validation_file) == (None, None, rows)
    assert (found.max_seq_length, found.encoding) == (99, "cp1252")
    assert found.text_column_names is None
    assert config_of(finished, "--validation_file", str(rows), "--text-columns", "c").text_column_names == ("c",)


def test_flags_go_before_the_record(finished: Path) -> None:
    assert config_of(finished, "--max_length", "50").max_seq_length == 50


def test_a_folder_without_a_record_gives_its_name_only(tmp_path: Path) -> None:
    assert config_of(tmp_path) == RunConfig(model=str(tmp_path))


def test_the_run_file_of_the_training_does_not_change_what_is_asked(finished: Path, tmp_path: Path) -> None:
    """`fleetune evaluate out --config run.toml` is about out, also where the file names the model it came from."""
    path = tmp_path / "run.toml"
    path.write_text('model = "bert-base-uncased"\noutput_dir = "elsewhere"\nmax_seq_length = 33\n')
    found = config_of(finished, "--config", str(path))
    assert found.model == str(finished)
    assert found.max_seq_length == 33


@pytest.mark.parametrize(
    "words", [["--learning_rate", "1"], ["--lr=1"], ["--save_steps", "5"], ["--model", "x"], ["--max-steps", "5"]]
)
def test_a_setting_of_training_is_refused_not_ignored(
    finished: Path, words: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    name = words[0].split("=")[0]
    expected = f"{name} is a setting of `fleetune train`, this command does not take it"
    assert error_of(["evaluate", finished, *words], capsys) == expected


def test_all_problems_of_a_command_are_told_at_once(finished: Path, capsys: pytest.CaptureFixture[str]) -> None:
    told = error_of(["evaluate", finished, "--seed", "1", "--bogus", "2", "--max_seq_length", "x"], capsys).splitlines()
    assert [line.split(" ")[0] for line in told] == ["--seed", "--bogus", "--max_seq_length"]


def test_the_sets_of_settings_are_settings() -> None:
    names = set(RunConfig().to_dict())
    assert names >= EVALUATING >= SOURCE | READING
    assert names >= PREDICTING
    assert not SOURCE & READING
    assert "model" not in EVALUATING | PREDICTING


def test_evaluate_needs_a_folder_and_data(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert "the following arguments are required: model_folder" in error_of(["evaluate"], capsys)
    assert error_of(["evaluate", tmp_path], capsys).startswith(
        "no data: give --task with --data_dir, --validation_file"
    )
    gone = tmp_path / "gone.csv"
    told = error_of(["evaluate", tmp_path, "--validation_file", gone], capsys)
    assert told == f"--validation_file {gone}: there is no such file"


def test_evaluate_refuses_a_folder_as_output(
    finished: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    told = error_of(["evaluate", finished, "--output", tmp_path], capsys)
    assert told == f"--output {tmp_path}: it is a folder, a file is expected"


def test_evaluate_refuses_a_file_as_a_folder(finished: Path, rows: Path, capsys: pytest.CaptureFixture[str]) -> None:
    told = error_of(["evaluate", finished, "--output_dir", rows], capsys)
    assert told == f"--output_dir {rows}: it is a file, a folder is expected"


@pytest.mark.parametrize(
    ("left_out", "words"),
    [("--input", "required: --input"), ("--output", "required: --output"), ("folder", "required: model_folder")],
)
def test_predict_needs_folder_input_and_output(
    finished: Path, rows: Path, tmp_path: Path, left_out: str, words: str, capsys: pytest.CaptureFixture[str]
) -> None:
    given = {"folder": [finished], "--input": ["--input", rows], "--output": ["--output", tmp_path / "p.jsonl"]}
    line = [word for name, part in given.items() if name != left_out for word in part]
    assert words in error_of(["predict", *line], capsys)


def test_predict_refuses_what_would_lose_something(
    finished: Path, rows: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    gone, output = tmp_path / "gone.csv", tmp_path / "p.jsonl"
    told = error_of(["predict", finished, "--input", gone, "--output", output], capsys)
    assert told == f"--input {gone}: there is no such file"
    told = error_of(["predict", finished, "--input", tmp_path, "--output", output], capsys)
    assert told == f"--input {tmp_path}: there is no such file"
    told = error_of(["predict", finished, "--input", rows, "--output", rows], capsys)
    assert told == f"--output {rows}: it is the input file"
    (tmp_path / "link.jsonl").symlink_to(rows)
    told = error_of(["predict", finished, "--input", rows, "--output", tmp_path / "link.jsonl"], capsys)
    assert told.endswith("it is the input file")
    told = error_of(["predict", finished, "--input", rows, "--output", tmp_path], capsys)
    assert told == f"--output {tmp_path}: it is a folder, a file is expected"
    assert rows.read_text() == "text,label\n"


def test_demo_needs_somewhere_to_write(capsys: pytest.CaptureFixture[str]) -> None:
    assert error_of(["demo", "--output_dir", "none"], capsys).startswith("--output_dir is missing")
