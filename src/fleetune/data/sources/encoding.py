"""Bytes to lines of text, strictly: a byte that does not fit is named with its row."""

from __future__ import annotations

import codecs
import difflib
from collections.abc import Iterator
from encodings.aliases import aliases
from pathlib import Path

from fleetune.data.sources.rows import READ_BYTES
from fleetune.errors import ConfigError, DataError

# UTF-32 first: its little-endian mark begins with that of UTF-16.
BYTE_ORDER_MARKS = (
    (codecs.BOM_UTF32_LE, "utf-32-le"),
    (codecs.BOM_UTF32_BE, "utf-32-be"),
    (codecs.BOM_UTF8, "utf-8"),
    (codecs.BOM_UTF16_LE, "utf-16-le"),
    (codecs.BOM_UTF16_BE, "utf-16-be"),
)
# What a byte-order mark settles; an encoding asked for outside this set is taken as it is, mark or not.
MARKLESS_DEFAULTS = {"utf-8-sig": "utf-8", "utf-16": "utf-16-le", "utf-32": "utf-32-le"}
MARKED_ENCODINGS = {name for _, name in BYTE_ORDER_MARKS} | set(MARKLESS_DEFAULTS)

# English text in UTF-16 is half NUL bytes, other scripts have at least their spaces and line ends;
# a UTF-8 file with a stray NUL has far fewer.
NUL_SHARE_OF_UTF16 = 0.05


def check_encoding(encoding: str) -> None:
    """Refuse a name that Python has no text encoding for.

    Raises:
        ConfigError: Unknown encoding; the nearest is named.
    """
    try:
        "".encode(encoding)
    except LookupError:
        known = sorted(set(aliases) | set(aliases.values()))
        near = difflib.get_close_matches(encoding.lower().replace("-", "_"), known, n=1)
        hint = f": did you mean {near[0]!r}?" if near else ", such as utf-8, cp1252 or utf-16"
        raise ConfigError(f"encoding {encoding!r} is not a text encoding that Python knows{hint}") from None


def read_lines(path: Path, encoding: str | None = None) -> Iterator[str]:
    """Stream the lines of a text file, without their ends, in constant memory.

    Lines end at LF or CRLF and nowhere else: a form feed or a Unicode line separator is part of the text.

    Args:
        path: A regular file.
        encoding: A Python codec name. None: UTF-8, or what a byte-order mark says.

    Raises:
        DataError: A byte does not fit the encoding; row and byte are named, and the encoding to try.
        ConfigError: The encoding is unknown.
    """
    rest = ""
    for text in _decoded_blocks(path, encoding):
        lines = (rest + text).split("\n")
        rest = lines.pop()
        for line in lines:
            yield line.removesuffix("\r")
    if rest:
        yield rest.removesuffix("\r")


def read_text(path: Path, encoding: str | None = None) -> str:
    """The whole file as one text; raises as `read_lines` does."""
    return "".join(_decoded_blocks(path, encoding))


def _decoded_blocks(path: Path, encoding: str | None) -> Iterator[str]:
    with path.open("rb") as file:
        start = file.read(4)
        actual, mark = _resolve(start, encoding)
        file.seek(len(mark))
        decoder = codecs.getincrementaldecoder(actual)(errors="strict")
        rows_before = 0
        while True:
            block = file.read(READ_BYTES)
            if encoding is None and actual == "utf-8":
                _refuse_unmarked_utf16(block, path, rows_before)
            try:
                text = decoder.decode(block, final=not block)
            except UnicodeDecodeError as error:
                raise _decode_error(error, path, actual, encoding, rows_before) from error
            yield text
            rows_before += text.count("\n")
            if not block:
                return


def _resolve(start: bytes, encoding: str | None) -> tuple[str, bytes]:
    """The codec to use, and the byte-order mark to skip."""
    asked = "utf-8"
    if encoding is not None:
        check_encoding(encoding)
        asked = codecs.lookup(encoding).name
    if asked in MARKED_ENCODINGS:
        for mark, marked in BYTE_ORDER_MARKS:
            # A mark overrides the default and completes "utf-16"; it does not contradict "utf-16-be".
            if start.startswith(mark) and (encoding is None or marked.startswith(asked.removesuffix("-sig"))):
                return marked, mark
    return MARKLESS_DEFAULTS.get(asked, asked), b""


def _refuse_unmarked_utf16(block: bytes, path: Path, rows_before: int) -> None:
    first = block.find(b"\0")
    if first < 0 or block.count(b"\0") < NUL_SHARE_OF_UTF16 * len(block):
        return
    # Little-endian puts the zero half of an ASCII character second. Blocks have an even length.
    likely = "utf-16-le" if block[1::2].count(0) >= block[::2].count(0) else "utf-16-be"
    raise DataError(
        f"holds NUL bytes, as UTF-16 without a byte-order mark does: try --encoding {likely}",
        file=path,
        row=rows_before + block[:first].count(b"\n") + 1,
    )


def _decode_error(error: UnicodeDecodeError, path: Path, actual: str, asked: str | None, rows_before: int) -> DataError:
    before = error.object[: error.start].decode(actual, errors="replace")
    bad = error.object[error.start : error.start + 1]
    hint = "another --encoding may fit"
    if asked is None:
        hint = "say --encoding cp1252 if it comes from an older Windows program"
    return DataError(
        f"byte 0x{bad.hex()} is not valid {actual.upper()}: {hint}",
        file=path,
        row=rows_before + before.count("\n") + 1,
    )
