"""The flags of scripts against the transformers that is installed, and what `fleetune train` makes of them."""

from __future__ import annotations

import dataclasses
from pathlib import Path

import pytest

from fleetune.cluster.commands.script import SCRIPT_FLAGS, rewrite_flags, training_arguments, training_words
from fleetune.errors import ConfigError

SCRIPT = "HfArgumentParser((ModelArguments, TrainingArguments))"


def test_fields_are_those_of_the_class() -> None:
    """They are read from its text, so that torch stays unloaded."""
    from transformers import TrainingArguments

    assert training_arguments() == {field.name for field in dataclasses.fields(TrainingArguments) if field.init}


@pytest.mark.parametrize("name", SCRIPT_FLAGS)
def test_what_a_flag_becomes_is_taken(name: str, tmp_path: object) -> None:
    """By the parser of the installed transformers, which refuses what it was, or by no script of its own."""
    from transformers import HfArgumentParser, TrainingArguments

    value = {"warmup_ratio": "0.1", "xpu_backend": "ccl", "evaluation_strategy": "epoch"}.get(name, "4")
    given = [f"--{name}"] if not SCRIPT_FLAGS[name].takes_value else [f"--{name}", value]
    words, notices = rewrite_flags([*given, "--output_dir", str(tmp_path)], SCRIPT, training_arguments())
    parser = HfArgumentParser(TrainingArguments)
    _, left = parser.parse_known_args(words)
    assert left == []
    assert [notice.split(":")[0] for notice in notices] == [f"--{name}"]
    _, refused = parser.parse_known_args([*given, "--output_dir", str(tmp_path)])
    assert refused[0] == f"--{name}"


def test_rewriting() -> None:
    words = ["--no_cuda", "False", "--warmup_ratio=0", "--ddp_backend=ccl", "--no-cuda", "--bf16", "True", "x.json"]
    new, notices = rewrite_flags(words, SCRIPT, {"ddp_backend", "bf16"})
    assert new == ["--ddp_backend", "gloo", "--use_cpu", "--bf16", "True", "x.json"]
    assert len(notices) == 4


def test_bf16_needs_a_word_about_the_cpu(tmp_path: Path) -> None:
    """As in today's guide for Kubernetes: `torchrun run_qa.py ... --bf16`, which transformers refuses without a GPU."""
    from transformers import HfArgumentParser, TrainingArguments

    given = ["--output_dir", str(tmp_path), "--bf16"]
    parser = HfArgumentParser(TrainingArguments)
    with pytest.raises(ValueError, match="assign use_cpu"):
        parser.parse_args_into_dataclasses(given)
    words, notices = rewrite_flags(given, SCRIPT, training_arguments())
    assert words == [*given, "--use_cpu"]
    assert len(notices) == 1
    (arguments,) = parser.parse_args_into_dataclasses(words)
    assert (arguments.bf16, str(arguments.device)) == (True, "cpu")
    assert rewrite_flags(words, SCRIPT, training_arguments()) == (words, [])


def test_flags_of_other_scripts_stay() -> None:
    """One that reads its flags by itself, one that has a flag of that name, a transformers that has it still."""
    words = ["--no_cuda", "--ddp_backend", "ccl"]
    assert rewrite_flags(words, "argparse.ArgumentParser()", frozenset()) == (words, [])
    assert rewrite_flags(["--no_cuda"], SCRIPT + "\nno_cuda: bool = False", frozenset()) == (["--no_cuda"], [])
    assert rewrite_flags(["--no_cuda"], SCRIPT, {"no_cuda"}) == (["--no_cuda"], [])


def test_settings_of_scripts() -> None:
    """What is trained is what the script would have trained: its defaults, where they are not ours."""
    settings, words, _ = training_words(["x/run_glue.py", "--do_train", "True", "--task_name", "mrpc", "--do_eval"])
    assert settings == {"learning_rate": 5e-5, "per_device_train_batch_size": 8, "scale_lr": "none"}
    assert words == ["--task_name", "mrpc", "--do_eval"]
    settings, words, _ = training_words(["run_ner_no_trainer.py", "--learning_rate", "1e-4"])
    assert settings == {"per_device_train_batch_size": 8, "scale_lr": "none", "do_eval": "true",
                        "problem_type": "token_classification"}  # fmt: skip


@pytest.mark.parametrize(
    ("words", "says"),
    [
        ([], "no script"),
        (["run_clm.py", "--do_train"], "run_clm.py: `fleetune train` does the work of run_glue.py"),
        (["run_glue.py", "--do_eval"], "without --do_train trains nothing"),
        (["run_glue.py", "--do_train", "false"], "without --do_train trains nothing"),
    ],
)
def test_refused(words: list[str], says: str) -> None:
    with pytest.raises(ConfigError, match=says):
        training_words(words)
