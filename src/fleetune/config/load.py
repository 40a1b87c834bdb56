"""From the names and values of a command line or file to a `RunConfig`."""

from __future__ import annotations

import dataclasses
import json
import os
import tomllib
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from fleetune.config.names import ALIASES, RETIRED, canonical
from fleetune.config.run import GROUPS, RunConfig
from fleetune.config.values import nearest
from fleetune.errors import ConfigError

IN_ENVIRONMENT = "env:"
_NAME_HOSTS = ("hosts", "hostfile")
FIELD_NAMES = tuple(f.name for f in dataclasses.fields(RunConfig))


@dataclasses.dataclass(frozen=True, kw_only=True)
class Settings:
    """Settings under their own names, before they are checked, and what is to be said of them."""

    values: dict[str, Any]
    notices: tuple[str, ...] = ()
    problems: tuple[str, ...] = ()


def resolve_names(given: Mapping[str, Any]) -> Settings:
    """Turn aliases into field names and retired words into notices; unknown names become problems."""
    values: dict[str, Any] = {}
    spelled: dict[str, str] = {}
    implied: dict[str, tuple[str, Any]] = {}
    notices, problems = [], []
    for name, value in given.items():
        field = canonical(name)
        if field in RETIRED:
            says, becomes, problem = _retired(field, value)
            notices += says
            problems += problem
            implied |= {setting: (field, meant) for setting, meant in becomes.items()}
        elif field not in FIELD_NAMES:
            problems.append(_unknown(name))
        elif field in _NAME_HOSTS and value == "":  # a variable that is not set would train on this host alone
            problems.append(f"--{field} is empty: no host is named")
        elif field in spelled:
            problems.append(f"--{spelled[field]} and --{name.lstrip('-')} are the same setting: give one")
        else:
            values[field], spelled[field] = value, name.lstrip("-")
    for field, (word, value) in implied.items():
        if str(values.setdefault(field, value)) != str(value):
            problems.append(f"--{word} means --{field} {value}, but --{spelled[field]} is {values[field]}: give one")
    return Settings(values=values, notices=tuple(notices), problems=tuple(problems))


def config_from_mapping(*layers: Mapping[str, Any]) -> tuple[RunConfig, tuple[str, ...]]:
    """The run's settings from layers of names and values, a later layer before an earlier one.

    Returns:
        The settings, and one line for each retired word that was given.

    Raises:
        ConfigError: Lists every unknown name and every value that cannot be used.
    """
    resolved = [resolve_names(layer) for layer in layers]
    values = {name: value for part in resolved for name, value in part.values.items()}
    problems = [p for part in resolved for p in part.problems]
    if problems:
        raise ConfigError(problems + _bad_values(values))
    return RunConfig(**values), tuple(dict.fromkeys(n for part in resolved for n in part.notices))


def read_config_file(path: Path) -> dict[str, Any]:
    """Names and values of a TOML, YAML or JSON file; settings may stand in tables named like the groups of `--help`.

    The path `env:NAME` means JSON in an environment variable: what ranks on hosts without the file are given.

    Raises:
        ConfigError: The file is missing, of another kind, or cannot be parsed (with the parser's place).
    """
    if str(path).startswith(IN_ENVIRONMENT):
        if (text := os.environ.get(str(path).removeprefix(IN_ENVIRONMENT))) is None:
            raise ConfigError(f"--config {path}: no such environment variable")
        return dict(json.loads(text))
    return _flatten(read_mapping(path, "--config"), path)


def read_mapping(path: Path, flag: str) -> dict[str, Any]:
    """Names and values of a TOML, YAML or JSON file, as they stand there.

    Args:
        path: Of the file.
        flag: Which flag named it, for messages.

    Raises:
        ConfigError: The file is missing, of another kind, or cannot be parsed (with the parser's place).
    """
    reader = _READERS.get(path.suffix.lower())
    if reader is None:
        raise ConfigError(f"{flag} {path}: a .toml, .yaml or .json file is expected")
    try:
        content = reader(path.read_text(encoding="utf-8-sig"))
    except FileNotFoundError:
        raise ConfigError(f"{flag} {path}: there is no such file") from None
    except OSError as error:
        raise ConfigError(f"{flag} {path}: {error.strerror or error}") from error
    except ValueError as error:
        raise ConfigError(f"{flag} {path}: {error}") from error
    if not isinstance(content, dict):
        raise ConfigError(f"{flag} {path}: names with values are expected, not {type(content).__name__}")
    return content


