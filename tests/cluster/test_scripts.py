"""Unmodified scripts of the usual libraries under `fleetune launch`: two ranks here, three hosts of a lab."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import pytest

import fleetune as package
from lab import Lab
from tests.conftest import fleetune

pytestmark = pytest.mark.slow

TRAINER = """
import json, os, sys
import torch
from transformers import AutoModelForSequenceClassification, Trainer, TrainingArguments
model = AutoModelForSequenceClassification.from_pretrained(sys.argv[1], num_labels=2)
rows = [{"input_ids": [2, 5 + i % 9, 3], "attention_mask": [1, 1, 1], "labels": i % 2} for i in range(24)]
arguments = TrainingArguments("out", max_steps=4, per_device_train_batch_size=2, report_to="none", save_strategy="no",
                              use_cpu=True, disable_tqdm=True, learning_rate=1e-3, seed=3)
trainer = Trainer(model=model, args=arguments, train_dataset=rows)
trainer.train()
"""
ACCELERATE = """
import json, os, sys
import torch
from accelerate import Accelerator
from transformers import AutoModelForSequenceClassification
accelerator = Accelerator()
torch.manual_seed(3)
model = AutoModelForSequenceClassification.from_pretrained(sys.argv[1], num_labels=2)
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
ids = torch.tensor([[2, 5 + i % 9, 3] for i in range(24)])
data = torch.utils.data.DataLoader(list(zip(ids, torch.arange(24) % 2)), batch_size=2, shuffle=True)
model, optimizer, data = accelerator.prepare(model, optimizer, data)
for batch_ids, labels in data:
    loss = model(input_ids=batch_ids, labels=labels).loss
    accelerator.backward(loss)
    optimizer.step()
    optimizer.zero_grad()
"""
TELL = """
import torch.distributed as dist
weights = torch.cat([p.detach().flatten().double() for p in model.parameters()])
told = {"world": dist.get_world_size(), "backend": dist.get_backend(), "sum": weights.abs().sum().item(),
        "cores": len(os.sched_getaffinity(0)), "host": os.uname().nodename}
with open(f"told.{dist.get_rank()}.json", "w") as file:
    json.dump(told, file)
"""
SCRIPTS = {"trainer": TRAINER + TELL, "accelerate": ACCELERATE + TELL}


def told(folder: Path) -> list[dict[str, object]]:
    return [json.loads(path.read_text()) for path in sorted(folder.glob("told.*.json"))]


@pytest.mark.parametrize("name", SCRIPTS)
def test_two_ranks_on_this_machine(
    name: str, tiny_model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "script.py").write_text(SCRIPTS[name])
    monkeypatch.chdir(tmp_path)
    fleetune("launch", "--processes", 2, "script.py", tiny_model, HF_HUB_OFFLINE="1")
    ranks = told(tmp_path)
    assert [(rank["world"], rank["backend"]) for rank in ranks] == [(2, "gloo")] * 2
    assert ranks[0]["sum"] == ranks[1]["sum"]  # they trained one model


@pytest.mark.parametrize("name", SCRIPTS)
def test_three_hosts(name: str, tiny_model: Path, tmp_path: Path) -> None:
    if reason := Lab.unavailable(with_ssh=True):
        pytest.skip(reason)
    (tmp_path / "script.py").write_text(SCRIPTS[name])
    base = Path(*tmp_path.parts[:3])
    environ = {"HF_HUB_OFFLINE": "1", "PYTHONPATH": str(Path(package.__file__).parents[1])}
    with Lab.up(3, with_ssh=True, keep=[base] if tmp_path.is_relative_to("/tmp") else []) as lab:
        command = [sys.executable, "-m", "fleetune", "launch", "--hosts", "node[1-3]", "script.py", str(tiny_model)]
        result = lab["node1"].run(command, env=environ, cwd=tmp_path, timeout=200)
    assert result.returncode == 0, f"{result.stdout}\n{result.stderr}"
    ranks = told(tmp_path)
    assert [(rank["world"], rank["host"]) for rank in ranks] == [(3, f"node{i + 1}") for i in range(3)]
    assert len({rank["sum"] for rank in ranks}) == 1
