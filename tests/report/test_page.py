"""The page: its numbers are the records', it loads nothing, and everybody can read it."""

from __future__ import annotations

import itertools
import json
import re
from collections.abc import Iterator
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

import pytest

from fleetune.report.page import page
from fleetune.report.rows import Table, make_table
from fleetune.report.tables import as_json
from fleetune.report.turns import read_source
from tests.report import browser
from tests.report.records import (
    GOLDEN,
    STEP_PARTS,
    a_record,
    scaling_bench,
    write_bench,
    write_failure,
    write_run,
    write_turn,
)

VOID = {"meta", "link", "path", "line", "rect", "br"}


class Document(HTMLParser):
    """Elements of a page, with their attributes and texts; unbalanced tags fail."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.elements: list[tuple[str, dict[str, str], list[str]]] = []
        self._open: list[int] = []
        self.feed(text)
        assert self._open == []

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.elements.append((tag, {name: value or "" for name, value in attrs}, []))
        if tag not in VOID:
            self._open.append(len(self.elements) - 1)

    def handle_startendtag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.elements.append((tag, {name: value or "" for name, value in attrs}, []))

    def handle_endtag(self, tag: str) -> None:
        if tag not in VOID:
            assert self.elements[self._open.pop()][0] == tag

    def handle_data(self, data: str) -> None:
        for i in self._open:
            self.elements[i][2].append(data)

    def of(self, tag: str) -> list[tuple[dict[str, str], str]]:
        return [(attributes, "".join(text)) for name, attributes, text in self.elements if name == tag]

    def numbers(self) -> list[float]:
        """Exact values of all numbers in tables and headlines."""
        return [float(attributes["value"]) for attributes, _ in self.of("data")]


def document_of(*paths: Path) -> tuple[Document, Table]:
    table = make_table([read_source(path) for path in paths])
    return Document(page(table)), table


def all_numbers(content: Any) -> Iterator[float]:
    """Every number in a JSON value."""
    if isinstance(content, bool):
        return
    if isinstance(content, (int, float)):
        yield float(content)
    for inner in content.values() if isinstance(content, dict) else content if isinstance(content, list) else ():
        yield from all_numbers(inner)


@pytest.fixture(scope="module")
def bench(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Everything at once: three sizes, two trainers, one size failed, names with markup."""
    folder = write_bench(
        tmp_path_factory.mktemp("bench"), mode="full", steps=None, discarded_steps=0,
        trainers=["fleetune", "transformers"],
        command="fleetune bench scaling --model '<b>&\"x'",
    )  # fmt: skip
    for trainer, factor in (("fleetune", 1.0), ("transformers", 2.5)):
        for hosts, size in ((1, "1 host"), (2, "2 hosts")):
            for number in (1, 2, 3):
                record = a_record(hosts=hosts, step_s=factor * (0.5 + 0.01 * number), accuracy=0.8 + 0.01 * number)
                record["config"]["model"] = '/models/<b>&"x'
                if trainer == "transformers":
                    record.pop("time")
                write_turn(folder, size, number, record, trainer=trainer)
    write_failure(folder, "4 hosts", 1, "node4 <does> not & answer")
    return folder


def test_every_number_is_in_the_json_of_the_report_which_has_those_of_the_records(bench: Path) -> None:
    """And all numbers of a row that JSON has are on the page."""
    document, table = document_of(bench)
    content = as_json(table)
    known = set(all_numbers(json.loads(json.dumps(content))))
    shown = document.numbers()
    named = {"of pictures": _numbers_of_pictures(table)}
    assert [x for x in shown if x not in known | named["of pictures"] | _efficiencies(content)] == []
    for row in (r for r in content["rows"] if r["runs"]):
        for name in (
            "samples_per_s",
            "tokens_per_s",
            "speedup",
            "efficiency",
            "startup_s",
            "training_s",
            "wall_s",
            "cost",
        ):
            assert row[name]["mean"] in shown, name
            assert row[name]["deviation"] in (None, *shown), name
        assert {row["ranks"], row["threads"], row["global_batch"], row["hosts"], row["accuracy"]["mean"]} <= set(shown)


