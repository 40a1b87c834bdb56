"""Checks of a host's CPUs: what they can do, and whether all of them would work."""

from __future__ import annotations

import re

from fleetune.doctor.examine import Scope
from fleetune.doctor.facts import Facts
from fleetune.doctor.finding import Verdict, ok, warning

_AMX_KERNEL = (5, 16)
_FAST_SETS = {
    "avx2": "AVX2", "avx512f": "AVX-512", "avx_vnni": "AVX-VNNI", "avx512_vnni": "AVX-512 VNNI",
    "avx512_bf16": "AVX-512 bf16", "amx_tile": "AMX", "asimd": "Neon", "sve": "SVE", "bf16": "bf16",
}  # fmt: skip
"""Flag of /proc/cpuinfo -> what people call it."""
_SETS_ITS_OWN_RATE = ("intel_pstate", "amd-pstate-epp", "intel_cpufreq")
"""Drivers whose governor `powersave` is the usual one, under which the CPU raises its rate by itself."""
_IDLE_SHARE = 1 / 2


def cpu(facts: Facts, scope: Scope) -> Verdict | None:
    """The model and the instruction sets that matter."""
    machine = facts.machine
    sets = ", ".join(name for flag, name in _FAST_SETS.items() if flag in machine.isa)
    if not {"avx2", "asimd"} & set(machine.isa):
        return warning(
            f"{machine.cpu_model} without AVX2: everything is slow",
            "another machine; or let the virtual machine see its host's CPU (qemu: -cpu host)",
        )
    return ok(f"{machine.cpu_model}: {sets}")


def amx(facts: Facts, scope: Scope) -> Verdict | None:
    """AMX has to be asked of the kernel, which knows how to grant it from 5.16 on."""
    machine = facts.machine
    if "amx_tile" not in machine.isa:
        return None
    if facts.cpus.amx_granted:
        return ok("the kernel grants it: --bf16 auto uses it")
    number = re.match(r"(\d+)\.(\d+)", machine.kernel)
    is_old = number is not None and (int(number[1]), int(number[2])) < _AMX_KERNEL
    if is_old:
        return warning(f"the CPU has it, but kernel {machine.kernel} does not grant it", "Linux 5.16 or newer")
    return warning(
        f"the CPU has it, but kernel {machine.kernel} does not grant it: a container's or hypervisor's filter",
        "allow the system call arch_prctl (docker: --security-opt seccomp=unconfined)",
    )


def cores(facts: Facts, scope: Scope) -> Verdict | None:
    """Cores that a run may use, of those that are there."""
    machine, cpus = facts.machine, facts.cpus
    told = f"{cpus.num_cores} physical core{_s(cpus.num_cores)}"
    told += f" on {cpus.num_nodes} NUMA node{_s(cpus.num_nodes)}" if cpus.num_nodes else ""
    allowed = len(machine.allowed_cpus)
    if allowed < cpus.num_online:
        return warning(
            f"{told}: only {allowed} of {cpus.num_online} CPUs may be used, the others stay idle",
            "lift the limit: `taskset -p $$` shows it; cpuset, docker --cpuset-cpus, Slurm --cpus-per-task set it",
        )
    if machine.cpu_quota is not None and machine.cpu_quota < allowed:
        return warning(
            f"{told}, but a quota of {machine.cpu_quota:g} CPUs of {allowed}",
            "raise it: docker --cpus, Kubernetes resources.limits.cpu, systemd CPUQuota",
        )
    return ok(told)


def threads(facts: Facts, scope: Scope) -> Verdict | None:
    """Whether ranks would have a thread for every core: the others would be idle."""
    plan, usable = facts.plan, min(facts.machine.usable_cores, facts.cpus.num_cores)
    if plan.problem is not None:
        return warning(plan.problem, "unset OMP_NUM_THREADS")
    total = plan.processes * plan.threads
    told = f"{plan.processes} rank{_s(plan.processes)} of {plan.threads} thread{_s(plan.threads)}"
    if total > usable:
        reason = f"{told} on {usable} core{_s(usable)}: they take turns"
    elif total <= usable * _IDLE_SHARE:
        reason = f"{told}: {usable - total} of {usable} cores idle"
    else:
        return ok(f"{told}, for {usable} usable core{_s(usable)}")
    if plan.omp_num_threads is not None:
        return warning(f"{reason} (OMP_NUM_THREADS={plan.omp_num_threads})", "unset OMP_NUM_THREADS")
    return warning(reason, "give --threads and --processes; `fleetune plan` shows what they make of a host")


def load(facts: Facts, scope: Scope) -> Verdict | None:
    """Whether something else computes there."""
    num_cpus = facts.cpus.num_online
    if facts.cpus.load > num_cpus:
        return warning(
            f"busy: {facts.cpus.load:.1f} processes want {num_cpus} CPU{_s(num_cpus)}",
            "`top` there shows which; end them, or wait",
        )
    return ok("not overloaded")


def smt(facts: Facts, scope: Scope) -> Verdict | None:
    """Two threads a core: no harm, since ranks count cores."""
    told = {True: "on: ranks count physical cores, so it does no harm", False: "off", None: "not shown"}
    return ok(told[facts.cpus.smt])


def governor(facts: Facts, scope: Scope) -> Verdict | None:
    """Whether the clock rate is kept low."""
    name, driver = facts.cpus.governor, facts.cpus.driver
    if name is None:
        return ok("not shown, as in most virtual machines")
    if name == "powersave" and driver not in _SETS_ITS_OWN_RATE:
        return warning(f"{name} ({driver}) keeps the clock low", "sudo cpupower frequency-set -g performance")
    return ok(f"{name} ({driver})")


def _s(count: int) -> str:
    return "" if count == 1 else "s"
