"""The lines of a guide, as one text: `export`, `source`, continued lines, and one command."""

from __future__ import annotations

import re
import shlex
import string
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path

from fleetune.errors import ConfigError

SOURCED = "Intel's environment is not needed: its MPI and oneCCL are not used"

_ASSIGNMENTS = re.compile(r"[A-Za-z_]\w*=")
_SEPARATORS = re.compile(r"[;&|]+")
_SHOWN = ("cat", "echo", "ls", "unset")
"""Commands that change nothing of ours."""


def is_text(words: Sequence[str]) -> bool:
    """Whether words are a guide's lines, given as one word in quotes; a file's name may have blanks, too."""
    return len(words) == 1 and len(words[0].split()) > 1 and ("\n" in words[0] or not Path(words[0]).exists())


def read_text(text: str, environ: Mapping[str, str]) -> tuple[list[str], tuple[str, ...]]:
    """The words of a guide's lines: variables, then the command, as one would type them in one line.

    Args:
        text: Lines for a shell; a backslash at the end continues a line.
        environ: Values of variables that the lines name, and do not set themselves.

    Returns:
        The words, and one line for each line that is left away.

    Raises:
        ConfigError: There is no command, or there are several, or quotes are left open.
    """
    known = dict(environ)
    variables: dict[str, str] = {}
    commands: list[list[str]] = []
    notices: list[str] = []
    for statement in _statements(text):
        words = [string.Template(word).safe_substitute(known) for word in statement]
        if words[0] == "export" or all(_ASSIGNMENTS.match(word) for word in words) or "$(" in words[0]:
            for name, _, value in (word.partition("=") for word in words if _ASSIGNMENTS.match(word)):
                if "$(" not in value:  # a path that is only there to be sourced
                    known[name] = variables[name] = value
        elif words[0] in ("source", "."):
            notices.append(f"{' '.join(words)}: {SOURCED}")
        elif words[0] not in _SHOWN:
            commands.append(words)
    if len(commands) != 1:
        raise ConfigError(f"one command is expected in these lines, not {len(commands)}: "
                          + ("; ".join(" ".join(words[:3]) for words in commands) or text.strip()))  # fmt: skip
    return [*(f"{name}={value}" for name, value in variables.items()), *commands[0]], tuple(notices)


def _statements(text: str) -> Iterator[list[str]]:
    for line in re.sub(r"\\[ \t]*\n", " ", text).splitlines():
        lexer = shlex.shlex(line, posix=True, punctuation_chars=";&|")
        lexer.whitespace_split = True
        try:
            words = list(lexer)
        except ValueError as error:
            raise ConfigError(f"{line.strip()}: {error}") from None
        statement: list[str] = []
        for word in [*words, ";"]:
            if not _SEPARATORS.fullmatch(word):
                statement.append(word)
            elif statement:
                yield statement
                statement = []
