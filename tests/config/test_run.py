"""Values of settings: conversion, ranges, contradictions, and what a training run needs."""

from __future__ import annotations

import dataclasses
import os
from pathlib import Path
from typing import Any

import pytest

from fleetune.config import RunConfig
from fleetune.config.run import check_source, check_train, user_cache
from fleetune.errors import ConfigError


def problems_of(**values: Any) -> list[str]:
    with pytest.raises(ConfigError) as caught:
        RunConfig(**values)
    return list(caught.value.problems)


def test_the_defaults_are_the_published_recipe() -> None:
    config = RunConfig()
    assert (config.learning_rate, config.per_device_train_batch_size, config.num_train_epochs) == (2e-5, 16, 3.0)
    assert (config.lr_scheduler_type, config.warmup_steps, config.weight_decay) == ("linear", 0, 0.0)
    assert (config.max_seq_length, config.max_grad_norm, config.scale_lr) == (128, 1.0, "linear")
    assert (config.adam_beta1, config.adam_beta2, config.adam_epsilon) == (0.9, 0.999, 1e-8)
    assert config.cache_dir == user_cache(os.environ).expanduser()


@pytest.mark.parametrize(("told", "place"), [
    (None, "~/.cache/fleetune"), ("", "~/.cache/fleetune"), ("/c", "/c/fleetune"), ("c", "~/.cache/fleetune"),
])  # fmt: skip
def test_the_users_cache(told: str | None, place: str) -> None:
    assert user_cache({} if told is None else {"XDG_CACHE_HOME": told}) == Path(place)


@pytest.mark.parametrize(
    ("name", "given", "value"),
    [
        ("learning_rate", "2e-5", 2e-5), ("learning_rate", 1, 1.0), ("seed", "7", 7), ("seed", 7.0, 7),
        ("seed", "1e3", 1000), ("seed", "9007199254740993", 9007199254740993), ("max_steps", "12", 12),
        ("do_eval", "False", False), ("do_eval", "off", False), ("do_eval", 0, False), ("do_predict", "YES", True),
        ("do_predict", True, True), ("output_dir", "a/b", Path("a/b")), ("output_dir", Path("x"), Path("x")),
        ("output_dir", "~/x", Path.home() / "x"), ("text_column_names", "a, b", ("a", "b")),
        ("text_column_names", ["a"], ("a",)), ("text_column_names", "a", ("a",)), ("label_column_name", 3, "3"),
        ("eval_strategy", False, "no"), ("save_strategy", "no", "no"), ("greater_is_better", "false", False),
        ("resume_from_checkpoint", True, "auto"), ("resume_from_checkpoint", False, None),
        ("resume_from_checkpoint", "out/checkpoint-5", "out/checkpoint-5"),
    ],
)  # fmt: skip
def test_values_become_the_type_of_their_field(name: str, given: Any, value: Any) -> None:
    found = getattr(RunConfig(**{name: given}), name)
    assert found == value
    assert type(found) is type(value) or isinstance(value, Path)


@pytest.mark.parametrize("word", [None, "none", "None", "null", ""])
@pytest.mark.parametrize(
    "name", ["max_steps", "save_total_limit", "task", "output_dir", "text_column_names", "threads"]
)
def test_settings_that_may_be_absent(name: str, word: str | None) -> None:
    assert getattr(RunConfig(**{name: word}), name) is None


@pytest.mark.parametrize("given", [-1, "-1"])
@pytest.mark.parametrize("name", ["max_steps", "max_train_samples", "save_total_limit", "eval_steps"])
def test_minus_one_is_read_as_not_set(name: str, given: Any) -> None:
    assert getattr(RunConfig(**{name: given}), name) is None


