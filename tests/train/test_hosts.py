"""Ranks on several hosts, of which only the first has model and data: the same model as one process trains.

Real hosts of a lab: each has a network, a name and a /tmp of its own. 3 ranks on 3 hosts.
"""

from __future__ import annotations

import json
import shutil
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from safetensors.numpy import load_file

from fleetune.errors import LaunchError, OutputError, PeerError
from lab import Lab
from lab.host import Host
from tests.conftest import REPOSITORY, TinyData, losses_of, read_json

pytestmark = pytest.mark.slow

WORK = "/tmp/work"
"""On the first host alone: model, data and output."""
CACHE = "/tmp/cache"
"""On every host, of its own."""
PORT = 29533


@pytest.fixture(scope="module")
def kept(tiny_model: Path, tiny_data: TinyData, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder that all hosts see, where nothing is looked for: hosts copy from it, and to it."""
    folder = tmp_path_factory.mktemp("kept")
    if not folder.is_relative_to("/tmp"):
        pytest.skip(f"temporary folders are in {folder}, not under /tmp")
    shutil.copytree(tiny_model, folder / "model")
    for path in (tiny_data.train, tiny_data.validation, tiny_data.test):
        shutil.copy(path, folder)
    return folder


@pytest.fixture(scope="module")
def lab(kept: Path) -> Iterator[Lab]:
    if reason := Lab.unavailable():
        pytest.skip(reason)
    with Lab.up(3, keep=[kept]) as lab:
        lab["node1"].run(["cp", "-r", str(kept), WORK]).check_returncode()
        yield lab


def environment_of(rank: int | None, address: str, world_size: int = 3, **more: str) -> dict[str, str]:
    told = {"PYTHONPATH": f"{REPOSITORY / 'src'}:{REPOSITORY}", "HF_HUB_OFFLINE": "1", "PYTHONWARNINGS": "default",
            "OMP_NUM_THREADS": "1", **more}  # fmt: skip
    if rank is None:
        return told
    return told | {"RANK": str(rank), "WORLD_SIZE": str(world_size), "MASTER_ADDR": address, "MASTER_PORT": str(PORT)}


def training(output: str, **settings: object) -> list[str]:
    chosen = {
        "model": f"{WORK}/model", "train_file": f"{WORK}/train.csv", "validation_file": f"{WORK}/validation.csv",
        "cache_dir": CACHE, "output_dir": f"{WORK}/{output}", "learning_rate": 1e-3, "scale_lr": "none",
        "num_train_epochs": 2, "logging_steps": 1, "report_to": "none", "threads": 1,
        "per_device_train_batch_size": 11, "load_best_model_at_end": "true", **settings,
    }  # fmt: skip
    words = [word for name, value in chosen.items() for word in (f"--{name}", str(value))]
    return [sys.executable, "-m", "fleetune", "train", *words]


def run_on(hosts: list[Host], command: list[str], **more: Any) -> list[tuple[int, str]]:
    """Status and output of a command as a rank on each host."""
    ranks = [
        host.start(command, env=environment_of(i, hosts[0].address, len(hosts), **more)) for i, host in enumerate(hosts)
    ]
    said = [rank.communicate(timeout=200)[0] for rank in ranks]
    return [(rank.returncode, text) for rank, text in zip(ranks, said, strict=True)]


def copied_back(lab: Lab, kept: Path, output: str) -> Path:
    lab["node1"].run(["cp", "-r", f"{WORK}/{output}", str(kept)]).check_returncode()
    return kept / output


def test_only_the_first_host_has_model_and_data(lab: Lab, kept: Path) -> None:
    """The weights of one process with the same global batch; what was sent is found by a second run."""
    first, *others = lab
    alone = first.run(training("one", per_device_train_batch_size=33), env=environment_of(None, ""), timeout=200)
    assert alone.returncode == 0, alone.stdout + alone.stderr
    ended = run_on(lab.hosts, training("three", profile=2))
    assert [status for status, _ in ended] == [0, 0, 0], ended
    assert [said for _, said in ended[1:]] == ["", ""]
    one, three = copied_back(lab, kept, "one"), copied_back(lab, kept, "three")
    np.testing.assert_allclose(losses_of(three), losses_of(one), rtol=2e-5)
    for key, expected in load_file(one / "model.safetensors").items():
        found = load_file(three / "model.safetensors")[key]
        np.testing.assert_allclose(found, expected, rtol=1e-3, atol=2e-5, err_msg=key)
    sent = [line for line in ended[0][1].splitlines() if line.startswith("sent ")]
    size = sum((kept / "model" / name).stat().st_size for name in model_files(kept / "model"))
    assert sent[0] == f"sent the model to 2 hosts (node2, node3): {size / 1e6:,.1f} MB each"
    assert [line.split(" to ")[0] for line in sent[1:]] == ["sent the tokens of train", "sent the tokens of validation"]
    for host in others:
        listed = host.run(["ls", WORK, f"{CACHE}/models", f"{CACHE}/tokens"])
        assert f"cannot access '{WORK}'" in listed.stderr, "a worker has the cache alone"
        assert ".partial" not in listed.stdout
    roster = read_json(three / "record.json")["roster"]
    assert [(facts["rank"], facts["host"]) for facts in roster] == [(0, "node1"), (1, "node2"), (2, "node3")]
    assert [facts["address"] for facts in roster] == [host.address for host in lab]
    check_traffic(three)

    again = run_on(lab.hosts, training("again"))
    assert [status for status, _ in again] == [0, 0, 0], again
    assert "sent " not in again[0][1]
    assert (copied_back(lab, kept, "again") / "model.safetensors").read_bytes() == (
        three / "model.safetensors"
    ).read_bytes()


def check_traffic(output: Path) -> None:
    """Every rank leads its host: it tells what it sent, and what went through the interface, which is more."""
    for rank, figures in enumerate(read_json(output / "record.json")["time"]["per_rank"]):
        interface = figures["interface"]
        assert 0 < figures["sent_bytes"] <= interface["sent_bytes"]
        assert interface["received_bytes"] > 0
        assert interface["name"] != "lo"
        events = read_json(output / f"trace_rank_{rank}.json")["traceEvents"]
        steps = [event["args"] for event in events if event["name"].startswith("step ")]
        assert len(steps) == 2
        assert all(step["interface"] == interface["name"] for step in steps)
        assert sum(step["sent_bytes"] for step in steps) > 0


def model_files(folder: Path) -> list[str]:
    return [p.name for p in folder.iterdir() if p.name.startswith(("config", "model", "tokenizer", "special", "vocab"))]


def test_evaluate_and_predict_need_them_on_the_first_host_alone(lab: Lab, kept: Path) -> None:
    hosts = lab.hosts[:2]
    lab["node1"].run(training("finished", max_steps=2, load_best_model_at_end="false"), env=environment_of(None, ""))
    shared = ["--cache_dir", CACHE, "--threads", "1"]
    command = [sys.executable, "-m", "fleetune", "evaluate", f"{WORK}/finished", "--validation_file",
               f"{WORK}/validation.csv", "--text_column_names", "sentence1,sentence2", *shared]  # fmt: skip
    ended = run_on(hosts, command)
    assert [status for status, _ in ended] == [0, 0], ended
    assert "sent the model to 1 host (node2)" in ended[0][1]
    command = [sys.executable, "-m", "fleetune", "predict", f"{WORK}/finished", "--input", f"{WORK}/test.csv",
               "--output", f"{WORK}/predicted.jsonl", *shared]  # fmt: skip
    ended = run_on(hosts, command)
    assert [status for status, _ in ended] == [0, 0], ended  # its chunks are sent and nothing is said
    assert len(lab["node1"].run(["cat", f"{WORK}/predicted.jsonl"]).stdout.splitlines()) == 7


def test_a_full_disk_on_a_worker_is_named(lab: Lab, kept: Path) -> None:
    full = "/tmp/full"
    for host in lab.hosts[:2]:
        host.run(["mkdir", full]).check_returncode()
    lab["node2"].run(["mount", "-t", "tmpfs", "-o", "size=8k", "tmpfs", full]).check_returncode()
    ended = run_on(lab.hosts[:2], training("full", cache_dir=full))
    assert [status for status, _ in ended] == [PeerError.exit_status, OutputError.exit_status], ended
    told = ended[1][1]
    assert told.startswith(f"error on rank 1: node2: {full}/models/")
    assert "the disk is full" in told
    assert lab["node2"].run(["find", full, "-name", "*.partial"]).stdout == ""


def roster_rank(**told: Any) -> list[str]:
    return [sys.executable, "-m", "tests.comm.roster_rank", json.dumps(told)]


def test_a_name_that_means_loopback_on_its_own_host(lab: Lab, kept: Path) -> None:
    """`127.0.1.1 node1` in node1's /etc/hosts, as Debian writes it: all meet on the network, and on it alone."""
    first, second = lab.hosts[:2]
    first.run(
        ["sh", "-ec", "echo '127.0.0.1 localhost\n127.0.1.1 node1' > /tmp/hosts; mount --bind /tmp/hosts /etc/hosts"]
    ).check_returncode()
    try:
        ranks = [
            host.start(roster_rank(), env=environment_of(i, "node1", 2, FLEETUNE_KERNELS="reference"), cwd=REPOSITORY)
            for i, host in enumerate((first, second))
        ]
        said = [rank.communicate(timeout=120)[0] for rank in ranks]
    finally:
        first.run(["umount", "/etc/hosts"]).check_returncode()
    assert [rank.returncode for rank in ranks] == [0, 0], said
    notice, found = said[0].splitlines()[0], json.loads(said[0].splitlines()[-1])
    assert notice == (
        f"MASTER_ADDR=node1 means this host alone, and ranks are on several hosts: rank 0 listens on {first.address}"
    )
    assert found["listening"] == [f"{first.address}:{PORT}"]
    assert (found["names"], found["interface"]) == (["node1", "node2"], "eth0")


def test_ranks_of_several_hosts_listen_on_the_clusters_address_alone(lab: Lab) -> None:
    """Both what the first rank serves and what gradients go through, on every host."""
    hosts = lab.hosts[:2]
    command = roster_rank(pause_s=5)
    ranks = [
        host.start(command, env=environment_of(i, hosts[0].address, 2, FLEETUNE_KERNELS="reference"), cwd=REPOSITORY)
        for i, host in enumerate(hosts)
    ]
    seen: dict[str, set[str]] = {host.name: set() for host in hosts}
    while any(rank.poll() is None for rank in ranks):
        for host in hosts:
            lines = host.run(["ss", "-Hltn"]).stdout.splitlines()
            seen[host.name] |= {line.split()[3].rpartition(":")[0] for line in lines}
        time.sleep(0.2)
    said = [rank.communicate(timeout=10)[0] for rank in ranks]
    assert [rank.returncode for rank in ranks] == [0, 0], said
    assert seen == {host.name: {host.address} for host in hosts}


def test_no_answer_is_told_apart_from_refused(lab: Lab) -> None:
    """An address of the network that no host has."""
    silent = ".".join([*lab.hosts[0].address.split(".")[:3], "200"])
    env = environment_of(1, silent, 2, FLEETUNE_KERNELS="reference")
    result = lab["node2"].run(roster_rank(settings={"timeout_s": 4}), env=env, cwd=REPOSITORY, timeout=120)
    assert result.returncode == LaunchError.exit_status
    assert (
        f"node2 (rank 1) could not reach rank 0 for 4 s. {silent}:{PORT}: no answer: the host is down" in result.stdout
    )


def test_a_missing_host_is_named_with_those_that_came(lab: Lab) -> None:
    ranks = [
        lab[name].start(
            roster_rank(settings={"timeout_s": 6}),
            env=environment_of(rank, lab.hosts[0].address, 3, FLEETUNE_KERNELS="reference"), cwd=REPOSITORY,
        )
        for rank, name in ((0, "node1"), (2, "node3"))
    ]  # fmt: skip
    said = [rank.communicate(timeout=120)[0] for rank in ranks]
    assert [rank.returncode for rank in ranks] == [LaunchError.exit_status, PeerError.exit_status], said
    assert "rank 1 of 3 did not come within 6 s. There are: node1 (rank 0), node3 (rank 2)." in said[0]
    assert said[1] == ""
