"""A real Ray cluster on three hosts of a lab; and what is asked of Ray, as text."""

from __future__ import annotations

import importlib.util
import json
import os
import sys
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
from safetensors.numpy import load_file

import fleetune
from fleetune.cluster.job import Job
from fleetune.cluster.launchers.ray_train import RankError, check_size, plan_ray, run_beside
from fleetune.errors import ConfigError, LaunchError
from fleetune.hardware.host import usable_cores
from lab import Lab
from tests.conftest import TinyData, Train, losses_of

JOB = Job(command=("python", "it's.py"), environ={"HF_TOKEN": "sesame", "OMP_X": "1"}, cwd=Path("/work"), threads=2)


def test_the_plan_as_text(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("RAY_ADDRESS", raising=False)
    assert str(plan_ray(JOB, 3)).splitlines() == [
        "on the Ray cluster at auto:",
        "  TorchTrainer with 3 workers of {'CPU': 2}, placed STRICT_SPREAD",
        "  beside each: python 'it'\"'\"'s.py'",
        "variables of all ranks:",
        "  HF_TOKEN='(not shown)'",
        "  OMP_X=1",
    ]


def test_the_number_of_hosts_is_needed() -> None:
    with pytest.raises(ConfigError, match="--launcher ray: on how many hosts"):
        plan_ray(JOB, None)


def test_a_cluster_that_is_too_small_is_refused_at_once() -> None:
    nodes = [{"NodeManagerAddress": f"10.0.0.{i}", "Resources": {"CPU": cpus}, "Alive": i != 4}
             for i, cpus in enumerate((4.0, 2.0, 1.0, 8.0), start=1)]  # fmt: skip
    check_size(plan_ray(JOB, 2), nodes)
    with pytest.raises(
        LaunchError, match=r"^3 hosts with 2 CPUs each are asked for; .* has 10.0.0.1: 4, 10.0.0.2: 2, "
    ):
        check_size(plan_ray(JOB, 3), nodes)


@pytest.mark.parametrize(
    ("code", "words"),
    [("raise SystemExit(3)", "failed with exit status 3"), ("import os; os.kill(os.getpid(), 9)", "killed by SIGKILL")],
)
def test_a_rank_that_fails_is_told_by_number_and_host(code: str, words: str) -> None:
    told = {"command": [sys.executable, "-c", code], "environ": {}, "cwd": "/no/such"}
    with pytest.raises(RankError, match=f"rank 4 on {os.uname().nodename} .*{words}"):
        run_beside(told, {"RANK": "4"})


@pytest.fixture
def cluster(tmp_path: Path) -> Iterator[tuple[Lab, dict[str, str]]]:
    if reason := Lab.unavailable():
        pytest.skip(reason)
    if importlib.util.find_spec("ray") is None:
        pytest.skip("the extra [ray] is not installed")
    environ = {
        "PATH": f"{Path(sys.executable).parent}:{os.environ['PATH']}",
        "PYTHONPATH": str(Path(fleetune.__file__).parents[1]),
        "RAY_USAGE_STATS_ENABLED": "0",
        "RAY_memory_monitor_refresh_ms": "0",
        "HF_HUB_OFFLINE": "1",
    }
    base = Path(*tmp_path.parts[:3])
    with Lab.up(3, keep=[base] if tmp_path.is_relative_to("/tmp") else []) as lab:
        head = f"{lab.hosts[0].address}:6379"
        for host in lab:
            role = ["--head", "--port=6379"] if host is lab.hosts[0] else [f"--address={head}"]
            options = [f"--node-ip-address={host.address}", "--num-cpus=1", "--object-store-memory=80000000"]
            command = [sys.executable, "-m", "ray.scripts.scripts", "start", *role, *options, "--disable-usage-stats"]
            host.run(command, env=environ, timeout=120).check_returncode()
        yield lab, environ


@pytest.mark.slow
def test_ray_trains_the_model_that_one_process_trains(
    cluster: tuple[Lab, dict[str, str]], train: Train, tiny_data: TinyData, tiny_model_with_dropout: Path,
    tmp_path: Path,
) -> None:  # fmt: skip
    lab, environ = cluster
    one = train("one", model=tiny_model_with_dropout, per_device_train_batch_size=33)
    settings = {
        "launcher": "ray", "num_hosts": 3, "model": tiny_model_with_dropout,
        "train_file": tiny_data.train, "validation_file": tiny_data.validation, "output_dir": tmp_path / "three",
        "learning_rate": 1e-3, "scale_lr": "none", "num_train_epochs": 2, "logging_steps": 1, "report_to": "none",
        "per_device_train_batch_size": 11, "cache_dir": tmp_path / "cache",
    }  # fmt: skip
    words = [str(word) for name, value in settings.items() for word in (f"--{name}", value)]
    command = [sys.executable, "-m", "fleetune", "train", *words]
    result = lab.hosts[1].run(command, env=environ, cwd=tmp_path, timeout=240)
    assert result.returncode == 0, f"{result.stdout}\n{result.stderr}"
    if usable_cores() > 1:
        assert "OMP_NUM_THREADS=1 is Ray's own default, not a choice: using" in result.stdout
    of_rank_0 = next(line for line in result.stdout.splitlines() if "global batch" in line)
    assert ", ip=" not in of_rank_0  # how Ray marks lines from other hosts than this, which has model and data
    np.testing.assert_allclose(losses_of(tmp_path / "three"), losses_of(one), rtol=2e-5)
    expected = load_file(one / "model.safetensors")
    for name, value in load_file(tmp_path / "three" / "model.safetensors").items():
        np.testing.assert_allclose(value, expected[name], rtol=1e-3, atol=2e-5, err_msg=name)


OWN_TRAINER = """
import json, sys
from ray.train import ScalingConfig
from ray.train.torch import TorchTrainer

def loop(settings):
    from fleetune import RunConfig, finetune
    finetune(RunConfig(**settings))

scaling = ScalingConfig(num_workers=3, resources_per_worker={"CPU": 1}, placement_strategy="STRICT_SPREAD")
TorchTrainer(loop, train_loop_config=json.loads(sys.argv[1]), scaling_config=scaling).fit()
"""


@pytest.mark.slow
def test_finetune_in_a_trainer_of_the_users_own(
    cluster: tuple[Lab, dict[str, str]], train: Train, tiny_data: TinyData, tiny_model_with_dropout: Path,
    tmp_path: Path,
) -> None:  # fmt: skip
    lab, environ = cluster
    one = train("one", model=tiny_model_with_dropout, per_device_train_batch_size=33, max_steps=3)
    settings = {
        "model": tiny_model_with_dropout, "train_file": tiny_data.train, "validation_file": tiny_data.validation,
        "output_dir": tmp_path / "three", "learning_rate": 1e-3, "scale_lr": "none", "logging_steps": 1, "threads": 1,
        "report_to": "none", "per_device_train_batch_size": 11, "cache_dir": tmp_path / "cache", "max_steps": 3,
    }  # fmt: skip
    (tmp_path / "own.py").write_text(OWN_TRAINER)
    told = json.dumps({name: str(value) if isinstance(value, Path) else value for name, value in settings.items()})
    result = lab.hosts[0].run([sys.executable, "own.py", told], env=environ, cwd=tmp_path, timeout=240)
    assert result.returncode == 0, f"{result.stdout}\n{result.stderr}"
    np.testing.assert_allclose(losses_of(tmp_path / "three"), losses_of(one), rtol=2e-5)
    assert json.loads((tmp_path / "three" / "record.json").read_text())["plan"]["processes"] == 3
