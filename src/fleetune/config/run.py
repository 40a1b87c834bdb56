"""`RunConfig`: every setting of a run, with its meaning, unit and range, in one place.

The command line, configuration files and Python all end here. The names are those of transformers'
`TrainingArguments` and example scripts where these have one, so that a known command keeps working.
"""

from __future__ import annotations

import dataclasses
import os
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

from fleetune.config.tuning import tuning_problems
from fleetune.config.values import BadValue, coerce, field_types
from fleetune.errors import ConfigError

GROUPS = ("data", "model", "training", "evaluation", "output", "run", "cluster")


def user_cache(environ: Mapping[str, str]) -> Path:
    """Our folder among what a user's programs can make again: $XDG_CACHE_HOME, if it is absolute, as XDG has it."""
    told = environ.get("XDG_CACHE_HOME", "")
    return Path(told if told.startswith("/") else "~/.cache") / "fleetune"


def setting(default: Any, group: str, help_text: str, *, at_least: float | None = None, above: float | None = None,
            below: float | None = None, at_most: float | None = None, shown_as: str | None = None) -> Any:  # fmt: skip
    """A field of `RunConfig`: its default, the group it is listed under, its meaning, its range, and its value in a usage."""
    assert group in GROUPS, group
    limits = {"at least": at_least, "above": above, "below": below, "at most": at_most}
    return field(default=default, metadata={"group": group, "help": help_text, "limits": limits, "shown_as": shown_as})


