"""What a run executes on every host, whatever starts it there."""

from __future__ import annotations

import json
import re
import shlex
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from fleetune.cluster.outputs import LOG_FOLDER
from fleetune.cluster.rank import CWD_VARIABLE, NETWORK_VARIABLE, PORT_RANGE_VARIABLE, THREADS_VARIABLE
from fleetune.config.load import IN_ENVIRONMENT

AS_RANK = ("-m", "fleetune.cluster.as_rank", "--")
"""What Python is told before a job's command, where the launcher or the command is not our own."""
ON_CPU = {"ACCELERATE_USE_CPU": "true"}
"""Without it, where there is no GPU, accelerate's `Accelerator()` takes each rank for the only one: all train alone."""
SETTINGS_VARIABLE = "FLEETUNE_SETTINGS"
"""Holds the settings of a run as JSON, for hosts that have no file of the head's."""

_FORWARDED = re.compile(
    r"(OMP|KMP|GOMP|MKL|OPENBLAS|GLOO|CCL|FI|I_MPI|DNNL|ONEDNN|TORCH|TORCHINDUCTOR|TP|HF|HUGGINGFACE|TRANSFORMERS"
    r"|TOKENIZERS|DATASETS|ACCELERATE|WANDB|MLFLOW|TENSORBOARD|FLEETUNE|MALLOC|TCMALLOC|PYTHON|XDG)_\w+"
    r"|PYTHON[A-Z]+|MALLOC_CONF|GLIBC_TUNABLES|LD_PRELOAD|LD_LIBRARY_PATH|USE_\w+|NO_COLOR"
    r"|LANG|LC_\w+|(http|https|no|all)_proxy|(HTTP|HTTPS|NO|ALL)_PROXY"
)
_OF_ONE_HOST = re.compile(
    r"XDG_(RUNTIME_DIR|SESSION_\w+|SEAT|VTNR|DATA_DIRS|CONFIG_DIRS)|FLEETUNE_LAUNCHER|TORCHELASTIC_\w+"
)
_SECRET = re.compile(
    r"TOKEN(?!IZER|S(_|$))|SECRET|PASSWORD|PASSWD|PASSPHRASE|CREDENTIAL|(?<=[A-Z0-9])[_-]KEY(?![A-Z])|APIKEY|(http|https|all)_proxy",
    re.IGNORECASE,
)
"""Names whose values are not shown, of variables and of flags. `TOKENIZERS_PARALLELISM` and `--max_tokens` are none."""
_LOGIN = re.compile(r"(?<=://)[^/\s]+@")
_NOT_SHOWN = "(not shown)"


@dataclass(frozen=True, kw_only=True)
class Job:
    """One command for every rank, and how the ranks meet."""

    command: tuple[str, ...]
    """Program and arguments of every rank."""
    environ: Mapping[str, str] = field(repr=False)
    """Variables that every rank gets, beside those of its host; not shown, since they may hold secrets."""
    cwd: Path
    """Working folder on every host that has it."""
    processes: int | None = None
    """Ranks of each host; None for what the host file or the host's plan says."""
    threads: int | None = None
    """Threads of each rank; None for what the host's plan says."""
    network: str | None = None
    """Network that the hosts talk through, as 10.0.0.0/8; None for that of the route."""
    port_range: str | None = None
    """Ports that rank 0 may listen on, as 29500-29510."""
    timeout_s: int = 60
    """Seconds after which a host that does not answer ends the run."""

    def shown_environ(self) -> dict[str, str]:
        """The variables with secrets left out, for people to read."""
        return shown(self.environ)


def fleetune_job(words: Sequence[str], settings: Mapping[str, Any], environ: Mapping[str, str], **how: Any) -> Job:
    """A command of fleetune as ranks.

    Args:
        words: `train`, `evaluate` or `predict`, and its own arguments.
        settings: What `RunConfig.to_dict` gives; travels in a variable, since hosts may share no files.
        environ: The user's environment.
        how: Fields of `Job`.
    """
    command = (sys.executable, "-m", "fleetune", *words, "--config", f"{IN_ENVIRONMENT}{SETTINGS_VARIABLE}")
    return Job(
        command=command, environ=forwarded(environ) | {SETTINGS_VARIABLE: json.dumps(settings)}, cwd=Path.cwd(), **how
    )


