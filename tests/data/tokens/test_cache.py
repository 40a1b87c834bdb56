from __future__ import annotations

import multiprocessing
import os
import threading
import time
from collections.abc import Callable
from concurrent.futures import ProcessPoolExecutor, ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from fleetune.data.examples import Reading
from fleetune.data.labels import reader_of
from fleetune.data.sources import open_source
from fleetune.data.tasks import Columns, custom_task
from fleetune.data.tokens import DamagedTableError, TableRequest, TokenTable, load_or_build, tokenizer_identity
from fleetune.errors import DataError, OutputError
from tests.data.conftest import WordTokenizer

Write = Callable[[str, str | bytes], Path]
COLUMNS = Columns(texts=("text",), label="label")
TASK = custom_task("classification", text_columns=("text",), label_column="label", labels=("bad", "good"))
CONTENT = "text,label\ngood film,good\na,bad\nbad,bad\n"


def request(path: Path, tokenizer: Any = None, **changes: Any) -> TableRequest:
    tokenizer = tokenizer or WordTokenizer()
    reading = {
        "columns": COLUMNS,
        "labels": reader_of(TASK),
        "label_optional": False,
        "on_bad_row": "skip",
        **{name: changes.pop(name) for name in list(changes) if name in Reading.__dataclass_fields__},
    }
    plain = {
        "source": open_source(path),
        "split": "train",
        "reading": Reading(**reading),
        "tokenizer": tokenizer,
        "tokenizer_identity": tokenizer_identity(tokenizer),
        "max_length": 16,
        "encoding": None,
    }
    return TableRequest(**{**plain, **changes})


def build(path: Path, cache: Path, tokenizer: Any = None, *, overwrite: bool = False, **changes: Any) -> TokenTable:
    return load_or_build(request(path, tokenizer, **changes), cache, overwrite=overwrite).table


def assert_is_the_content(table: TokenTable) -> None:
    # [CLS] good film [SEP], [CLS] a [SEP], [CLS] bad [SEP], by their places in the word list.
    assert table.token_ids.tolist() == [2, 8, 10, 3, 2, 4, 3, 2, 9, 3]
    assert table.offsets.tolist() == [0, 4, 7, 10]
    assert table.rows.tolist() == [2, 3, 4]
    assert table.labels is not None
    assert table.labels.tolist() == [1, 0, 0]


def test_a_table_by_hand(write: Write, tmp_path: Path) -> None:
    table = build(write("a.csv", CONTENT), tmp_path)
    assert_is_the_content(table)
    assert table.type_ids is not None
    assert [array.dtype.name for array in (table.token_ids, table.type_ids, table.offsets, table.rows)] == [
        "int32",
        "uint8",
        "int64",
        "int64",
    ]
    assert table.labels is not None
    assert table.labels.dtype == np.int64
    assert (len(table), table.num_tokens, table.lengths.tolist()) == (3, 10, [4, 3, 3])
    assert (table.split, table.source, table.columns) == ("train", str(tmp_path / "a.csv"), COLUMNS)
    assert sorted(path.name for path in (tmp_path / "tokens").iterdir()) == [table.folder.name]


def test_head_is_the_first_examples(write: Write, tmp_path: Path) -> None:
    table = build(write("a.csv", CONTENT), tmp_path)
    head = table.head(2)
    assert (len(head), head.token_ids.tolist(), head.offsets.tolist()) == (2, [2, 8, 10, 3, 2, 4, 3], [0, 4, 7])
    assert head.labels is not None
    assert head.labels.tolist() == [1, 0]
    assert len(table.head(99)) == 3


def test_arrays_cannot_be_written_to(write: Write, tmp_path: Path) -> None:
    table = build(write("a.csv", CONTENT), tmp_path)
    with pytest.raises(ValueError, match="read-only"):
        table.token_ids[0] = 7


def test_a_second_request_does_not_tokenise(write: Write, tmp_path: Path) -> None:
    path, tokenizer = write("a.csv", CONTENT), WordTokenizer()
    build(path, tmp_path, tokenizer)
    assert_is_the_content(build(path, tmp_path, tokenizer))
    assert tokenizer.num_calls == 1