@dataclass(frozen=True, kw_only=True)
class RunConfig:
    """A run's settings, checked when made.

    Values may be given as text, as on a command line: they are converted to the field's type.

    Raises:
        ConfigError: Lists every value that cannot be used, not only the first.
    """

    # fmt: off
    task: str | None = setting(None, "data", "task of GLUE (cola, sst2, mrpc, qqp, stsb, mnli, qnli, rte, wnli), squad, squad_v2 or conll2003; none for your own files")
    data_dir: Path | None = setting(None, "data", "folder with the task's files (train, dev or validation, test; tsv, csv, json, jsonl, parquet, or words in columns: conll, txt)")
    train_file: Path | None = setting(None, "data", "file to train on")
    validation_file: Path | None = setting(None, "data", "file to evaluate on")
    test_file: Path | None = setting(None, "data", "file to predict with --do_predict")
    dataset_name: str | None = setting(None, "data", "data set of the Hugging Face hub (needs the extra [hub])")
    dataset_config_name: str | None = setting(None, "data", "configuration of that data set")
    text_column_names: tuple[str, ...] | None = setting(None, "data", "column, or two columns separated by a comma, that hold the text; the words of token classification, or question and context")
    label_column_name: str | None = setting(None, "data", "column that holds the label; or, for several labels of a text, columns of 0 and 1 separated by commas")
    label_delimiter: str | None = setting(None, "data", "what stands between several labels in a cell of text, as ; or |")
    problem_type: Literal["auto", "classification", "regression", "multi_label_classification", "token_classification", "question_answering"] = setting("auto", "data", "what the labels are; auto: numbers with fractions mean regression, lists several labels or tags")
    version_2_with_negative: bool = setting(False, "data", "questions in your own files may have no answer, as in SQuAD 2.0")
    encoding: str | None = setting(None, "data", "text encoding of the files; none: UTF-8, or UTF-16 with a byte-order mark")
    on_bad_row: Literal["error", "skip"] = setting("error", "data", "stop at a row that cannot be used, or leave it out, counted and listed")
    max_seq_length: int = setting(None, "data", "longest sequence in tokens, special ones counted; longer texts are cut, contexts of questions into windows (default: 128, for questions 384)", at_least=3)
    doc_stride: int = setting(128, "data", "tokens of a context that one window of it has in common with the next", at_least=0)
    max_train_samples: int | None = setting(None, "data", "train on the first so many rows", at_least=1)
    max_eval_samples: int | None = setting(None, "data", "evaluate on the first so many rows", at_least=1)
    max_predict_samples: int | None = setting(None, "data", "predict the first so many rows", at_least=1)
    cache_dir: Path = setting(user_cache(os.environ), "data", "where tokenised data is kept between runs; the default follows XDG_CACHE_HOME")
    overwrite_cache: bool = setting(False, "data", "tokenise again even when the cache has the data")

    model: str | None = setting(None, "model", "folder or hub name of the encoder to fine-tune")
    tokenizer_name: str | None = setting(None, "model", "folder or hub name of the tokenizer; none: the model's own")
    model_revision: str = setting("main", "model", "branch, tag or commit on the hub")
    trust_remote_code: bool = setting(False, "model", "run Python code that a hub repository ships")
    base_model: str | None = setting(None, "model", "folder or hub name of the model that the adapter in --model was trained on; none: what its adapter_config.json says")
    freeze: tuple[str, ...] | None = setting(None, "model", "what of the encoder does not learn: embeddings, layers:N for the N lowest layers, or both, separated by a comma")
    lora_r: int | None = setting(None, "model", "rank of low-rank updates (LoRA): of the encoder, they alone learn; the output is an adapter as peft writes it", at_least=1)
    lora_alpha: float | None = setting(None, "model", "the updates are multiplied by lora_alpha / lora_r; none: 8, as in peft", above=0)
    lora_dropout: float = setting(0.0, "model", "dropout of what the updates read", at_least=0, below=1)
    lora_target_modules: tuple[str, ...] | None = setting(None, "model", "linear layers of the encoder that get an update, by the end of their names, or all-linear; none: those of queries and values")
    lora_merge: bool = setting(False, "model", "add the updates to the weights at the end, so that the output is a whole model")

    learning_rate: float = setting(2e-5, "training", "peak learning rate of one process, before --scale_lr", above=0)
    scale_lr: Literal["linear", "sqrt", "none"] = setting("linear", "training", "how the learning rate grows with the number of processes")
    per_device_train_batch_size: int = setting(16, "training", "examples a process contributes to a micro-batch, on average", at_least=1)
    gradient_accumulation_steps: int = setting(1, "training", "micro-batches a process works through for one update", at_least=1)
    num_train_epochs: float = setting(3.0, "training", "passes over the training data; may be a fraction", above=0)
    max_steps: int | None = setting(None, "training", "stop after so many updates, whatever num_train_epochs says", at_least=1)
    lr_scheduler_type: Literal["linear", "cosine", "constant", "constant_with_warmup", "polynomial", "inverse_sqrt"] = setting("linear", "training", "shape of the learning rate over the run")
    warmup_steps: int = setting(0, "training", "updates over which the learning rate rises from 0", at_least=0)
    warmup_ratio: float = setting(0.0, "training", "the same as a share of all updates; warmup_steps wins when both are set", at_least=0, at_most=1)
    weight_decay: float = setting(0.0, "training", "AdamW's decay, not applied to biases and layer norms", at_least=0)
    adam_beta1: float = setting(0.9, "training", "AdamW's decay of the first moment", at_least=0, below=1)
    adam_beta2: float = setting(0.999, "training", "AdamW's decay of the second moment", at_least=0, below=1)
    adam_epsilon: float = setting(1e-8, "training", "AdamW's epsilon", above=0)
    layerwise_lr_decay: float = setting(1.0, "training", "factor of the learning rate from each part of the model to the one below it: head, layers from the last to the first, embeddings", above=0, at_most=1)
    label_smoothing_factor: float = setting(0.0, "training", "share of the label that is spread evenly over all classes", at_least=0, below=1)
    class_weights: tuple[str, ...] | None = setting(None, "training", "weights of the classes in the loss: a number for each label, in the order of the labels, or balanced: inverse to how often each occurs")
    gradient_checkpointing: bool = setting(False, "training", "keep each layer's input alone, and compute the layer again in backward: less memory, more time")
    max_grad_norm: float = setting(1.0, "training", "gradients are scaled down to this global norm; 0 turns it off", at_least=0)
    bf16: Literal["false", "true", "auto"] = setting("false", "training", "compute in bfloat16 with float32 master weights; auto: where the CPU has units for it and a short probe finds it faster")
    seed: int = setting(42, "training", "decides the order of the data, the dropout and the new head's weights", at_least=0)

    do_eval: bool = setting(True, "evaluation", "evaluate during and after training")
    do_predict: bool = setting(False, "evaluation", "predict the test split after training")
    eval_strategy: Literal["no", "steps", "epoch"] = setting("epoch", "evaluation", "when to evaluate during training; the end is always evaluated")
    eval_steps: int | None = setting(None, "evaluation", "updates between evaluations; none: logging_steps", at_least=1)
    per_device_eval_batch_size: int = setting(32, "evaluation", "examples of a batch in evaluation and prediction", at_least=1)
    n_best_size: int = setting(20, "evaluation", "answers to a question that are weighed and written", at_least=1)
    max_answer_length: int = setting(30, "evaluation", "longest answer to a question, in tokens", at_least=1)
    null_score_diff_threshold: float = setting(0.0, "evaluation", "a question has no answer where that scores so much more than the best answer")
    load_best_model_at_end: bool = setting(False, "evaluation", "keep the weights of the best evaluation instead of the last")
    metric_for_best_model: str | None = setting(None, "evaluation", "metric that decides what is best; none: the task's own")
    greater_is_better: bool | None = setting(None, "evaluation", "whether more of that metric is better; none: no for losses and errors")
    early_stopping_patience: int | None = setting(None, "evaluation", "stop after so many evaluations in a row that are no better than the best before", at_least=1)
    early_stopping_threshold: float = setting(0.0, "evaluation", "an evaluation is better if its metric is so by more than this", at_least=0)

    output_dir: Path | None = setting(None, "output", "folder for the model, the checkpoints and the reports")
    overwrite_output_dir: bool = setting(False, "output", "replace the run that the output folder holds")
    resume_from_checkpoint: str | None = setting(None, "output", "go on from a checkpoint: a folder, or without a value the newest intact one")
    save_strategy: Literal["no", "steps", "epoch"] = setting("epoch", "output", "when to write a checkpoint")
    save_steps: int = setting(500, "output", "updates between checkpoints", at_least=1)
    save_total_limit: int | None = setting(2, "output", "checkpoints to keep; the best one is always among them", at_least=1)
    logging_steps: int = setting(10, "output", "updates between two lines of the log", at_least=1)
    report_to: tuple[Literal["tensorboard", "wandb", "mlflow", "all", "none"], ...] = setting(("tensorboard",), "output", "experiment trackers, several separated by commas; all: those that are installed")
    profile: int | None = setting(None, "output", "updates to trace on every rank, after the first two: trace_rank_N.json for chrome://tracing or Perfetto", at_least=1)
    push_to_hub: bool = setting(False, "output", "upload the finished model and its card to the Hugging Face hub, as whom `hf auth login` or HF_TOKEN says")
    hub_model_id: str | None = setting(None, "output", "repository to upload to, as me/my-model; none: the name of the output folder")
    hub_private_repo: bool | None = setting(None, "output", "whether a repository that is made for it is private; none: as the hub has it by default")

    processes: int | None = setting(None, "run", "ranks of each host; none: one per NUMA node, or what an outer launcher started", at_least=1)
    grad_dtype: Literal["float32", "bfloat16"] = setting("float32", "run", "what gradients cross the network in; bfloat16: half the bytes, rounded with error feedback")
    local_steps: int = setting(1, "run", "updates that a rank takes alone after warm-up, before all average their weights (post-local SGD); 1: gradients are exchanged in every update", at_least=1)
    threads: int | None = setting(None, "run", "threads of a rank; none: the usable cores shared out", at_least=1)
    ddp_timeout: int = setting(1800, "run", "seconds to wait for another rank before giving up", at_least=1)

    hosts: tuple[str, ...] | None = setting(None, "cluster", "hosts to train on, separated by commas: names, ssh aliases, addresses, user@host, host:RANKS, node[1-4]; the first has model and data")
    hostfile: Path | None = setting(None, "cluster", "file with a host a line, as in --hosts or as `host slots=RANKS`")
    launcher: Literal["auto", "ssh", "mpirun", "slurm", "ray"] = setting("auto", "cluster", "what starts the ranks on several hosts; auto: ssh with --hosts or --hostfile")
    num_hosts: int | None = setting(None, "cluster", "hosts to take from Slurm or Ray; with --hosts: how many must take part", at_least=1)
    network: str | None = setting(None, "cluster", "network that the hosts talk through, as 10.0.0.0/8; none: that of the route to the first host", shown_as="ADDRESS/BITS")
    port_range: str | None = setting(None, "cluster", "TCP ports that rank 0 may listen on, as 29500-29510; none: any free one from 20000 to 29999", shown_as="FIRST-LAST")
    timeout_s: int = setting(60, "cluster", "seconds after which a host that does not answer, or a rank that does not come, ends the run", at_least=1)
    # fmt: on

    def __post_init__(self) -> None:
        problems = []
        resume: Any = self.resume_from_checkpoint
        if isinstance(resume, bool):  # a file has no setting without a value
            object.__setattr__(self, "resume_from_checkpoint", "auto" if resume else None)
        length: Any = self.max_seq_length
        if length is None:
            object.__setattr__(self, "max_seq_length", 384 if _asks_questions(self) else 128)
        for name, kind in field_types(type(self)).items():
            try:
                object.__setattr__(self, name, coerce(getattr(self, name), kind, LIMITS[name]))
            except BadValue as error:
                problems.append(f"--{name} {getattr(self, name)!r}: {error}")
        if not problems:
            problems = _contradictions(self)
        if problems:
            raise ConfigError(problems)
        object.__setattr__(self, "cache_dir", self.cache_dir.expanduser())

    def replace(self, **changes: Any) -> RunConfig:
        """A copy with some settings changed, checked again."""
        return dataclasses.replace(self, **changes)

    def to_dict(self) -> dict[str, Any]:
        """All settings as JSON-ready values, in the order of the fields."""
        return {f.name: _plain(getattr(self, f.name)) for f in dataclasses.fields(self)}


