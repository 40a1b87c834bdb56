"""Ranks told from each launcher's variables, as texts and as real launchers set them."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from fleetune.cluster import rank as rank_module
from fleetune.cluster.rank import DIALECTS, RankInfo, as_environment, host_names, is_loopback, rank_variable, read_rank
from fleetune.errors import ConfigError

TORCHRUN = {
    "RANK": "3",
    "WORLD_SIZE": "4",
    "LOCAL_RANK": "1",
    "LOCAL_WORLD_SIZE": "2",
    "MASTER_ADDR": "node1",
    "MASTER_PORT": "29500",
    "TORCHELASTIC_RUN_ID": "none",
}
OPENMPI = {
    "OMPI_COMM_WORLD_RANK": "1",
    "OMPI_COMM_WORLD_SIZE": "2",
    "OMPI_COMM_WORLD_LOCAL_RANK": "1",
    "OMPI_COMM_WORLD_LOCAL_SIZE": "2",
    "PMIX_NAMESPACE": "2103050241",
    "PMIX_RANK": "1",
}
PMI = {"PMI_RANK": "0", "PMI_SIZE": "2", "MPI_LOCALRANKID": "0", "MPI_LOCALNRANKS": "2"}
SLURM = {
    "SLURM_JOB_ID": "77",
    "SLURM_STEP_ID": "0",
    "SLURM_PROCID": "1",
    "SLURM_NTASKS": "2",
    "SLURM_LOCALID": "1",
    "SLURM_NTASKS_PER_NODE": "2",
}
PMIX = {"PMIX_RANK": "1", "PMIX_NAMESPACE": "prterun-host-1@1", "WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1"}
PRINT_RANK = (
    "import dataclasses, json, os, sys; from fleetune.cluster.rank import read_rank; "
    "sys.stdout.write(json.dumps(dataclasses.asdict(read_rank(os.environ))) + '\\n')"
)


def numbers(info: RankInfo | None) -> tuple[int, int, int, int]:
    assert info is not None
    return info.rank, info.world_size, info.local_rank, info.local_world_size


@pytest.mark.parametrize(
    ("environ", "launcher", "expected"),
    [
        (TORCHRUN, "torchrun", (3, 4, 1, 2)),
        ({**TORCHRUN, "FLEETUNE_LAUNCHER": "local"}, "local", (3, 4, 1, 2)),
        (OPENMPI, "openmpi", (1, 2, 1, 2)),
        (PMI, "pmi", (0, 2, 0, 2)),
        (SLURM, "slurm", (1, 2, 1, 2)),
        (PMIX, "pmix", (1, 2, 1, 2)),
    ],
)
def test_each_dialect(environ: dict[str, str], launcher: str, expected: tuple[int, int, int, int]) -> None:
    info = read_rank(environ)
    assert info is not None
    assert info.launcher == launcher
    assert numbers(info) == expected


def test_no_launcher() -> None:
    assert read_rank({}) is None
    assert read_rank({"HOME": "/root", "MASTER_ADDR": "node1", "RANK": ""}) is None


def test_torchrun_wins_over_what_it_runs_in() -> None:
    info = read_rank({**SLURM, **OPENMPI, **TORCHRUN})
    assert info is not None
    assert (info.launcher, info.rank) == ("torchrun", 3)


def test_mpirun_wins_over_the_slurm_step_it_runs_in() -> None:
    info = read_rank({**SLURM, "SLURM_PROCID": "0", "SLURM_NTASKS": "1", **OPENMPI})
    assert info is not None
    assert (info.launcher, info.rank) == ("openmpi", 1)


@pytest.mark.parametrize(
    ("environ", "name"),
    [(TORCHRUN, "RANK"), (OPENMPI, "OMPI_COMM_WORLD_RANK"), (TORCHRUN | OPENMPI, "RANK"), ({}, None)],
)
def test_the_variable_of_the_rank(environ: dict[str, str], name: str | None) -> None:
    assert rank_variable(environ) == name


def test_exact_fields_of_torchrun() -> None:
    assert read_rank(TORCHRUN) == RankInfo(
        rank=3,
        world_size=4,
        local_rank=1,
        local_world_size=2,
        launcher="torchrun",
        main_address="node1",
        main_port=29500,
    )


def test_as_environment_is_read_back_alike() -> None:
    info = read_rank(SLURM)
    assert info is not None
    again = read_rank({**as_environment(info), "FLEETUNE_LAUNCHER": info.launcher})
    assert again == info


# ---- env:// by hand


@pytest.mark.parametrize(
    ("address", "expected"),
    [("127.0.0.1", (1, 2, 1, 2)), ("localhost", (1, 2, 1, 2)), ("10.0.0.7", (1, 2, 0, 1))],
)
def test_env_without_local_variables(address: str, expected: tuple[int, int, int, int]) -> None:
    environ = {"RANK": "1", "WORLD_SIZE": "2", "MASTER_ADDR": address, "MASTER_PORT": "29500"}
    info = read_rank(environ)
    assert numbers(info) == expected
    assert info is not None
    assert info.launcher == "env"


@pytest.mark.parametrize("address", ["127.0.1.1", "::1", "localhost"])
def test_loopback(address: str) -> None:
    assert is_loopback(address)
    assert not is_loopback("10.0.0.1")


def test_variables_exported_by_a_slurm_script_complete_the_launchers() -> None:
    environ = {**SLURM, "WORLD_SIZE": "2", "MASTER_ADDR": "node1", "MASTER_PORT": "29500"}
    info = read_rank(environ)
    assert info is not None
    assert (info.launcher, info.main_address, info.main_port) == ("slurm", "node1", 29500)


def test_exported_world_size_that_contradicts_the_launchers() -> None:
    with pytest.raises(ConfigError, match=r"WORLD_SIZE=8 contradicts SLURM_NTASKS=2: unset WORLD_SIZE"):
        read_rank({**SLURM, "WORLD_SIZE": "8"})


# ---- Slurm


@pytest.mark.parametrize(
    "environ",
    [
        {"SLURM_JOB_ID": "77", "SLURM_NTASKS": "4", "SLURM_NTASKS_PER_NODE": "2", "SLURM_NNODES": "2"},
        {**SLURM, "SLURM_STEP_ID": "", "SLURM_PROCID": "0"},
        {**SLURM, "SLURM_STEP_ID": "4294967290", "SLURM_PROCID": "0"},
        {**SLURM, "SLURM_STEP_ID": "4294967291", "PMIX_RANK": "0"},
        {**SLURM, "SLURM_STEP_ID": "4294967290", "PMI_RANK": "0", "PMI_SIZE": "1"},
    ],
    ids=["salloc", "sbatch", "interactive step", "batch step", "interactive step with pmi2"],
)
def test_a_bare_slurm_allocation_is_no_rank(environ: dict[str, str]) -> None:
    assert read_rank(environ) is None


def test_mpirun_from_a_batch_script() -> None:
    assert numbers(read_rank({**SLURM, "SLURM_STEP_ID": "", **PMI})) == (0, 2, 0, 2)


@pytest.mark.parametrize(
    ("name", "counts", "node", "expected"),
    [
        ("SLURM_NTASKS_PER_NODE", "2", "1", 2),
        ("SLURM_NTASKS_PER_NODE", "2(x3)", None, 2),
        ("SLURM_TASKS_PER_NODE", "2(x2),1", "2", 1),
        ("SLURM_STEP_TASKS_PER_NODE", "1,2(x2)", "2", 2),
    ],
)
def test_slurm_task_counts(name: str, counts: str, node: str | None, expected: int) -> None:
    environ = {
        **{key: value for key, value in SLURM.items() if key != "SLURM_NTASKS_PER_NODE"},
        **{"SLURM_NTASKS": "6", "SLURM_LOCALID": "0", "MASTER_ADDR": "node1", name: counts},
        **({"SLURM_NODEID": node} if node else {}),
    }
    assert numbers(read_rank(environ)) == (1, 6, 0, expected)


def test_slurm_step_is_believed_before_the_allocation() -> None:
    step = {"SLURM_STEP_NUM_TASKS": "2", "SLURM_STEP_TASKS_PER_NODE": "2", "SLURM_NTASKS": "8"}
    assert numbers(read_rank({**SLURM, **step, "SLURM_TASKS_PER_NODE": "4(x2)"})) == (1, 2, 1, 2)


def test_uneven_slurm_list_without_the_nodes_number() -> None:
    with pytest.raises(ConfigError, match=r"SLURM_NTASKS_PER_NODE=2\(x2\),1"):
        read_rank({**SLURM, "SLURM_NTASKS": "5", "SLURM_NTASKS_PER_NODE": "2(x2),1"})


# ---- contradictions


@pytest.mark.parametrize(
    ("environ", "message"),
    [
        ({**TORCHRUN, "RANK": "4"}, "RANK=4 must be smaller than WORLD_SIZE=4"),
        ({**TORCHRUN, "LOCAL_RANK": "2"}, "LOCAL_RANK=2 must be smaller than LOCAL_WORLD_SIZE=2"),
        ({**TORCHRUN, "LOCAL_WORLD_SIZE": "5"}, "LOCAL_WORLD_SIZE=5 cannot be greater than WORLD_SIZE=4"),
        ({**TORCHRUN, "WORLD_SIZE": "four"}, "WORLD_SIZE=four is not a whole number"),
        ({**TORCHRUN, "RANK": "-1"}, "RANK=-1 is not a whole number"),
        ({**TORCHRUN, "MASTER_PORT": "70000"}, "MASTER_PORT=70000 is not a TCP port"),
        ({"WORLD_SIZE": "2"}, "WORLD_SIZE=2 is set, but not RANK, LOCAL_RANK, LOCAL_WORLD_SIZE or LOCAL_SIZE"),
        ({"RANK": "0", "WORLD_SIZE": "2", "LOCAL_RANK": "0"}, "LOCAL_RANK=0 is set, but not LOCAL_WORLD_SIZE"),
        ({"OMPI_COMM_WORLD_RANK": "0"}, "OMPI_COMM_WORLD_RANK=0 is set, but not OMPI_COMM_WORLD_SIZE"),
        ({"PMI_RANK": "0", "PMI_SIZE": "2"}, "PMI_RANK=0, PMI_SIZE=2 is set, but not MPI_LOCALRANKID"),
        ({"PMIX_RANK": "0"}, "PMIX_RANK=0 is set, but not WORLD_SIZE"),
    ],
)
def test_inconsistent_variables_are_named(environ: dict[str, str], message: str) -> None:
    with pytest.raises(ConfigError) as caught:
        read_rank(environ)
    assert message in str(caught.value)


def test_all_problems_at_once() -> None:
    with pytest.raises(ConfigError) as caught:
        read_rank({**TORCHRUN, "RANK": "9", "LOCAL_RANK": "9"})
    assert len(caught.value.problems) == 2


def test_every_dialect_has_an_example_here() -> None:
    assert {dialect.launcher for dialect in DIALECTS} == {"env", "openmpi", "pmi", "slurm", "pmix"}


# ---- where ranks meet


def test_local_ranks_derive_one_port_from_the_job() -> None:
    first = read_rank({**SLURM, "SLURM_PROCID": "0", "SLURM_LOCALID": "0"})
    second = read_rank(SLURM)
    other_step = read_rank({**SLURM, "SLURM_STEP_ID": "1"})
    assert first is not None
    assert second is not None
    assert other_step is not None
    assert first.main_address == second.main_address == "127.0.0.1"
    assert first.main_port == second.main_port != other_step.main_port
    assert 20000 <= first.main_port < 30000


def test_local_ranks_without_a_job_derive_it_from_who_started_them(monkeypatch: pytest.MonkeyPatch) -> None:
    ports = []
    for pid in (4000, 4000, 4001):
        monkeypatch.setattr(rank_module, "_launcher_pid", lambda _, pid=pid: pid)
        info = read_rank(PMI)
        assert info is not None
        ports.append(info.main_port)
    assert ports[0] == ports[1] != ports[2]


def test_told_address_and_port_are_kept() -> None:
    info = read_rank({**OPENMPI, "MASTER_ADDR": "10.0.0.1", "MASTER_PORT": "4000"})
    assert info is not None
    assert (info.main_address, info.main_port) == ("10.0.0.1", 4000)


def test_several_hosts_need_an_address() -> None:
    several = {**OPENMPI, "OMPI_COMM_WORLD_SIZE": "4"}
    with pytest.raises(ConfigError, match="MASTER_ADDR is not set, and the ranks are on several hosts"):
        read_rank(several)
    info = read_rank({**several, "MASTER_ADDR": "node1"})  # the job's name gives the port on every host
    assert info is not None
    assert 20000 <= info.main_port < 30000


def test_several_hosts_that_share_no_job_need_a_port_too() -> None:
    with pytest.raises(ConfigError) as caught:
        read_rank({**PMI, "PMI_SIZE": "4"})
    assert [problem.split()[0] for problem in caught.value.problems] == ["MASTER_ADDR", "MASTER_PORT"]


# ---- real launchers


def clean_environment() -> dict[str, str]:
    """This process's environment, without what a launcher above the tests may have set."""
    prefixes = ("OMPI_", "PMI", "MPI_", "SLURM_", "TORCHELASTIC_", "MASTER_", "RANK", "WORLD_SIZE", "LOCAL_")
    kept = {name: value for name, value in os.environ.items() if not name.startswith(prefixes)}
    return {**kept, "OMPI_ALLOW_RUN_AS_ROOT": "1", "OMPI_ALLOW_RUN_AS_ROOT_CONFIRM": "1"}


