"""The flags of `accelerate launch`, and the file that `accelerate config` writes.

Source: accelerate/commands/launch.py and config/config_args.py of accelerate 1.15; `ipex` and `mpirun_ccl` of 0.28.
What accelerate tells its scripts by variables, they are told here by the same ones.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from fleetune.cluster.commands.flags import Flag, Meaning, fact, only, read_flags, refused, without
from fleetune.cluster.commands.retired import GLOO, IPEX, LOGS, MEETING, PINNED, RESTARTS
from fleetune.config.load import read_mapping
from fleetune.errors import ConfigError

_ON_CPU = "fleetune works on CPUs, and every rank holds the whole model"
_NO_HALF = "CPUs have no units for float16: bf16 is their short format; float32 is used"


def _precision(flag: str, values: tuple[str, ...]) -> Meaning:
    value = values[0].lower()
    if value == "fp16":
        return Meaning(facts={"mixed_precision": "no"}, notices=(f"{flag} fp16: {_NO_HALF}",))
    if value not in ("no", "bf16"):
        return Meaning(problems=(f"{flag} {values[0]}: no or bf16 is expected",))
    return Meaning(facts={"mixed_precision": value}, variables={"ACCELERATE_MIXED_PRECISION": value})


def _variable(names: str, variable: str, *, value: str | None = None) -> Flag:
    """A flag that accelerate hands to the script as a variable."""
    return Flag(
        names=tuple(names.split()),
        reads=lambda flag, values: Meaning(variables={variable: values[0] if value is None else value}),
        num_values=0 if value is not None else 1,
    )


def _if_true(names: str, says: str) -> Flag:
    """A setting of the file that is left away, and said to be where it is on."""
    return Flag(
        names=tuple(names.split()),
        reads=lambda flag, values: Meaning(notices=(f"{flag}: {says}",) if values[0].lower() == "true" else ()),
    )


_SETTINGS: tuple[Flag, ...] = (
    fact("num_processes", "ranks"),
    fact("num_machines", "num_hosts"),
    fact("machine_rank", "host_rank"),
    fact("main_process_port", "port"),
    fact("num_cpu_threads_per_process", "threads"),
    fact("mpirun_hostfile", "hostfile"),
    Flag(names=("mixed_precision",), reads=_precision),
    _variable("gradient_accumulation_steps", "ACCELERATE_GRADIENT_ACCUMULATION_STEPS"),
    _variable("dynamo_backend", "ACCELERATE_DYNAMO_BACKEND"),
    _variable("dynamo_mode", "ACCELERATE_DYNAMO_MODE"),
    without("main_process_ip rdzv_backend rdzv_conf", MEETING, num_values=1),
    without("mpirun_ccl", GLOO, num_values=1),
    without("max_restarts monitor_interval", RESTARTS, num_values=1),
    without("tee t log_dir role", LOGS, num_values=1),
    without("gpu_ids main_training_function", num_values=1),
)
"""With a value, as flags and in the file."""

ACCELERATE: tuple[Flag, ...] = (
    *_SETTINGS,
    fact("config_file", "config_file"),
    fact("m module", "module", value="true"),
    fact("no_python", "no_python", value="true"),
    _variable("debug", "ACCELERATE_DEBUG_MODE", value="true"),
    _variable("dynamo_use_fullgraph", "ACCELERATE_DYNAMO_USE_FULLGRAPH", value="True"),
    _variable("dynamo_use_dynamic", "ACCELERATE_DYNAMO_USE_DYNAMIC", value="True"),
    without("cpu use_cpu same_network quiet q"),
    without("enable_cpu_affinity", PINNED),
    without("ipex", IPEX),
    without("use_xpu", "fleetune works on CPUs"),
    refused("multi_gpu tpu use_deepspeed use_fsdp use_megatron_lm use_parallelism_config", _ON_CPU),
)

ACCELERATE_FILE: tuple[Flag, ...] = (
    *_SETTINGS,
    only("compute_environment", ("local_machine",), "LOCAL_MACHINE is expected"),
    only("distributed_type", ("no", "multi_cpu"), f"NO or MULTI_CPU is expected: {_ON_CPU}"),
    _variable("debug", "ACCELERATE_DEBUG_MODE"),
    _if_true("enable_cpu_affinity", PINNED),
    _if_true("ipex", IPEX),
    without("use_cpu same_network downcast_bf16 use_xpu", num_values=1),
    without("tpu_use_cluster tpu_use_sudo tpu_name tpu_zone tpu_env tpu_vm command_file commands", num_values=1),
    without("dynamo_use_fullgraph dynamo_use_dynamic dynamo_use_regional_compilation", num_values=1),
)
_GROUPS = ("mpirun_config", "ipex_config", "dynamo_config")
"""Settings of the file that hold others."""


def read_accelerate_file(path: Path) -> Meaning:
    """What a file of accelerate's tells: YAML or JSON, as `accelerate config` writes it.

    Raises:
        ConfigError: It cannot be read, or has settings that cannot be followed here; lists them all.
    """
    words = []
    for name, value in _flat(read_mapping(path, "--config_file")).items():
        if value not in (None, [], {}, ""):
            words.append(f"--{name}={_text(value)}")
    found, _ = read_flags(words, ACCELERATE_FILE, "accelerate's file")
    if found.problems:
        raise ConfigError([f"{path}: {problem.removeprefix('--')}" for problem in found.problems])
    told = [f"{path}: {notice.removeprefix('--')}" for notice in found.notices]
    return Meaning(facts=found.facts, variables=_of_cpu(found.variables), notices=tuple(told))


def default_accelerate_file(environ: Mapping[str, str]) -> Path | None:
    """The file that `accelerate launch` reads unless it is told of another; None where there is none."""
    cache = Path(environ.get("XDG_CACHE_HOME") or "~/.cache").expanduser()
    home = Path(environ.get("HF_HOME") or cache / "huggingface").expanduser() / "accelerate"
    names = ("default_config.yaml", "default_config.yml", "default_config.json")
    return next((home / name for name in names if (home / name).is_file()), None)


def _of_cpu(variables: Mapping[str, str]) -> dict[str, str]:
    return {"ACCELERATE_USE_CPU": "true", **variables}


def with_file(found: Meaning, environ: Mapping[str, str]) -> Meaning:
    """What the flags of `accelerate launch` tell, above what its file tells."""
    told = found.facts.get("config_file")
    path = Path(told).expanduser() if told else default_accelerate_file(environ)
    below = Meaning(variables=_of_cpu({}))
    if path is not None:
        below += read_accelerate_file(path)
    if path is not None and told is None:
        below += Meaning(notices=(f"accelerate launch: settings of {path} count, too",))
    return below + found


def _flat(content: Mapping[str, Any]) -> dict[str, Any]:
    flat: dict[str, Any] = {}
    for name, value in content.items():
        flat |= value if name in _GROUPS and isinstance(value, dict) else {name: value}
    return flat


def _text(value: Any) -> str:
    return str(value).lower() if isinstance(value, bool) else str(value)
