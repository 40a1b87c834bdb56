"""What the checks make of versions, torch, kernels and allocators."""

from __future__ import annotations

from collections.abc import Mapping

import pytest

from fleetune.doctor.checks import software
from fleetune.doctor.facts import Facts
from fleetune.doctor.finding import Finding, Status, Verdict
from tests.doctor.made_up import FACTS, SCOPE, VERSIONS, changed, examination, view


def judged(judge: object, facts: Facts) -> Verdict:
    assert callable(judge)
    verdict = judge(facts, SCOPE)
    assert isinstance(verdict, Verdict)
    return verdict


@pytest.mark.parametrize(
    "judge", [software.requirements, software.torch_imports, software.kernels, software.allocators]
)  # fmt: skip
def test_a_healthy_host_is_ok(judge: object) -> None:
    assert judged(judge, FACTS).status is Status.OK


def test_equal_versions_are_told_once() -> None:
    assert software.versions(examination()) == [
        Finding(
            check="versions", hosts=("node1", "node2", "node3"), status=Status.OK,
            reason="python 3.11.7, fleetune 0.1.0, torch 2.13.0, transformers 5.24.0, numpy 2.4.6",
        )
    ]  # fmt: skip


@pytest.mark.parametrize(
    ("versions", "status", "reason"),
    [
        ({"torch": "2.12.1"}, Status.FAILURE, "other versions than on node1: torch 2.12.1, not 2.13.0"),
        ({"python": "3.12.1"}, Status.FAILURE, "other versions than on node1: Python 3.12.1, not 3.11.7"),
        ({"python": "3.11.2"}, Status.WARNING, "other versions than on node1: python 3.11.2, not 3.11.7"),
        ({"numpy": "2.4.5"}, Status.WARNING, "other versions than on node1: numpy 2.4.5, not 2.4.6"),
        ({"fleetune": "0.2.0", "transformers": "missing"}, Status.FAILURE,
         "other versions than on node1: fleetune 0.2.0, not 0.1.0; transformers missing, not 5.24.0"),
    ],
)  # fmt: skip
def test_another_version_is_told_with_its_host(versions: Mapping[str, str], status: Status, reason: str) -> None:
    other = changed("software", versions={**VERSIONS, **versions})
    assert software.versions(examination(view(1), view(2), view(3, other))) == [
        Finding(check="versions", hosts=("node3",), status=status, reason=reason, fix="fleetune setup --hosts node3")
    ]


def test_other_files_of_the_same_version_are_told() -> None:
    (found,) = software.versions(examination(view(1), view(2, changed("software", sources="ba9876543210"))))
    assert (found.status, found.hosts) == (Status.FAILURE, ("node2",))
    assert found.reason == "fleetune 0.1.0, but its files differ from those on node1"


def test_unmet_requirements_are_a_failure() -> None:
    facts = changed(
        "software", versions={**VERSIONS, "scipy": "missing"}, unmet=("torch>=2.13 is needed, 2.8.0 is installed",)
    )
    verdict = judged(software.requirements, facts)
    assert verdict.status is Status.FAILURE
    assert verdict.reason == "scipy is missing; torch>=2.13 is needed, 2.8.0 is installed"


def test_archived_extensions_are_told() -> None:
    assert software.retired_extensions(FACTS, SCOPE) is None
    verdict = judged(software.retired_extensions, changed("software", retired=("oneccl_bind_pt 2.8.0",)))
    assert verdict.status is Status.WARNING
    assert verdict.reason.startswith("oneccl_bind_pt 2.8.0 with torch 2.13.0: archived extensions")
    assert verdict.fix == "/opt/venv/bin/python -m pip uninstall oneccl_bind_pt"


def test_torch_that_cannot_be_imported_is_a_failure_and_hides_the_kernels() -> None:
    facts = changed("kernels", torch=None, problem="OSError: libgomp.so.1: cannot open shared object file")
    verdict = judged(software.torch_imports, facts)
    assert verdict.status is Status.FAILURE
    assert "libgomp.so.1" in verdict.reason
    assert software.kernels(facts, SCOPE) is None


def test_torch_that_takes_its_time_is_a_warning() -> None:
    facts = changed("kernels", torch=None, waited_s=45.0)
    verdict = judged(software.torch_imports, facts)
    assert verdict.status is Status.WARNING
    assert verdict.reason.startswith("importing it takes more than 45 s")
    assert software.kernels(facts, SCOPE) is None


@pytest.mark.parametrize(
    ("changes", "status", "words"),
    [
        ({"built": None}, Status.OK, "not built yet; g++ 12.2.0 (/usr/bin/g++) builds them"),
        ({"built": None, "compiler": None, "no_compiler": "no C++ compiler"}, Status.WARNING, "neither built nor"),
        ({"wish": "reference"}, Status.WARNING, "FLEETUNE_KERNELS=reference"),
    ],
)
def test_kernels(changes: Mapping[str, str | None], status: Status, words: str) -> None:
    verdict = judged(software.kernels, changed("kernels", FACTS, **changes))
    assert verdict.status is status
    assert words in verdict.reason


def test_allocators() -> None:
    assert judged(software.allocators, FACTS).reason == "the C library's; tcmalloc found"
    assert judged(software.allocators, changed(allocators=())).reason == "the C library's; no other found"
    assert judged(software.allocators, changed(preloaded="tcmalloc")).reason == "tcmalloc, by LD_PRELOAD"
    absent = judged(software.allocators, changed(preloaded="jemalloc"))
    assert absent.status is Status.WARNING
    assert absent.fix == "sudo apt-get install libjemalloc2, or unset LD_PRELOAD"
