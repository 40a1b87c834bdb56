"""`fleetune setup` from one host to two others of a lab, over real ssh."""

from __future__ import annotations

import importlib.metadata
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

import psutil
import pytest

from lab import Host, Lab
from tests.cluster.environment.conftest import BASE, PREFIX, SITE, Run, names_beside, tree
from tests.conftest import REPOSITORY

PYTHON = f"{PREFIX}/bin/python"


def shell(host: Host, script: str) -> str:
    ran = host.run(["sh", "-c", script])
    assert ran.returncode == 0, ran.stderr
    return ran.stdout


def line_of(output: str, host: str) -> str:
    """The last line about a host."""
    return [line for line in output.splitlines() if line.strip().startswith(f"{host}:")][-1].strip()


def test_first_time_and_second_time(lab: Lab, setup: Run) -> None:
    """The same files and versions on all, fleetune as a package without its checkout; then nothing to do."""
    ran = setup()
    assert (ran.returncode, ran.stderr) == (0, "")
    node1, *others = lab
    assert line_of(ran.stdout, "node1") == "node1: this machine, nothing to send"
    for host in others:
        assert line_of(ran.stdout, host.name).startswith(f"{host.name}: new, ")
        assert names_beside(host) == ["env"]
        there, here = tree(host), tree(node1)
        unlike = {path.split()[0] for path, what in there.items() if here.get(path) != what}
        site = f"./{SITE.relative_to(PREFIX)}"
        assert {path for path in unlike if not path.startswith(f"{site}/fleetune")} == {"./fleetune-setup.json"}
        missing = {path.split()[0] for path in here.keys() - there.keys()}
        info = f"{site}/fleetune-0.1.0.dist-info"
        assert missing == {f"{site}/__editable__.fleetune-0.1.0.pth", f"{info}/RECORD", f"{info}/direct_url.json"}
        told = shell(host, f"cd /; {PYTHON} -I -c 'import fleetune.cli.main, importlib.metadata as m; "
                           "print(fleetune.__file__, m.version(\"fleetune\"))'")  # fmt: skip
        assert told == f"{SITE}/fleetune/__init__.py 0.1.0\n"
        source = REPOSITORY / "src"
        files = [path for path in (source / "fleetune").rglob("*") if path.suffix in (".py", ".cpp", ".h")]
        assert {f"{site}/{path.relative_to(source)} digest" for path in files} <= there.keys()
    assert ran.stdout.splitlines()[-1] == "3 hosts are set up"
    again = setup()
    assert (again.returncode, again.stderr) == (0, "")
    assert line_of(again.stdout, "node2") == "node2: up to date, nothing to send"
    assert line_of(again.stdout, "node3") == "node3: up to date, nothing to send"


def test_only_what_changed_is_sent(lab: Lab, head: Host, setup: Run) -> None:
    """A new text; another one of the same size and time; a mode; a link; what is gone; a package that is new."""
    shell(head, f"mkdir {SITE}/old && touch {SITE}/old/__init__.py && echo 1 >{SITE}/same.py && ln -s a {SITE}/link")
    assert setup(hosts="node2").returncode == 0
    node2 = lab["node2"]
    assert shell(node2, f"cat {SITE}/same.py") == "1\n"
    shell(node2, f"{PYTHON} -c 'import old, same'")  # leaves compiled files beside the sources
    shell(head, f"cd {SITE}; rm -r old; touch -r same.py then; echo 2 >same.py; touch -r then same.py; rm then; "
                "chmod 700 psutil/_common.py; ln -sfn b link; mkdir new; echo 3 >new/__init__.py; "
                f"echo '# more' >>{PREFIX}/bin/activate")  # fmt: skip
    before = shell(node2, f"stat -c %i {SITE}/psutil/__init__.py")
    ran = setup(hosts="node2")
    assert ran.returncode == 0, ran.stderr
    # activate, _common.py, same.py, new/__init__.py
    assert "changed, 4 files, " in line_of(ran.stdout, "node2")
    assert shell(node2, f"cat {SITE}/same.py {SITE}/new/__init__.py; readlink {SITE}/link") == "2\n3\nb\n"
    assert node2.run([PYTHON, "-c", "import old"]).returncode == 1
    assert shell(node2, f"stat -c %i {SITE}/psutil/__init__.py") == before
    assert names_beside(node2) == ["env"]
    assert "up to date" in line_of(setup(hosts="node2").stdout, "node2")


