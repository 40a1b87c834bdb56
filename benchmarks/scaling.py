"""How training scales over hosts: a cluster slowed down on one machine, plain DDP and fleetune interleaved.

Hosts are network namespaces with a share of the CPU each and cables of a given rate (`lab`). On every cluster each way
of exchanging gradients takes turns of some updates, and so does training alone, whose time is that of one host; the
efficiency is the time of an update alone by that of one together, of as many examples a host. The first updates of a
turn are not counted. Bytes are those of the first host's interface.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from benchmarks.models import (
    FLOAT32_SETTINGS,
    add_shared_options,
    model_folder,
    settle_shared_options,
    shown_model,
    shown_shared_options,
)
from benchmarks.result_file import REPOSITORY, describe, print_result, write_result
from benchmarks.rotation import rotated
from benchmarks.scaling_rank import EXCHANGES
from benchmarks.summary import markdown_table
from benchmarks.texts import MRPC_FOLDER, pair_settings
from fleetune.files import write_json
from lab import Lab

DESCRIPTION = "Time of an update over several hosts of a scaled-down cluster, by the way gradients are exchanged."
MASTER_PORT = 29400
GOODPUT = 0.956
"""Share of a cable's rate that arrives as data, see docs/lab.md."""
SKIPPED = 2
"""Updates at the beginning of a turn that are not counted: those before left nothing to wait for."""
PATIENCE_S = 900.0


def main(words: Sequence[str] | None = None) -> None:
    """Measure all clusters, write the result and print the table."""
    options = parse_options(words)
    with tempfile.TemporaryDirectory(prefix="fleetune-scaling-") as name:
        folder = Path(name)
        result = describe("scaling", resolved_options(options)) | {"turns": []}
        config = run_config(options, folder)
        for num_hosts in options.hosts:
            result["turns"] += measure(options, num_hosts, config, folder / f"{num_hosts}")
    result["summary"] = summarise(result["turns"])
    notes = [f"{shown_model(options.model, options.size)}, 16 pairs a host and update, {options.quota} cores a host"]
    print_result(notes, table(result["summary"]), write_result(result, options.output))


