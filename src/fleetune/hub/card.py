"""The model card of a run: its record in words, and the metadata that the hub reads."""

from __future__ import annotations

import hashlib
import re
import shlex
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from fleetune.config import RunConfig
from fleetune.report.record import RunRecord

CARD = "README.md"
_SIGNATURE = re.compile(r"<!-- written by fleetune, ([0-9a-f]{64}) -->\n")

PIPELINES = {
    "classification": "text-classification",
    "regression": "text-classification",
    "multi_label_classification": "text-classification",
    "token_classification": "token-classification",
    "question_answering": "question-answering",
}
"""Kind of task -> the hub's name of it."""

_PATHS = ("data_dir", "train_file", "validation_file", "test_file", "model", "tokenizer_name", "hostfile")
_PRIVATE = frozenset({"hosts", "hostfile", "network", "port_range", "cache_dir", "output_dir", "overwrite_output_dir",
                      "overwrite_cache", "resume_from_checkpoint", "push_to_hub", "hub_model_id",
                      "hub_private_repo"})  # fmt: skip
"""Settings that are of the user's machines, not of the model."""
_OF_RESULTS = ("runtime", "samples", "samples_per_second")


def model_card(record: RunRecord, name: str) -> str:
    """A model card.

    Folders of files, names of hosts and addresses are left out: a card is read by everyone.

    Args:
        record: Of a finished run.
        name: Of the model.

    Returns:
        Markdown with metadata in front, signed, so that one that somebody has changed is known; see `is_ours`.
    """
    return f"---\n{_metadata(record, name)}\n---\n\n{_signed(_text(record, name))}"


def is_ours(card: str) -> bool:
    """Whether a card was written by fleetune, and nobody has changed its text since."""
    found = _SIGNATURE.search(card)
    return found is not None and _digest(card[found.end() :]) == found[1]


def write_card(folder: Path, record: RunRecord, name: str) -> str | None:
    """Write a run's card into a folder, unless there is one that somebody else wrote.

    Returns:
        What to tell of one that was left alone; None if the card was written.
    """
    path = folder / CARD
    if path.exists() and not is_ours(path.read_text(encoding="utf-8", errors="replace")):
        return f"{path} is not fleetune's, or was changed: it was left as it is, and no model card was written"
    path.write_text(model_card(record, name), encoding="utf-8")
    return None


def _digest(text: str) -> str:
    return hashlib.sha256(text.strip().encode()).hexdigest()


def _signed(text: str) -> str:
    return f"<!-- written by fleetune, {_digest(text)} -->\n{text}"


# ---- metadata


def _metadata(record: RunRecord, name: str) -> str:
    """YAML in the hub's layout, with the results as a model index."""
    from huggingface_hub import ModelCardData

    task, base = record.task, _hub_name(record.config.get("model"))
    data_set = record.config.get("dataset_name") or (task.get("hub_name") if _is_of_the_hub(record) else None)
    return str(
        ModelCardData(
            model_name=name,
            library_name="transformers",
            tags=["fleetune"],
            pipeline_tag=PIPELINES.get(str(task.get("problem"))),
            base_model=base,
            datasets=None if data_set is None else [data_set],
            metrics=[metric for metric, *_ in _results(record)] or None,
            eval_results=_eval_results(record, data_set) or None,
        ).to_yaml()
    )


def _eval_results(record: RunRecord, data_set: str | None) -> list[Any]:
    from huggingface_hub import EvalResult

    task, name = record.task, _name_of_data(record)
    return [
        EvalResult(
            task_type=PIPELINES.get(str(task.get("problem")), "other"),
            dataset_type=data_set or "own-files",
            dataset_name=name,
            dataset_config=task.get("hub_config") if data_set else None,
            dataset_split=split,
            metric_type=metric,
            metric_name=metric,
            metric_value=round(value, 6),
        )
        for metric, value, split in _results(record)
    ]