def test_what_was_changed_on_the_host_is_put_right(lab: Lab, setup: Run) -> None:
    assert setup(hosts="node2").returncode == 0
    node2 = lab["node2"]
    shell(node2, f"rm -r {SITE}/psutil; echo x >{SITE}/stray.py; rm {PREFIX}/bin/python; mkdir {PREFIX}/bin/python")
    ran = setup(hosts="node2")
    assert ran.returncode == 0, ran.stderr
    assert "changed, " in line_of(ran.stdout, "node2")
    shell(node2, f"{PYTHON} -c 'import psutil'; test ! -e {SITE}/stray.py")


def test_dry_run_changes_nothing(lab: Lab, head: Host, setup: Run) -> None:
    ran = setup("--dry_run")
    assert (ran.returncode, ran.stderr) == (0, "")
    told = ran.stdout
    assert told.count("\n    tar -cf - --format=gnu ") == 2
    assert f" -C {PREFIX} -T node2.files -C /tmp/fleetune-setup-" in told
    assert told.count(" -- node3 'sh -c '") == 1
    for host in (lab["node2"], lab["node3"]):
        assert names_beside(host) == []
    assert setup(hosts="node2").returncode == 0
    shell(head, f"echo 1 >{SITE}/one.py; rm {SITE}/torch/__init__.py")
    shell(head, f"echo '__version__ = 0' >{SITE}/torch/__init__.py")
    told = setup("--dry_run", hosts="node2").stdout
    site = SITE.relative_to(PREFIX)
    assert f"\n    + {site}/one.py\n" in told
    assert f"\n    + {site}/torch/__init__.py\n" in told
    assert lab["node2"].run(["cat", f"{SITE}/one.py"]).returncode == 1
    assert names_beside(lab["node2"]) == ["env"]


def test_the_printed_commands_do_it(lab: Lab, head: Host, setup: Run) -> None:
    """What a dry run says of the checking command works when it is typed."""
    assert setup(hosts="node2").returncode == 0
    command = setup("--dry_run", hosts="node2").stdout.splitlines()[-1].strip()
    version = ".".join(map(str, sys.version_info[:3]))
    assert shell(head, command) == f"{version} 0.1.0 9.9\n"


def test_a_host_that_is_not_reached_does_not_keep_the_others(lab: Lab, setup: Run) -> None:
    node3 = lab["node3"]
    shell(node3, "kill $(cat /run/sshd.pid)")
    try:
        ran = setup()
    finally:
        node3.kill()
        node3.boot()
    assert ran.returncode == 1
    assert ran.stderr == (
        "error: 1 of 3 hosts are not set up:\n"
        "  node3: nothing listens on its ssh port: start sshd there, or give the port in ~/.ssh/config\n"
    )
    assert "new, " in line_of(ran.stdout, "node2")
    assert names_beside(lab["node2"]) == ["env"]


def test_a_foreign_environment_is_refused_unless_forced(lab: Lab, setup: Run) -> None:
    node2, node3 = lab["node2"], lab["node3"]
    shell(node2, f"mkdir -p {PREFIX}/mine; echo 1 >{PREFIX}/mine/file")
    shell(node3, f"mkdir -p {PREFIX.parent}/elsewhere; ln -s elsewhere {PREFIX}")
    ran = setup()
    assert ran.returncode == 1
    for name in ("node2", "node3"):
        assert (
            f"  {name}: {PREFIX} is there already, and was not made by fleetune setup: move it away, or replace it "
            "with --force\n"
        ) in ran.stderr
    assert shell(node2, f"cat {PREFIX}/mine/file") == "1\n"
    assert setup("--force").returncode == 0
    assert shell(node2, f"ls {PREFIX}/mine 2>/dev/null || echo gone") == "gone\n"
    assert names_beside(node2) == ["env"]
    assert names_beside(node3) == ["elsewhere", "env"]
    assert shell(node3, f"ls {PREFIX.parent}/elsewhere") == ""


