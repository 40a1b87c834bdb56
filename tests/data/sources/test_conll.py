from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

from fleetune.data.sources import Source, open_source
from fleetune.errors import DataError

Write = Callable[[str, str | bytes], Path]

NEWS = """-DOCSTART- -X- O O

EU NNP I-NP B-ORG
rejects VBZ I-VP O

-DOCSTART- -X- -X- O

Peter\tNNP\tI-NP\tB-PER
"""


def rows(source: Source, *columns: str) -> list[tuple[object, ...]]:
    return [
        (row.number, *row.cells) if row.problem is None else (row.number, row.problem) for row in source.rows(columns)
    ]


def test_sentences_words_and_tags(write: Write) -> None:
    source = open_source(write("train.txt", NEWS))
    assert source.columns == ("1", "2", "3", "4", "tokens", "ner_tags")
    assert rows(source, "tokens", "ner_tags") == [(3, ["EU", "rejects"], ["B-ORG", "O"]), (8, ["Peter"], ["B-PER"])]
    assert rows(source, "2", "1") == [(3, ["NNP", "VBZ"], ["EU", "rejects"]), (8, ["NNP"], ["Peter"])]


@pytest.mark.parametrize("suffix", [".conll", ".iob", ".bio", ".txt"])
def test_files_without_tags_with_crlf_and_without_a_last_blank_line(write: Write, suffix: str) -> None:
    source = open_source(write(f"a{suffix}", "EU\r\nrejects\r\n \r\n\r\nPeter"))
    assert source.columns == ("1", "tokens")
    assert rows(source, "tokens") == [(1, ["EU", "rejects"]), (5, ["Peter"])]


def test_comments_stand_before_a_sentence_and_a_number_sign_may_be_a_word(write: Write) -> None:
    source = open_source(write("a.conll", "# id 1 of this file\nEU B-ORG\n# O\n\n# O\n# sent 2 of\n# 3 x\n\nx O\n"))
    # Line 3 is a word within a sentence, line 5 a word at the beginning of one; lines 6 and 7 then do not fit.
    assert rows(source, "tokens", "ner_tags") == [
        (2, ["EU", "#"], ["B-ORG", "O"]),
        (5, "line 6 has 4 columns, the first word of the file 2"),
        (9, ["x"], ["O"]),
    ]


def test_a_line_with_other_columns_is_told_with_its_sentence(write: Write) -> None:
    source = open_source(write("a.conll", "EU B-ORG\nrejects\n\nx O\n"))
    assert rows(source, "tokens") == [(1, "line 2 has 1 column, the first word of the file 2"), (4, ["x"])]


def test_a_file_without_words(write: Write) -> None:
    with pytest.raises(DataError, match="holds no word"):
        open_source(write("a.conll", "\n-DOCSTART- O\n\n# a comment\n"))