@pytest.mark.parametrize(
    ("name", "given", "expected"),
    [
        ("learning_rate", "fast", "a number is expected"), ("learning_rate", True, "a number is expected"),
        ("learning_rate", None, "a value is needed"), ("learning_rate", "nan", "a finite number is expected"),
        ("learning_rate", "inf", "a finite number is expected"), ("learning_rate", [1], "a number is expected"),
        ("seed", 1.5, "a whole number is expected"), ("seed", True, "a number is expected"),
        ("seed", 10**400, "a number is expected"), ("do_eval", "maybe", "true or false is expected"),
        ("do_eval", None, "a value is needed"), ("output_dir", 5, "a path is expected"),
        ("task", ["mrpc"], "one value is expected"), ("dataset_config_name", False, "put it in quotes"),
        ("text_column_names", "a,,b", "names separated by commas"), ("text_column_names", [], "names separated"),
        ("text_column_names", 5, "a list of names is expected"), ("text_column_names", {"a": 1}, "a list of names"),
        ("text_column_names", ["a", ["b"]], "a list of names"), ("lr_scheduler_type", "cosin", "did you mean cosine?"),
        ("eval_strategy", "epochs", "one of no, steps, epoch is expected (did you mean epoch?)"),
        ("scale_lr", "Linear", "one of linear, sqrt, none is expected"),
        ("report_to", "wand", "mlflow, all, none is expected (did you mean wandb?)"),
    ],
)  # fmt: skip
def test_a_value_that_does_not_fit_is_quoted_with_what_is_expected(name: str, given: Any, expected: str) -> None:
    (problem,) = problems_of(**{name: given})
    assert problem.startswith(f"--{name} {given!r}: ")
    assert expected in problem


@pytest.mark.parametrize(
    ("name", "given", "expected"),
    [
        ("learning_rate", 0, "above 0"), ("learning_rate", -1e-5, "above 0"), ("max_seq_length", 2, "at least 3"),
        ("per_device_train_batch_size", 0, "at least 1"), ("gradient_accumulation_steps", 0, "at least 1"),
        ("num_train_epochs", 0, "above 0"), ("max_steps", 0, "at least 1"), ("max_steps", -2, "at least 1"),
        ("warmup_steps", -1, "at least 0"), ("warmup_ratio", 1.01, "at most 1"), ("warmup_ratio", -0.1, "at least 0"),
        ("weight_decay", -1, "at least 0"), ("adam_beta1", 1, "below 1"), ("adam_beta2", 1.0, "below 1"),
        ("adam_epsilon", 0, "above 0"), ("max_grad_norm", -1, "at least 0"), ("seed", -1, "at least 0"),
        ("save_steps", 0, "at least 1"), ("save_total_limit", 0, "at least 1"), ("logging_steps", 0, "at least 1"),
        ("processes", 0, "at least 1"), ("threads", 0, "at least 1"), ("ddp_timeout", 0, "at least 1"),
        ("max_train_samples", 0, "at least 1"), ("per_device_eval_batch_size", 0, "at least 1"),
    ],
)  # fmt: skip
def test_ranges(name: str, given: Any, expected: str) -> None:
    assert problems_of(**{name: given}) == [f"--{name} {given!r}: a value {expected} is expected"]


@pytest.mark.parametrize(
    ("name", "given"),
    [
        ("max_seq_length", 3), ("warmup_ratio", 0), ("warmup_ratio", 1), ("adam_beta1", 0), ("max_grad_norm", 0),
        ("weight_decay", 0), ("seed", 0), ("max_steps", 1),
    ],
)  # fmt: skip
def test_the_ends_of_the_ranges_that_belong_to_them(name: str, given: Any) -> None:
    assert getattr(RunConfig(**{name: given}), name) == given


def test_all_bad_values_are_told_at_once() -> None:
    assert len(problems_of(learning_rate=0, seed="x", do_eval="maybe", max_seq_length=1)) == 4


BEST = {"load_best_model_at_end": True}


