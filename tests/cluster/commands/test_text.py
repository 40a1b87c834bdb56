"""Lines of a guide as one text."""

from __future__ import annotations

from pathlib import Path

import pytest

from fleetune.cluster.commands.command import read_command
from fleetune.cluster.commands.text import read_text
from fleetune.errors import ConfigError


def test_lines() -> None:
    """Exports, values of other variables, continued lines, comments, several statements in a line."""
    text = """
    # two nodes
    export N=4 HERE="/a b"; source /opt/intel/oneapi/setvars.sh --force && cat hosts
    path=$(python -c "import x; print(x.cwd)")
    mpirun -n ${N} \\
      -genv WHERE=$HERE/$USER python train.py --title 'a # b' # the end
    """
    words, notices = read_text(text, {"USER": "ann"})
    assert words == ["N=4", "HERE=/a b", "mpirun", "-n", "4", "-genv", "WHERE=/a b/ann", "python", "train.py",
                     "--title", "a # b"]  # fmt: skip
    assert [notice.split(":")[0] for notice in notices] == ["source /opt/intel/oneapi/setvars.sh --force"]


def test_variables_in_front() -> None:
    command = read_command(["env", "OMP_NUM_THREADS=4", "A=1", "torchrun", "--nproc-per-node=2", "x.py"], {})
    assert command.settings == {"processes": 2, "threads": 4}
    assert (command.variables, command.script) == ({"A": "1"}, ("x.py",))


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("export A=1\nsource x", "one command is expected in these lines, not 0"),
        ("python a.py\npython b.py", "not 2: python a.py; python b.py"),
        ("python 'a.py --x\n", "No closing quotation"),
    ],
)
def test_refused(text: str, says: str) -> None:
    with pytest.raises(ConfigError, match=says):
        read_text(text, {})


def test_launchers_that_are_modules() -> None:
    """With python in front and without, as `fleetune launch -m`; a user's own module is the script."""
    words = ["-m", "torch.distributed.run", "--nproc_per_node", "2", "-m", "my.module", "--x"]
    for command in (read_command(words, {}), read_command(["python3", *words], {})):
        assert (command.settings, command.script) == ({"processes": 2}, ("-m", "my.module", "--x"))
    assert read_command(["-m", "my.module", "--x"], {}).script == ("-m", "my.module", "--x")
    assert read_command(["python", "-u", "x.py"], {}).script == ("x.py",)
    assert read_command(["python", "-W", "error", "x.py"], {}).script == ("python", "-W", "error", "x.py")


def test_a_files_name_may_have_blanks(tmp_path: Path) -> None:
    script = tmp_path / "my script.py"
    script.write_text("")
    assert read_command([str(script)], {}).script == (str(script),)


def test_what_guides_export_is_told_of() -> None:
    """Once the lines of a guide were typed into the shell, their variables are there; only behind a launcher."""
    environ = {"CCL_WORKER_COUNT": "1", "LD_PRELOAD": "/usr/lib/libtcmalloc.so", "MASTER_ADDR": "10.1.0.10"}
    told = [notice.split(":")[0] for notice in read_command(["mpirun", "-n", "2", "x.py"], environ).notices]
    assert told == ["CCL_WORKER_COUNT"]
    assert read_command(["x.py"], environ).notices == ()
    environ = {"HF_HOME": "/hf", "CCL_X": "1", "OMP_NUM_THREADS": "3"}
    words = ["mpirun", "-x", "HF_HOME", "-x", "CCL_X,NONE", "-x", "OMP_NUM_THREADS", "x.py"]
    command = read_command(words, environ)  # handed on by name, with the values that they have here
    assert (command.variables, command.settings) == ({"HF_HOME": "/hf"}, {"threads": 3})
    assert [notice.split(":")[0] for notice in command.notices] == ["CCL_X"]
