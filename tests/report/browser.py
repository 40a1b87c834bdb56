"""A page in headless Chromium: what it says to the console, how wide it becomes, how it looks."""

from __future__ import annotations

import html
import re
import subprocess
from pathlib import Path

from benchmarks.report_pictures import CHROMIUM, FLAGS, find_chromium

_CONSOLE = re.compile(r":(?:INFO|WARNING|ERROR):CONSOLE[:(]\d+\)?\] (.*)")


def unavailable() -> str | None:
    """Why no page can be opened here."""
    return (
        None
        if find_chromium() is not None
        else f"none of {', '.join(CHROMIUM)} is installed (apt-get install chromium)"
    )


def dump(page: Path, profile: Path) -> tuple[str, list[str]]:
    """The page's elements after it was opened, and what the console said."""
    program = find_chromium()
    assert program is not None
    result = subprocess.run(
        [program, *FLAGS, "--enable-logging=stderr", "--virtual-time-budget=3000", f"--user-data-dir={profile}",
         "--dump-dom", page.absolute().as_uri()],
        check=True, capture_output=True, text=True, timeout=120,
    )  # fmt: skip
    return result.stdout, _CONSOLE.findall(result.stderr)


def width_within(page: Path, width: int, folder: Path) -> int:
    """How wide the page becomes in a window of a width, when all that is folded is unfolded."""
    script = (
        "addEventListener('load', () => { const inner = frames[0].document;"
        " inner.querySelectorAll('details').forEach(one => one.open = true);"
        " document.title = 'width ' + inner.documentElement.scrollWidth; })"
    )
    source = html.escape(page.read_text(encoding="utf-8"))
    outer = folder / f"frame-{width}.html"
    outer.write_text(
        f"<!doctype html><title>-</title><script>{script}</script>"
        f'<iframe srcdoc="{source}" style="width:{width}px;height:800px;border:0"></iframe>',
        encoding="utf-8",
    )
    content, _ = dump(outer, folder / f"profile-{width}")
    found = re.search(r"<title>width (\d+)</title>", content)
    assert found is not None, content[:300]
    return int(found[1])