@pytest.mark.parametrize(
    ("values", "words"),
    [
        ({"text_column_names": "a,b,c"}, "--text_column_names names 3 columns: one or two are expected"),
        (BEST | {"do_eval": False}, "needs evaluations during training"),
        (BEST | {"eval_strategy": "no"}, "needs evaluations during training"),
        (BEST | {"eval_strategy": "steps"}, "to be the same, not 'epoch' and 'steps'"),
        (
            BEST | {"eval_strategy": "steps", "save_strategy": "steps", "save_steps": 25, "eval_steps": 10},
            "--save_steps (25) to be a multiple of --eval_steps (10)",
        ),
        (
            BEST | {"eval_strategy": "steps", "save_strategy": "steps", "save_steps": 25, "logging_steps": 10},
            "--save_steps (25) to be a multiple of --eval_steps (10)",
        ),
        ({"adam_beta1": 0, "adam_beta2": 0}, "are both 0"),
        ({"lr_scheduler_type": "polynomial", "learning_rate": 1e-8}, "the polynomial schedule ends at 1e-07"),
    ],
)
def test_settings_that_contradict_each_other(values: dict[str, Any], words: str) -> None:
    (problem,) = problems_of(**values)
    assert words in problem


@pytest.mark.parametrize(
    "values", [{}, {"eval_strategy": "steps", "save_strategy": "steps", "save_steps": 20, "eval_steps": 10}]
)
def test_settings_that_keep_the_best(values: dict[str, Any]) -> None:
    assert RunConfig(**(BEST | values)).load_best_model_at_end


def test_a_config_is_frozen_and_a_changed_copy_is_checked() -> None:
    config = RunConfig(seed=5)
    with pytest.raises(dataclasses.FrozenInstanceError):
        config.seed = 6  # type: ignore[misc]
    assert config.replace(learning_rate="1e-3") == RunConfig(seed=5, learning_rate=1e-3)
    with pytest.raises(ConfigError, match="--seed -2"):
        config.replace(seed=-2)


def test_every_setting_has_a_group_a_meaning_and_a_default_that_passes() -> None:
    for field in dataclasses.fields(RunConfig):
        assert len(field.metadata["help"]) > 10, field.name
        assert RunConfig(**{field.name: field.default}) == RunConfig()


# what a run needs


def check_problems(**values: Any) -> list[str]:
    with pytest.raises(ConfigError) as caught:
        check_train(RunConfig(**values))
    return list(caught.value.problems)


@pytest.fixture
def file(tmp_path: Path) -> Path:
    path = tmp_path / "rows.csv"
    path.write_text("text,label\n")
    return path


def test_a_run_without_anything_is_told_all_it_lacks() -> None:
    problems = check_problems()
    assert [p.split(":")[0] for p in problems] == ["no data", "--model is missing", "--output_dir is missing"]


def test_what_is_enough(file: Path, tmp_path: Path) -> None:
    rest = {"model": "m", "output_dir": "out"}
    check_train(RunConfig(task="mrpc", **rest))
    check_train(RunConfig(task="mrpc", data_dir=tmp_path, **rest))
    check_train(RunConfig(dataset_name="x/y", **rest))
    check_train(RunConfig(train_file=file, validation_file=file, **rest))
    check_train(RunConfig(train_file=file, do_eval=False, **rest))


def test_a_file_to_train_on_needs_one_to_evaluate_on(file: Path) -> None:
    (problem,) = check_problems(train_file=file, model="m", output_dir="o")
    assert problem.startswith("--validation_file is missing")


def test_two_sources_exclude_each_other(file: Path) -> None:
    (problem,) = check_problems(dataset_name="x/y", train_file=file, model="m", output_dir="o")
    assert "--dataset_name excludes --train_file" in problem


def test_missing_files_and_folders_are_all_named(tmp_path: Path) -> None:
    gone = tmp_path / "gone"
    problems = check_problems(
        train_file=gone / "a.csv", validation_file=gone / "b.csv", test_file=tmp_path, data_dir=gone, model="m",
        output_dir="o",
    )  # fmt: skip
    assert problems == [
        f"--train_file {gone}/a.csv: there is no such file",
        f"--validation_file {gone}/b.csv: there is no such file",
        f"--test_file {tmp_path}: a file is expected, not a folder",
        f"--data_dir {gone}: there is no such folder",
    ]


def test_evaluation_needs_its_own_file(file: Path) -> None:
    (problem,) = check_source(RunConfig(train_file=file), needs_train=False)
    assert problem.startswith("no data: give --task with --data_dir, --validation_file")
    assert check_source(RunConfig(validation_file=file), needs_train=False) == []