def ranks_printed_by(command: list[str]) -> list[dict[str, object]]:
    done = subprocess.run(command, env=clean_environment(), capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr
    found = [json.loads(line) for line in done.stdout.splitlines() if line.startswith("{")]
    return sorted(found, key=lambda info: info["rank"])


def mpirun(flavour: str) -> list[str]:
    for name in (f"mpirun.{flavour}", "mpirun"):
        path = shutil.which(name)
        if path is None:
            continue
        version = subprocess.run([path, "--version"], capture_output=True, text=True, env=clean_environment())
        if flavour == ("openmpi" if "Open MPI" in version.stdout else "mpich"):
            return [path, *(["--oversubscribe"] if flavour == "openmpi" else []), "-n", "2"]
    return pytest.skip(f"needs mpirun of {flavour} (apt-get install {flavour}, or openmpi-bin)")


@pytest.mark.parametrize("wrapped", [False, True], ids=["bare", "under a shell of its own"])
@pytest.mark.parametrize("flavour", ["openmpi", "mpich"])
def test_mpirun_with_2_ranks(flavour: str, wrapped: bool) -> None:
    python = [sys.executable, "-c", PRINT_RANK]
    command = ["sh", "-c", 'true; "$@"; true', "sh", *python] if wrapped else python
    first, second = ranks_printed_by([*mpirun(flavour), *command])
    assert [first["rank"], second["rank"]] == [0, 1]
    assert [first["local_rank"], second["local_rank"]] == [0, 1]
    assert first["world_size"] == first["local_world_size"] == 2
    assert first["launcher"] == {"openmpi": "openmpi", "mpich": "pmi"}[flavour]
    assert (first["main_address"], first["main_port"]) == (second["main_address"], second["main_port"])
    assert first["main_address"] == "127.0.0.1"


def test_torchrun_with_2_ranks(tmp_path: Path) -> None:
    script = tmp_path / "print_rank.py"
    script.write_text(PRINT_RANK)
    torchrun = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]
    first, second = ranks_printed_by([*torchrun, str(script)])
    assert [first["rank"], second["rank"]] == [0, 1]
    assert first["launcher"] == "torchrun"
    assert first["main_port"] == second["main_port"]


