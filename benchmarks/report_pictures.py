"""Pictures of a report's page in light, dark and narrow, taken with headless Chromium: `docs/report/*.png`."""

from __future__ import annotations

import argparse
import shutil
import subprocess
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from benchmarks.result_file import REPOSITORY, shown_path

DESCRIPTION = "Pictures of a report's page: light, dark and narrow."
FOLDER = REPOSITORY / "docs" / "report"
CHROMIUM = ("chromium", "chromium-browser", "google-chrome")
FLAGS = (
    "--headless", "--no-sandbox", "--disable-gpu", "--disable-background-networking", "--no-first-run",
    "--hide-scrollbars", "--disable-dev-shm-usage",
)  # fmt: skip


@dataclass(frozen=True, kw_only=True)
class View:
    """How the page is looked at."""

    width: int
    height: int
    is_dark: bool = False


VIEWS = {
    "light": View(width=1040, height=1150),
    "dark": View(width=1040, height=1150, is_dark=True),
    "narrow": View(width=390, height=1000),
}
"""Name of the picture -> its view. Chromium makes no window narrower than 500 pixels."""


def main(words: Sequence[str] | None = None) -> None:
    """Take the pictures."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.report_pictures", description=DESCRIPTION)
    parser.add_argument("page", type=Path, help="report.html")
    parser.add_argument("--output", type=Path, default=FOLDER, help=f"folder (default: {shown_path(FOLDER)})")
    options = parser.parse_args(words)
    program = find_chromium()
    if program is None:
        parser.error(f"none of {', '.join(CHROMIUM)} is installed: apt-get install chromium")
    if not options.page.is_file():
        parser.error(f"{options.page}: there is no such page")
    options.output.mkdir(parents=True, exist_ok=True)
    for name, view in VIEWS.items():
        path = options.output / f"{name}.png"
        take(program, options.page, view, path)
        print(f"{shown_path(path)}: {path.stat().st_size / 1e3:,.0f} kB")


def find_chromium() -> str | None:
    """The browser's program; None where there is none."""
    return next((found for name in CHROMIUM if (found := shutil.which(name))), None)


def take(program: str, page: Path, view: View, path: Path) -> None:
    """One picture.

    Raises:
        CalledProcessError: The browser failed; it has said why.
    """
    dark = ["--blink-settings=preferredColorScheme=0"] if view.is_dark else ["--blink-settings=preferredColorScheme=1"]
    with tempfile.TemporaryDirectory(prefix="fleetune-page-") as profile:
        subprocess.run(
            [program, *FLAGS, *dark, f"--user-data-dir={profile}", f"--window-size={view.width},{view.height}",
             f"--screenshot={path.absolute()}", page.absolute().as_uri()],
            check=True, capture_output=True, timeout=120,
        )  # fmt: skip


if __name__ == "__main__":
    main()
