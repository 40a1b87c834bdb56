"""Which files of an environment count as changed."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from fleetune.cluster.environment.contents import MARKER, Contents, Difference, Entry, compare, parse_listing

FILE = Entry(kind="f", num_bytes=5, mode="644", modified_s=100, changed_s=200.5, link="")
FOLDER = Entry(kind="d", num_bytes=4096, mode="755", modified_s=100, changed_s=200.5, link="")
LINK = Entry(kind="l", num_bytes=1, mode="777", modified_s=100, changed_s=200.5, link="a")


def contents(entries: dict[str, Entry]) -> Contents:
    return Contents(prefix=Path("/env"), stage=Path("/stage"), of_prefix=entries, of_stage={})


def test_what_find_says() -> None:
    text = (
        b" Welcome!\nd 4096 755 100.9 200.25 .\0\0f 5 644 100.9 200.25 ./a b\nc\0\0l 1 777 1.0 2.0 ./l\0to it\0"
        b"s 0 755 1.0 2.0 ./socket\0\0f 1 644 1.0 2.0 ./" + MARKER.encode() + b"\0\0f 1 600 1.0 2.0 ./\xff\0\0"
    )
    assert parse_listing(text) == {
        "a b\nc": Entry(kind="f", num_bytes=5, mode="644", modified_s=100, changed_s=200.25, link=""),
        "l": Entry(kind="l", num_bytes=1, mode="777", modified_s=1, changed_s=2.0, link="to it"),
        "\udcff": Entry(kind="f", num_bytes=1, mode="600", modified_s=1, changed_s=2.0, link=""),
    }


def test_everything_goes_to_a_host_that_has_nothing() -> None:
    here = contents({"d": FOLDER, "d/x.py": FILE, "d/__pycache__": FOLDER})
    assert compare(here, None, None) == Difference(send=("d", "d/__pycache__", "d/x.py", MARKER), remove=())


def test_nothing_goes_where_all_is_there() -> None:
    here = contents({"d": FOLDER, "x.py": FILE, "l": LINK})
    there = {name: replace(entry, changed_s=999.0, num_bytes=entry.num_bytes) for name, entry in here.all.items()}
    there["d"] = replace(FOLDER, num_bytes=40, modified_s=7)  # of no meaning for a folder
    there["l"] = replace(LINK, modified_s=7)
    assert compare(here, there, here.newest_s) == Difference(send=(), remove=())


@pytest.mark.parametrize(
    "now",
    [
        replace(FILE, num_bytes=6),
        replace(FILE, modified_s=101),
        replace(FILE, mode="755"),
        replace(FILE, changed_s=200.6),
        replace(LINK, changed_s=1.0),
        replace(FOLDER, changed_s=1.0),
    ],
)
def test_a_file_that_is_not_the_same(now: Entry) -> None:
    """By size, time, mode or kind; or since something touched it after it was sent, with all of these as they were."""
    sent = contents({"x.py": FILE, "y.py": FILE})
    difference = compare(contents({"x.py": now, "y.py": FILE}), sent.all, sent.newest_s)
    assert difference == Difference(send=("x.py", MARKER), remove=("x.py", MARKER))


def test_a_link_that_leads_elsewhere_and_a_folder_of_another_mode() -> None:
    there = {"l": LINK, "d": FOLDER, "d/x.py": FILE}
    here = contents({"l": replace(LINK, link="b"), "d": replace(FOLDER, mode="700"), "d/x.py": FILE})
    assert compare(here, there, 300.0) == Difference(send=("d", "l", MARKER), remove=("l", MARKER))


def test_what_another_machine_sent_is_sent_again() -> None:
    here = contents({"d": FOLDER, "x.py": FILE})
    assert compare(here, here.all, None).send == ("x.py", MARKER)


def test_what_is_gone_here_goes_there_with_its_compiled_files() -> None:
    """A folder of nothing but compiled files would be taken for a package."""
    here = contents({"d": FOLDER, "d/x.py": FILE})
    there = {
        "d": FOLDER, "d/x.py": FILE, "d/__pycache__": FOLDER, "d/__pycache__/x.pyc": FILE, "gone": FOLDER,
        "gone/__init__.py": FILE, "gone/__pycache__": FOLDER, "gone/__pycache__/i.pyc": FILE,
    }  # fmt: skip
    assert compare(here, there, 300.0) == Difference(
        send=(MARKER,), remove=("gone", "gone/__init__.py", "gone/__pycache__", "gone/__pycache__/i.pyc", MARKER)
    )


def test_compiled_files_are_not_compared() -> None:
    here = contents({"d": FOLDER, "d/__pycache__": FOLDER, "d/__pycache__/x.pyc": FILE})
    assert compare(here, {"d": FOLDER}, 300.0) == Difference(send=(), remove=())
