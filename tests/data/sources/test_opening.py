from __future__ import annotations

import csv
import json
from collections.abc import Callable, Sequence
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from fleetune.data.sources import MISSING, Row, delimited, missing_column, open_source, require_columns
from fleetune.errors import DataError

Write = Callable[[str, str | bytes], Path]


def rows_of(path: Path, columns: Sequence[str], encoding: str | None = None) -> list[Row]:
    return list(open_source(path, encoding).rows(columns))


def good_rows(path: Path, *columns: str) -> list[tuple[int, tuple[object, ...]]]:
    return [(row.number, row.cells) for row in rows_of(path, columns) if row.problem is None]


def problems(path: Path, *columns: str) -> dict[int, str]:
    return {row.number: row.problem for row in rows_of(path, columns) if row.problem is not None}


class TestTsv:
    def test_quotes_are_plain_characters(self, write: Write) -> None:
        path = write("a.tsv", 'text\tlabel\n" I said "no\t1\n"two\t0\n')
        assert good_rows(path, "text", "label") == [(2, ('" I said "no', "1")), (3, ('"two', "0"))]

    def test_columns_come_in_the_order_asked_for(self, write: Write) -> None:
        assert good_rows(write("a.tsv", "a\tb\tc\n1\t2\t3\r\n"), "c", "a") == [(2, ("3", "1"))]

    def test_a_tab_inside_a_text_and_a_missing_cell_are_told_with_both_counts(self, write: Write) -> None:
        path = write("a.tsv", "text\tlabel\nx\ty\t1\nfine\t1\nshort\n")
        told = problems(path, "text")
        assert told.keys() == {2, 4}
        assert told[2].startswith("3 cells where the header has 2")
        assert told[4].startswith("1 cell where the header has 2")
        assert good_rows(path, "text") == [(3, ("fine",))]

    def test_blank_lines_between_rows_are_told_and_at_the_end_are_not(self, write: Write) -> None:
        path = write("a.tsv", "text\tlabel\na\t1\n\nb\t0\n\n\n")
        assert problems(path, "text") == {3: "the line is blank"}

    @pytest.mark.parametrize("text", ["NA", "null", "None", "nan", "N/A", "NULL"])
    def test_words_that_mean_nothing_elsewhere_stay_texts(self, write: Write, text: str) -> None:
        assert good_rows(write("a.tsv", f"text\tlabel\n{text}\t1\n"), "text") == [(2, (text,))]
        assert good_rows(write("a.csv", f"text,label\n{text},1\n"), "text") == [(2, (text,))]


class TestCsv:
    def test_quoted_cells_hold_commas_quotes_and_line_ends(self, write: Write) -> None:
        path = write("a.csv", 'text,label\n"one, ""two""\r\nthree",1\nlast,0\n')
        # The quoted cell covers lines 2 and 3, so the next row starts on line 4.
        assert good_rows(path, "text", "label") == [(2, ('one, "two"\nthree', "1")), (4, ("last", "0"))]

    def test_a_quote_never_closed_is_told_where_it_opens(self, write: Write) -> None:
        path = write("a.csv", 'text,label\nfine,1\n"open,0\nmore,1\n')
        reason = r"row 3: a quote that starts a cell here is never closed, so the rows after it cannot.*mend.*as TSV"
        with pytest.raises(DataError, match=reason):
            rows_of(path, ["text"])

    def test_a_quote_never_closed_after_a_cell_of_several_lines(self, write: Write) -> None:
        path = write("a.csv", 'text,more,label\n"one\ntwo","three\nfour",1\n"five\nsix","open\nseven,0\n')
        with pytest.raises(DataError, match=r"a\.csv, row 6: a quote that starts a cell here is never closed"):
            rows_of(path, ["text"])

    def test_a_quote_never_closed_in_the_header(self, write: Write) -> None:
        with pytest.raises(DataError, match=r"row 1: .*never closed"):
            open_source(write("a.csv", 'text,"label\na,1\n'))

    @pytest.mark.parametrize(
        ("closing", "problem"),
        [
            ('x,"quoted"', "not valid CSV"),
            ('"end",0', "not valid CSV"),
            ('one" wide, a cell more,1', "not valid CSV"),
            ('end",0,1', "3 cells where the header has 2"),
            ('end"', "1 cell where the header has 2"),
            ('end",a\rb', "a carriage return stands alone"),
        ],
    )
    def test_a_quote_that_swallows_rows_stops_the_reading(self, write: Write, closing: str, problem: str) -> None:
        swallowed = "good,1\n" * 34
        path = write("a.csv", "text,label\n" + "fine,1\n" * 5 + f'"open,0\n{swallowed}{closing}\nfine,1\n')
        reason = rf"row 7: rows 7 to 42 are read as one, .* swallows 35 lines; then {problem}.*mend the quote.*as TSV"
        with pytest.raises(DataError, match=reason):
            rows_of(path, ["text"])

    def test_a_single_swallowed_line(self, write: Write) -> None:
        with pytest.raises(DataError, match=r"rows 2 to 3 are read as one, .* swallows 1 line; then 1 cell where"):
            rows_of(write("a.csv", 'text,label\n"open,0\nend"\n'), ["text"])

    def test_a_torn_row_that_goes_on_in_the_next_line_stops_the_reading(self, write: Write) -> None:
        path = write("a.csv", 'text,more,label\n"a" b,"one\ntwo",1\nfine,fine,0\n')
        with pytest.raises(DataError, match=r"row 2: not valid CSV.*a later quote is open.*as TSV"):
            rows_of(path, ["text"])

    def test_a_quote_inside_a_quoted_cell_costs_one_row(self, write: Write) -> None:
        path = write("a.csv", 'text,label\n"the 5" pipe",1\nfine,1\n')
        assert problems(path, "text").keys() == {2}
        assert good_rows(path, "text") == [(3, ("fine",))]

    def test_a_torn_quote_costs_one_row(self, write: Write) -> None:
        path = write("a.csv", 'text,label\n"a" b,1\nfine,1\n')
        assert "not valid CSV" in problems(path, "text")[2]
        assert good_rows(path, "text") == [(3, ("fine",))]

    def test_line_ends_of_another_age(self, write: Write) -> None:
        with pytest.raises(DataError, match="row 1: a carriage return stands alone"):
            open_source(write("a.csv", "text,label\ra,1\r"))

    def test_too_many_cells(self, write: Write) -> None:
        told = problems(write("a.csv", "text,label\nyes, no,1\n"), "text")
        assert told[2].startswith("3 cells where the header has 2")


