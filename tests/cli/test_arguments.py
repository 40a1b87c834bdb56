"""Flags: every setting in every spelling, the help, `--print_config`, and what is refused before a run starts."""

from __future__ import annotations

import dataclasses
from pathlib import Path

import pytest

from fleetune.cli import main
from fleetune.cli.arguments import make_parser, parse
from fleetune.config import RunConfig, config_from_mapping, read_config_file, to_toml
from fleetune.config.names import ALIASES, RETIRED
from fleetune.errors import ConfigError


@pytest.fixture(autouse=True)
def _no_launcher(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT"):
        monkeypatch.delenv(name, raising=False)


def config_of(line: str) -> RunConfig:
    return parse(make_parser("train", ""), line.split()).config


def problems_of(line: str) -> tuple[str, ...]:
    with pytest.raises(ConfigError) as caught:
        config_of(line)
    return caught.value.problems


def error_of(line: list[str], capsys: pytest.CaptureFixture[str]) -> str:
    """What a command says on stderr before it ends with status 2."""
    assert main.run(line) == 2
    told = capsys.readouterr()
    assert told.out == ""
    assert "Traceback" not in told.err
    return told.err.removeprefix("error: ").rstrip("\n")


@pytest.mark.parametrize("field", dataclasses.fields(RunConfig), ids=lambda f: f.name)
def test_every_setting_is_a_flag_with_each_of_its_names(field: dataclasses.Field[object]) -> None:
    values = {"learning_rate": "2e-5", "problem_type": "auto", "on_bad_row": "skip", "scale_lr": "sqrt",
             "lr_scheduler_type": "cosine", "eval_strategy": "no", "save_strategy": "no", "report_to": "none",
             "warmup_ratio": "0.5", "adam_beta1": "0.5", "adam_beta2": "0.5", "bf16": "auto",
             "grad_dtype": "bfloat16", "launcher": "slurm", "freeze": "layers:7", "layerwise_lr_decay": "0.5",
             "label_smoothing_factor": "0.5", "early_stopping_threshold": "0",
             # what means nothing without --lora_r
             "lora_alpha": "none", "lora_dropout": "0", "lora_target_modules": "none",
             "lora_merge": "false"}  # fmt: skip
    value = values.get(field.name)
    if value is None:
        value = "true" if "bool" in str(field.type) else "7"
    if field.name == "load_best_model_at_end":
        value = "false"
    expected = RunConfig(**{field.name: value})
    names = [field.name, *(alias for alias, name in ALIASES.items() if name == field.name)]
    for name in names:
        for flag in (f"--{name}", f"--{name.replace('_', '-')}"):
            assert config_of(f"{flag} {value}") == expected
            assert config_of(f"{flag}={value}") == expected


def test_help_shows_every_setting_with_its_default(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as end:
        main.run(["train", "--help"])
    assert end.value.code == 0
    text = " ".join(capsys.readouterr().out.split())
    for field in dataclasses.fields(RunConfig):
        assert f"--{field.name} " in text
        default = str(field.default).lower() if isinstance(field.default, bool) else field.default
        default = ",".join(default) if isinstance(default, tuple) else default
        shown = text.split(f" --{field.name} ", 1)[1]
        meaning = " ".join(field.metadata["help"].split())
        assert meaning in shown
        if field.default is not None:
            assert shown.split(meaning, 1)[1].startswith(f" (default: {default})"), field.name
    for word in RETIRED:
        assert f"--{word} " not in text
    for alias in ALIASES:
        assert f"--{alias}" in text


def test_flags_that_may_stand_alone() -> None:
    found = config_of("--do_predict --overwrite_output_dir --resume_from_checkpoint --fp16 --no_cuda --seed 3")
    assert (found.do_predict, found.overwrite_output_dir, found.resume_from_checkpoint) == (True, True, "auto")
    assert found.seed == 3
    assert config_of("--do_eval false").do_eval is False
    assert config_of("--resume out/checkpoint-5").resume_from_checkpoint == "out/checkpoint-5"


def test_a_negative_number_is_a_value() -> None:
    assert config_of("--max_steps -1").max_steps is None
    assert problems_of("--seed -3") == ("--seed '-3': a value at least 0 is expected",)


SEEDS = "--seeds is not a setting (did you mean seed?)"


@pytest.mark.parametrize(
    ("line", "problems"),
    [
        ("--lr 1 --learning-rate 2", ["--lr and --learning-rate are the same setting: give one"]),
        ("--learning_rate 1 --learning-rate 2", ["--learning_rate and --learning-rate are the same setting: give one"]),
        ("--seeds 1 --epoch=2", [SEEDS, "--epoch is not a setting (did you mean epochs?)"]),
        ("--seeds 1 --learning_rate x", [SEEDS, "--learning_rate 'x': a number is expected"]),
        ("--learn 1", ["--learn is not a setting"]),  # an abbreviation is not guessed
    ],
)  # fmt: skip
def test_what_is_refused(line: str, problems: list[str]) -> None:
    found = problems_of(line)
    assert len(found) == len(problems)
    for problem, expected in zip(found, problems, strict=True):
        assert problem.startswith(expected)


@pytest.mark.parametrize("line", ["mrpc", "-lr 3", "task=mrpc"])
def test_a_word_that_is_no_flag(line: str) -> None:
    (problem,) = problems_of(line)
    assert problem.startswith(f"{line}: not understood")
    assert problem.endswith("settings begin with --")


def test_a_flag_without_its_value() -> None:
    (problem,) = problems_of("--learning_rate --seed 3")
    assert problem.startswith("argument --learning_rate: expected one argument (fleetune train --help")


def test_the_file_gives_what_the_flags_do_not(tmp_path: Path) -> None:
    path = tmp_path / "run.toml"
    path.write_text("lr = 1.0\nseed = 5\nno_cuda = true\n")
    parsed = parse(make_parser("train", ""), ["--config", str(path), "--learning-rate", "3", "--use_ipex"])
    assert (parsed.config.learning_rate, parsed.config.seed) == (3.0, 5)
    assert [n.split(":")[0] for n in parsed.notices] == ["--no_cuda", "--use_ipex"]


def test_print_config_is_read_back(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    line = ["--task", "mrpc", "--text_column_names", "a,b", "--save_total_limit", "none", "--lr", "3e-5", "--use_ipex"]
    with pytest.raises(SystemExit) as end:
        main.run(["train", *line, "--print-config"])
    assert end.value.code == 0
    path = tmp_path / "run.toml"
    path.write_text(capsys.readouterr().out)
    config = config_from_mapping(read_config_file(path))[0]
    assert config == RunConfig(
        task="mrpc", text_column_names=("a", "b"), save_total_limit=None, learning_rate=3e-5
    )  # fmt: skip
    assert path.read_text() == to_toml(config)


def test_print_config_of_bad_settings_is_an_error(capsys: pytest.CaptureFixture[str]) -> None:
    assert "--seed" in error_of(["train", "--seed", "x", "--print_config"], capsys)


# train


def test_train_without_anything_says_all_it_needs(capsys: pytest.CaptureFixture[str]) -> None:
    told = error_of(["train"], capsys).splitlines()
    assert [line.split(":")[0] for line in told] == ["no data", "--model is missing", "--output_dir is missing"]


def test_train_refuses_before_it_writes(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    out = tmp_path / "out"
    told = error_of(
        ["train", "--train_file", str(tmp_path / "gone.csv"), "--model", "m", "--output_dir", str(out)], capsys
    )
    assert f"--train_file {tmp_path}/gone.csv: there is no such file" in told
    assert not out.exists()


@pytest.mark.parametrize("command", ["train", "evaluate", "predict"])
def test_retired_words_are_told_by_every_command(
    command: str, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    file = tmp_path / "rows.csv"
    file.write_text("text,label\n")
    source = ["--train_file", str(file), "--validation_file", str(file)]
    line = {
        "train": [*source, "--model", "m", "--output_dir", str(tmp_path / "out")],
        "evaluate": [str(tmp_path), *source[2:]],
        "predict": [str(tmp_path), "--input", str(file), "--output", str(tmp_path / "p.jsonl")],
    }[command]
    for module in ("train", "asking"):  # the work itself is left out
        monkeypatch.setattr(f"fleetune.cli.{module}.start_ranks", lambda *words, **options: 0)
    assert main.run([command, *line, "--no_cuda", "--xpu_backend", "ccl"]) == 0
    told = capsys.readouterr().out.splitlines()
    assert [t.split(":")[0] for t in told] == ["--no_cuda", "--xpu_backend"]
