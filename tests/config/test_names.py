"""Names of settings: both spellings, aliases, words of older guides, and unknown ones."""

from __future__ import annotations

import dataclasses
from typing import Any

import pytest
from transformers import TrainingArguments

from fleetune.config import RunConfig, config_from_mapping
from fleetune.config.load import FIELD_NAMES
from fleetune.config.names import ALIASES, RETIRED, canonical
from fleetune.errors import ConfigError

VALUES: dict[str, Any] = {
    "task": "mrpc", "model": "bert", "max_seq_length": 64, "text_column_names": ("a", "b"), "label_column_name": "l",
    "per_device_train_batch_size": 4, "per_device_eval_batch_size": 9, "num_train_epochs": 1.5, "learning_rate": 0.5,
    "eval_strategy": "steps", "max_eval_samples": 7, "max_predict_samples": 8, "processes": 2,
    "resume_from_checkpoint": "auto", "warmup_ratio": 0.1, "gradient_checkpointing": True, "hub_model_id": "me/it",
}  # fmt: skip
"""A value that is not the default, for every setting with an alias."""


def problems_of(*layers: dict[str, Any]) -> list[str]:
    with pytest.raises(ConfigError) as caught:
        config_from_mapping(*layers)
    return list(caught.value.problems)


@pytest.mark.parametrize("alias", sorted(ALIASES))
def test_every_alias_in_both_spellings(alias: str) -> None:
    field = ALIASES[alias]
    for spelling in (alias, alias.replace("_", "-"), f"--{alias}", f"--{alias.replace('_', '-')}"):
        config, notices = config_from_mapping({spelling: VALUES[field]})
        assert getattr(config, field) == VALUES[field] != getattr(RunConfig(), field)
        assert notices == ()


@pytest.mark.parametrize("name", FIELD_NAMES)
def test_every_setting_in_both_spellings(name: str) -> None:
    assert canonical(name) == canonical(name.replace("_", "-")) == canonical(f"--{name.replace('_', '-')}") == name


def test_aliases_and_retired_words_lead_somewhere_and_hide_no_setting() -> None:
    assert set(ALIASES.values()) <= set(FIELD_NAMES)
    assert not set(ALIASES) & set(FIELD_NAMES)
    assert not set(RETIRED) & (set(FIELD_NAMES) | set(ALIASES))


def test_arguments_of_the_example_scripts_and_of_the_trainer() -> None:
    """A command of run_glue.py, as its README and the guides for CPU clusters give it."""
    config, _ = config_from_mapping({
        "model_name_or_path": "bert-base-uncased", "task_name": "mrpc", "do_train": "true", "do_eval": "true",
        "max_seq_length": "128", "per_device_train_batch_size": "32", "per_device_eval_batch_size": "64",
        "learning_rate": "2e-5", "num_train_epochs": "3", "lr_scheduler_type": "cosine", "warmup_steps": "7",
        "warmup_ratio": "0.1", "weight_decay": "0.01", "gradient_accumulation_steps": "2", "max_train_samples": "100",
        "seed": "1", "eval_strategy": "steps", "eval_steps": "5", "save_strategy": "steps", "save_steps": "10",
        "save_total_limit": "3", "logging_steps": "5", "load_best_model_at_end": "true",
        "metric_for_best_model": "f1", "greater_is_better": "true", "output_dir": "out", "overwrite_output_dir": "true",
        "adam_beta1": "0.8", "adam_beta2": "0.9", "adam_epsilon": "1e-6", "max_grad_norm": "0", "max_steps": "-1",
        "report_to": "none", "ddp_timeout": "60", "cache_dir": "cache",
    })  # fmt: skip
    assert (config.model, config.task, config.learning_rate, config.warmup_ratio) == (
        "bert-base-uncased", "mrpc", 2e-5, 0.1,
    )  # fmt: skip
    assert (config.eval_steps, config.save_steps, config.max_steps, config.seed) == (5, 10, None, 1)
    assert config.load_best_model_at_end is True
    assert str(config.output_dir) == "out"


def test_defaults_that_transformers_has_too_are_the_same() -> None:
    """Where ours differ on purpose, the recipe asks for it, and the line below says so."""
    on_purpose = {
        "learning_rate", "per_device_train_batch_size", "per_device_eval_batch_size", "eval_strategy", "save_strategy",
        "save_total_limit", "logging_steps", "output_dir", "report_to", "do_eval", "max_steps",
        "gradient_checkpointing",  # None there, as the older name of a setting that is False
    }  # fmt: skip
    theirs = {f.name: f.default for f in dataclasses.fields(TrainingArguments)}
    for field in dataclasses.fields(RunConfig):
        if field.name in theirs and field.name not in on_purpose:
            default = theirs[field.name]
            default = str(getattr(default, "value", default))
            assert default in (str(field.default), str(field.default).capitalize()), field.name


@pytest.mark.parametrize(
    ("word", "neutral"),
    [("label_all_tokens", "false")],
)
def test_what_would_change_the_result_is_refused_unless_it_asks_for_nothing(word: str, neutral: object) -> None:
    assert config_from_mapping({word: neutral}) == (RunConfig(), ())
    assert problems_of({word: "0.1"}) == [f"--{word} 0.1: {RETIRED[word].says}"]


