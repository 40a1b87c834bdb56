"""A program for tests: start a job on hosts, as the command line does, from a description in JSON.

    python -m tests.cluster.start_job '{"launcher": "mpirun", "hosts": "node1,node2", "settings": {...}}'

`script` in place of `settings` gives the words of a script; all else are fields of `Job`.
"""

from __future__ import annotations

import json
import os
import sys
from typing import Any

from fleetune.cluster.hosts import parse_hosts, resolve
from fleetune.cluster.job import Job, fleetune_job, script_job
from fleetune.cluster.launchers.mpirun import run_with_mpirun
from fleetune.cluster.launchers.slurm import run_with_slurm
from fleetune.errors import FleetuneError


def main(told: dict[str, Any]) -> int:
    launcher, hosts, num_hosts = told.pop("launcher"), told.pop("hosts", None), told.pop("num_hosts", None)
    dry_run = told.pop("dry_run", False)
    job = make_job(told)
    try:
        if launcher == "mpirun":
            found = resolve(parse_hosts(hosts))
            return run_with_mpirun(job, found, dry_run=dry_run, environ=os.environ)
        return run_with_slurm(job, num_hosts=num_hosts, dry_run=dry_run, environ=os.environ)
    except FleetuneError as error:
        print(f"error: {error}", file=sys.stderr)
        return error.exit_status


def make_job(told: dict[str, Any]) -> Job:
    script, settings = told.pop("script", None), told.pop("settings", None)
    if script is not None:
        return script_job(script, os.environ, **told)
    return fleetune_job(["train"], settings, os.environ, **told)


if __name__ == "__main__":
    sys.exit(main(json.loads(sys.argv[1])))
