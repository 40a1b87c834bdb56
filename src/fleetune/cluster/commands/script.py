"""The flags of scripts: those of transformers' examples that today's transformers refuses, and what they mean to us.

rewrite_flags(script, words, ...) -> words for the script itself, under `fleetune launch`
training_words(script, words)     -> words for `fleetune train`, which does the same work
"""

from __future__ import annotations

import importlib.util
import re
from collections.abc import Callable, Collection, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from fleetune.cluster.commands.retired import GLOO, IPEX
from fleetune.errors import ConfigError

_FALSE = ("false", "no", "0", "off")
_BOOLEAN = (*_FALSE, "true", "yes", "1", "on")


@dataclass(frozen=True, kw_only=True)
class Rewritten:
    """A flag that transformers once had."""

    becomes: Callable[[str], list[str]]
    """Its value -> the words that mean it today."""
    says: str
    takes_value: bool = True
    """False for a flag that may stand alone, and then means true."""


def _dropped(says: str, *, takes_value: bool = True) -> Rewritten:
    return Rewritten(becomes=lambda value: [], says=says, takes_value=takes_value)


def _renamed(name: str) -> Rewritten:
    return Rewritten(becomes=lambda value: [f"--{name}", value], says=f"is called --{name} now")


def _switch(*words: str, says: str) -> Rewritten:
    return Rewritten(becomes=lambda value: [] if value.lower() in _FALSE else list(words), says=says, takes_value=False)


_GONE = "is gone from transformers: left away"

SCRIPT_FLAGS: dict[str, Rewritten] = {
    "no_cuda": _switch("--use_cpu", says="is called --use_cpu now"),
    "use_ipex": _dropped(IPEX, takes_value=False),
    "jit_mode_eval": _dropped(_GONE, takes_value=False),
    "use_mps_device": _dropped(_GONE, takes_value=False),
    "xpu_backend": Rewritten(becomes=lambda value: ["--ddp_backend", "gloo"], says=GLOO),
    "overwrite_output_dir": _dropped("is gone from transformers, which writes into the folder as it is",
                                     takes_value=False),
    "evaluation_strategy": _renamed("eval_strategy"),
    "per_gpu_train_batch_size": _renamed("per_device_train_batch_size"),
    "per_gpu_eval_batch_size": _renamed("per_device_eval_batch_size"),
    "warmup_ratio": Rewritten(becomes=lambda value: [] if value.strip("0.") == "" else ["--warmup_steps", value],
                              says="is --warmup_steps now, which takes a share of the steps, too"),
    "group_by_length": _switch("--train_sampling_strategy", "group_by_length",
                               says="is --train_sampling_strategy group_by_length now"),
    "adafactor": _switch("--optim", "adafactor", says="is --optim adafactor now"),
    "include_inputs_for_metrics": _switch("--include_for_metrics", "inputs",
                                          says="is --include_for_metrics inputs now"),
    "push_to_hub_token": _renamed("hub_token"),
    "push_to_hub_model_id": _renamed("hub_model_id"),
    "logging_dir": _dropped("is gone from transformers: set TENSORBOARD_LOGGING_DIR"),
    "save_safetensors": _dropped("is gone from transformers: weights are always safetensors", takes_value=False),
    "half_precision_backend": _dropped(_GONE),
    "fp16_backend": _dropped(_GONE),
    "fp16_opt_level": _dropped(_GONE),
    "include_tokens_per_second": _dropped(_GONE, takes_value=False),
    "use_legacy_prediction_loop": _dropped(_GONE, takes_value=False),
    "use_auth_token": _dropped("is gone from transformers: the hub's own login (`hf auth login`) is used"),
}  # fmt: skip
"""Flag of transformers 4 -> what is given to the script in its place, where its transformers has the flag no more."""

_BACKENDS_GONE = ("ccl", "mpi")
"""Values of --ddp_backend; torch has no MPI in its wheels."""


def rewrite_flags(words: Sequence[str], text: str, fields: Collection[str]) -> tuple[list[str], list[str]]:
    """The words of a script, as the transformers that is installed takes them.

    Args:
        words: Behind the script's name.
        text: The script's own text; a script that reads its flags without transformers, or has a flag of the same name
            itself, is given what was typed.
        fields: The flags that `TrainingArguments` has.

    Returns:
        The words, and one line for each that is another now.
    """
    if "HfArgumentParser" not in text or "TrainingArguments" not in text:
        return list(words), []
    new: list[str] = []
    notices: list[str] = []
    for name, given, value in _flags(words):
        row = SCRIPT_FLAGS.get(name)
        if name == "ddp_backend" and value in _BACKENDS_GONE:
            row = SCRIPT_FLAGS["xpu_backend"]
        elif name in fields or re.search(rf"\b{re.escape(name)}\b", text):
            row = None
        if row is None:
            new += given
        else:
            becomes = row.becomes(value or "true")
            new += [word for word in becomes if word not in new or not word.startswith("--")]
            notices.append(f"--{name}: {row.says}")
    if "--bf16" in new and "use_cpu" in fields and not {"--use_cpu", "--use-cpu"} & set(new):
        new.append("--use_cpu")
        notices.append("--bf16: transformers wants --use_cpu beside it where there is no GPU: added")
    return new, notices


