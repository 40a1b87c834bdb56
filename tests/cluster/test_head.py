"""Head and agents with a stand-in for ssh that runs its command here: what a login shell prints, what agents say."""

from __future__ import annotations

import os
import stat
import sys
from pathlib import Path

import pytest

from tests.conftest import Result, fleetune

SSH = f"""#!{sys.executable} -S
import os, sys
if sys.argv[1] == "-G":
    print("hostname 127.0.0.1\\nport 2200\\nproxyjump none")
    sys.exit(0)
target, command = sys.argv[-2:]
open(os.environ["SSH_LOG"], "a").write(f"{{target}} {{command}}\\n")
if target.endswith("refused"):
    sys.exit(print(f"me@{{target}}: Permission denied (publickey).", file=sys.stderr) or 255)
print("Welcome to this host. Maintenance on Sunday.")
print("\\x1efleetune-like noise", flush=True)
os.execvp("sh", ["sh", "-c", command])
"""
SCRIPT = """
import os, sys
rank = int(os.environ["RANK"])
print("rank", rank, "of", os.environ["WORLD_SIZE"], flush=True)
print("warned", rank, file=sys.stderr)
if "fail" in sys.argv and rank == 1:
    print("the reason", file=sys.stderr)
    sys.exit(7)
"""


@pytest.fixture
def launch(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> object:
    """Run `fleetune launch` on this machine and on another that is this machine, too."""
    programs = tmp_path / "bin"
    programs.mkdir()
    ssh = programs / "ssh"
    ssh.write_text(SSH)
    ssh.chmod(ssh.stat().st_mode | stat.S_IXUSR)
    (tmp_path / "script.py").write_text(SCRIPT)
    monkeypatch.chdir(tmp_path)

    def run(hosts: str, *words: object, check: bool = True) -> Result:
        environ = {"PATH": f"{programs}:{os.environ['PATH']}", "SSH_LOG": str(tmp_path / "ssh.log")}
        chosen = ("--hosts", hosts, "--network", "127.0.0.0/8", "--timeout_s", 20, "--processes", 1, "--threads", 1)
        return fleetune("launch", *chosen, *words, check=check, **environ)

    return run


def test_what_a_login_shell_prints_does_no_harm(launch: object, tmp_path: Path) -> None:
    assert callable(launch)
    result = launch("localhost,other", "script.py")
    assert result.stdout.splitlines() == ["rank 0 of 2"]
    lines = result.stderr.splitlines()
    assert lines[0].startswith("fleetune: 2 hosts, 2 ranks: localhost (0), other (1)")
    assert lines[1:] == ["warned 0"]
    assert (tmp_path / "logs" / "other.1.log").read_text().splitlines() == ["rank 1 of 2", "warned 1"]
    (called,) = (tmp_path / "ssh.log").read_text().splitlines()
    assert called.startswith("other ")
    assert called.endswith("-m fleetune.cluster.launchers.agent")


def test_the_failing_rank_is_told_last(launch: object) -> None:
    assert callable(launch)
    result = launch("localhost,other", "script.py", "fail", check=False)
    assert result.returncode == 7
    assert result.stderr.splitlines()[-3:] == [
        "[other rank 1] warned 1",
        "[other rank 1] the reason",
        "fleetune: other: rank 1 failed with exit status 7 (all it said: logs/other.1.log)",
    ]


def test_a_host_that_refuses(launch: object) -> None:
    assert callable(launch)
    result = launch("localhost,refused", "script.py", check=False)
    assert result.returncode == 1
    assert result.stdout == ""
    assert result.stderr == (
        "error: host refused: it refuses the key; `ssh-copy-id refused`, or start an agent that has the key\n"
    )


def test_ranks_that_print_more_than_anybody_reads(launch: object, tmp_path: Path) -> None:
    """All of it arrives, in order; the head holds back who prints faster than it writes."""
    assert callable(launch)
    count = 20_000
    (tmp_path / "noisy.py").write_text(f"for i in range({count}):\n    print(i, 'x' * 50)\n")
    result = launch("localhost,other", "noisy.py")
    expected = [f"{i} {'x' * 50}" for i in range(count)]
    assert result.stdout.splitlines() == expected
    assert (tmp_path / "logs" / "other.1.log").read_text().splitlines() == expected