def _results(record: RunRecord) -> Iterator[tuple[str, float, str]]:
    """(metric, value, split) of the last evaluation, without its loss and its timing."""
    for key, value in record.metrics.items():
        name, is_second = key.removeprefix("eval_").removesuffix("_mm"), key.endswith("_mm")
        if key.startswith("eval_") and name != "loss" and name not in _OF_RESULTS and value is not None:
            yield name, value, _split(record, is_second)


def _split(record: RunRecord, is_second: bool) -> str:
    """The name of the first validation split, or of the other one."""
    names = [split["name"] for split in record.task.get("splits", ()) if split["role"] == "validation"]
    return str(names[1 if is_second and len(names) > 1 else 0]) if names else "validation"


def _hub_name(model: Any) -> str | None:
    """The name of a model of the hub; None for a folder, which may be gone by now."""
    text = str(model or "")
    is_name = re.fullmatch(r"[\w.-]+(/[\w.-]+)?", text) is not None
    return text if is_name and not Path(text).exists() else None


def _is_of_the_hub(record: RunRecord) -> bool:
    """Whether the data came from the hub, or are those of a task that is there."""
    return record.task.get("name") not in (None, "custom")


def _name_of_data(record: RunRecord) -> str:
    config, task = record.config, record.task
    if config.get("dataset_name"):
        return str(config["dataset_name"])
    if _is_of_the_hub(record):
        return str(task["name"])
    return Path(str(config.get("validation_file") or config.get("data_dir") or "own files")).name


# ---- text


def _text(record: RunRecord, name: str) -> str:
    config = record.config
    base = _hub_name(config.get("model")) or Path(str(config.get("model"))).name
    parts = [
        f"# {name}",
        f"`{base}`, fine-tuned by fleetune {record.versions.get('fleetune', '')} for {_task_words(record)}.",
        *_section("Results", _results_table(record)),
        *_section("Data", _table(_data(record))),
        *_section("Training", _table(_training(record))),
        *_section("Time and hardware", _table(_hardware(record))),
        *_section("Versions", _table(record.versions)),
        *_section("Command", f"```\n{command(config)}\n```"),
        *_section("Remarks", "\n".join(f"- {notice}" for notice in map(_without_folders, record.notices))),
    ]
    return "\n\n".join(parts) + "\n"


def _section(title: str, content: str) -> list[str]:
    return [f"## {title}", content] if content else []


def _table(values: Mapping[str, Any]) -> str:
    rows = [f"| {name} | {_cell(value)} |" for name, value in values.items() if value is not None]
    return "\n".join(["| | |", "| --- | --- |", *rows]) if rows else ""


def _cell(value: Any) -> str:
    text = f"{value:,}" if isinstance(value, int) and not isinstance(value, bool) else f"{value}"
    return text.replace("|", "\\|").replace("\n", " ")


def _task_words(record: RunRecord) -> str:
    task = record.task
    kind = str(task.get("problem", "")).replace("_", " ")
    return kind if task.get("name") in (None, "custom") else f"{task['name']} ({kind})"


def _results_table(record: RunRecord) -> str:
    rows = [f"| {metric} | {value:.4f} | {split} |" for metric, value, split in _results(record)]
    if not rows:
        return "It was not evaluated."
    count = record.metrics.get("eval_samples")
    of = f"\n\nOf {int(count):,} examples, after the last update." if count else ""
    if record.config.get("load_best_model_at_end"):
        of = of.replace("after the last update", "with the weights of the best evaluation")
    return "\n".join(["| metric | value | split |", "| --- | --- | --- |", *rows]) + of


