"""The other names of settings: aliases, and words of older guides with what happens instead."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

ALIASES = {
    "task_name": "task",
    "model_name_or_path": "model",
    "max_length": "max_seq_length",
    "text_columns": "text_column_names",
    "text_column_name": "text_column_names",
    "label_column": "label_column_name",
    "batch_size": "per_device_train_batch_size",
    "train_batch_size": "per_device_train_batch_size",
    "eval_batch_size": "per_device_eval_batch_size",
    "per_gpu_train_batch_size": "per_device_train_batch_size",
    "per_gpu_eval_batch_size": "per_device_eval_batch_size",
    "warmup_proportion": "warmup_ratio",
    "epochs": "num_train_epochs",
    "lr": "learning_rate",
    "evaluation_strategy": "eval_strategy",
    "max_val_samples": "max_eval_samples",
    "max_test_samples": "max_predict_samples",
    "push_to_hub_model_id": "hub_model_id",
    "nproc_per_node": "processes",
    "num_processes": "processes",
    "resume": "resume_from_checkpoint",
    "activation_checkpointing": "gradient_checkpointing",
}
"""Alias -> name of the field."""


@dataclass(frozen=True, kw_only=True)
class Retired:
    """A word that older guides and scripts use and that is no setting here."""

    says: str
    """One line: what happens instead."""
    becomes: dict[Any, dict[str, Any]] = field(default_factory=dict)
    """Settings that a given value (lower case text) turns into."""
    takes_value: bool = True
    """False for a flag that may stand alone."""
    accepts: frozenset[str] | None = None
    """Values (lower case text) that ask for what happens anyway; all others are refused with `says`. None: any."""
    refuses: frozenset[str] = frozenset()
    """Values (lower case text) that ask for something else and are refused with `says`."""
    is_secret: bool = False
    """Whether no message may repeat the value."""


def _flag(says: str, **more: Any) -> Retired:
    return Retired(says=says, takes_value=False, **more)


def _secret(says: str) -> Retired:
    """A setting whose value must not be given here; none is accepted, or repeated."""
    return Retired(says=says, accepts=frozenset(), is_secret=True)


def _unsupported(what: str, *neutral: str) -> Retired:
    """A setting that would change the result and is not there: only its neutral values are accepted."""
    return Retired(says=f"{what} is not supported", takes_value=False, accepts=frozenset(neutral or _OFF))


_OFF = ("false", "no", "0", "off")
_TRUE = ("true", "yes", "1", "on")
_DISTRIBUTED = "ranks always talk through gloo"

RETIRED: dict[str, Retired] = {
    "do_train": _flag("`fleetune train` always trains; use `fleetune evaluate` to evaluate only",
                      refuses=frozenset({"false", "no", "0", "off"})),
    "use_ipex": _flag("Intel Extension for PyTorch was archived in 2026; the unpadded forward replaces it"),
    "jit_mode_eval": _flag("no TorchScript is needed; evaluation runs on unpadded batches"),
    "no_cuda": _flag("fleetune always trains on the CPU"),
    "use_cpu": _flag("fleetune always trains on the CPU"),
    "use_mps_device": _flag("fleetune always trains on the CPU"),
    "xpu_backend": Retired(says=f"oneCCL's PyTorch bindings were archived in 2025; {_DISTRIBUTED}"),
    "ddp_backend": Retired(says=_DISTRIBUTED),
    "ddp_find_unused_parameters": _flag("unused parameters are found once, before training"),
    "local_rank": Retired(says="the rank comes from the launcher's environment"),
    "pad_to_max_length": _flag("batches hold no padding at all, which gives the same result faster"),
    "group_by_length": _flag("batches hold no padding, so there is no need to group by length"),
    "dataloader_num_workers": Retired(says="tokens are read from a memory-mapped file, without workers"),
    "dataloader_drop_last": _flag("the last, smaller batch is used, and weighted right"),
    "preprocessing_num_workers": Retired(says="tokenising uses all threads of the rank"),
    "use_fast_tokenizer": _flag("the fast tokenizer is used where the model has one"),
    "ignore_mismatched_sizes": _flag("a head of another size is replaced by a new one, with a notice"),
    "disable_tqdm": _flag("progress is a bar in a terminal and plain lines elsewhere"),
    "optim": Retired(says="AdamW in its fused form is used"),
    "use_auth_token": Retired(says="the hub's own login (`hf auth login`) is used"),
    "logging_dir": Retired(says="logs are written to the output folder, under runs/"),
    "logging_strategy": Retired(says="the log is written every --logging_steps updates"),
    "half_precision_backend": Retired(says="--bf16 decides"),
    "fp16": _flag("CPUs have no units for float16; see --bf16"),
    "auto_find_batch_size": _flag("the batch size stays as set"),
    "do_lower_case": _flag("the tokenizer's own configuration decides about case"),
    "model_type": Retired(says="the model's own configuration tells its type"),
    "fp16_opt_level": Retired(says="CPUs have no units for float16; see --bf16"),
    "evaluate_during_training": _flag("--eval_strategy decides when to evaluate"),
    "eval_all_checkpoints": _flag("checkpoints are evaluated as they are made; see --eval_strategy"),
    "include_inputs_for_metrics": _flag("metrics are those of the task"),
    "torch_compile": _flag("eager mode is used: on CPUs it measured no slower"),
    "hub_token": _secret("everyone on the host sees a command line: say `hf auth login`, or set HF_TOKEN"),
    "push_to_hub_token": _secret("see --hub_token: say `hf auth login`, or set HF_TOKEN"),
    "hub_strategy": Retired(says="the finished model is uploaded, once", accepts=frozenset({"end"})),
    "hub_always_push": _flag("the finished model is uploaded, once"),
    "run_name": Retired(says="a run is named by its output folder"),
    "logging_first_step": _flag("the log is written every --logging_steps updates"),
    "log_level": Retired(says="fleetune says what matters, once"),
    "remove_unused_columns": _flag("only the columns that are needed are read"),
    "label_names": Retired(says="the label column is --label_column_name"),
    "dataloader_pin_memory": _flag("there is no device to copy to"),
    "eval_accumulation_steps": Retired(says="logits stay in memory: they are small"),
    "shuffle_train_dataset": _flag("every epoch is shuffled"),
    "eval_on_start": _flag("the first evaluation is after the first epoch or --eval_steps updates"),
    "save_safetensors": _flag("checkpoints are always safetensors"),
    "save_only_model": _flag("checkpoints can always be resumed"),
    "include_tokens_per_second": _flag("tokens per second are always in the record"),
    "low_cpu_mem_usage": _flag("the model is loaded once, in place"),
    "label_all_tokens": _unsupported("labelling all tokens of a word, not the first alone,"),
    "return_entity_level_metrics": _flag("spans are scored over all kinds together"),
    "full_determinism": _flag("runs repeat bit for bit on the same number of ranks and threads anyway"),
    "do_regression": _flag("read as --problem_type", becomes={w: {"problem_type": "regression"} for w in _TRUE}),
}  # fmt: skip
"""Retired word -> what happens instead."""


def canonical(name: str) -> str:
    """The field's name for a spelling with `-` or `_`, any leading dashes, or an alias."""
    word = name.lstrip("-").replace("-", "_")
    return ALIASES.get(word, word)