def script_job(words: Sequence[str], environ: Mapping[str, str], **how: Any) -> Job:
    """A script of the user's as ranks: `script.py ...` or `-m module ...` is run by this Python, all else as it is.

    Args:
        words: The script and its arguments.
        environ: The user's environment.
        how: Fields of `Job`.
    """
    is_python = words[0] == "-m" or words[0].endswith(".py")
    return Job(
        command=((sys.executable, *words) if is_python else tuple(words)),
        environ={**ON_CPU, **forwarded(environ)}, cwd=Path.cwd(), **how,
    )  # fmt: skip


def logs_folder(job: Job) -> Path:
    """Where the ranks' logs go: into the output folder of a run of fleetune, else into the job's folder."""
    settings = json.loads(job.environ.get(SETTINGS_VARIABLE, "{}"))
    return job.cwd / (settings.get("output_dir") or "") / LOG_FOLDER


def stops_on_usr1(job: Job) -> bool:
    """Whether the ranks take SIGUSR1 for a request to stop, as our own training does; it ends other programs."""
    return _is_our_training(job.command)


def stop_notice(command: Sequence[str]) -> str:
    """What the user is told when the ranks of a command are asked to stop."""
    what = "stopping after the current step" if _is_our_training(command) else "all ranks are asked to stop"
    return f"{what}; press Ctrl-C again to end at once"


def _is_our_training(command: Sequence[str]) -> bool:
    return tuple(command[1:4]) == ("-m", "fleetune", "train")


def is_our_own(command: Sequence[str]) -> bool:
    """Whether a job's command is one of fleetune's, which sends model and data to hosts that lack them."""
    return tuple(command[1:3]) == ("-m", "fleetune")


def through_as_rank(job: Job) -> Job:
    """The job with its ranks going through `as_rank`, which gives each its cores before it becomes the command."""
    return replace(job, command=(sys.executable, *AS_RANK, *job.command), environ={**job.environ, **told_ranks(job)})


def told_ranks(job: Job) -> dict[str, str]:
    """What `as_rank` reads of a job's settings."""
    told = {
        CWD_VARIABLE: str(job.cwd),
        NETWORK_VARIABLE: job.network,
        PORT_RANGE_VARIABLE: job.port_range,
        THREADS_VARIABLE: None if job.threads is None else str(job.threads),
    }
    return {name: value for name, value in told.items() if value is not None}


def forwarded(environ: Mapping[str, str]) -> dict[str, str]:
    """Those variables of the user's that count on other hosts, too: of libraries, not of this session."""
    return {
        name: value
        for name, value in environ.items()
        if _FORWARDED.fullmatch(name) and not _OF_ONE_HOST.fullmatch(name) and value
    }


def shown(environ: Mapping[str, str]) -> dict[str, str]:
    """Variables for people to read: secrets are not, be it a whole value or the login of an address."""
    return {name: _NOT_SHOWN if _SECRET.search(name) else _masked(value) for name, value in environ.items()}


def shown_words(command: Sequence[str]) -> list[str]:
    """A command for people to read: the values of flags such as --hub_token and --api-key are left out."""
    words: list[str] = []
    is_secret = False
    for word in command:
        flag, equals, _ = word.partition("=")
        names_secret = flag.startswith("-") and _SECRET.search(flag) is not None
        if names_secret and equals:
            words.append(f"{flag}={_NOT_SHOWN}")
        else:
            words.append(_NOT_SHOWN if is_secret and not word.startswith("--") else _masked(word))
        is_secret = names_secret and not equals
    return words


def _masked(text: str) -> str:
    return _LOGIN.sub(f"{_NOT_SHOWN}@", text)


def holds_secret(name: str) -> bool:
    """Whether a variable of this name is not shown to anybody, nor written anywhere."""
    return _SECRET.search(name) is not None


def as_words(environ: Mapping[str, str], command: Sequence[str]) -> str:
    """What one would type: variables, then the command; secrets left out."""
    settings = [f"{name}={shlex.quote(value)}" for name, value in shown(environ).items()]
    return " ".join([*settings, shlex.join(shown_words(command))])