def test_a_disk_that_is_too_small_is_noticed_before(lab: Lab, setup: Run) -> None:
    node2 = lab["node2"]
    shell(node2, f"mkdir -p {PREFIX.parent}; mount -t tmpfs -o size=1m none {PREFIX.parent}")
    ran = setup(hosts="node2")
    assert ran.returncode == 1
    assert f"  node2: {PREFIX} does not fit there: " in ran.stderr
    assert " MB are needed, 1 MB are free: free some\n" in ran.stderr
    shell(node2, f"mount -o remount,size=100m,nr_inodes=50 {PREFIX.parent}")
    assert "files are to be made, its file system takes 4" in setup(hosts="node2").stderr
    assert names_beside(node2) == []


def test_a_disk_that_fills_up_meanwhile(lab: Lab, head: Host, setup: Run) -> None:
    node2 = lab["node2"]
    shell(node2, f"mkdir -p {PREFIX.parent}; mount -t tmpfs -o size=20m none {PREFIX.parent}")
    assert setup(hosts="node2").returncode == 0
    before = tree(node2)
    shell(head, f"head -c 30000000 /dev/zero >{SITE}/large")
    script = (
        "from fleetune.cluster.environment import probe; probe._ROOM = 0\n"
        "from fleetune.cli.main import main; main(['setup', '--hosts', 'node2', '--no_kernels'])"
    )
    ran = head.run([PYTHON, "-c", script])
    assert ran.returncode == 1
    assert f"  node2: its disk is full: what had arrived is removed, {PREFIX} is as it was; free 30 MB" in ran.stderr
    assert names_beside(node2) == ["env"]
    assert tree(node2) == before


def test_what_does_not_work_there_is_not_put_in_place(lab: Lab, head: Host, setup: Run) -> None:
    node2 = lab["node2"]
    assert setup(hosts="node2").returncode == 0
    before = tree(node2)
    shell(node2, "touch /tmp/no-libgomp")
    shell(head, f"echo 1 >{SITE}/more.py")
    ran = setup(hosts="node2")
    assert ran.returncode == 1
    assert (
        "  node2: what was sent does not work there, and is removed: importing says 'ImportError: libgomp.so.1: cannot "
        "open shared object file', '"
    ) in ran.stderr
    assert (tree(node2), names_beside(node2)) == (before, ["env"])
    shell(head, f"rm {SITE}/more.py")
    assert "is there but does not work: importing says 'ImportError: libgomp" in setup(hosts="node2").stderr


def test_another_base_interpreter(lab: Lab, setup: Run) -> None:
    node2 = lab["node2"]
    shell(
        node2,
        f"printf '#!/bin/sh\\necho Python 3.4.5\\n' >/tmp/fake; chmod 755 /tmp/fake; mount --bind /tmp/fake {BASE}",
    )
    try:
        ran = setup(hosts="node2")
    finally:
        shell(node2, f"umount {BASE}")
    version = ".".join(map(str, sys.version_info[:3]))
    assert ran.returncode == 1
    assert f"must be Python {version} there, but is Python 3.4.5: " in ran.stderr
    assert names_beside(node2) == []


def wait_for(condition: Callable[[], object], timeout_s: float = 60) -> None:
    end = time.monotonic() + timeout_s
    while not condition():
        assert time.monotonic() < end, "it did not come to pass"
        time.sleep(0.1)


