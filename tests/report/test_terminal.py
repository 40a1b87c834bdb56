"""What a person sees: plain lines at intervals, nothing on other ranks, a bar in a terminal."""

from __future__ import annotations

import os
import pty
import re
import subprocess
import sys
import time

import pytest

from fleetune.report.terminal import Pace, PlainTerminal, SilentTerminal, clock, open_terminal
from tests.conftest import environment


class Watch:
    """A clock that stands still until it is set."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.now = 1000.0
        monkeypatch.setattr(time, "monotonic", lambda: self.now)


@pytest.fixture
def watch(monkeypatch: pytest.MonkeyPatch) -> Watch:
    return Watch(monkeypatch)


@pytest.mark.parametrize(
    ("seconds", "text"),
    [
        (0, "0:00"), (0.4, "0:00"), (9, "0:09"), (59.6, "1:00"), (61, "1:01"), (3599, "59:59"), (3600, "1:00:00"),
        (3661, "1:01:01"), (90_061, "25:01:01"),
    ],
)  # fmt: skip
def test_durations(seconds: float, text: str) -> None:
    assert clock(seconds) == text


def test_the_pace_of_a_job(watch: Watch) -> None:
    pace = Pace("training", 690, "steps", 0)
    watch.now += 40  # 40 steps in 40 s: 650 more take 650 s, 10 minutes 50
    assert pace.line(40, "loss 0.61") == "training 40/690 steps, loss 0.61, 10:50 left"
    assert pace.line(690, "") == "training 690/690 steps"
    assert pace.line(0, "") == "training 0/690 steps"


def test_the_pace_of_a_resumed_job_counts_what_was_done_here(watch: Watch) -> None:
    pace = Pace("training", 1300, "steps", 1000)
    watch.now += 10  # 100 steps in 10 s: the other 200 take 20 s
    assert pace.line(1100, "") == "training 1,100/1,300 steps, 0:20 left"
    assert pace.line(1000, "") == "training 1,000/1,300 steps"


def test_a_job_of_unknown_length(watch: Watch) -> None:
    pace = Pace("tokenising", None, "rows", 0)
    watch.now += 10
    assert pace.line(12_345, "") == "tokenising 12,345 rows"


def test_plain_lines_come_at_most_every_few_seconds(watch: Watch, capsys: pytest.CaptureFixture[str]) -> None:
    terminal = PlainTerminal(interval_s=5)
    terminal.say("a line with [brackets] and 100%")
    with terminal.bar("training", 10, "steps") as bar:
        for done in range(1, 11):
            watch.now += 2
            bar.move_to(done, f"loss {done}")
    # told at 6 s, 12 s and 18 s: 2 s a step
    assert capsys.readouterr().out.splitlines() == [
        "a line with [brackets] and 100%",
        "training 3/10 steps, loss 3, 0:14 left",
        "training 6/10 steps, loss 6, 0:08 left",
        "training 9/10 steps, loss 9, 0:02 left",
    ]


def test_silence(capsys: pytest.CaptureFixture[str]) -> None:
    terminal = SilentTerminal()
    terminal.say("a line")
    with terminal.bar("training", 10, "steps", start=3) as bar:
        bar.move_to(5, "loss")
    assert capsys.readouterr() == ("", "")


def test_one_rank_speaks_and_a_pipe_is_no_terminal() -> None:
    assert isinstance(open_terminal(is_first=False), SilentTerminal)
    assert isinstance(open_terminal(is_first=True), PlainTerminal)


SCRIPT = """
import time
from fleetune.report.terminal import RichTerminal, open_terminal
terminal = open_terminal(is_first=True)
assert isinstance(terminal, RichTerminal)
terminal.say("plan: [bold]not markup[/bold] " + "x" * 100)
with terminal.bar("training", 40, "steps", start=10) as bar:
    bar.move_to(20, "loss 0.61")
    time.sleep(0.3)
    terminal.say("a line above the bar")
    bar.move_to(40, "loss 0.12")
terminal.say("done")
"""


def test_a_bar_in_a_terminal() -> None:
    """Under a pseudo-terminal of 100 columns."""
    main, side = pty.openpty()
    environ = environment(COLUMNS="100", TERM="xterm-256color", PYTHONWARNINGS="error")
    environ.pop("NO_COLOR", None)
    process = subprocess.Popen([sys.executable, "-c", SCRIPT], stdin=side, stdout=side, stderr=side, env=environ)
    os.close(side)
    shown = b""
    try:
        while chunk := os.read(main, 65536):
            shown += chunk
    except OSError:  # the other side is closed
        pass
    finally:
        os.close(main)
        status = process.wait(timeout=30)
    text = re.sub(r"\x1b\[[0-9;?]*[a-zA-Z]", "", shown.decode())
    assert status == 0, text
    assert "plan: [bold]not markup[/bold] " + "x" * 100 in text  # not wrapped
    assert re.search(r"training .*20/40 steps loss 0\.61", text)
    assert "━" in text
    assert text.index("a line above the bar") > text.index("20/40")
    assert text.rstrip().endswith("done")
    assert b"\x1b[2K" in shown  # the bar is drawn over, and removed at its end
