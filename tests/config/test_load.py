"""Files of settings: three formats, one meaning; and the way back into a file."""

from __future__ import annotations

import dataclasses
import json
import tomllib
from pathlib import Path
from typing import Any

import pytest

from fleetune.config import RunConfig, config_from_mapping, read_config_file, to_toml
from fleetune.errors import ConfigError

OTHER: dict[str, Any] = {
    "task": "mrpc", "data_dir": "data/ä 😀", "train_file": "a.csv", "validation_file": 'quo"ted\\.csv',
    "test_file": "t.csv", "dataset_name": "x/y", "dataset_config_name": "no", "text_column_names": ("a b", "ç"),
    "label_column_name": "1", "problem_type": "regression", "encoding": "cp1252", "on_bad_row": "skip",
    "max_seq_length": 77, "max_train_samples": 1, "max_eval_samples": 2, "max_predict_samples": 3, "cache_dir": "/c",
    "overwrite_cache": True, "model": "m\tn", "tokenizer_name": "t", "model_revision": "v1", "trust_remote_code": True,
    "learning_rate": 1.2345678901234567e-05, "scale_lr": "none", "per_device_train_batch_size": 5,
    "gradient_accumulation_steps": 6, "num_train_epochs": 0.1, "max_steps": 9, "lr_scheduler_type": "cosine",
    "warmup_steps": 4, "warmup_ratio": 0.25, "weight_decay": 1e-300, "adam_beta1": 0.1, "adam_beta2": 0.2,
    "adam_epsilon": 1e22, "max_grad_norm": 2.5, "bf16": "auto", "seed": 2**53 + 1, "do_eval": False, "do_predict": True,
    "eval_strategy": "no", "eval_steps": 11, "per_device_eval_batch_size": 12, "load_best_model_at_end": False,
    "metric_for_best_model": "eval_loss", "greater_is_better": False, "output_dir": "out", "overwrite_output_dir": True,
    "resume_from_checkpoint": "auto", "save_strategy": "no", "save_steps": 13, "save_total_limit": None,
    "logging_steps": 14, "report_to": ["wandb", "mlflow"], "profile": 17, "push_to_hub": True, "hub_model_id": "a/b",
    "hub_private_repo": True, "processes": 15, "threads": 16,
    "grad_dtype": "bfloat16", "local_steps": 1, "ddp_timeout": 17,
    "label_delimiter": "|", "version_2_with_negative": True, "doc_stride": 64, "n_best_size": 5,
    "max_answer_length": 15, "null_score_diff_threshold": -1.5,
    "hosts": ("node1", "node[2-4]"), "hostfile": Path("hosts"), "launcher": "mpirun", "num_hosts": 4,
    "base_model": "b", "freeze": None, "lora_r": 3, "lora_alpha": 4.5, "lora_dropout": 0.3, "lora_merge": True,
    "lora_target_modules": ("query", "output.dense"), "layerwise_lr_decay": 0.9, "label_smoothing_factor": 0.1,
    "class_weights": ("1", "2.5"), "gradient_checkpointing": True, "early_stopping_patience": None,
    "early_stopping_threshold": 0.0,
    "network": "10.0.0.0/8", "port_range": "29500-29510", "timeout_s": 9,
}  # fmt: skip
"""For every setting a value that is not its default."""


def write(path: Path, text: str, encoding: str = "utf-8") -> Path:
    path.write_text(text, encoding=encoding)
    return path


def read(path: Path) -> RunConfig:
    return config_from_mapping(read_config_file(path))[0]


def problem_of(path: Path) -> str:
    with pytest.raises(ConfigError) as caught:
        config_from_mapping(read_config_file(path))
    (problem,) = caught.value.problems
    return problem


EXCLUDING = (
    "load_best_model_at_end", "local_steps", "freeze", "early_stopping_patience", "early_stopping_threshold",
)  # fmt: skip


def test_other_names_every_setting() -> None:
    defaults = RunConfig()
    assert set(OTHER) == {f.name for f in dataclasses.fields(RunConfig)}
    config = RunConfig(**OTHER)
    same = [n for n in OTHER if getattr(config, n) == getattr(defaults, n) and n not in EXCLUDING]
    assert same == []  # those exclude other values here


@pytest.mark.parametrize(
    "config",
    [
        RunConfig(),
        RunConfig(**OTHER),
        RunConfig(
            load_best_model_at_end=True,
            greater_is_better=True,
            seed=3,
            early_stopping_patience=2,
            early_stopping_threshold=0.5,
            freeze=("embeddings", "layers:2"),
        ),
    ],
    ids=["defaults", "all other", "best"],
)
def test_toml_is_read_back_as_it_was(config: RunConfig, tmp_path: Path) -> None:
    assert read(write(tmp_path / "run.toml", to_toml(config))) == config


def test_toml_lists_every_setting_under_its_group() -> None:
    tables = tomllib.loads(to_toml(RunConfig(**OTHER)))
    assert list(tables) == ["data", "model", "training", "evaluation", "output", "run", "cluster"]
    assert {name for table in tables.values() for name in table} == set(OTHER) - {"freeze", "early_stopping_patience"}
    assert tables["training"]["learning_rate"] == OTHER["learning_rate"]
    assert "# max_steps =" in to_toml(RunConfig())


