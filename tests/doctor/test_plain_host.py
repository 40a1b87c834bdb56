"""What a shell prints of a host without Python."""

from __future__ import annotations

import subprocess

from fleetune.doctor.plain_host import _SCRIPT, facts_of
from fleetune.hardware.host import read_host

PRINTED = """Welcome!
==fleetune== /proc/cpuinfo
processor : 0
model name\t: Intel(R) Xeon(R) Gold 6430
flags\t\t: fpu avx2 fma avx512f amx_tile
==fleetune== /proc/meminfo
MemTotal:       65536 kB
==fleetune== /proc/self/cgroup
0::/
==fleetune== /proc/self/mountinfo
==fleetune== /proc/sys/kernel/hostname
node5
==fleetune== /proc/sys/kernel/osrelease
5.14.0
==fleetune== cpus
8
==fleetune== pythons
/usr/bin/python3
Python 3.9.2
"""


def test_the_facts_of_what_was_printed() -> None:
    facts, python = facts_of(PRINTED)
    assert (facts.hostname, facts.kernel, facts.cpu_model) == ("node5", "5.14.0", "Intel(R) Xeon(R) Gold 6430")
    assert facts.isa == ("avx2", "fma", "avx512f", "amx_tile")
    assert (facts.usable_cores, facts.memory_bytes) == (8, 65536 * 1024)
    assert python == "/usr/bin/python3 is Python 3.9.2"


def test_a_host_without_any_python() -> None:
    assert facts_of(PRINTED.partition("/usr/bin/python3")[0])[1] == "there is no python3"


def test_the_shell_tells_what_python_reads() -> None:
    printed = subprocess.run(["sh", "-c", _SCRIPT], capture_output=True, text=True, timeout=20).stdout
    facts, _ = facts_of(printed)
    here = read_host()
    assert (facts.hostname, facts.cpu_model, facts.isa) == (here.hostname, here.cpu_model, here.isa)
    assert (facts.kernel, facts.memory_bytes) == (here.kernel, here.memory_bytes)