LIMITS: dict[str, dict[str, float | None]] = {f.name: f.metadata["limits"] for f in dataclasses.fields(RunConfig)}


def _asks_questions(config: RunConfig) -> bool:
    """Whether the task is one of questions about a context, whose windows are longer than other sequences."""
    return config.problem_type == "question_answering" or str(config.task or "").lower().startswith("squad")


def _plain(value: Any) -> Any:
    if isinstance(value, Path):
        return str(value)
    return list(value) if isinstance(value, tuple) else value


def _contradictions(config: RunConfig) -> list[str]:
    """Settings that are fine alone but not together."""
    problems = []
    if config.text_column_names is not None and len(config.text_column_names) > 2:
        problems.append(f"--text_column_names names {len(config.text_column_names)} columns: one or two are expected")
    if "none" in config.report_to and len(config.report_to) > 1:
        problems.append(f"--report_to {','.join(config.report_to)}: none excludes the others")
    if config.load_best_model_at_end:
        problems += _best_model_problems(config)
    problems += tuning_problems(config)
    if config.local_steps > 1 and config.grad_dtype != "float32":
        problems.append(
            f"--local_steps {config.local_steps} averages weights, which --grad_dtype {config.grad_dtype} would round: give one of the two"
        )
    if config.adam_beta1 == 0 and config.adam_beta2 == 0:
        problems.append("--adam_beta1 and --adam_beta2 are both 0: AdamW then divides a gradient by itself")
    if config.lr_scheduler_type == "polynomial" and config.learning_rate <= 1e-7:
        problems.append(f"--learning_rate {config.learning_rate:g}: the polynomial schedule ends at 1e-07, give more")
    return problems


