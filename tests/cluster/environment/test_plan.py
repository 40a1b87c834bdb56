"""What is planned for a host, and how it is printed."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from fleetune.cluster.environment import plan as plans
from fleetune.cluster.environment.contents import FORMAT, MARKER, Contents, Difference
from fleetune.cluster.environment.plan import HostPlan, plan_host
from fleetune.cluster.environment.probe import probe_command
from fleetune.cluster.hosts import Host
from fleetune.cluster.remote import remote_words
from fleetune.errors import LaunchError
from tests.cluster.environment.test_contents import FILE, FOLDER
from tests.cluster.environment.test_probe import ENVIRONMENT, FACTS

HOST = Host(name="node2", user="me")
CONTENTS = Contents(
    prefix=Path("/opt/env"),
    stage=Path("/tmp/stage"),
    of_prefix={"bin": FOLDER, "bin/python": FILE, "lib/x.py": replace(FILE, num_bytes=20_000_000)},
    of_stage={"lib/fleetune/a.py": replace(FILE, changed_s=0.0)},
)
MARK = {"from": ENVIRONMENT.head, "newest_s": 200.5}


@pytest.fixture(autouse=True)
def _no_such_environment_here(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(plans, "identity", lambda environment: "1.1 2.2")


def planned(*, listing: Any = None, force: bool = False, **facts: Any) -> HostPlan:
    return plan_host(HOST, ENVIRONMENT, CONTENTS, replace(FACTS, **facts), listing, force=force)


def test_what_is_done_with_a_host() -> None:
    new = planned()
    assert (new.action, new.num_files, new.num_bytes) == ("new", 3, 20_000_010)
    assert new.title() == "new, 3 files, 20 MB"
    assert planned(found="other", force=True) == new
    ours = {"found": "ours", "marker": MARK}
    assert planned(listing=CONTENTS.all, **ours).title() == "up to date, nothing to send"
    without = {name: entry for name, entry in CONTENTS.all.items() if name != "bin/python"} | {"stray": FILE}
    changed = planned(listing=without, **ours)
    assert changed.title() == "changed, 1 file, 5 bytes; 1 removed"
    assert changed.difference == Difference(send=("bin/python", MARKER), remove=("stray", MARKER))
    of_another_head = planned(listing=CONTENTS.all, found="ours", marker={**MARK, "from": "head 2"})
    assert (of_another_head.action, of_another_head.num_files) == ("update", 3)
    torn = planned(listing=CONTENTS.all, found="ours", marker={})
    assert (torn.action, torn.num_files) == ("update", 3)


def test_a_host_that_sees_these_very_files_needs_nothing() -> None:
    assert planned(found="other", identity="1.1 2.2").action == "shared"
    assert planned(found="ours", identity="1.1 2.3").action == "new"


def test_what_cannot_be_set_up() -> None:
    with pytest.raises(LaunchError, match=r"no program `tar`: .*; its CPU is riscv64"):
        planned(missing=("tar",), machine="riscv64")
    with pytest.raises(LaunchError, match=r"^/opt/env does not fit there: 21 MB are needed, 5 MB are free: free some$"):
        planned(free_bytes=5_000_000)


def test_a_plan_as_text() -> None:
    change = Difference(send=("bin/python", "lib/x.py", MARKER), remove=("bin/python", "gone", MARKER))
    plan = HostPlan(host=HOST, action="update", difference=change, num_files=2, num_bytes=20_000_005)
    told = plans.lines(plan, ENVIRONMENT, CONTENTS, with_kernels=True, connect_timeout_s=10)
    assert told[:4] == [
        "node2: changed, 2 files, 20 MB; 1 removed", "    - gone", "    + bin/python", "    + lib/x.py"
    ]  # fmt: skip
    ssh = (
        "ssh -T -o BatchMode=yes -o ConnectTimeout=10 -o ServerAliveInterval=15 -o ClearAllForwardings=yes "
        "-o RemoteCommand=none -- me@node2 "
    )
    assert told[4].startswith(
        "    tar -cf - --format=gnu --no-recursion --null --verbatim-files-from -C /opt/env -T node2.files "
        f"-C /tmp/stage -T node2.staged | {ssh}'sh -c "
    )
    assert " sh /opt/env update 36 '\"'\"'3.11.2 0.1.0 2.13.0'\"'\"' " in told[4]
    assert told[5:] == [f"    {ssh}'/opt/env/bin/python -m fleetune build-kernels'"]
    assert plans.removals(plan) == b"bin/python\0gone\0fleetune-setup.json\0"
    assert plans.file_lists(plan, CONTENTS) == (b"bin/python\0lib/x.py\0", b"fleetune-setup.json\0")


def test_a_long_list_is_cut() -> None:
    send = tuple(f"f{number}" for number in range(25))
    plan = HostPlan(host=HOST, action="update", difference=Difference(send=(*send, MARKER), remove=()), num_files=25)
    told = plans.lines(plan, ENVIRONMENT, CONTENTS, with_kernels=False, connect_timeout_s=10)
    assert told[1:12] == [*(f"    + f{number}" for number in range(10)), "    ... and 15 more"]


def test_commands_stay_readable_under_every_login_shell() -> None:
    """None of them holds what csh or fish would read in another way than sh, which is sent in octal."""
    plan = HostPlan(host=HOST, action="new")
    for command in (
        probe_command(ENVIRONMENT),
        ["sh", "-c", plans.LIST, "sh", "/opt/env", FORMAT],
        plans.receive_command(plan, ENVIRONMENT),
        plans.check_command(ENVIRONMENT),
        plans.kernels_command(ENVIRONMENT),
    ):
        assert not remote_words(command).startswith("exec sh"), command
