"""Peaks of processes: of invented ones, and of a real one that takes a known amount of memory."""

from __future__ import annotations

import os
import subprocess
import sys

from benchmarks.memory_watch import MemoryWatch, ProcessStatus, family, parse_status

MEBIBYTE = 1024 * 1024


def test_status_file() -> None:
    text = "Name:\tpython: x\nPPid:\t12\nVmHWM:\t    2048 kB\nVmRSS:\t    1024 kB\n"
    assert parse_status(text) == ProcessStatus(parent=12, peak_rss_bytes=2 * MEBIBYTE)


def test_status_file_of_a_process_that_has_ended() -> None:
    assert parse_status("Name:\tpython\nState:\tZ (zombie)\nPPid:\t1\n") == ProcessStatus(parent=1, peak_rss_bytes=None)


def test_family_is_the_process_and_all_below_it() -> None:
    parents = {1: 0, 10: 1, 11: 10, 12: 11, 20: 1, 21: 20}
    assert list(family(10, parents)) == [10, 11, 12]
    assert list(family(99, parents)) == []


CHILD = "import time; x = bytearray(b'1' * (64 << 20)); del x; time.sleep(0.5)"
PARENT = (
    "import os, subprocess, sys, time; "
    f"subprocess.run([sys.executable, '-c', {CHILD!r}], env={{**os.environ, 'RANK': '1'}}); time.sleep(0.5)"
)


def test_peak_of_a_child_stays_known_after_the_memory_is_given_back() -> None:
    environment = {name: value for name, value in os.environ.items() if name != "RANK"}
    with (
        subprocess.Popen([sys.executable, "-c", PARENT], env=environment) as process,
        MemoryWatch(process.pid, "launcher") as watch,
    ):
        process.wait()
    peaks = {peak.role: peak.peak_rss_bytes for peak in watch.peaks()}
    assert set(peaks) == {"launcher", "rank 1"}
    assert 64 * MEBIBYTE < peaks["rank 1"] < 200 * MEBIBYTE
    assert peaks["launcher"] < 64 * MEBIBYTE