def to_toml(config: RunConfig) -> str:
    """The settings as a TOML file that `--config` reads back; a setting without a value is a comment."""
    lines: list[str] = []
    for group in GROUPS:
        lines.append(f"\n[{group}]" if lines else f"[{group}]")
        for field in dataclasses.fields(config):
            if field.metadata["group"] == group:
                value = config.to_dict()[field.name]
                if value is None and field.default is not None:
                    value = "none"  # left out, it would read as the default
                text = json.dumps(value, ensure_ascii=False)  # TOML has no escapes for halves of a character
                lines.append(f"# {field.name} =" if value is None else f"{field.name} = {text}")
    return "\n".join(lines) + "\n"


def _flatten(content: dict[str, Any], path: Path) -> dict[str, Any]:
    """Lift the tables' settings to the top; a table of another name, or a setting given twice, is refused."""
    flat: dict[str, Any] = {}
    for name, value in content.items():
        if isinstance(value, dict) and name not in GROUPS:
            raise ConfigError(f"--config {path}: [{name}] is no group of settings; they are {', '.join(GROUPS)}")
        for key, inner in value.items() if isinstance(value, dict) else [(name, value)]:
            if not isinstance(key, str):
                raise ConfigError(f"--config {path}: {key!r} is not the name of a setting")
            if key in flat:
                raise ConfigError(f"--config {path}: {key} is given twice")
            flat[key] = inner
    return flat


def _read_yaml(text: str) -> Any:
    import yaml

    class Loader(yaml.SafeLoader):  # type: ignore[misc]
        def construct_mapping(self, node: Any, deep: bool = False) -> Any:
            _refuse_repeated([str(key.value) for key, _ in node.value])
            return super().construct_mapping(node, deep)

    try:
        content = yaml.load(text, Loader)
    except yaml.YAMLError as error:
        raise ValueError(str(error)) from error
    return {} if content is None else content


def _read_json(text: str) -> Any:
    def to_dict(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
        _refuse_repeated([name for name, _ in pairs])
        return dict(pairs)

    return json.loads(text, object_pairs_hook=to_dict)


def _refuse_repeated(names: list[str]) -> None:
    """The parsers of YAML and JSON would let the last of two equal names win."""
    repeated = [name for i, name in enumerate(names) if name in names[:i]]
    if repeated:
        raise ValueError(f"{repeated[0]} is given twice")


_READERS: dict[str, Callable[[str], Any]] = {
    ".toml": tomllib.loads,
    ".json": _read_json,
    ".yaml": _read_yaml,
    ".yml": _read_yaml,
}


def _dashless(name: str) -> str:
    return name.lstrip("-").replace("-", "_")


def _unknown(name: str) -> str:
    return f"--{_dashless(name)} is not a setting" + nearest(_dashless(name), [*FIELD_NAMES, *ALIASES, *RETIRED])


def _retired(field: str, value: Any) -> tuple[list[str], dict[str, Any], list[str]]:
    """Notices, settings and problems of a retired word."""
    entry, word = RETIRED[field], str(value).strip().lower()
    if word in entry.refuses or (entry.accepts is not None and word not in entry.accepts):
        shown = "(not shown)" if entry.is_secret else value
        return [], {}, [f"--{field} {shown}: {entry.says}"]
    if entry.accepts is not None or (not entry.takes_value and word in ("false", "no", "0", "off")):
        return [], {}, []  # it asks for what happens anyway, or for nothing
    return [f"--{field}: {entry.says}"], entry.becomes.get(word, {}), []


def _bad_values(values: Mapping[str, Any]) -> list[str]:
    """The problems of the known settings, so that one message lists them beside the unknown names."""
    try:
        RunConfig(**values)
    except ConfigError as error:
        return list(error.problems)
    return []
