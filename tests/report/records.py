"""Made-up records and benches whose numbers are easy to work out by hand."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

GOLDEN = Path(__file__).parent / "golden"
"""A bench of three sizes, a bench with a failed size, and a run, as files."""

STEP_PARTS = {
    "products": 0.30, "attention": 0.05, "kernels": 0.10, "framework": 0.05, "optimizer": 0.10, "communication": 0.15,
    "waiting": 0.05, "data": 0.10, "rest": 0.10,
}  # fmt: skip
"""Shares of an update: they add up to 1."""


def a_record(
    *,
    hosts: int = 1,
    local: int = 1,
    step_s: float = 0.5,
    steps: int = 11,
    accuracy: float | None = None,
    seed: int = 42,
    parts: bool = True,
    **changes: Any,
) -> dict[str, Any]:
    """A run of `steps` updates of 16 examples a rank; the first update takes five times as long as the others."""
    ranks = hosts * local
    seconds = [5 * step_s, *[step_s] * (steps - 1)]
    training = sum(seconds)
    samples = 16 * ranks * steps
    mean = {
        "wall_s": training + 10,
        "start_up": {"imports": 2.0, "model": 3.0, "tokens": 1.0},
        "steps": {name: share * training for name, share in STEP_PARTS.items()},
        "around": {"evaluation": 3.0, "checkpoints": 0.0, "prediction": 0.0, "output": 0.5, "other": 0.5},
        "first_step": {name: share * 5 * step_s for name, share in STEP_PARTS.items()},
        "hidden_communication": 0.2 * steps,
    }
    interface = {"name": "eth0", "sent_bytes": 2_000_000 * local * steps, "received_bytes": 1}
    per_rank = [
        {"rank": r, "sent_bytes": 0, "interface": interface if hosts > 1 and r % local == 0 else None}
        for r in range(ranks)
    ]
    return {
        "status": "finished",
        "config": {"task": "mrpc", "model": "/models/tiny", "seed": seed, "num_train_epochs": 3.0, "max_steps": None,
                   "output_dir": "/tmp/out", "processes": local, "hosts": None, "do_eval": accuracy is not None},
        "plan": {
            "processes": ranks, "threads": 2, "micro_batch_size": 16, "accumulation": 1,
            "global_batch_size": 16 * ranks,
            "num_examples": 1600, "num_tokens": 80_000, "steps_per_epoch": 100 // ranks, "total_steps": steps,
            "learning_rate": 2e-5 * ranks, "base_learning_rate": 2e-5, "scale_lr": "linear", "lr_scheduler": "linear",
            "warmup_steps": 0, "dtype": "float32", "kernels": "compiled", "unpadded": True,
            "host": {"hostname": "node1", "parts": [{"local_rank": 0, "threads": 2, "cpus": [0, 1], "is_pinned": True}],
                     "reasons": {"ranks": "one per NUMA node"}},
            "exchange": ["link           23.4 MB/s each way, measured"],
        },
        "task": {"name": "mrpc", "best_metric": "accuracy"},
        "versions": {"fleetune": "0.1.0", "torch": "2.13.0+cpu"},
        "host": {"hostname": "node1", "cpu_model": "Made-up CPU", "usable_cores": 2, "memory_bytes": 8 * 2**30},
        "roster": [{"rank": r, "host": f"node{r // local + 1}", "threads": 2} for r in range(ranks)],
        "started": "2026-11-30T10:20:30+0000",
        "resumed_at_step": None,
        "step": steps,
        "seconds": {"model": 3.0, "data": 1.0, "training": training, "evaluation": 3.0, "output": 0.5},
        "throughput": {"samples": samples, "tokens": 50 * samples, "samples_per_s": samples / training,
                       "tokens_per_s": 50 * samples / training},
        "metrics": {} if accuracy is None else {"eval_accuracy": accuracy, "eval_loss": 0.5, "eval_runtime": 1.0},
        **({"time": {"num_steps": steps, "mean": mean, "per_rank": per_rank,
                     "step_s": {"steps_each": 1, "seconds": seconds}}} if parts else {}),
        **changes,
    }  # fmt: skip


def a_history(record: dict[str, Any]) -> list[dict[str, Any]]:
    """A loss for every step, and a metric at the end where there is one."""
    history: list[dict[str, Any]] = [
        {"step": i + 1, "loss": 0.7 - 0.01 * i, "epoch": 0.1} for i in range(record["step"])
    ]
    if record["metrics"]:
        history.append({"step": record["step"], **record["metrics"]})
    return history


def write_run(folder: Path, record: dict[str, Any]) -> Path:
    """The files that a run leaves and a report reads."""
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "record.json").write_text(json.dumps(record))
    (folder / "trainer_state.json").write_text(json.dumps({"log_history": a_history(record)}))
    return folder


def write_bench(folder: Path, **changes: Any) -> Path:
    """A bench without runs: by steps, one update of a run not counted, three sizes."""
    bench = {
        "command": "fleetune bench scaling --nodes 1,2,4", "started": "2026-11-30T10:00:00+0000", "mode": "steps",
        "steps": 10, "discarded_steps": 1, "rounds": 2, "seeds": [42], "sizes": ["1 host", "2 hosts", "4 hosts"],
        "trainers": ["fleetune"], "price_per_hour": 3.6, "settings": {"num_train_epochs": 3.0, "max_steps": None},
        "plan": {}, **changes,
    }  # fmt: skip
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "bench.json").write_text(json.dumps(bench))
    return folder


def write_turn(bench: Path, size: str, number: int, record: dict[str, Any], **changes: Any) -> None:
    """A run of a bench: of the wall time 20 seconds are neither training nor around it."""
    name = f"{size.replace(' ', '-')}-{changes.get('trainer', 'fleetune')}-round{number}"
    folder = write_run(bench / "runs" / name, record)
    turn = {
        "name": name, "size": size, "trainer": "fleetune", "hosts": int(size.split()[0]), "round": number, "seed": 42,
        "status": "finished", "reason": None, "wall_s": record["seconds"]["training"] + 4.0 + 20.0,
        "command": "fleetune train", **changes,
    }  # fmt: skip
    (folder / "turn.json").write_text(json.dumps(turn))


def write_failure(bench: Path, size: str, number: int, reason: str) -> None:
    """A run of a bench that left no record."""
    write_turn(bench, size, number, a_record(), status="failed", reason=reason)
    for name in ("record.json", "trainer_state.json"):
        (bench / "runs" / f"{size.replace(' ', '-')}-fleetune-round{number}" / name).unlink()


def scaling_bench(folder: Path) -> Path:
    """1, 2 and 4 hosts in two rounds; updates take 0.5 s, 0.6 s and 0.8 s in the first, a tenth more in the second."""
    write_bench(folder)
    for hosts, size, step_s in ((1, "1 host", 0.5), (2, "2 hosts", 0.6), (4, "4 hosts", 0.8)):
        write_turn(folder, size, 1, a_record(hosts=hosts, step_s=step_s))
        write_turn(folder, size, 2, a_record(hosts=hosts, step_s=1.1 * step_s))
    return folder