def _data(record: RunRecord) -> dict[str, Any]:
    config, plan, task = record.config, record.plan, record.task
    layout = (task.get("layouts") or [{}])[0]
    files = {name: Path(str(config[name])).name for name in ("train_file", "validation_file", "test_file")
             if config.get(name)}  # fmt: skip
    bad = {f"rows left out of {split}": told["count"] for split, told in record.bad_rows.items()}
    return {
        "task": task.get("name"),
        "data set": config.get("dataset_name"),
        **{name.replace("_", " "): value for name, value in files.items()},
        "folder": Path(str(config["data_dir"])).name if config.get("data_dir") else None,
        "columns": ", ".join([*layout.get("texts", ()), *([layout["label"]] if layout.get("label") else [])]) or None,
        "labels": ", ".join(task["labels"]) if task.get("labels") else None,
        "training examples": plan.get("num_examples"),
        "training tokens": plan.get("num_tokens"),
        **bad,
    }


def _training(record: RunRecord) -> dict[str, Any]:
    plan, config = record.plan, record.config
    resolved = {
        "updates": record.step,
        "epochs": _rounded(plan.get("epochs")),
        "global batch": plan.get("global_batch_size"),
        "peak learning rate": _rounded(plan.get("learning_rate")),
        "schedule": plan.get("lr_scheduler"),
        "warm-up updates": plan.get("warmup_steps"),
        "arithmetic": plan.get("dtype"),
        "kernels": plan.get("kernels"),
        "batches": None if plan.get("unpadded") is None else "flat" if plan["unpadded"] else "padded",
        "gone on at update": record.resumed_at_step,
    }
    return resolved | {f"`{name}`": value for name, value in given(config).items() if name not in _PATHS}


def _rounded(value: Any) -> Any:
    return f"{value:g}" if isinstance(value, float) else value


def _hardware(record: RunRecord) -> dict[str, Any]:
    host, plan, speed = record.host, record.plan, record.throughput
    num_hosts = len({member.get("place") or member.get("host") for member in record.roster}) or 1
    seconds = {f"{name} (s)": f"{value:,.1f}" for name, value in record.seconds.items()}
    return {
        "started": record.started,
        "hosts": num_hosts,
        "processes": f"{plan.get('processes')} x {plan.get('threads')} threads" if plan else None,
        "CPU": host.get("cpu_model"),
        "cores used": host.get("usable_cores"),
        "memory (GB)": f"{host['memory_bytes'] / 1e9:,.1f}" if host.get("memory_bytes") else None,
        **seconds,
        "samples a second": f"{speed['samples_per_s']:,.1f}" if "samples_per_s" in speed else None,
        "tokens a second": f"{speed['tokens_per_s']:,.0f}" if "tokens_per_s" in speed else None,
    }


# ---- the command


def given(config: Mapping[str, Any]) -> dict[str, Any]:
    """The settings that differ from their defaults, but those that are of the user's machines."""
    defaults = RunConfig().to_dict()
    defaults["max_seq_length"] = 384 if _is_of_questions(config) else 128
    known = {name: value for name, value in config.items() if name in defaults and name not in _PRIVATE}
    return {name: value for name, value in known.items() if value is not None and _listed(value) != defaults[name]}


def _listed(value: Any) -> Any:
    """A setting's value as records hold it: without tuples."""
    return list(value) if isinstance(value, tuple) else value


def _is_of_questions(config: Mapping[str, Any]) -> bool:
    return config.get("problem_type") == "question_answering" or str(config.get("task")).lower().startswith("squad")


def command(config: Mapping[str, Any]) -> str:
    """A command that asks for the same run; folders of files are left out."""
    words = ["fleetune", "train"]
    for name, value in given(config).items():
        shown = Path(str(value)).name if name in _PATHS and _hub_name(value) is None else value
        text = ",".join(map(str, shown)) if isinstance(shown, (list, tuple)) else str(shown)
        words += [f"--{name}", text.lower() if isinstance(shown, bool) else text]
    return shlex.join([*words, "--output_dir", "out"])


def _without_folders(line: str) -> str:
    """A notice with the names of files alone."""
    return re.sub(r"(?<![\w.])/(?:[^\s/:,;'\"()]+/)+", "", line)
