"""What tests of launchers on a lab's hosts share: a job's description, its run from the first host, what is left."""

from __future__ import annotations

import json
import subprocess
import sys
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import numpy as np
from safetensors.numpy import load_file

from lab import Host, Lab
from tests.conftest import REPOSITORY, TinyData

ENVIRONMENT = {"PYTHONPATH": f"{REPOSITORY}/src:{REPOSITORY}", "HF_HUB_OFFLINE": "1", "PYTHONWARNINGS": "default"}
BARE_PATH = "/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin"

WORKER = """
import os, pathlib, signal, socket, sys, time
folder, rank = pathlib.Path(sys.argv[1]), os.environ["RANK"]
if rank == "2" and sys.argv[2] == "fails":
    print("the disk is on fire", file=sys.stderr, flush=True)
    raise SystemExit(5)
(folder / f"up.{rank}").write_text(str(os.getpid()))
print("rank", rank, "is up on", socket.gethostname(), flush=True)
time.sleep(60)
"""
"""A script that says that it is up and stays, or whose third rank fails."""


def settings_of(folder: Path, model: Path, data: TinyData, **changes: object) -> dict[str, Any]:
    """Two epochs of the tiny data for the tiny model; 90 examples in global batches of 33."""
    settings: dict[str, object] = {
        "model": model, "train_file": data.train, "validation_file": data.validation, "cache_dir": folder / "cache",
        "learning_rate": 1e-3, "scale_lr": "none", "num_train_epochs": 2, "logging_steps": 1, "report_to": "none",
        "threads": 1, "per_device_train_batch_size": 11, **changes,
    }  # fmt: skip
    return {name: str(value) if isinstance(value, Path) else value for name, value in settings.items()}


def command_of(description: Mapping[str, object]) -> list[str]:
    return [sys.executable, "-m", "tests.cluster.start_job", json.dumps(description)]


def run(
    host: Host, cwd: Path, description: Mapping[str, object], env: Mapping[str, str]
) -> subprocess.CompletedProcess[str]:
    return host.run(command_of(description), env={**ENVIRONMENT, **env}, cwd=cwd, timeout=200)


def start(host: Host, cwd: Path, description: Mapping[str, object], env: Mapping[str, str]) -> subprocess.Popen[str]:
    return host.start(command_of(description), env={**ENVIRONMENT, **env}, cwd=cwd)


def assert_same_weights(output: Path, expected: Path) -> None:
    """Tolerances as in tests/train/test_equivalence.py."""
    weights = load_file(output / "model.safetensors")
    for name, values in load_file(expected / "model.safetensors").items():
        np.testing.assert_allclose(weights[name], values, rtol=1e-3, atol=2e-5, err_msg=name)


def wait_for(condition: Callable[[], bool], what: str, timeout_s: float = 60) -> None:
    deadline = time.monotonic() + timeout_s
    while not condition():
        assert time.monotonic() < deadline, f"{what}: not within {timeout_s} s"
        time.sleep(0.1)


def ranks_left(lab: Lab) -> list[str]:
    """Command lines of ranks, of what starts them and of launchers' daemons that run on any host."""
    words = ("as_rank", "fleetune", "worker.py", "orted", "prted", "hydra", "mpirun", "mpiexec", "slurmstepd")
    left = []
    for host in lab:
        for pid in host.processes():
            try:
                line = Path(f"/proc/{pid}/cmdline").read_bytes().replace(b"\0", b" ").decode(errors="replace")
            except OSError:  # it ended
                continue
            if any(word in line for word in words) and "inside.py" not in line:
                left.append(f"{host.name}: {line}")
    return left


def assert_nothing_left(lab: Lab) -> None:
    """Within the five seconds that a run promises, and some for a busy machine."""
    deadline = time.monotonic() + 8
    while left := ranks_left(lab):
        assert time.monotonic() < deadline, left
        time.sleep(0.1)