def _efficiencies(content: dict[str, Any]) -> set[float]:
    return {quoted["speedup"] / quoted["hosts"] for quoted in content["quoted"]}


def _numbers_of_pictures(table: Table) -> set[float]:
    """What stands in the tables behind pictures, from the records."""
    from fleetune.report.figures import time_at
    from fleetune.report.phases import phases_of, startup_parts_of, step_parts_of

    known = {1.0}  # the ideal efficiency
    for row in (r for r in table.rows if r.turns):
        turn = row.turns[0]
        known |= {entry[key] for entry in turn.history for key in ("loss", "eval_accuracy") if key in entry}
        known |= {time_at(turn, entry["step"]) for entry in turn.history}
        for parts in (phases_of(row), startup_parts_of(row), step_parts_of(row)):
            known |= {seconds for _, seconds in parts} | {sum(seconds for _, seconds in parts)}
    return known


def test_numbers_of_records_are_on_the_page(tmp_path: Path) -> None:
    """One run: what its record says, to the last digit."""
    record = a_record(accuracy=0.8125)
    document, _ = document_of(write_run(tmp_path / "out", record))
    shown = document.numbers()
    throughput = record["throughput"]
    expected = [throughput["samples_per_s"], throughput["tokens_per_s"], 0.8125, record["seconds"]["training"]]
    assert [value for value in expected if value not in shown] == []


def test_it_loads_nothing(bench: Path) -> None:
    text = page(make_table([read_source(bench)]))
    assert len(text.encode()) < 2_000_000
    assert not re.search(r"https?:|<script|@import|\bsrc=", text.replace("http://www.w3.org", ""))
    assert {target for target in re.findall(r"url\(([^)]*)\)", text) if not target.startswith("#hatch")} == set()
    assert re.findall(r'href="([^"]*)"', text) == ["data:,"]


def test_headings_are_in_order(bench: Path) -> None:
    document, _ = document_of(bench)
    levels = [int(tag[1]) for tag, _, _ in document.elements if re.fullmatch("h[1-6]", tag)]
    assert levels[0] == 1
    assert levels.count(1) == 1
    assert all(after - before <= 1 for before, after in itertools.pairwise(levels))


def test_pictures_have_titles_descriptions_and_tables(bench: Path) -> None:
    document, _ = document_of(bench)
    ids = [attributes["id"] for _, attributes, _ in document.elements if "id" in attributes]
    assert len(ids) == len(set(ids))
    pictures = [attributes for attributes, _ in document.of("svg") if attributes.get("class") == "picture"]
    assert len(pictures) == 7  # speed-up, efficiency, loss, metric, wall time, start-up, update
    for attributes in pictures:
        assert attributes["role"] == "img"
        assert set(attributes["aria-labelledby"].split()) <= set(ids)
    others = [attributes for attributes, _ in document.of("svg") if attributes.get("class") != "picture"]
    assert all(attributes["aria-hidden"] == "true" for attributes in others)
    figures = page(make_table([read_source(bench)])).split("<figure>")[1:]
    assert all("<table" in figure.split("</figure>")[0] for figure in figures)
    assert len(figures) == len(pictures)


def test_series_and_parts_differ_without_colour(bench: Path) -> None:
    text = page(make_table([read_source(bench)]))
    picture = text.split('aria-labelledby="speed-up-title')[1].split("</svg>")[0]
    assert len(set(re.findall(r'class="line s\d" stroke-dasharray="([^"]+)"', picture))) == 1  # the other is solid
    assert len(set(re.findall(r'class="mark (s\d)"', picture))) == 2
    bars = text.split('aria-labelledby="update-title')[1].split("</svg>")[0]
    assert len(set(re.findall(r"url\(#(hatch-\d)\)", bars))) == len(STEP_PARTS)


def test_markup_in_names_stays_text(bench: Path) -> None:
    text = page(make_table([read_source(bench)]))
    assert "<b>" not in text
    assert "<does>" not in text
    assert "node4 &lt;does&gt; not &amp; answer" in text


