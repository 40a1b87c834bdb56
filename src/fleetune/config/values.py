"""Conversion of a setting's value, often text, to the type its field declares."""

from __future__ import annotations

import dataclasses
import difflib
import math
import types
from pathlib import Path
from typing import Any, Literal, Union, get_args, get_origin, get_type_hints

_TRUE, _FALSE, _NONE = {"true", "yes", "on", "1"}, {"false", "no", "off", "0"}, {"none", "null", ""}


class BadValue(ValueError):  # noqa: N818 - read as a sentence where it is caught
    """A value that does not fit its field; the text says what is expected."""


def field_types(cls: type) -> dict[str, Any]:
    """The declared type of every field of a dataclass, by name."""
    hints = get_type_hints(cls)
    return {f.name: hints[f.name] for f in dataclasses.fields(cls)}


def coerce(value: Any, kind: Any, limits: dict[str, float | None]) -> Any:
    """`value` as `kind`.

    Args:
        value: What was given: text, or a value of a TOML, YAML or JSON file.
        kind: The field's type: str, int, float, bool, Path, a Literal, a tuple of str, or one of these or None.
        limits: The field's range ("at least", "above", "at most", "below").

    Raises:
        BadValue: The value does not fit.
    """
    optional, kind = _without_none(kind)
    if value is None or (optional and isinstance(value, str) and value.strip().lower() in _NONE):
        if optional:
            return None
        raise BadValue("a value is needed")
    if optional and kind is int and value in (-1, "-1"):  # the TrainingArguments spelling of "not set"
        return None
    converted = _CONVERTERS[get_origin(kind) or kind](value, kind)
    _check_limits(converted, limits)
    return converted


def choices(kind: Any) -> tuple[str, ...]:
    """The words a field accepts, or each of its values does; empty when it accepts more than a list."""
    _, kind = _without_none(kind)
    if get_origin(kind) is tuple:
        kind = get_args(kind)[0]
    return get_args(kind) if get_origin(kind) is Literal else ()


def nearest(word: str, known: list[str] | tuple[str, ...]) -> str:
    """ " (did you mean ...?)", or nothing when no known word is near."""
    found = difflib.get_close_matches(word, known, n=1)
    return f" (did you mean {found[0]}?)" if found else ""


def value_type(kind: Any) -> Any:
    """The type of a field's values without "or None": int, float, bool, str, Path, tuple or Literal."""
    kind = _without_none(kind)[1]
    return get_origin(kind) or kind


def is_boolean(kind: Any) -> bool:
    """Whether a field takes true or false, maybe among other words, so that its flag may stand without a value."""
    return value_type(kind) is bool or "true" in choices(kind)


def _without_none(kind: Any) -> tuple[bool, Any]:
    if get_origin(kind) in (Union, types.UnionType):
        rest = [k for k in get_args(kind) if k is not type(None)]
        assert len(rest) == 1, kind
        return True, rest[0]
    return False, kind


def _to_bool(value: Any, kind: Any) -> bool:
    word = str(value).strip().lower()
    if word in _TRUE:
        return True
    if word in _FALSE:
        return False
    raise BadValue("true or false is expected")


def _to_int(value: Any, kind: Any) -> int:
    number = _to_float(value, kind)
    if number != int(number):
        raise BadValue("a whole number is expected")
    try:
        return int(value)  # exact, where the way through a float would round
    except ValueError:
        return int(number)  # a text such as 1e3


def _to_float(value: Any, kind: Any) -> float:
    try:
        number = float(value)
    except (TypeError, ValueError, OverflowError):
        raise BadValue("a number is expected") from None
    if isinstance(value, bool):
        raise BadValue("a number is expected")
    if not math.isfinite(number):
        raise BadValue("a finite number is expected")
    return number


def _to_text(value: Any, kind: Any) -> str:
    if isinstance(value, (dict, list, tuple)):
        raise BadValue("one value is expected")
    if isinstance(value, bool):  # YAML reads an unquoted `no` as false
        raise BadValue("text is expected: put it in quotes")
    return str(value)


def _to_path(value: Any, kind: Any) -> Path:
    if not isinstance(value, (str, Path)) or not str(value):
        raise BadValue("a path is expected")
    return Path(value).expanduser()


def _to_choice(value: Any, kind: Any) -> str:
    words = get_args(kind)
    word = value
    if "true" in words:
        word = str(value).strip().lower()
        word = "true" if word in _TRUE else "false" if word in _FALSE else word
    elif isinstance(value, bool):  # YAML reads `no` as false
        word = "yes" if value else "no"
    if word not in words:
        raise BadValue(f"one of {', '.join(words)} is expected" + nearest(str(word), words))
    return str(word)


def _to_words(value: Any, kind: Any) -> tuple[str, ...]:
    parts = value.split(",") if isinstance(value, str) else value
    if not isinstance(parts, (list, tuple)) or any(isinstance(p, (bool, dict, list, tuple)) for p in parts):
        raise BadValue("a list of names is expected")
    words = tuple(str(p).strip() for p in parts)
    if not words or not all(words):
        raise BadValue("names separated by commas are expected")
    inner = get_args(kind)[0]
    return tuple(_to_choice(word, inner) for word in words) if get_origin(inner) is Literal else words


_CONVERTERS = {
    bool: _to_bool, int: _to_int, float: _to_float, str: _to_text, Path: _to_path, Literal: _to_choice,
    tuple: _to_words,
}  # fmt: skip


def _check_limits(value: Any, limits: dict[str, float | None]) -> None:
    tests = {
        "at least": lambda v, x: v >= x, "above": lambda v, x: v > x,
        "at most": lambda v, x: v <= x, "below": lambda v, x: v < x,
    }  # fmt: skip
    for word, limit in limits.items():
        if limit is not None and not tests[word](value, limit):
            raise BadValue(f"a value {word} {limit:g} is expected")