class TestJson:
    def test_a_key_that_is_missing_is_no_null(self, write: Write) -> None:
        rows = [{"text": "a", "label": None}, {"text": "b"}]
        expected = [(1, ("a", None)), (2, ("b", MISSING))]
        assert good_rows(write("a.jsonl", "\n".join(map(json.dumps, rows))), "text", "label") == expected
        assert good_rows(write("a.json", json.dumps(rows)), "text", "label") == expected

    @pytest.mark.parametrize("value", ["1" * 5000, "[" * 100_000 + "]" * 100_000])
    def test_json_that_python_does_not_read(self, write: Write, value: str) -> None:
        path = write("a.jsonl", f'{{"text": "a"}}\n{{"text": {value}}}\n{{"text": "b"}}\n')
        assert problems(path, "text")[2].startswith("this JSON cannot be read: ")
        assert good_rows(path, "text") == [(1, ("a",)), (3, ("b",))]
        with pytest.raises(DataError, match="this JSON cannot be read"):
            open_source(write("a.json", f"[{value}]"))

    def test_lines_are_numbered_as_in_an_editor(self, write: Write) -> None:
        path = write("a.jsonl", '{"text": "a", "label": 1}\n\n{"label": null, "text": "b"}\n')
        assert good_rows(path, "text", "label") == [(1, ("a", 1)), (3, ("b", None))]

    def test_torn_lines_are_told(self, write: Write) -> None:
        path = write("a.jsonl", '{"text": "a"}\n{"text": \n["b"]\n')
        told = problems(path, "text")
        assert told[2].startswith("not valid JSON")
        assert told[3] == "a JSON object was expected, found an array"

    @pytest.mark.parametrize("wrap", [lambda rows: rows, lambda rows: {"version": 1, "data": rows}])
    def test_arrays_are_numbered_by_record(self, write: Write, wrap: Callable[[object], object]) -> None:
        path = write("a.json", json.dumps(wrap([{"text": "a"}, {"text": "b", "label": 2}]), indent=1))
        assert open_source(path).columns == ("text", "label")
        assert good_rows(path, "text", "label") == [(1, ("a", MISSING)), (2, ("b", 2))]

    def test_json_lines_under_the_suffix_json(self, write: Write) -> None:
        path = write("a.json", '{"text": "a"}\n{"text": "b"}\n')
        assert good_rows(path, "text") == [(1, ("a",)), (2, ("b",))]

    def test_invalid_json_is_told_with_its_line(self, write: Write) -> None:
        with pytest.raises(DataError, match="row 2: not valid JSON"):
            open_source(write("a.json", '[{"text": "a"},\n{"text" "b"}]'))

    @pytest.mark.parametrize("content", ['{"rows": []}', '"text"', "[]", '{"data": []}', "[1, 2]"])
    def test_json_of_another_shape_is_refused(self, write: Write, content: str) -> None:
        with pytest.raises(DataError, match="JSON array"):
            open_source(write("a.json", content))