def parse_options(words: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.scaling", description=DESCRIPTION)
    parser.add_argument("--hosts", type=int, nargs="+", default=[2, 4], help="hosts of each cluster (default: 2 4)")
    parser.add_argument("--mbit", type=float, nargs="+", default=[800, 200, 80], help="rates of its cables, Mbit/s")
    parser.add_argument("--quota", type=float, default=0.4, help="CPU time of a host, cores (default: 0.4)")
    parser.add_argument(
        "--exchanges", nargs="+", default=list(EXCHANGES), choices=list(EXCHANGES), help="what takes turns"
    )
    parser.add_argument("--rounds", type=int, default=3, help="turns of each exchange at a rate (default: 3)")
    parser.add_argument("--steps", type=int, default=6, help=f"updates of a turn, the first {SKIPPED} not counted")
    add_shared_options(parser)
    options = parser.parse_args(words)
    settle_shared_options(parser, options, MRPC_FOLDER)
    if options.steps <= SKIPPED:
        parser.error(f"--steps {options.steps}: more than {SKIPPED} are needed, the first are not counted")
    if reason := Lab.unavailable(with_quota=True):
        parser.error(f"no cluster can be made here: {reason}")
    return options


def resolved_options(options: argparse.Namespace) -> dict[str, object]:
    """The options that repeat this very measurement."""
    names = ("hosts", "mbit", "quota", "exchanges", "rounds", "steps")
    return {name: getattr(options, name) for name in names} | shown_shared_options(options)


def run_config(options: argparse.Namespace, folder: Path) -> dict[str, Any]:
    """Settings of the runs, the same on all hosts."""
    data = pair_settings(options.data_dir, folder)
    return {
        "model": str((options.model or model_folder(options.size, folder / "model")).absolute()),
        "cache_dir": str(folder / "cache"),
        "lr_scheduler_type": "constant",
        "do_eval": False,
        **FLOAT32_SETTINGS,
        **{name: str(value) for name, value in data.items()},
    }


def measure(options: argparse.Namespace, num_hosts: int, config: dict[str, Any], folder: Path) -> list[dict[str, Any]]:
    """All turns on a cluster of some hosts."""
    folder.mkdir()
    turns: list[dict[str, Any]] = []
    with (
        Lab.up(num_hosts, keep=[folder.parent, *kept_folders(config)]) as lab,
        started_ranks(options, lab, config, folder) as ranks,
    ):
        take = Turns(lab, ranks, folder)
        for exchange in options.exchanges:  # all start, each at full speed
            take(exchange, SKIPPED)
        for host in lab:
            host.set_quota(options.quota)
        for mbit in options.mbit:
            for host in lab:
                host.set_link(mbit)
            for number in range(options.rounds):
                for exchange in rotated(options.exchanges, number):
                    turn = {"hosts": num_hosts, "mbit": mbit, "exchange": exchange, **take(exchange, options.steps)}
                    turns.append(turn)
                    print(f"{num_hosts} hosts, {mbit:g} Mbit/s, {exchange}: {median_s([turn]):.2f} s", flush=True)
        for host in lab:
            host.set_quota(None)
        take.end()
    return turns


def kept_folders(config: dict[str, Any]) -> list[Path]:
    """Folders of /tmp that hosts must see: of the data, the model and this repository."""
    paths = [Path(config.get("data_dir", "/")), Path(config["model"]), REPOSITORY]
    return sorted({Path("/tmp", p.parts[2]) for p in paths if p.parts[:2] == ("/", "tmp") and len(p.parts) > 2})


class Turns:
    """Tells all ranks what to do next, and hears what came of it."""

    def __init__(self, lab: Lab, ranks: list[subprocess.Popen[str]], folder: Path) -> None:
        self._lab, self._ranks, self._folder, self._number = lab, ranks, folder, 0

    def __call__(self, exchange: str, steps: int) -> dict[str, Any]:
        """One turn: seconds of each update on the first rank, losses, bytes that the first host sent."""
        host = next(iter(self._lab))
        before = host.bytes_sent()
        write_json(self._folder / f"turn-{self._number}.json", {"exchange": exchange, "steps": steps})
        told = [self._await(self._folder / f"turn-{self._number}-rank-{r}.json") for r in range(len(self._ranks))]
        self._number += 1
        return {**told[0], "bytes_sent": host.bytes_sent() - before}

    def end(self) -> None:
        write_json(self._folder / f"turn-{self._number}.json", {"exchange": None})

    def _await(self, path: Path) -> dict[str, Any]:
        end = time.monotonic() + PATIENCE_S
        while not path.exists():
            for rank, process in enumerate(self._ranks):
                if process.poll() is not None:
                    raise RuntimeError(f"rank {rank} ended with {process.returncode}: see its output above")
            if time.monotonic() > end:
                raise TimeoutError(f"{path.name}: not there after {PATIENCE_S:.0f} s")
            time.sleep(0.05)
        content: dict[str, Any] = json.loads(path.read_text())
        return content


@contextlib.contextmanager
def started_ranks(options: argparse.Namespace, lab: Lab, config: dict[str, Any], folder: Path) -> Iterator[list[Any]]:
    """One rank on every host; they end with the hosts."""
    hosts = list(lab)
    environment = {
        "GLOO_SOCKET_IFNAME": "eth0",
        "HF_HUB_OFFLINE": "1",
        "OMP_NUM_THREADS": "1",
        "PYTHONPATH": os.pathsep.join([str(REPOSITORY / "src"), str(REPOSITORY)]),
        "HOME": os.environ.get("HOME", "/root"),
    }
    ranks = [
        host.start(
            [sys.executable, "-m", "benchmarks.scaling_rank", "--rank", str(rank), "--world_size", str(len(hosts)),
             "--master", hosts[0].address, "--port", str(MASTER_PORT), "--threads", "1", "--folder", str(folder),
             "--config", json.dumps(config), "--exchanges", *options.exchanges],
            env=environment, cwd=REPOSITORY, stdout=None,
        )
        for rank, host in enumerate(hosts)
    ]  # fmt: skip
    yield ranks
    for rank in ranks:
        rank.wait(timeout=60)


def median_s(turns: Sequence[dict[str, Any]]) -> float:
    return float(statistics.median(s for turn in turns for s in turn["seconds"][SKIPPED:]))


def summarise(turns: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
    """A line for each cluster, rate and exchange."""
    lines = []
    for hosts, mbit in dict.fromkeys((t["hosts"], t["mbit"]) for t in turns):
        here = [t for t in turns if (t["hosts"], t["mbit"]) == (hosts, mbit)]
        alone_s = median_s([t for t in here if t["exchange"] == "alone"])
        for exchange in dict.fromkeys(t["exchange"] for t in here):
            mine = [t for t in here if t["exchange"] == exchange]
            steps = sum(len(t["seconds"]) for t in mine)
            bytes_sent = sum(t["bytes_sent"] for t in mine) / steps
            wire_s = bytes_sent / (mbit * 1e6 / 8 * GOODPUT)
            per_turn = [alone_s / median_s([t]) for t in mine]
            lines.append({
                "hosts": hosts, "mbit": mbit, "exchange": exchange, "update_s": median_s(mine),
                "efficiency": alone_s / median_s(mine), "efficiency_of_turns": [min(per_turn), max(per_turn)],
                "bytes_per_update": bytes_sent, "wire_s": wire_s, "cpu_s": statistics.median(t["cpu_s"] for t in mine),
                "bound": min(1.0, alone_s / wire_s) if wire_s else 1.0,
            })  # fmt: skip
    return lines


def table(summary: Sequence[dict[str, Any]]) -> str:
    """The summary for people."""
    rows = [
        [
            f"{line['hosts']} @ {line['mbit']:g}", line["exchange"], f"{line['update_s']:.2f}",
            f"{line['cpu_s']:.2f}", f"{line['bytes_per_update'] / 1e6:.1f}",
            f"{line['efficiency']:.2f} ({line['efficiency_of_turns'][0]:.2f} to {line['efficiency_of_turns'][1]:.2f})",
            f"{line['bound']:.2f}", f"{line['efficiency'] / line['bound']:.0%}",
        ]
        for line in summary
    ]  # fmt: skip
    header = ["hosts @ Mbit/s", "exchange", "update, s", "CPU, s", "MB sent", "efficiency", "bound", "of the bound"]
    return markdown_table(header, rows)


if __name__ == "__main__":
    main()