def test_the_same_content_elsewhere_is_found_under_its_new_name(write: Write, tmp_path: Path) -> None:
    first = build(write("a.csv", CONTENT), tmp_path)
    tokenizer = WordTokenizer()
    second = build(write("moved/b.csv", CONTENT), tmp_path, tokenizer)
    assert (second.folder, second.source, tokenizer.num_calls) == (first.folder, str(tmp_path / "moved/b.csv"), 0)


OTHER_LABELS = custom_task("classification", text_columns=("text",), label_column="label", labels=("good", "bad"))


@pytest.mark.parametrize(
    "changes",
    [
        {"max_length": 8},
        {"split": "validation"},
        {"encoding": "utf-8"},
        {"tokenizer": WordTokenizer(type_ids=False)},
        {"labels": reader_of(OTHER_LABELS)},
        {"labels": None},
        {"on_bad_row": "error"},
        {"max_rows": 2},
        {"label_optional": True},
        {"columns": Columns(texts=("label",), label="label")},
    ],
)
def test_whatever_decides_the_content_is_in_the_key(write: Write, changes: dict[str, Any]) -> None:
    path = write("a.csv", CONTENT)
    assert request(path, **changes).key() != request(path).key()


def test_the_content_and_the_format_are_in_the_key(write: Write) -> None:
    key = request(write("a.csv", CONTENT)).key()
    assert request(write("b.csv", CONTENT.replace("film", "c"))).key() != key
    one_column = "text\na\n"
    keys = {request(write(name, one_column)).key() for name in ("c.csv", "c.tsv")}
    assert len(keys) == 2


def test_overwrite_tokenises_anew(write: Write, tmp_path: Path) -> None:
    path, tokenizer = write("a.csv", CONTENT), WordTokenizer()
    build(path, tmp_path, tokenizer)
    assert_is_the_content(build(path, tmp_path, tokenizer, overwrite=True))
    assert tokenizer.num_calls == 2
    assert len(list((tmp_path / "tokens").iterdir())) == 1


def cut(path: Path) -> None:
    path.write_bytes(path.read_bytes()[:-1])


def flip(path: Path) -> None:
    data = bytearray(path.read_bytes())
    data[3] ^= 1
    path.write_bytes(data)


@pytest.mark.parametrize(
    ("name", "damage", "told"),
    [
        ("token_ids.bin", cut, "token_ids.bin has 39 bytes instead of 40"),
        ("token_ids.bin", flip, "token_ids.bin has changed since it was written"),
        ("labels.bin", Path.unlink, "labels.bin is missing"),
        ("meta.json", cut, "no readable meta.json"),
        ("meta.json", Path.unlink, "no readable meta.json"),
    ],
)
def test_a_damaged_table_is_told_and_made_anew(
    write: Write, tmp_path: Path, name: str, damage: Callable[[Path], None], told: str
) -> None:
    path = write("a.csv", CONTENT)
    damage(build(path, tmp_path).folder / name)
    cached = load_or_build(request(path), tmp_path)
    assert cached.notice is not None
    assert "damaged and were made anew" in cached.notice
    assert told in cached.notice
    assert_is_the_content(cached.table)
    assert_is_the_content(TokenTable.open(cached.table.folder, verify=True))
    assert load_or_build(request(path), tmp_path).notice is None


def test_opening_a_folder_that_is_no_table(tmp_path: Path) -> None:
    with pytest.raises(DamagedTableError, match=r"no readable meta\.json"):
        TokenTable.open(tmp_path)


def test_threads_that_build_the_same_table_at_once(write: Write, tmp_path: Path) -> None:
    path, barrier = write("a.csv", CONTENT), threading.Barrier(4)

    class WaitingTokenizer(WordTokenizer):
        """Lets no build end before all have begun."""

        def __call__(self, text: Any, text_pair: Any = None, **options: Any) -> dict[str, Any]:
            barrier.wait(timeout=60)
            return super().__call__(text, text_pair, **options)

    def one(_: int) -> TokenTable:
        return build(path, tmp_path, WaitingTokenizer())

    with ThreadPoolExecutor(4) as pool:
        tables = list(pool.map(one, range(4)))
    for table in tables:
        assert_is_the_content(table)
    assert len({table.folder for table in tables}) == 1
    assert [entry.name for entry in (tmp_path / "tokens").iterdir()] == [tables[0].folder.name]


