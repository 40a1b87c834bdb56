"""Every command and the Python example of the README run as they stand there, on tiny data under the same names."""

from __future__ import annotations

import json
import re
import shlex
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from fleetune.kernels.library import cache_folder, load_kernels
from tests.conftest import REPOSITORY, TinyData, environment, read_json, write_pairs

pytestmark = pytest.mark.slow

README = (REPOSITORY / "README.md").read_text(encoding="utf-8")
BLOCKS = re.findall(r"```(\w*)\n(.*?)```", README, flags=re.DOTALL)
COMMANDS = [
    line.split("#")[0].strip()
    for _, block in BLOCKS
    for line in block.splitlines()
    if line.startswith(("fleetune ", "torchrun "))
]
PYTHON = [block for language, block in BLOCKS if language == "python"]
OWN_FILES = "--train_file train.csv --validation_file dev.csv --model ./my-encoder --output_dir out"


@pytest.fixture
def workplace(tiny_model: Path, tiny_data: TinyData, tmp_path: Path) -> Path:
    """A folder with what the commands name, which is their home too; the kernels compiled for the tests are in it."""
    load_kernels()
    kernels = cache_folder() / "kernels"
    if kernels.is_dir():
        (tmp_path / "cache" / "fleetune").mkdir(parents=True)
        (tmp_path / "cache" / "fleetune" / "kernels").symlink_to(kernels)
    shutil.copytree(tiny_model, tmp_path / "my-encoder")
    shutil.copytree(tiny_model, tmp_path / "bert-base-uncased")
    shutil.copy(tiny_data.train, tmp_path / "train.csv")
    shutil.copy(tiny_data.validation, tmp_path / "dev.csv")
    write_pairs(tmp_path / "new.csv", 9, seed=5)
    (tmp_path / "my.py").write_text("import os; print('rank', os.environ['RANK'], 'of', os.environ['WORLD_SIZE'])")
    mrpc = tmp_path / "glue_data" / "MRPC"
    mrpc.mkdir(parents=True)
    for name, count in (("train", 20), ("dev", 6)):
        rows = [f"{i % 2}\t{i}\t{i + 1}\tthe cat sees\tthe dog {'runs ' * (i % 3)}" for i in range(count)]
        (mrpc / f"{name}.tsv").write_text("Quality\t#1 ID\t#2 ID\t#1 String\t#2 String\n" + "\n".join(rows) + "\n")
    words = shlex.split(OWN_FILES)
    settings = dict(zip([w.removeprefix("--") for w in words[::2]], words[1::2], strict=True))
    (tmp_path / "run.toml").write_text("".join(f"{k} = {json.dumps(v)}\n" for k, v in settings.items()))
    return tmp_path


def home(folder: Path) -> dict[str, str]:
    """The variables that make a folder the user's."""
    return {"HOME": str(folder), "XDG_CACHE_HOME": str(folder / "cache")}


def run(command: str, folder: Path) -> str:
    """Run a command line of the README in a folder."""
    words = shlex.split(command.replace("...", OWN_FILES))
    programs = {"fleetune": ["-m", "fleetune"], "torchrun": ["-m", "torch.distributed.run"]}
    result = subprocess.run(
        [sys.executable, *programs[words[0]], *words[1:]],
        cwd=folder, env=environment(**home(folder)), check=False,
        capture_output=True, text=True, timeout=240,
    )  # fmt: skip
    assert result.returncode == 0, f"{command}\n{result.stdout}\n{result.stderr}"
    return result.stdout


def test_the_readme_has_the_commands_that_are_tested_here() -> None:
    verbs = [" ".join(command.split()[:2]) for command in COMMANDS]
    assert verbs.count("fleetune train") == 3
    assert {"fleetune evaluate", "fleetune predict", "torchrun --nproc-per-node"} <= set(verbs)
    assert verbs.count("fleetune export") == 1
    assert verbs.count("fleetune build-kernels") == verbs.count("fleetune plan") == 1
    assert len(PYTHON) == 2