@pytest.mark.parametrize("word", sorted(w for w in RETIRED if RETIRED[w].accepts is None))
def test_every_retired_word_says_its_line_and_changes_no_default(word: str) -> None:
    value = "true" if not RETIRED[word].takes_value else "5"
    config, notices = config_from_mapping({word.replace("_", "-"): value})
    assert notices == (f"--{word}: {RETIRED[word].says}",)
    assert "\n" not in notices[0]
    assert config == (RunConfig(problem_type="regression") if word == "do_regression" else RunConfig())


@pytest.mark.parametrize(
    ("word", "value", "line"),
    [
        ("pad_to_max_length", True, "--pad_to_max_length: batches hold no padding at all, "),
        ("no_cuda", "true", "--no_cuda: fleetune always trains on the CPU"),
        ("use_ipex", "True", "--use_ipex: Intel Extension for PyTorch was archived in 2026; "),
        ("xpu_backend", "ccl", "--xpu_backend: oneCCL's PyTorch bindings were archived in 2025; "),
        ("ddp-backend", "ccl", "--ddp_backend: ranks always talk through gloo"),
        ("fp16", "true", "--fp16: CPUs have no units for float16; see --bf16"),
    ],
)
def test_words_of_old_guides(word: str, value: Any, line: str) -> None:
    config, notices = config_from_mapping({word: value})
    assert config == RunConfig()
    assert len(notices) == 1
    assert notices[0].startswith(line)


def test_evaluation_strategy_still_means_eval_strategy() -> None:
    config, notices = config_from_mapping({"evaluation_strategy": "steps"})
    assert config.eval_strategy == "steps"
    assert notices == ()


@pytest.mark.parametrize("value", ["false", "False", "no", "0", False, "off"])
def test_training_without_training_is_refused(value: Any) -> None:
    (problem,) = problems_of({"do_train": value})
    assert problem.startswith(f"--do_train {value}: `fleetune train` always trains")
    assert "fleetune evaluate" in problem


@pytest.mark.parametrize("word", ["fp16", "no_cuda", "pad_to_max_length", "do_regression"])
def test_a_retired_flag_that_is_off_needs_no_word(word: str) -> None:
    assert config_from_mapping({word: "false"}) == (RunConfig(), ())


def test_a_retired_word_in_file_and_flags_is_told_once() -> None:
    _, notices = config_from_mapping({"no_cuda": True}, {"--no-cuda": "true", "use_cpu": "true"})
    assert [n.split(":")[0] for n in notices] == ["--no_cuda", "--use_cpu"]


@pytest.mark.parametrize("order", [1, -1])
def test_regression_asked_for_in_two_ways(order: int) -> None:
    agree = dict([("do_regression", "true"), ("problem_type", "regression")][::order])
    assert config_from_mapping(agree)[0].problem_type == "regression"
    differ = dict([("do_regression", "true"), ("problem-type", "classification")][::order])
    assert problems_of(differ) == [
        "--do_regression means --problem_type regression, but --problem-type is classification: give one"
    ]


@pytest.mark.parametrize(
    ("name", "near"),
    [
        ("learning_rat", "learning_rate"), ("--learnig-rate", "learning_rate"), ("epoch", "epochs"),
        ("model_name", "model_name_or_path"), ("max-seq-len", "max_seq_length"), ("uses_ipex", "use_ipex"),
        ("warmup_step", "warmup_steps"),
    ],
)  # fmt: skip
def test_an_unknown_name_is_refused_and_the_nearest_named(name: str, near: str) -> None:
    (problem,) = problems_of({name: 1})
    written = name.lstrip("-").replace("-", "_")
    assert problem == f"--{written} is not a setting (did you mean {near}?)"


def test_a_name_near_to_nothing_gets_no_suggestion() -> None:
    assert problems_of({"qqqqzzzz": 1}) == ["--qqqqzzzz is not a setting"]


def test_all_problems_are_told_at_once() -> None:
    problems = problems_of(
        {"learning_rate": "fast", "bogus_setting": 1, "do_train": "no"}, {"seed": -5, "lr_scheduler_type": "linaer"}
    )
    assert len(problems) == 5
    text = "\n".join(problems)
    for word in ("--bogus_setting", "--do_train", "--learning_rate 'fast'", "--seed -5", "did you mean linear?"):
        assert word in text


@pytest.mark.parametrize(
    "names",
    [
        ("learning_rate", "learning-rate"), ("lr", "learning_rate"), ("task", "task_name"),
        ("batch_size", "train-batch-size"),
    ],
)  # fmt: skip
def test_one_setting_in_two_spellings_is_refused_as_written(names: tuple[str, str]) -> None:
    value = "mrpc" if "task" in names else 4
    assert problems_of(dict.fromkeys(names, value)) == [
        f"--{names[0]} and --{names[1]} are the same setting: give one"
    ]  # fmt: skip


def test_a_later_layer_comes_before_an_earlier_one_also_by_another_name() -> None:
    config, _ = config_from_mapping({"learning_rate": 1, "seed": 3}, {"lr": 2}, {"learning-rate": "3"})
    assert (config.learning_rate, config.seed) == (3.0, 3)


@pytest.mark.parametrize("name", ["hosts", "hostfile"])
def test_an_empty_name_of_hosts_is_no_choice_of_this_one(name: str) -> None:
    """As `--hosts "$HOSTS"` has it where the variable is not set."""
    with pytest.raises(ConfigError, match=f"--{name} is empty: no host is named"):
        config_from_mapping({name: ""})