@pytest.mark.parametrize(
    "number",
    [
        signal.SIGINT,
        pytest.param(signal.SIGTERM, marks=pytest.mark.slow),
        pytest.param(signal.SIGKILL, marks=pytest.mark.slow),
    ],
)
def test_an_interrupted_transfer_leaves_what_was_there(
    number: signal.Signals, lab: Lab, head: Host, setup: Run
) -> None:
    """Ctrl-C, and ends that let nobody tidy up: the host itself removes what arrived."""
    node2, node3 = lab["node2"], lab["node3"]
    assert setup(hosts="node2").returncode == 0
    before = tree(node2)
    shell(head, f"head -c 50000000 /dev/urandom >{SITE}/large")
    for host in lab:
        host.set_link(8)
    command = [PYTHON, "-u", "-m", "fleetune", "setup", "--hosts", "node2,node3", "--no_kernels"]
    try:
        with head.start(command) as process:
            for host in (node2, node3):
                wait_for(lambda host=host: "env.fleetune-new" in names_beside(host))
            # the signal is for the program alone: a terminal would send Ctrl-C to ssh and tar as well
            process.send_signal(number)
            output = process.communicate(timeout=60)[0]
    finally:
        for host in lab:
            host.set_link(None)
    assert process.returncode == (130 if number == signal.SIGINT else -number)
    assert ("interrupted" in output) == (number == signal.SIGINT)
    wait_for(lambda: names_beside(node2) == ["env"] and names_beside(node3) == [])
    assert tree(node2) == before
    assert setup(hosts="node2,node3").returncode == 0
    assert tree(node2) == tree(node3)


def test_left_overs_of_a_lost_host_are_removed(lab: Lab, setup: Run) -> None:
    """As of one that was switched off in the middle."""
    node2 = lab["node2"]
    assert setup(hosts="node2").returncode == 0
    left = f"{PREFIX}.fleetune-new"
    shell(node2, f"mkdir -p {left}/env; echo node2 99999999 >{left}/owner; mv {PREFIX} {left}/old")
    ran = setup(hosts="node2")
    assert ran.returncode == 0, ran.stderr
    assert "new, " in line_of(ran.stdout, "node2")
    assert names_beside(node2) == ["env"]


def test_somebody_else_is_writing(lab: Lab, head: Host, setup: Run) -> None:
    node2 = lab["node2"]
    place = f"{PREFIX}.fleetune-new"
    shell(node2, f"mkdir -p {place}; echo node9 1 >{place}/owner")
    ran = setup(hosts="node2")
    assert ran.returncode == 1
    assert f"  node2: {place} is there: another setup is writing it; if none is running, remove it\n" in ran.stderr
    assert names_beside(node2) == ["env.fleetune-new"]


def test_two_setups_at_once(lab: Lab, head: Host, setup: Run) -> None:
    with head.start(["flock", str(PREFIX), "sh", "-c", "echo locked; sleep 30"]) as holder:
        assert holder.stdout is not None
        assert holder.stdout.readline() == "locked\n"
        ran = setup(hosts="node2")
        holder.kill()
    assert (ran.returncode, ran.stderr) == (1, f"error: another setup is sending {PREFIX}: wait for it to end\n")


def test_kernels_that_cannot_be_compiled_are_named(lab: Lab, head: Host) -> None:
    """The environment stays; here torch is a stand-in without anything in it."""
    ran = head.run([PYTHON, "-m", "fleetune", "setup", "--hosts", "node2"])
    assert ran.returncode == 1
    assert "  node2: the environment is there, but its kernels are not compiled: " in ran.stderr
    assert ran.stderr.endswith("or train without them, which is slower (--no_kernels)\n")
    assert names_beside(lab["node2"]) == ["env"]


def test_a_shared_folder_is_left_alone(packages: Path) -> None:
    """All hosts see the environment: nothing is sent, and nothing refused."""
    if reason := Lab.unavailable(with_ssh=True):
        pytest.skip(reason)
    shared = Path(tempfile.mkdtemp(prefix="fleetune-test-shared-", dir="/var/tmp"))
    try:
        subprocess.run([BASE, "-m", "venv", "--without-pip", shared], check=True)
        shutil.copytree(packages, shared / SITE.relative_to(PREFIX), dirs_exist_ok=True)
        with Lab.up(2, with_ssh=True) as lab:
            command = [f"{shared}/bin/python", "-m", "fleetune", "setup", "--hosts", "node1,node2", "--no_kernels"]
            ran = lab["node1"].run(command)
    finally:
        shutil.rmtree(shared, ignore_errors=True)
    assert (ran.returncode, ran.stderr) == (0, "")
    assert line_of(ran.stdout, "node2") == "node2: sees this very environment (a shared folder), nothing to send"


