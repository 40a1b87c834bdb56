"""A real Slurm on the hosts of a lab: munged and slurmd on each, slurmctld on the first."""

from __future__ import annotations

import contextlib
import os
import secrets
import shutil
import subprocess
import time
from collections.abc import Iterator
from pathlib import Path

from lab import Lab

PROGRAMS = ("/usr/sbin/munged", "/usr/sbin/slurmctld", "/usr/sbin/slurmd", "/usr/bin/srun", "/usr/bin/sbatch")

CONF = """\
ClusterName=lab
SlurmctldHost={head}
SlurmUser=root
SlurmdUser=root
AuthType=auth/munge
CredType=cred/munge
MailProg=/bin/true
ProctrackType=proctrack/linuxproc
TaskPlugin=task/none
SelectType=select/cons_tres
SelectTypeParameters=CR_Core
SlurmdParameters=config_overrides
ReturnToService=2
MpiDefault=none
SlurmctldPidFile=/run/slurmctld.pid
SlurmdPidFile=/run/slurmd.pid
SlurmctldLogFile={folder}/slurmctld.log
SlurmdLogFile={folder}/slurmd.%n.log
StateSaveLocation={folder}/state
SlurmdSpoolDir=/run/slurmd
KillWait={kill_wait_s}
NodeName={nodes} CPUs=2 State=UNKNOWN
PartitionName=all Nodes=ALL Default=YES MaxTime=INFINITE State=UP
"""
CGROUP_CONF = "CgroupPlugin=cgroup/v1\nCgroupAutomount=no\n"


def unavailable() -> str | None:
    """Why Slurm cannot be had here; `None` where it can."""
    missing = [program for program in PROGRAMS if not os.access(program, os.X_OK)]
    return f"no {missing[0]}: apt-get install slurm-wlm munge" if missing else None


@contextlib.contextmanager
def slurm_up(lab: Lab, folder: Path, *, kill_wait_s: int = 30) -> Iterator[dict[str, str]]:
    """Bring Slurm up on all hosts, and end its daemons when the block is left.

    Args:
        lab: Its hosts see `folder`.
        folder: For its settings, logs and state.
        kill_wait_s: What tasks get between SIGTERM and SIGKILL.

    Yields:
        The variables with which Slurm's commands find it.
    """
    _write(lab, folder, kill_wait_s)
    environ = {"SLURM_CONF": str(folder / "slurm.conf")}
    daemons: list[subprocess.Popen[str]] = []
    try:
        for host in lab:
            host.run(["mkdir", "-p", "/run/munge", "/run/slurmd", "/run/munge-log"]).check_returncode()
            munged = ["/usr/sbin/munged", "--force", "-F", f"--key-file={folder}/munge.key"]
            munged += [f"--{name}=/run/munge-log/{name}" for name in ("log-file", "pid-file", "seed-file")]
            daemons.append(host.start(munged, stdout=subprocess.DEVNULL))
        daemons.append(lab.hosts[0].start(["/usr/sbin/slurmctld", "-D"], env=environ, stdout=subprocess.DEVNULL))
        for host in lab:
            slurmd = ["/usr/sbin/slurmd", "-D", "-N", host.name]
            daemons.append(host.start(slurmd, env=environ, stdout=subprocess.DEVNULL))
        _wait_until_idle(lab, environ, folder)
        yield environ
    finally:
        for daemon in daemons:
            daemon.terminate()
        for daemon in daemons:
            with contextlib.suppress(subprocess.TimeoutExpired):
                daemon.wait(10)


def _write(lab: Lab, folder: Path, kill_wait_s: int) -> None:
    nodes = ",".join(host.name for host in lab)
    shutil.rmtree(folder / "state", ignore_errors=True)
    (folder / "state").mkdir()
    text = CONF.format(head=lab.hosts[0].name, folder=folder, nodes=nodes, kill_wait_s=kill_wait_s)
    (folder / "slurm.conf").write_text(text)
    (folder / "cgroup.conf").write_text(CGROUP_CONF)
    key = folder / "munge.key"
    key.unlink(missing_ok=True)
    key.write_bytes(secrets.token_bytes(1024))
    key.chmod(0o400)


def _wait_until_idle(lab: Lab, environ: dict[str, str], folder: Path, timeout_s: float = 30) -> None:
    deadline, said = time.monotonic() + timeout_s, ""
    while time.monotonic() < deadline:
        said = lab.hosts[0].run(["sinfo", "-h", "-N", "-o", "%t"], env=environ, timeout=20).stdout
        if said.split() == ["idle"] * len(lab.hosts):
            return
        time.sleep(0.2)
    logs = "\n".join(path.read_text()[-2000:] for path in folder.glob("*.log"))
    raise RuntimeError(f"Slurm does not come up within {timeout_s} s: {said}\n{logs}")
