"""What the settings ask for against what an outer launcher started."""

from __future__ import annotations

import pytest

from fleetune.cluster.rank import RankInfo, speaks_for_all
from fleetune.cluster.start import check_hosts_asked, check_processes, chosen_launcher
from fleetune.config import RunConfig
from fleetune.errors import ConfigError


def info(local_world_size: int, world_size: int) -> RankInfo:
    return RankInfo(
        rank=0, world_size=world_size, local_rank=0, local_world_size=local_world_size, launcher="torchrun",
        main_address="10.0.0.1", main_port=29500,
    )  # fmt: skip


def test_processes_are_those_of_each_host() -> None:
    check_processes(2, info(2, 6))
    check_processes(None, info(2, 6))
    with pytest.raises(ConfigError, match=r"--processes 3: torchrun started 2 ranks on \S+; leave it out"):
        check_processes(3, info(2, 6))
    with pytest.raises(ConfigError, match=r"--processes 3: torchrun started 2 ranks; leave it out"):
        check_processes(3, info(2, 2))


@pytest.mark.parametrize(("environ", "speaks"), [
    ({}, True),
    ({"RANK": "0", "WORLD_SIZE": "2", "MASTER_ADDR": "h", "MASTER_PORT": "29500"}, True),
    ({"RANK": "1", "WORLD_SIZE": "2", "MASTER_ADDR": "h", "MASTER_PORT": "29500"}, False),
], ids=["alone", "first", "second"])  # fmt: skip
def test_who_has_the_files(environ: dict[str, str], speaks: bool) -> None:
    assert speaks_for_all(environ) is speaks


def test_a_number_of_hosts_needs_something_that_starts_ranks_there() -> None:
    check_hosts_asked(RunConfig(num_hosts=1))
    check_hosts_asked(RunConfig(num_hosts=3, launcher="slurm"))
    with pytest.raises(ConfigError, match="--num_hosts 3: nothing starts ranks on other hosts; give --hosts"):
        check_hosts_asked(RunConfig(num_hosts=3))


@pytest.mark.parametrize("launcher", ["slurm", "ray"])
def test_hosts_are_not_named_where_they_are_chosen(launcher: str) -> None:
    with pytest.raises(ConfigError, match=f"--launcher {launcher} chooses the hosts itself"):
        chosen_launcher(RunConfig(launcher=launcher, hosts=("node1",)))  # type: ignore[arg-type]