@pytest.mark.parametrize(
    "module",
    [
        "fleetune.cluster.rank",
        "fleetune.cluster.launchers.local",
        "fleetune.cluster.launchers.guard",
        "fleetune.hardware.host",
        "fleetune.hardware.versions",
    ],
)
def test_imports_no_torch(module: str) -> None:
    heavy = "[name for name in ('torch', 'numpy', 'transformers') if name in sys.modules]"
    code = f"import sys, {module}; print({heavy})"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"


# ---- Slurm's hosts, --port_range, and ranks that as_rank has prepared


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("node1", ["node1"]),
        ("node[1-3],gpu1", ["node1", "node2", "node3", "gpu1"]),
        ("node[08-10,12]", ["node08", "node09", "node10", "node12"]),
        ("r[1-2]n[5,7]-ib", ["r1n5-ib", "r1n7-ib", "r2n5-ib", "r2n7-ib"]),
        ("", []),
    ],
)
def test_hosts_as_slurm_writes_them(text: str, expected: list[str]) -> None:
    assert host_names(text) == expected


def test_a_step_meets_at_its_first_host() -> None:
    step = {**SLURM, "SLURM_NTASKS_PER_NODE": "1", "SLURM_LOCALID": "0", "SLURM_JOB_NODELIST": "node[1-4]"}
    for more, expected in (
        ({}, "node1"),
        ({"SLURM_STEP_NODELIST": "node[3-4]"}, "node3"),
        ({"MASTER_ADDR": "10.0.0.9"}, "10.0.0.9"),
    ):
        info = read_rank({**step, **more})
        assert info is not None
        assert info.main_address == expected


def test_a_shared_port_keeps_to_the_range() -> None:
    info = read_rank({**SLURM, "FLEETUNE_PORT_RANGE": "29500-29502"})
    assert info is not None
    assert info.main_port in range(29500, 29503)
    assert read_rank({**SLURM, "FLEETUNE_PORT_RANGE": "29500-29502"}) == info


def test_the_rank_variable_of_a_prepared_rank_is_its_launchers() -> None:
    """Whether Slurm has bound a rank is told by Slurm's rules."""
    prepared = {**SLURM, **TORCHRUN, "RANK": "1", "WORLD_SIZE": "2", "FLEETUNE_LAUNCHER": "slurm"}
    assert rank_variable(prepared) == "SLURM_PROCID"
    assert rank_variable({**TORCHRUN, "FLEETUNE_LAUNCHER": "local"}) == "RANK"