def build_again_and_again(path: Path, cache: Path, times: int) -> list[int]:
    """Overwrite and read the same table; runs in a process of its own."""
    tables = [build(path, cache, overwrite=True) for _ in range(times)]
    for table in tables:
        assert_is_the_content(table)
    return [len(table) for table in tables]


def test_processes_that_overwrite_the_same_table_at_once(write: Write, tmp_path: Path) -> None:
    path = write("a.csv", CONTENT)
    with ProcessPoolExecutor(2, mp_context=multiprocessing.get_context("spawn")) as pool:
        jobs = [pool.submit(build_again_and_again, path, tmp_path, 20) for _ in range(2)]
        assert [job.result(timeout=120) for job in jobs] == [[3] * 20] * 2
    assert_is_the_content(build(path, tmp_path))
    assert len(list((tmp_path / "tokens").iterdir())) == 1


def test_bad_rows_are_kept_with_the_table(write: Write, tmp_path: Path) -> None:
    path = write("a.csv", "text,label\n,good\na,bad\nb,best\n")
    build(path, tmp_path)
    table = build(path, tmp_path)
    assert (table.rows.tolist(), table.num_bad_rows) == ([3], 2)
    assert [(bad.row, bad.column) for bad in table.bad_rows] == [(2, "text"), (4, "label")]


def test_the_list_of_bad_rows_is_capped_and_the_count_is_not(write: Write, tmp_path: Path) -> None:
    table = build(write("a.csv", "text,label\na,bad\n" + ",bad\n" * 1500), tmp_path)
    assert (table.num_bad_rows, len(table.bad_rows)) == (1500, 1000)


def test_no_row_that_can_be_used(write: Write, tmp_path: Path) -> None:
    with pytest.raises(DataError, match=r"no row can be used, all 2 are bad:\n  row 2, column 'text'"):
        build(write("a.csv", "text,label\n,good\n,bad\n"), tmp_path)
    assert list((tmp_path / "tokens").iterdir()) == []


def test_a_split_with_an_unlabelled_row_counts_as_unlabelled(write: Write, tmp_path: Path) -> None:
    table = build(write("a.csv", "text,label\na,good\nb,-1\n"), tmp_path, label_optional=True)
    assert (table.labels, len(table), table.num_unlabelled) == (None, 2, 1)


def test_scores_are_float32(write: Write, tmp_path: Path) -> None:
    task = custom_task("regression", text_columns=("text",), label_column="label")
    table = build(write("a.csv", "text,label\na,0.1\nb,-2\n"), tmp_path, labels=reader_of(task))
    assert table.labels is not None
    assert table.labels.dtype == np.float32
    np.testing.assert_array_equal(table.labels, np.array([0.1, -2], np.float32))


def test_progress_counts_rows(write: Write, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("fleetune.data.tokens.tokenizing.BLOCK_EXAMPLES", 2)
    calls: list[tuple[int, int | None]] = []
    path = write("a.tsv", "text\tlabel\na\tgood\n\tbad\nb\tbad\nc\tbad\n")
    load_or_build(request(path), tmp_path, progress=lambda done, total: calls.append((done, total)))
    assert calls == [(3, 4), (4, 4), (4, 4)]


def test_a_cache_that_cannot_be_written_names_the_setting(write: Write, tmp_path: Path) -> None:
    with pytest.raises(OutputError, match=r"token cache .* cannot be written: Not a directory; --cache_dir"):
        build(write("a.csv", CONTENT), write("occupied", "a file"))


def test_a_full_disk_is_told(write: Write, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(self: object, values: object) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr("fleetune.data.tokens.writer.ArrayFile.append", full)
    with pytest.raises(OutputError, match="No space left on device"):
        build(write("a.csv", CONTENT), tmp_path)
    assert list((tmp_path / "tokens").iterdir()) == []


def test_what_a_killed_build_left_is_removed_after_a_day(write: Write, tmp_path: Path) -> None:
    old, new = tmp_path / "tokens" / "x.partial", tmp_path / "tokens" / "y.partial"
    for folder, age_s in ((old, 25 * 3600), (new, 60)):
        folder.mkdir(parents=True)
        os.utime(folder, (time.time() - age_s,) * 2)
    build(write("a.csv", CONTENT), tmp_path)
    assert (old.exists(), new.exists()) == (False, True)
