"""Where oneCCL is, and what it is told."""

from __future__ import annotations

import importlib.metadata
from pathlib import Path
from types import SimpleNamespace

import pytest

from fleetune.comm.backends.oneccl import SETTINGS, Surroundings, choose_settings, find_oneccl
from fleetune.errors import BackendError


def surroundings(**changes: object) -> Surroundings:
    usual = {
        "libfabric": Path("/opt/lib/libfabric.so.1"), "interface": "eth0", "local_world_size": 1, "world_size": 4,
        "cores": frozenset(range(8)), "num_cores": 8, "has_fast_network": False,
    }  # fmt: skip
    return Surroundings(**{**usual, **changes})  # type: ignore[arg-type]


def chosen(there: Surroundings, **environ: str) -> dict[str, str]:
    return {setting.name: setting.value for setting in choose_settings(there, environ)}


def test_one_rank_a_host() -> None:
    assert chosen(surroundings()) == {
        "CCL_ATL_TRANSPORT": "ofi", "CCL_PROCESS_LAUNCHER": "none", "CCL_OFI_LIBRARY_PATH": "/opt/lib/libfabric.so.1",
        "FI_PROVIDER_PATH": "/opt/lib", "FI_PROVIDER": "tcp", "FI_TCP_IFACE": "eth0", "CCL_KVS_IFACE": "eth0",
        "CCL_LOG_LEVEL": "error", "CCL_YIELD": "sched_yield",
    }  # fmt: skip


def test_several_ranks_on_each_of_several_hosts_share_memory_and_cross_links_once() -> None:
    there = surroundings(local_world_size=2, cores=frozenset({2, 3}))
    more = dict(chosen(there).items() - chosen(surroundings()).items())
    assert more == {"CCL_ATL_SHM": "1", "CCL_ALLREDUCE": "2d", "CCL_WORKER_AFFINITY": "3"}
    assert "CCL_ALLREDUCE" not in chosen(surroundings(local_world_size=4)), "a host alone has no link"
    unknown = chosen(surroundings(local_world_size=None))
    assert unknown["CCL_ATL_SHM"] == "1"
    assert "CCL_ALLREDUCE" not in unknown


def test_a_fast_network_is_libfabrics_choice() -> None:
    assert "FI_PROVIDER" not in chosen(surroundings(has_fast_network=True, interface=None))


def test_what_the_user_has_set_stays_and_is_told() -> None:
    found = choose_settings(surroundings(), {"CCL_YIELD": "pause", "CCL_ALLREDUCE": "ring", "CCL_BCAST": "ring"})
    told = {setting.name: str(setting) for setting in found}
    assert told["CCL_YIELD"] == "CCL_YIELD=pause (as it was set)"
    assert told["CCL_ALLREDUCE"] == "CCL_ALLREDUCE=ring (as it was set)"
    assert told["FI_PROVIDER"] == "FI_PROVIDER=tcp (there is no faster network)"
    assert "CCL_BCAST" not in told, "only what the table has"
    assert all(setting.why for setting in SETTINGS)


def test_a_missing_extra_is_told_with_the_command(monkeypatch: pytest.MonkeyPatch) -> None:
    def absent(name: str) -> None:
        raise importlib.metadata.PackageNotFoundError(name)

    monkeypatch.setattr("importlib.metadata.distribution", absent)
    with pytest.raises(BackendError) as caught:
        find_oneccl()
    assert str(caught.value) == (
        'backend ccl needs oneccl-cpu-devel, which is not installed (pip install "fleetune[ccl]")'
    )


def test_a_torn_installation_is_told(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("importlib.metadata.distribution", lambda name: SimpleNamespace(version="1.0", files=None))
    with pytest.raises(BackendError, match=r"oneccl-cpu-devel 1.0 and impi-rt 1.0 have no oneapi/ccl.hpp and no cpu"):
        find_oneccl()