def test_hosts_that_share_a_folder_with_each_other(lab: Lab, head: Host, setup: Run) -> None:
    """But not with the head: one of them gets the environment, the other one finds it."""
    shared = Path(tempfile.mkdtemp(prefix="fleetune-test-shared-", dir="/var/tmp"))
    try:
        for name in ("node2", "node3"):
            shell(lab[name], f"mkdir -p {PREFIX.parent}; mount --bind {shared} {PREFIX.parent}")
        ran = setup()
        assert (ran.returncode, ran.stderr) == (0, "")
        assert names_beside(lab["node2"]) == ["env"]
        assert tree(lab["node2"]) == tree(lab["node3"])
    finally:
        for name in ("node2", "node3"):
            lab[name].run(["umount", str(PREFIX.parent)])
        shutil.rmtree(shared)


def test_a_host_behind_a_jump_host(lab: Lab, head: Host) -> None:
    """An alias of ssh's configuration; from here, that host's address leads nowhere."""
    usual = shell(head, "cat /etc/ssh/ssh_config").replace("Host node1 node2 node3", "Host inner node1 node2 node3")
    jump = "Host inner\n  HostName node3\n  HostKeyAlias node3\n  ProxyJump node2\n"
    head.run(["sh", "-c", "cat >/tmp/jump"], stdin=jump + usual).check_returncode()
    ssh = '#!/bin/sh\nexec /usr/bin/ssh -F /tmp/jump "$@"\n'
    head.run(["sh", "-c", "mkdir -p /tmp/bin; cat >/tmp/bin/ssh; chmod 755 /tmp/bin/ssh"], stdin=ssh).check_returncode()
    shell(lab["node3"], f"ip route add blackhole {head.address}")
    try:
        ran = head.run(
            [PYTHON, "-m", "fleetune", "setup", "--hosts", "inner", "--no_kernels"],
            env={"PATH": "/tmp/bin:/usr/bin:/bin:/usr/sbin:/sbin"},
        )
    finally:
        shell(lab["node3"], f"ip route delete blackhole {head.address}")
    assert (ran.returncode, ran.stderr) == (0, "")
    assert line_of(ran.stdout, "inner").startswith("inner: new, ")
    assert names_beside(lab["node3"]) == ["env"]


def test_words_that_cannot_be_used(setup: Run) -> None:
    ran = setup("--learning_rate", "1", hosts="node2")
    assert (ran.returncode, ran.stderr) == (
        2, "error: --learning_rate is a setting of `fleetune train`, this command does not take it\n"
    )  # fmt: skip
    ran = setup(hosts="node2,nowhere.invalid")
    assert ran.returncode == 2
    assert "host nowhere.invalid: the name cannot be resolved" in ran.stderr


@pytest.mark.slow
def test_the_real_environment(lab: Lab) -> None:
    """That of the tests, some 2 GB, to a host where an empty folder in memory covers it; torch is imported there."""
    prefix = Path(sys.prefix)
    if prefix == Path(sys.base_prefix):
        pytest.skip("the tests run in no virtual environment")
    if psutil.virtual_memory().available < 8e9:
        pytest.skip("less than 8 GB of memory are free")
    node1, node2, _ = lab
    shell(node2, f"mount -t tmpfs -o size=6g none {prefix.parent}")
    command = [sys.executable, "-m", "fleetune", "setup", "--hosts", "node2"]
    try:
        ran = node1.run(command, env={"PYTHONPATH": f"{REPOSITORY}/src"}, timeout=280)
        assert ran.returncode == 0, ran.stderr
        assert line_of(ran.stdout, "node2").startswith("node2: new, ")
        assert "; kernels " in line_of(ran.stdout, "node2")
        version = shell(node2, f"{prefix}/bin/python -c 'import torch; print(torch.__version__)'").strip()
        assert version == importlib.metadata.version("torch")
        assert shell(node2, f"ls -A {prefix.parent}") == f"{prefix.name}\n"
    finally:
        shell(node2, f"umount {prefix.parent}")
