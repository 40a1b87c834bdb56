from __future__ import annotations

import re
from collections.abc import Callable
from pathlib import Path

import pytest

from fleetune.data.sources.encoding import read_lines, read_text
from fleetune.data.sources.rows import READ_BYTES
from fleetune.errors import ConfigError, DataError

Write = Callable[[str, str | bytes], Path]
TEXT = "Größe\nzwei\n"
LINES = ["Größe", "zwei"]


@pytest.mark.parametrize(
    ("encoding", "content"),
    [
        (None, TEXT.encode()),
        (None, b"\xef\xbb\xbf" + TEXT.encode()),
        (None, b"\xff\xfe" + TEXT.encode("utf-16-le")),
        (None, b"\xfe\xff" + TEXT.encode("utf-16-be")),
        (None, b"\xff\xfe\x00\x00" + TEXT.encode("utf-32-le")),
        ("utf-8", b"\xef\xbb\xbf" + TEXT.encode()),
        ("utf-16", b"\xfe\xff" + TEXT.encode("utf-16-be")),
        ("utf-16-le", TEXT.encode("utf-16-le")),
        ("utf-16-le", b"\xff\xfe" + TEXT.encode("utf-16-le")),
        ("cp1252", TEXT.encode("cp1252")),
        ("latin-1", TEXT.encode("latin-1")),
    ],
)
def test_encodings_give_the_same_lines(write: Write, encoding: str | None, content: bytes) -> None:
    assert list(read_lines(write("a.tsv", content), encoding)) == LINES


def test_crlf_and_a_last_line_without_an_end(write: Write) -> None:
    assert list(read_lines(write("a.tsv", "one\r\ntwo\r\nthree"))) == ["one", "two", "three"]


def test_only_line_feeds_end_lines(write: Write) -> None:
    text = "form\x0cfeed\u2028separator\x85next\rreturn"
    assert list(read_lines(write("a.tsv", text + "\n"))) == [text]


def test_a_foreign_byte_is_named_with_its_row_and_an_encoding_to_try(write: Write) -> None:
    path = write("a.tsv", b"one\ntwo\n" + "Größe\n".encode("cp1252"))
    with pytest.raises(DataError, match=r"row 3: byte 0xf6 is not valid UTF-8: say --encoding cp1252") as caught:
        list(read_lines(path))
    assert (caught.value.file, caught.value.row) == (path, 3)


def test_a_foreign_byte_far_into_a_large_file(write: Write) -> None:
    line = b"x" * 99 + b"\n"
    rows = 2 * READ_BYTES // len(line)
    path = write("a.tsv", line * rows + b"caf\xe9 noir\n")
    with pytest.raises(DataError, match=f"row {rows + 1}: byte 0xe9"):
        list(read_lines(path))


def test_a_character_across_two_blocks_is_read(write: Write) -> None:
    text = "x" * (READ_BYTES - 1) + "ö"
    assert list(read_lines(write("a.tsv", text))) == [text]


@pytest.mark.parametrize("encoding", ["utf-16-le", "utf-16-be"])
@pytest.mark.parametrize("text", ["text\tlabel\nfine\t1\n", "größe\tlabel\n\u4f60\u597d\t1\n"])
def test_utf16_without_a_mark_is_recognised(write: Write, encoding: str, text: str) -> None:
    with pytest.raises(DataError, match=f"NUL bytes.*try --encoding {encoding}"):
        list(read_lines(write("a.tsv", text.encode(encoding))))


def test_utf16_cut_short_is_named(write: Write) -> None:
    with pytest.raises(DataError, match="row 2: byte 0x62 is not valid UTF-16-LE"):
        list(read_lines(write("a.tsv", b"\xff\xfe" + "a\nb".encode("utf-16-le")[:-1])))


def test_an_encoding_asked_for_is_not_second_guessed(write: Write) -> None:
    with pytest.raises(DataError, match=re.escape("byte 0x81 is not valid CP1252: another --encoding may fit")):
        read_text(write("a.txt", b"\x81"), "cp1252")


@pytest.mark.parametrize(("name", "hint"), [("utf-88", "did you mean"), ("base64", "is not a text encoding")])
def test_an_unknown_encoding_is_a_config_error(write: Write, name: str, hint: str) -> None:
    with pytest.raises(ConfigError, match=hint):
        read_text(write("a.txt", "x"), name)
