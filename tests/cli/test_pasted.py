"""Commands of other launchers behind `fleetune launch` and `fleetune train`: what is said, and what is run."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from fleetune.cli.pasted import as_typed, config_file_of, split_command
from fleetune.config import RunConfig
from tests.conftest import TinyData, Train, fleetune, losses_of

RANK = """
import os, sys
names = ("RANK", "WORLD_SIZE", "OMP_NUM_THREADS", "ACCELERATE_MIXED_PRECISION", "CCL_WORKER_COUNT")
with open(f"told.{os.environ['RANK']}", "w") as file:
    file.write(" ".join([os.environ.get(name, "-") for name in names] + sys.argv[1:]))
"""


@pytest.mark.parametrize(
    ("words", "own", "pasted"),
    [
        ("--model m --bf16", "--model m --bf16", ""),
        ("--launcher mpirun --model m", "--launcher mpirun --model m", ""),
        ("--launcher mpirun mpirun -n 2 python run_qa.py", "--launcher mpirun", "mpirun -n 2 python run_qa.py"),
        ("--dry_run run_glue.py --do_train", "--dry_run", "run_glue.py --do_train"),
        ("python -m torch.distributed.run x.py", "", "python -m torch.distributed.run x.py"),
        ("/opt/mpi/bin/mpiexec.hydra -n 2 x.py", "", "/opt/mpi/bin/mpiexec.hydra -n 2 x.py"),
        ("OMP_NUM_THREADS=2 torchrun x.py", "", "OMP_NUM_THREADS=2 torchrun x.py"),
        (
            "--model mpirun --label_column_name env --output_dir a=b",
            "--model mpirun --label_column_name env --output_dir a=b",
            "",
        ),
        ("--bf16 mpirun x.py", "--bf16", "mpirun x.py"),
        ("--do_eval false --use_ipex torchrun x.py", "--do_eval false --use_ipex", "torchrun x.py"),
        ("--processes 2 -m module x.py", "--processes 2 -m module", "x.py"),
    ],
)
def test_where_a_command_begins(words: str, own: str, pasted: str) -> None:
    assert split_command(words.split()) == (own.split(), pasted.split())


def test_a_text_in_quotes_is_a_command() -> None:
    text = "export N=2\nmpirun -n $N python run_qa.py"
    assert split_command(["--dry_run", text]) == (["--dry_run"], [text])


def test_settings_as_typed() -> None:
    config = RunConfig(hosts=("a", "b"), threads=4, model="my model")
    assert as_typed("launch", config, "x.py") == "fleetune launch --model 'my model' --threads 4 --hosts a,b x.py"
    assert config_file_of(["--threads", "2", "--config-file", "a.yaml"]) == Path("a.yaml")
    assert config_file_of([]) is None


def test_launch_runs_a_pasted_command(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Ranks, threads and variables are the command's; what no longer exists is told of in a line each."""
    (tmp_path / "x.py").write_text(RANK)
    monkeypatch.chdir(tmp_path)
    result = fleetune("launch", "mpirun", "-n", 2, "-genv", "OMP_NUM_THREADS=1", "-genv", "CCL_WORKER_COUNT", 4,
                      "accelerate", "launch", "--mixed_precision", "bf16", "x.py", "-n", "3",
                      HF_HOME=str(tmp_path))  # fmt: skip
    assert [(tmp_path / f"told.{rank}").read_text() for rank in range(2)] == [f"{r} 2 1 bf16 - -n 3" for r in range(2)]
    assert result.stdout.splitlines() == [
        "CCL_WORKER_COUNT: oneCCL's PyTorch bindings were archived in 2025: gradients travel through gloo"
    ]


def test_own_flags_count_above_the_commands(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "x.py").write_text("")
    (tmp_path / "hosts").write_text("10.1.0.10\n10.1.0.11\n")
    (tmp_path / "config.yaml").write_text("num_processes: 3\nnum_machines: 1\n")
    monkeypatch.chdir(tmp_path)
    said = fleetune("launch", "--dry_run", "--threads", 3, "mpirun", "-f", "hosts", "-ppn", 2, "-genv",
                    "OMP_NUM_THREADS=4", "x.py").stdout  # fmt: skip
    assert said.splitlines()[0] == "# fleetune launch --processes 2 --threads 3 --hostfile hosts x.py"
    assert "2 ranks in" in said
    said = fleetune("launch", "--dry_run", "--config_file", "config.yaml", "x.py").stdout
    assert said.count(" WORLD_SIZE=3") == 3
    result = fleetune("launch", "torchrun", "--nnodes", 2, "x.py", check=False)
    assert (result.returncode, "--num_hosts 2: nothing starts ranks on other hosts" in result.stderr) == (2, True)


def test_train_does_the_work_of_a_pasted_command(
    tiny_data: TinyData, tiny_model: Path, cache_dir: Path, train: Train, tmp_path: Path
) -> None:
    """The same losses as with our own flags, and with the script's batch size and rate where none are given."""
    ours = train("ours", processes=2, learning_rate=5e-5, per_device_train_batch_size=8, num_train_epochs=1)
    files = ("--train_file", tiny_data.train, "--validation_file", tiny_data.validation)
    result = fleetune(
        "train", "--cache_dir", cache_dir, "--report_to", "none",
        "mpirun", "-n", 2, "-genv", "OMP_NUM_THREADS=1", "-genv", "I_MPI_PIN_DOMAIN=socket", "python3", "run_glue.py",
        "--model_name_or_path", tiny_model, *files, "--do_train", "--do_eval", "--num_train_epochs", 1,
        "--logging_steps", 1, "--output_dir", tmp_path / "theirs", "--no_cuda", "--xpu_backend", "ccl", "--use_ipex",
    )  # fmt: skip
    assert losses_of(tmp_path / "theirs") == pytest.approx(losses_of(ours), abs=1e-6)
    told = [line.split(":")[0] for line in result.stdout.splitlines() if ": " in line]
    for word in ("I_MPI_PIN_DOMAIN", "run_glue.py", "--no_cuda", "--xpu_backend", "--use_ipex"):
        assert told.count(word) == 1
    record = json.loads((tmp_path / "theirs/record.json").read_text())
    assert record["config"]["threads"] == 1


def test_accelerates_file_for_train(tmp_path: Path) -> None:
    (tmp_path / "config.yaml").write_text("distributed_type: MULTI_CPU\nnum_processes: 2\nmixed_precision: bf16\n")
    said = fleetune("train", "--config_file", tmp_path / "config.yaml", "--print_config").stdout
    assert 'bf16 = "true"\n' in said
    assert "processes = 2\n" in said
