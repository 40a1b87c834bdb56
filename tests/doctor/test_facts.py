"""Facts survive the way through JSON, and those of another version are refused."""

from __future__ import annotations

import json
import os
from pathlib import Path

import pytest

from fleetune.cluster.network import DEFAULT_PORTS
from fleetune.doctor.facts import Facts, from_json, to_json
from fleetune.doctor.machine import read_facts
from fleetune.hardware.versions import read_versions
from tests.doctor.made_up import FACTS


def test_facts_travel_as_json() -> None:
    assert from_json(Facts, json.loads(json.dumps(to_json(FACTS)))) == FACTS


@pytest.mark.parametrize("change", [{"colour": "red"}, {"cpus": {"num_online": 4}}, {"software": None}])
def test_facts_of_another_version_are_refused(change: dict[str, object]) -> None:
    with pytest.raises(ValueError, match="not as expected"):
        from_json(Facts, {**to_json(FACTS), **change})


def test_facts_of_this_machine(tmp_path: Path) -> None:
    """Against what other parts of the system say."""
    environ = {**os.environ, "HF_TOKEN": "hf_secret", "OMP_NUM_THREADS": "1"}
    facts = read_facts(cache_dir=tmp_path / "not" / "there", ports=DEFAULT_PORTS, environ=environ)
    assert facts.machine.hostname == os.uname().nodename
    assert facts.cpus.num_online == os.cpu_count()
    assert facts.software.versions == read_versions()
    assert facts.kernels.problem is None
    assert facts.kernels.torch == read_versions()["torch"]
    assert facts.kernels.built is not None  # the tests' own fixture has built them
    assert (facts.plan.threads, facts.plan.omp_num_threads) == (1, "1")
    cache, temporary = facts.disks
    assert cache.path == str(tmp_path / "not" / "there")
    assert cache.free_bytes == pytest.approx(os.statvfs(tmp_path).f_bavail * os.statvfs(tmp_path).f_frsize, rel=0.1)
    assert (cache.problem, temporary.problem) == (None, None)
    assert not (tmp_path / "not").exists()
    assert facts.variables["HF_TOKEN"] == "(not shown)"
    assert "hf_secret" not in json.dumps(to_json(facts))