def _best_model_problems(config: RunConfig) -> list[str]:
    """The best weights can be kept only if every evaluation falls on a checkpoint."""
    if not config.do_eval or config.eval_strategy == "no":
        return ["--load_best_model_at_end needs evaluations during training: set --eval_strategy to epoch or steps"]
    if config.save_strategy != config.eval_strategy:
        return [f"--load_best_model_at_end needs --save_strategy and --eval_strategy to be the same, not {config.save_strategy!r} and {config.eval_strategy!r}"]  # fmt: skip
    interval = config.eval_steps or config.logging_steps
    if config.eval_strategy == "steps" and config.save_steps % interval:
        return [f"--load_best_model_at_end needs --save_steps ({config.save_steps}) to be a multiple of --eval_steps ({interval})"]  # fmt: skip
    return []


def check_train(config: RunConfig, *, has_files: bool = True) -> None:
    """Refuse, before anything starts, a training run that lacks what it needs.

    Args:
        config: The settings.
        has_files: Whether the data should be on this host.

    Raises:
        ConfigError: Lists every missing setting.
    """
    problems = check_source(config, needs_train=True, has_files=has_files)
    if config.model is None:
        problems.append("--model is missing: the folder or hub name of an encoder, for example bert-base-uncased")
    if config.output_dir is None:
        problems.append("--output_dir is missing: the folder that the fine-tuned model is written to")
    if problems:
        raise ConfigError(problems)


def check_source(config: RunConfig, *, needs_train: bool, has_files: bool = True) -> list[str]:
    """The problems of where the data come from: no source, two that exclude each other, or files that are not there.

    Args:
        config: The settings.
        needs_train: Whether it is for training.
        has_files: Whether the files should be on this host.
    """
    problems = []
    if config.task is None and config.dataset_name is None:
        if needs_train and config.train_file is None:
            problems.append("no data: give --task with --data_dir, --train_file, or --dataset_name")
        elif not needs_train and config.validation_file is None and config.test_file is None:
            problems.append("no data: give --task with --data_dir, --validation_file, or --dataset_name")
        elif needs_train and config.do_eval and config.validation_file is None:
            problems.append("--validation_file is missing: give one, or --do_eval false to train without evaluating")
    if config.dataset_name is not None and (config.train_file is not None or config.data_dir is not None):
        problems.append("--dataset_name excludes --train_file and --data_dir: give one source")
    return problems + (_missing_files(config) if has_files else [])


def _missing_files(config: RunConfig) -> list[str]:
    problems = []
    files = {n: getattr(config, n) for n in ("train_file", "validation_file", "test_file")}
    for name, path in files.items():
        if path is not None and not path.is_file():
            problems.append(
                f"--{name} {path}: "
                + ("a file is expected, not a folder" if path.is_dir() else "there is no such file")
            )
    if config.data_dir is not None and not config.data_dir.is_dir():
        problems.append(f"--data_dir {config.data_dir}: there is no such folder")
    return problems