@pytest.mark.parametrize("config", [RunConfig(), RunConfig(**OTHER)], ids=["defaults", "all other"])
def test_ranks_read_their_settings_from_a_variable(config: RunConfig, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SETTINGS", json.dumps(config.to_dict()))
    assert read(Path("env:SETTINGS")) == config


def test_a_variable_that_is_not_there() -> None:
    assert problem_of(Path("env:NO_SUCH_SETTINGS")) == "--config env:NO_SUCH_SETTINGS: no such environment variable"


TOML = """
model = "bert"
learning-rate = 2e-5
text_columns = ["a", "b"]
[training]
epochs = 2
seed = 7
[evaluation]
do_eval = false
eval_strategy = "no"
"""
YAML = """
model: bert
learning-rate: 2e-5        # YAML 1.1 reads a text here
text_columns: [a, b]
training: {epochs: 2, seed: 7}
evaluation:
  do_eval: no
  eval_strategy: no
"""
JSON = """{"model": "bert", "learning-rate": 2e-5, "text_columns": "a,b", "training": {"epochs": 2, "seed": 7},
"evaluation": {"do_eval": false, "eval_strategy": "no"}}"""


def test_the_three_formats_say_the_same(tmp_path: Path) -> None:
    expected = RunConfig(
        model="bert", learning_rate=2e-5, text_column_names=("a", "b"), num_train_epochs=2, seed=7, do_eval=False,
        eval_strategy="no",
    )  # fmt: skip
    for name, text in (("a.toml", TOML), ("b.yaml", YAML), ("c.yml", YAML), ("d.json", JSON), ("E.TOML", TOML)):
        assert read(write(tmp_path / name, text)) == expected, name


@pytest.mark.parametrize(
    ("name", "text"), [("a.toml", 'model = "ä"'), ("b.yaml", "model: ä"), ("c.json", '{"model": "ä"}')]
)
def test_a_byte_order_mark_and_windows_line_ends(tmp_path: Path, name: str, text: str) -> None:
    path = write(tmp_path / name, text.replace("\n", "\r\n") + "\r\n", "utf-8-sig")
    assert read(path).model == "ä"


def test_flags_go_before_the_file(tmp_path: Path) -> None:
    path = write(tmp_path / "run.toml", "learning_rate = 1.0\nseed = 5\n")
    config, _ = config_from_mapping(read_config_file(path), {"--lr": "3"})
    assert (config.learning_rate, config.seed) == (3.0, 5)


@pytest.mark.parametrize(
    ("name", "text"), [("a.toml", ""), ("b.yaml", ""), ("b.yaml", "# nothing\n"), ("c.json", "{}")]
)
def test_an_empty_file_is_all_defaults(tmp_path: Path, name: str, text: str) -> None:
    assert read(write(tmp_path / name, text)) == RunConfig()


@pytest.mark.parametrize(
    ("name", "text", "words"),
    [
        ("a.toml", "seed = 5\nlr = = 3\n", "at line 2"),
        ("a.toml", "seed = 5\nseed = 6\n", "Cannot overwrite a value"),
        ("b.yaml", "seed: 5\n  lr: [1\n", "line 2"),
        ("b.yaml", "seed: 5\nlr: 1\nseed: 6\n", "seed is given twice"),
        ("b.yaml", "training:\n  seed: 5\n  seed: 6\n", "seed is given twice"),
        ("b.yaml", "seed: !!python/object/apply:os.getcwd []\n", "could not determine a constructor"),
        ("b.yaml", "- seed\n- lr\n", "names with values are expected, not list"),
        ("b.yaml", "[]\n", "names with values are expected, not list"),
        ("b.yaml", "1: 5\n", "1 is not the name of a setting"),
        ("b.yaml", "no: 5\n", "False is not the name of a setting"),
        ("c.json", '{"seed": 5,}', "line 1 column"),
        ("c.json", '{"seed": 5, "seed": 6}', "seed is given twice"),
        ("c.json", "", "line 1 column 1"),
        ("c.json", "null", "names with values are expected, not NoneType"),
        ("d.ini", "seed=5", "a .toml, .yaml or .json file is expected"),
        ("a.toml", "[trainig]\nseed = 5\n", "[trainig] is no group of settings; they are data, model, training"),
        ("a.toml", "seed = 5\n[training]\nseed = 6\n", "seed is given twice"),
    ],
)
def test_what_cannot_be_read_is_told_with_the_file(tmp_path: Path, name: str, text: str, words: str) -> None:
    path = write(tmp_path / name, text)
    problem = problem_of(path)
    assert problem.startswith(f"--config {path}: ")
    assert words in problem


def test_two_spellings_of_one_setting_in_two_tables(tmp_path: Path) -> None:
    path = write(tmp_path / "run.toml", "lr = 1.0\n[training]\nlearning-rate = 2.0\n")
    assert problem_of(path) == "--lr and --learning-rate are the same setting: give one"


def test_files_that_are_not_there_or_no_text(tmp_path: Path) -> None:
    assert problem_of(tmp_path / "gone.toml") == f"--config {tmp_path}/gone.toml: there is no such file"
    (tmp_path / "folder.toml").mkdir()
    assert "Is a directory" in problem_of(tmp_path / "folder.toml")
    utf16 = write(tmp_path / "wide.json", json.dumps({"seed": 1}), "utf-16")
    assert problem_of(utf16).startswith(f"--config {utf16}: ")


def test_text_that_yaml_reads_as_a_truth_value_is_not_guessed(tmp_path: Path) -> None:
    path = write(tmp_path / "run.yaml", "dataset_config_name: no\n")  # Norwegian
    assert problem_of(path) == "--dataset_config_name False: text is expected: put it in quotes"
    assert read(write(tmp_path / "run.yaml", "dataset_config_name: 'no'\n")).dataset_config_name == "no"


def test_resuming_can_be_asked_for_in_a_file(tmp_path: Path) -> None:
    assert read(write(tmp_path / "run.toml", "resume_from_checkpoint = true\n")).resume_from_checkpoint == "auto"