def test_failures_quoted_rows_plan_versions_and_command_are_told(bench: Path) -> None:
    document, _ = document_of(bench)
    titles = [text for _, text in document.of("h2")]
    assert titles == [
        "What failed", "Results", "Speed-up and efficiency", "Published elsewhere", "Loss and metric against time",
        "Where the time goes", "Plan", "Versions", "Repeat it",
    ]  # fmt: skip
    whole = "".join(text for _, text in document.of("main"))
    told = [
        "1 host: 200 ms",
        "Quoted, not measured here.",
        "other hardware",
        "23.4 MB/s each way",
        "2.13.0+cpu",
        "rank 0: CPUs 0, 1",
    ]
    assert [words for words in told if words not in whole] == []
    assert document.of("pre")[0][1] == "fleetune bench scaling --model '<b>&\"x'"


def test_an_older_record_says_what_it_lacks(tmp_path: Path) -> None:
    document, _ = document_of(write_run(tmp_path / "old", a_record(parts=False)))
    whole = "".join(text for _, text in document.of("main"))
    assert "These records do not tell what an update consists of" in whole
    assert "Published elsewhere" not in whole


def test_nothing_finished(tmp_path: Path) -> None:
    write_bench(tmp_path)
    write_failure(tmp_path, "1 host", 1, "no memory")
    document, _ = document_of(tmp_path)
    assert document.of("h1")[0][1] == "Scaling of nothing that finished"
    assert "no memory" in "".join(text for _, text in document.of("main"))


# ---- in a browser


needs_browser = pytest.mark.skipif(browser.unavailable() is not None, reason=browser.unavailable() or "")


@pytest.fixture(scope="module")
def page_file(bench: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("page") / "report.html"
    path.write_text(page(make_table([read_source(bench)])), encoding="utf-8")
    return path


@needs_browser
def test_the_browser_has_nothing_to_complain_of(page_file: Path, tmp_path: Path) -> None:
    content, console = browser.dump(page_file, tmp_path / "profile")
    assert console == []
    assert content.count("<svg") == page_file.read_text(encoding="utf-8").count("<svg")


@needs_browser
def test_complaints_of_the_browser_are_heard(tmp_path: Path) -> None:
    path = tmp_path / "bad.html"
    path.write_text("<!doctype html><script>console.error('it is broken')</script>")
    _, console = browser.dump(path, tmp_path / "profile")
    assert len(console) == 1
    assert "it is broken" in console[0]


@needs_browser
@pytest.mark.parametrize("width", [360, 700, 1280])
def test_nothing_sticks_out(width: int, page_file: Path, tmp_path: Path) -> None:
    assert browser.width_within(page_file, width, tmp_path) == width


@needs_browser
def test_what_sticks_out_is_seen(tmp_path: Path) -> None:
    path = tmp_path / "wide.html"
    path.write_text("<!doctype html><body style='margin:0'><details><div style='width:500px'>x</div></details>")
    assert browser.width_within(path, 360, tmp_path) == 500


# ---- golden files


def test_the_golden_bench_gives_the_golden_tables() -> None:
    """`golden/bench` was written by `scaling_bench`, with a size that failed; the tables were checked by hand."""
    from fleetune.report.tables import as_csv, markdown

    table = make_table([read_source(GOLDEN / "bench")])
    assert markdown(table) == (GOLDEN / "report.md").read_text(encoding="utf-8")
    expected = (GOLDEN / "report.csv").read_text(encoding="utf-8")
    for cell, golden in zip(re.split("[,\n]", as_csv(table)), re.split("[,\n]", expected), strict=True):
        assert cell == golden or float(cell) == pytest.approx(float(golden), abs=1e-12)
    shown = Document(page(table)).numbers()
    for name in ("samples_per_s", "speedup", "wall_s", "cost"):
        assert [row[name]["mean"] for row in as_json(table)["rows"][:2] if row[name]["mean"] not in shown] == []


def test_the_golden_bench_is_what_the_tests_make(tmp_path: Path) -> None:
    scaling_bench(tmp_path)
    write_failure(tmp_path, "4 hosts", 1, "rank 3: node4 does not answer (exit status 1)")
    write_failure(tmp_path, "4 hosts", 2, "left out")
    made = {path.relative_to(tmp_path): path.read_text() for path in tmp_path.rglob("*.json")}
    golden = GOLDEN / "bench"
    assert made == {path.relative_to(golden): path.read_text() for path in golden.rglob("*.json")}