def training_arguments() -> frozenset[str]:
    """The flags of the `TrainingArguments` that is installed, told from its text: importing it would load torch."""
    found = importlib.util.find_spec("transformers")
    if found is None or found.origin is None:
        return frozenset()
    text = (Path(found.origin).parent / "training_args.py").read_text(encoding="utf-8")
    return frozenset(re.findall(r"^    (\w+): ", text[text.index("class TrainingArguments") :], re.MULTILINE))


def _flags(words: Sequence[str]) -> Iterator[tuple[str, list[str], str | None]]:
    """(name, its words, its value) of each flag; words that belong to no known flag have an empty name."""
    rest = list(words)
    while rest:
        word = rest.pop(0)
        flag, equals, value = word.partition("=")
        name = flag.removeprefix("--").replace("-", "_") if flag.startswith("--") else ""
        row = SCRIPT_FLAGS.get(name)
        if equals or not rest or (row is None and name != "ddp_backend"):
            yield name, [word], value if equals else None
        elif row is None or row.takes_value or rest[0].lower() in _BOOLEAN:
            yield name, [word, rest[0]], rest.pop(0)
        else:
            yield name, [word], None


# ---- what `fleetune train` makes of them


_EXAMPLES: dict[str, dict[str, Any]] = {
    "run_glue": {},
    "run_classification": {},
    "run_ner": {"problem_type": "token_classification"},
    "run_qa": {"problem_type": "question_answering"},
}
"""Name of an example script -> settings that it implies."""

_DEFAULTS: dict[str, Any] = {
    "learning_rate": 5e-5, "per_device_train_batch_size": 8, "scale_lr": "none", "do_eval": "false",
}  # fmt: skip
"""Settings of the scripts that change what is trained, where they are not ours: TrainingArguments, 4.0 to 5."""


def training_words(words: Sequence[str]) -> tuple[dict[str, Any], list[str], list[str]]:
    """What a script's command asks `fleetune train` for.

    Args:
        words: The script and its own words.

    Returns:
        The script's own settings, which its words come above; the words; one line about the settings.

    Raises:
        ConfigError: It is no script whose work is known, or it does not train.
    """
    name = Path(words[0]).stem.removesuffix("_no_trainer") if words else ""
    if name not in _EXAMPLES:
        known = ", ".join(f"{example}.py" for example in _EXAMPLES)
        raise ConfigError(f"{words[0] if words else 'no script'}: `fleetune train` does the work of {known}; for other "
                          "scripts there is `fleetune launch`")  # fmt: skip
    is_own_loop = Path(words[0]).stem.endswith("_no_trainer")
    given = dict(_named(words[1:]))
    if not is_own_loop and given.get("do_train", "false").lower() in _FALSE:
        raise ConfigError(f"{words[0]} without --do_train trains nothing: `fleetune evaluate` and `fleetune predict` "
                          "do the rest of its work")  # fmt: skip
    settings = {**_DEFAULTS, **_EXAMPLES[name]} | ({"do_eval": "true"} if is_own_loop else {})
    kept = {key: value for key, value in settings.items() if key not in given}
    shown = ", ".join(f"--{key} {value:g}" if isinstance(value, float) else f"--{key} {value}" for key, value in
                      kept.items())  # fmt: skip
    return kept, _but_for_training(words[1:]), [f"{words[0]}: its own settings count where none are given: {shown}"]


def _named(words: Sequence[str]) -> Iterator[tuple[str, str]]:
    """Name and value of each flag, `true` for one that stands alone."""
    for place, word in enumerate(words):
        flag, equals, value = word.partition("=")
        if flag.startswith("--"):
            behind = words[place + 1] if place + 1 < len(words) else "--"
            yield flag[2:].replace("-", "_"), value if equals else "true" if behind.startswith("--") else behind


def _but_for_training(words: Sequence[str]) -> list[str]:
    """The words without --do_train, which needs no saying here."""
    kept, rest = [], list(words)
    while rest:
        word = rest.pop(0)
        if word.partition("=")[0].replace("-", "_") != "__do_train":
            kept.append(word)
        elif "=" not in word and rest and rest[0].lower() in _BOOLEAN:
            rest.pop(0)
    return kept
