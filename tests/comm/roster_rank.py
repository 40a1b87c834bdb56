"""One rank of the tests of the roster: meets the others, and prints what it knows of them as JSON.

    python -m tests.comm.roster_rank '{"settings": {"timeout_s": 5}, "versions": {"torch": "2.12.0"}}'

Ends as `fleetune` does: a failure in one line, with the exit status of its kind.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from typing import Any

from fleetune.cluster.rank import read_rank
from fleetune.cluster.start import silence_connections
from fleetune.config import RunConfig
from fleetune.errors import FleetuneError, PeerError


def main(told: dict[str, Any]) -> int:
    """Be a rank with some settings, and with other versions where they are given."""
    silence_connections()
    from fleetune.comm import roster
    from fleetune.comm.ranks import joined_ranks

    versions = {**roster.own_versions(), **told.get("versions", {})}
    roster.own_versions = lambda: versions
    info = read_rank(os.environ)
    try:
        with joined_ranks(
            info, RunConfig(**told.get("settings", {})), say=lambda line: print(line, flush=True)
        ) as ranks:
            assert ranks.tell_all(ranks.rank) == list(range(ranks.world_size))
            found = {
                "hosts": ranks.roster.hosts,
                "names": [ranks.roster.host_name(rank) for rank in range(ranks.world_size)],
                "interface": os.environ.get("GLOO_SOCKET_IFNAME"),
                "listening": listening(info.main_port) if info is not None else [],
                "record": [member.for_record() for member in ranks.roster.members],
            }
            time.sleep(told.get("pause_s", 0))
            print(json.dumps(found), flush=True)
    except PeerError as error:
        return error.exit_status
    except FleetuneError as error:
        print(f"error: {error}", flush=True)
        return error.exit_status
    return 0


def listening(port: int) -> list[str]:
    """The addresses of this host on which somebody listens on a port."""
    said = subprocess.run(["ss", "-Hltn", f"sport = :{port}"], capture_output=True, text=True, check=True).stdout
    return [line.split()[3] for line in said.splitlines()]


if __name__ == "__main__":
    sys.exit(main(json.loads(sys.argv[1])))