@pytest.mark.parametrize("command", [c for c in COMMANDS if " train" in c and "--help" not in c])
def test_training_commands(command: str, workplace: Path) -> None:
    run(command, workplace)
    record = read_json(workplace / "out" / "record.json")
    assert record["status"] == "finished"
    assert record["plan"]["processes"] == (2 if "2" in command.split() else 1)


def test_evaluate_and_predict_commands(workplace: Path) -> None:
    run(f"fleetune train {OWN_FILES} --max_steps 2", workplace)
    evaluate, predict = (next(c for c in COMMANDS if f"fleetune {verb}" in c) for verb in ("evaluate", "predict"))
    assert "accuracy" in run(evaluate, workplace)
    run(predict, workplace)
    assert len((workplace / "predictions.jsonl").read_text().splitlines()) == 9


def test_the_export_command(workplace: Path) -> None:
    pytest.importorskip("onnxruntime", reason="the extra [onnx] is not installed")
    run(f"fleetune train {OWN_FILES} --max_steps 2", workplace)
    (command,) = (c for c in COMMANDS if c.startswith("fleetune export"))
    assert "logits of 25 rows differ by up to" in run(command, workplace)
    assert (workplace / "out" / "onnx" / "model.onnx").is_file()


def test_the_plan_command(workplace: Path) -> None:
    (command,) = (c for c in COMMANDS if c == "fleetune plan")
    assert run(command, workplace).startswith("rank  host")


def test_the_command_for_a_script_of_ones_own(workplace: Path) -> None:
    (command,) = (c for c in COMMANDS if c.startswith("fleetune launch"))
    assert sorted(run(command, workplace).splitlines()) == ["rank 0 of 2", "rank 1 of 2"]


def test_the_doctor_command(workplace: Path) -> None:
    """It may find something here, which is no fault of its own."""
    (command,) = (c for c in COMMANDS if c == "fleetune doctor")
    result = subprocess.run([sys.executable, "-m", *command.split()], cwd=workplace, env=environment(**home(workplace)),
                            check=False, capture_output=True, text=True, timeout=240)  # fmt: skip
    assert result.returncode in (0, 1), result.stderr
    assert "cpu" in result.stdout.lower()


def test_bench_and_report_commands(workplace: Path) -> None:
    """With fewer steps and rounds than the README has."""
    bench, report = (next(c for c in COMMANDS if c.startswith(f"fleetune {verb}")) for verb in ("bench", "report"))
    told = run(bench.replace("--steps 50 --repeat 3", "--steps 2 --repeat 1 --threads 1"), workplace)
    assert "| 2 processes |" in told
    assert "out/report.html" in run(report, workplace)
    assert (workplace / "out" / "report.html").stat().st_size > 10_000


def test_the_kernels_command(workplace: Path) -> None:
    (command,) = (c for c in COMMANDS if "build-kernels" in c)
    assert "libfleetune.so" in run(command, workplace)


def test_the_line_for_a_script(tiny_model: Path, tmp_path: Path) -> None:
    """The example with a model in front, and a use of it behind."""
    before = f"import transformers\nmodel = transformers.AutoModel.from_pretrained({str(tiny_model)!r})\n"
    after = "\nimport torch\nprint(tuple(model(torch.tensor([[2, 5, 3]])).last_hidden_state.shape))\n"
    result = subprocess.run([sys.executable, "-W", "error", "-c", before + PYTHON[1] + after], env=environment(),
                            check=False, capture_output=True, text=True, timeout=240)  # fmt: skip
    assert result.returncode == 0, result.stderr
    assert result.stdout.split("\n")[-2] == "(1, 3, 32)"


def test_the_python_example(workplace: Path) -> None:
    result = subprocess.run(
        [sys.executable, "-c", PYTHON[0]], cwd=workplace, env=environment(**home(workplace)), check=False,
        capture_output=True, text=True, timeout=240,
    )  # fmt: skip
    assert result.returncode == 0, result.stderr
    f1, speed = map(float, result.stdout.split()[-2:])
    assert 0.0 <= f1 <= 1.0
    assert speed > 0.0


def test_the_files_that_the_readme_names_are_there() -> None:
    for target in re.findall(r"\]\(([^)#]+)\)", README):
        assert (REPOSITORY / target).exists(), target
