"""What the checks make of CPUs that are well, and of such that are not."""

from __future__ import annotations

from dataclasses import replace

import pytest

from fleetune.doctor.checks import cpus
from fleetune.doctor.facts import Facts
from fleetune.doctor.finding import Status, Verdict
from tests.doctor.made_up import FACTS, SCOPE, changed

AMX = changed("machine", isa=("avx2", "avx512f", "avx512_bf16", "amx_tile", "amx_int8", "amx_bf16"))


def judged(judge: object, facts: Facts) -> Verdict:
    assert callable(judge)
    verdict = judge(facts, SCOPE)
    assert isinstance(verdict, Verdict)
    return verdict


@pytest.mark.parametrize(
    "judge", [cpus.cpu, cpus.cores, cpus.threads, cpus.load, cpus.smt, cpus.governor]
)  # fmt: skip
def test_a_healthy_host_is_ok(judge: object) -> None:
    verdict = judged(judge, FACTS)
    assert (verdict.status, verdict.fix) == (Status.OK, None)


def test_the_cpu_is_told_with_what_counts() -> None:
    assert judged(cpus.cpu, FACTS).reason == "Intel Xeon Platinum 8375C: AVX2, AVX-512, AVX-512 VNNI"
    assert judged(cpus.cpu, AMX).reason == "Intel Xeon Platinum 8375C: AVX2, AVX-512, AVX-512 bf16, AMX"


def test_a_cpu_without_avx2_is_slow() -> None:
    verdict = judged(cpus.cpu, changed("machine", isa=()))
    assert verdict.status is Status.WARNING
    assert "without AVX2" in verdict.reason


def test_amx_does_not_concern_a_cpu_without_it() -> None:
    assert cpus.amx(FACTS, SCOPE) is None


@pytest.mark.parametrize(
    ("kernel", "granted", "status", "fix"),
    [
        ("5.15.0-100-generic", False, Status.WARNING, "Linux 5.16 or newer"),
        ("4.18.0-500.el8", False, Status.WARNING, "Linux 5.16 or newer"),
        ("5.16.0", True, Status.OK, None),
        ("5.14.0-400.el9", True, Status.OK, None),  # distributions carry newer features back: the kernel is asked
        ("6.1.0", False, Status.WARNING,
         "allow the system call arch_prctl (docker: --security-opt seccomp=unconfined)"),
    ],
)  # fmt: skip
def test_amx_has_to_be_granted_by_the_kernel(kernel: str, granted: bool, status: Status, fix: str | None) -> None:
    facts = changed("cpus", changed("machine", AMX, kernel=kernel), amx_granted=granted)
    verdict = judged(cpus.amx, facts)
    assert (verdict.status, verdict.fix) == (status, fix)


def test_cores_that_may_not_be_used_are_idle() -> None:
    verdict = judged(cpus.cores, changed("machine", allowed_cpus=(0, 1, 2, 3), usable_cores=4))
    assert verdict.status is Status.WARNING
    assert "only 4 of 32 CPUs may be used" in verdict.reason


def test_a_quota_is_told() -> None:
    verdict = judged(cpus.cores, changed("machine", cpu_quota=3.5, usable_cores=3))
    assert verdict.status is Status.WARNING
    assert "a quota of 3.5 CPUs of 32" in verdict.reason


@pytest.mark.parametrize(
    ("processes", "threads", "variable", "reason", "fix"),
    [
        (2, 1, "1", "2 ranks of 1 thread: 14 of 16 cores idle (OMP_NUM_THREADS=1)", "unset OMP_NUM_THREADS"),
        (2, 4, "4", "2 ranks of 4 threads: 8 of 16 cores idle (OMP_NUM_THREADS=4)", "unset OMP_NUM_THREADS"),
        (2, 32, "32", "2 ranks of 32 threads on 16 cores: they take turns (OMP_NUM_THREADS=32)",
         "unset OMP_NUM_THREADS"),
        (1, 4, None, "1 rank of 4 threads: 12 of 16 cores idle",
         "give --threads and --processes; `fleetune plan` shows what they make of a host"),
    ],
)  # fmt: skip
def test_idle_and_crowded_cores_are_told(
    processes: int, threads: int, variable: str | None, reason: str, fix: str
) -> None:
    verdict = judged(cpus.threads, changed("plan", processes=processes, threads=threads, omp_num_threads=variable))
    assert verdict == Verdict(status=Status.WARNING, reason=reason, fix=fix)


def test_a_variable_that_is_no_number_is_told() -> None:
    problem = "OMP_NUM_THREADS=many is not a number of 1 or more: correct or unset it"
    assert judged(cpus.threads, changed("plan", processes=0, threads=0, problem=problem)).reason == problem


def test_something_else_computes_there() -> None:
    verdict = judged(cpus.load, changed("cpus", load=47.3))
    assert verdict.status is Status.WARNING
    assert verdict.reason == "busy: 47.3 processes want 32 CPUs"


@pytest.mark.parametrize(
    ("governor", "driver", "status"),
    [
        (None, None, Status.OK),
        ("powersave", "intel_pstate", Status.OK),
        ("powersave", "acpi-cpufreq", Status.WARNING),
        ("schedutil", "acpi-cpufreq", Status.OK),
    ],
)
def test_the_governor(governor: str | None, driver: str | None, status: Status) -> None:
    assert judged(cpus.governor, changed("cpus", governor=governor, driver=driver)).status is status


@pytest.mark.parametrize(("smt", "reason"), [(False, "off"), (None, "not shown")])
def test_smt(smt: bool | None, reason: str) -> None:
    facts = replace(FACTS, cpus=replace(FACTS.cpus, smt=smt))
    assert judged(cpus.smt, facts) == Verdict(status=Status.OK, reason=reason)
