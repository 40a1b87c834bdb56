"""Ranks that an outer launcher started train the same model as those that fleetune starts itself."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from fleetune.cluster.network import free_port
from tests.conftest import TinyData, Train, environment, flags_of, fleetune, read_json

TORCHRUN = (sys.executable, "-m", "torch.distributed.run", "--nproc-per-node", "2")
TORCHRUN_MODULE = (*TORCHRUN, "-m")


def mpirun(name: str, *more: str) -> tuple[str, ...]:
    path = shutil.which(name)
    if path is None:
        pytest.skip(f"{name} is not installed")
    return (path, *more, "-n", "2", sys.executable)


@pytest.mark.slow
def test_outer_launchers_train_the_model_of_the_local_one(train: Train) -> None:
    local = train("local", processes=2, num_train_epochs=1)
    expected = (local / "model.safetensors").read_bytes()
    root = ("--allow-run-as-root",) if os.geteuid() == 0 else ()
    launches = {
        "torchrun": TORCHRUN,
        "openmpi": mpirun("mpirun.openmpi", *root, "--oversubscribe", "--bind-to", "none"),
        "mpich": mpirun("mpirun.mpich"),
    }
    for name, launch in launches.items():
        other = train(name, launch=launch, num_train_epochs=1)
        assert (other / "model.safetensors").read_bytes() == expected, name
        assert read_json(other / "record.json")["plan"]["processes"] == 2


@pytest.mark.slow
def test_srun_variables_make_a_rank(train: Train, tmp_path: Path) -> None:
    """Two processes with the variables that a step of srun sets, started by hand."""
    local = train("local", processes=2, max_steps=2)
    config = read_json(local / "record.json")["config"]
    words = flags_of({key: value for key, value in config.items() if key not in ("processes", "output_dir")})
    output = tmp_path / "srun"
    ranks = [
        subprocess.Popen(
            [sys.executable, "-m", "fleetune", "train", *words, "--output_dir", str(output)],
            stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, env=srun_environment(rank),
        )
        for rank in range(2)
    ]  # fmt: skip
    said = [rank.communicate(timeout=120)[0] for rank in ranks]
    assert [rank.returncode for rank in ranks] == [0, 0], said
    assert said[1] == "", "only the first rank speaks"
    assert (output / "model.safetensors").read_bytes() == (local / "model.safetensors").read_bytes()


def srun_environment(rank: int) -> dict[str, str]:
    from tests.conftest import environment

    return environment(
        SLURM_JOB_ID="77", SLURM_STEP_ID="0", SLURM_PROCID=str(rank), SLURM_NTASKS="2", SLURM_LOCALID=str(rank),
        SLURM_NTASKS_PER_NODE="2", SLURM_STEP_NUM_TASKS="2", SLURM_STEP_TASKS_PER_NODE="2", SLURM_NODEID="0",
    )  # fmt: skip


def test_another_number_of_processes_than_the_launcher_started_is_refused(tmp_path: Path) -> None:
    result = fleetune(
        "train", "--model", "x", "--train_file", __file__, "--do_eval", "false", "--output_dir", tmp_path / "out",
        "--processes", 3, check=False, RANK="0", WORLD_SIZE="2", LOCAL_RANK="0", LOCAL_WORLD_SIZE="2",
        MASTER_ADDR="127.0.0.1", MASTER_PORT="29512", TORCHELASTIC_RUN_ID="1",
    )  # fmt: skip
    assert result.returncode == 2
    assert "--processes 3: torchrun started 2 ranks" in result.stderr


def test_a_rank_that_fails_ends_the_run_and_says_why_once(train: Train, tmp_path: Path) -> None:
    """The first rank cannot read the data; the other one must neither hang nor print a traceback."""
    bad = tmp_path / "bad.csv"
    bad.write_text("text,label\nred cat,a\n,b\n")
    result = fleetune(
        "train", "--model", train("done", max_steps=1), "--train_file", bad, "--do_eval", "false", "--output_dir",
        tmp_path / "out", "--processes", 3, check=False,
    )  # fmt: skip
    assert result.returncode == 2
    assert f"error: {bad}, row 3, column 'text'" in result.stderr
    assert result.stderr.count("error:") == 1
    assert "Traceback" not in result.stderr


def test_several_processes_can_be_started_from_a_thread(train: Train) -> None:
    from concurrent.futures import ThreadPoolExecutor

    with ThreadPoolExecutor(1) as pool:
        output = pool.submit(train, "thread", processes=2, max_steps=1).result(timeout=120)
    assert read_json(output / "record.json")["status"] == "finished"


def test_evaluate_works_from_any_folder(train: Train, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The data were named relative to where the run was started."""
    (tmp_path / "here").mkdir()
    (tmp_path / "elsewhere").mkdir()
    for name in ("train.csv", "dev.csv"):
        (tmp_path / "here" / name).write_text("text,label\nred cat,a\nbig dog,b\n")
    monkeypatch.chdir(tmp_path / "here")
    output = train(train_file="train.csv", validation_file="dev.csv", max_steps=1)
    (tmp_path / "here" / "train.csv").unlink()  # evaluating needs the validation data only
    monkeypatch.chdir(tmp_path / "elsewhere")
    assert "accuracy" in fleetune("evaluate", output).stdout


GROUP_BEFORE = """
import sys
import torch.distributed as dist
from fleetune import RunConfig, finetune
dist.init_process_group("gloo")
config = RunConfig(model=sys.argv[1], train_file=sys.argv[2], validation_file=sys.argv[3], output_dir="out",
                   max_steps=2, report_to="none", save_strategy="no", cache_dir="cache", per_device_train_batch_size=8)
record = finetune(config)
print("still there:", dist.get_world_size(), record.plan["processes"])
dist.destroy_process_group()
"""


@pytest.mark.parametrize("launcher", ["fleetune launch", "torchrun"])
def test_a_script_may_have_a_process_group_already(
    launcher: str, tiny_model: Path, tiny_data: TinyData, tmp_path: Path
) -> None:
    """As a worker of Ray's TorchTrainer has, too."""
    (tmp_path / "script.py").write_text(GROUP_BEFORE)
    start = {
        "fleetune launch": ["-m", "fleetune", "launch", "--processes", "2"],
        "torchrun": ["-m", "torch.distributed.run", "--nproc-per-node", "2", "--master-port", str(free_port())],
    }[launcher]
    words = ["script.py", str(tiny_model), str(tiny_data.train), str(tiny_data.validation)]
    result = subprocess.run([sys.executable, *start, *words], cwd=tmp_path, env=environment(), capture_output=True,
                            text=True, timeout=240, check=False)  # fmt: skip
    assert result.returncode == 0, f"{result.stdout}\n{result.stderr}"
    assert result.stdout.splitlines().count("still there: 2 2") == 2