class TestParquet:
    def test_records_are_numbered_from_one_across_batches(self, tmp_path: Path) -> None:
        table = pa.table({"text": [f"t{i}" for i in range(10_000)], "label": [i % 2 for i in range(10_000)]})
        path = tmp_path / "a.parquet"
        pq.write_table(table, path)
        rows = good_rows(path, "label", "text")
        assert [number for number, _ in rows] == list(range(1, 10_001))
        assert rows[4096] == (4097, (0, "t4096"))
        assert open_source(path).total_rows() == 10_000

    def test_a_file_that_is_not_parquet(self, write: Write) -> None:
        with pytest.raises(DataError, match="not a readable Parquet file"):
            open_source(write("a.parquet", "text\n"))

    def test_no_rows(self, tmp_path: Path) -> None:
        pq.write_table(pa.table({"text": pa.array([], pa.string())}), tmp_path / "a.parquet")
        with pytest.raises(DataError, match="no rows"):
            open_source(tmp_path / "a.parquet")


def test_a_text_longer_than_the_csv_module_expects(write: Write) -> None:
    text = "word " * 60_000
    for path in (
        write("a.csv", f"text,label\n{text},1\nb,0\n"),
        write("quoted.csv", f'text,label\n"{text}",1\nb,0\n'),
        write("a.tsv", f"text\tlabel\n{text}\t1\nb\t0\n"),
    ):
        assert good_rows(path, "text", "label") == [(2, (text, "1")), (3, ("b", "0"))]
    jsonl = write("a.jsonl", json.dumps({"text": text}) + "\n")
    assert good_rows(jsonl, "text") == [(1, (text,))]


def test_a_cell_that_would_fill_the_memory(write: Write, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(delimited, "LONGEST_CELL", 20)
    usual = csv.field_size_limit(20)
    try:
        path = write("a.csv", f"text,label\n{'a' * 21},1\nb,0\n")
        assert problems(path, "text") == {2: "a cell is longer than 20 characters"}
        with pytest.raises(DataError, match=r"row 2: .*never closed"):
            rows_of(write("b.csv", 'text,label\n"open,1\n' + "b,0\n" * 9), ["text"])
    finally:
        csv.field_size_limit(usual)


@pytest.mark.parametrize("suffix", ["tsv", "csv", "json", "jsonl", "parquet"])
def test_an_empty_file(write: Write, suffix: str) -> None:
    with pytest.raises(DataError, match=rf"a\.{suffix}: the file is empty"):
        open_source(write(f"a.{suffix}", ""))


@pytest.mark.parametrize(("name", "content"), [("a.tsv", "text\tlabel\n"), ("a.csv", "text,label\n\n")])
def test_a_header_without_rows(write: Write, name: str, content: str) -> None:
    with pytest.raises(DataError, match="a header and no rows"):
        rows_of(write(name, content), ["text"])


@pytest.mark.parametrize(("name", "content"), [("a.tsv", "text\ttext\na\tb\n"), ("a.csv", "text,text\na,b\n")])
def test_a_header_that_names_a_column_twice(write: Write, name: str, content: str) -> None:
    with pytest.raises(DataError, match="column 'text': the header names this column 2 times"):
        open_source(write(name, content))


def test_a_folder_a_missing_file_and_an_unknown_suffix(write: Write, tmp_path: Path) -> None:
    write("train.csv", "text,label\na,1\n")
    with pytest.raises(DataError, match="this is a folder"):
        open_source(tmp_path)
    with pytest.raises(DataError, match=r"no such file: did you mean train\.csv"):
        open_source(tmp_path / "trian.csv")
    with pytest.raises(DataError, match=r"suffix '.xls' tells no format: expected .tsv, .csv"):
        open_source(write("a.xls", "x"))


def test_a_missing_column_is_told_with_those_present_and_the_nearest(write: Write) -> None:
    source = open_source(write("a.csv", "sentence,Label\na,1\n"))
    with pytest.raises(DataError, match=r"no column 'labels': the columns are 'sentence', 'Label' \(nearest: 'Label'"):
        require_columns(source, ["sentence", "labels"])


def test_several_missing_columns_are_told_at_once() -> None:
    told = missing_column(["sentnce1", "more"], "sentence1", "hypothesis")
    assert told == (
        "there is no column 'sentence1' and no column 'hypothesis': "
        "the columns are 'sentnce1', 'more' (nearest: 'sentnce1')"
    )


def test_another_separator_is_suspected(write: Write) -> None:
    source = open_source(write("a.csv", "text;label\na;1\n"))
    with pytest.raises(DataError, match=r"the header holds ';'"):
        require_columns(source, ["text"])


def test_the_digest_is_that_of_the_bytes(write: Write) -> None:
    # sha256sum of "a\tb\n1\t2\n", from coreutils.
    expected = "8db4d84da82d0020646ed808dff19ce516a74a948820cc5cdbbe1ce69c7e037d"
    digest = open_source(write("a.tsv", "a\tb\n1\t2\n")).digest()
    assert digest == expected
