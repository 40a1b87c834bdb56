"""`fleetune setup` as far as no other host is needed; the rest is in tests/cluster/environment."""

from __future__ import annotations

import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from fleetune.cli import main


@pytest.mark.parametrize(
    ("words", "line"),
    [
        ([], "error: on which hosts? Give --hosts node1,node2 or --hostfile FILE\n"),
        (["--hosts", "a", "--hostfile", "b"], "error: --hosts and --hostfile: give one\n"),
        (["--hosts", "node[2-1]"], "error: --hosts node[2-1]: [2-1] is no range: 1 comes before 2\n"),
        (["--hosts", "a", "--processes", "2"],
         "error: --processes is a setting of `fleetune train`, this command does not take it\n"),
        (["--hosts", "a", "--forse"], "error: --forse is not a setting\n"),
    ],
)  # fmt: skip
def test_unusable_words(words: list[str], line: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main.run(["setup", *words]) == 2
    assert capsys.readouterr() == ("", line)


def test_hosts_come_from_a_file_of_settings_too(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "run.toml").write_text('[cluster]\nhosts = ["localhost"]\n[training]\nlearning_rate = 1e-5\n')
    assert main.run(["setup", "--config", str(tmp_path / "run.toml"), "--dry_run"]) == 0
    told = capsys.readouterr()
    assert told.err == ""
    lines = told.out.splitlines()
    assert lines[0].startswith(f"{sys.prefix} (")
    assert lines[-2:] == [
        "localhost: this machine, nothing to send", f"    {sys.prefix}/bin/python -m fleetune build-kernels"
    ]  # fmt: skip


def test_a_python_without_an_environment_is_refused(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(sys, "prefix", str(tmp_path))
    assert main.run(["setup", "--hosts", "localhost"]) == 2


def test_the_control_side_loads_no_torch() -> None:
    """A real environment, whose torch is only asked for its version by another process."""
    if shutil.which("find") is None:
        pytest.skip("no find")
    script = (
        "import sys\n"
        "from fleetune.cli import main\n"
        "assert main.run(['setup', '--hosts', 'localhost', '--dry_run']) == 0\n"
        "assert not {'torch', 'numpy'} & set(sys.modules)\n"
    )
    subprocess.run([sys.executable, "-c", script], check=True, capture_output=True, timeout=120)
