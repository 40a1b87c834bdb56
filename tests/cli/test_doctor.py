"""`fleetune doctor` as a person calls it: on this machine, and with a fake ssh for others."""

from __future__ import annotations

import json
import os
import socket
from pathlib import Path

import pytest

from fleetune.cli import doctor, main
from fleetune.cluster.hosts import Host
from fleetune.config import RunConfig
from fleetune.doctor.examine import Scope, probe_command
from fleetune.errors import ConfigError
from tests.conftest import fleetune


def test_this_machine_alone() -> None:
    result = fleetune("doctor")
    lines = result.stdout.splitlines()
    assert lines[-1].startswith(f"{socket.gethostname()}: no failures, ")
    checks = {line.split()[1] for line in lines if line.startswith(("ok ", "warning "))}
    assert {"python", "versions", "kernels", "CPU", "cores", "memory", "ports", "connections"} <= checks
    assert not {"ssh", "clocks", "bandwidth"} & checks  # there is nobody else
    assert result.stderr == ""


def test_everything_as_json() -> None:
    report = json.loads(fleetune("doctor", "--hosts", "localhost", "--json").stdout)
    assert report["status"] in ("ok", "warning")
    facts = report["hosts"]["localhost"]["facts"]
    assert facts["machine"]["hostname"] == socket.gethostname()
    assert {one["outcome"] for one in report["connections"]} == {"reached"}
    assert {one["address"] for one in report["connections"]} == {"127.0.0.1"}


def test_a_name_that_means_nothing_is_a_finding() -> None:
    result = fleetune("doctor", "--hosts", "localhost,no-such-host.invalid", check=False)
    assert result.returncode == 1
    lines = result.stdout.splitlines()
    assert lines[-1].startswith("2 hosts: 1 failure, ")
    (line,) = [line for line in lines if line.startswith("failure")]
    assert line.endswith("host no-such-host.invalid: the name cannot be resolved")


def test_only_names_that_mean_nothing() -> None:
    result = fleetune("doctor", "--hosts", "no-such-host.invalid", check=False)
    assert (result.returncode, result.stderr) == (1, "")
    assert result.stdout.startswith("failure  name  no-such-host.invalid  host no-such-host.invalid: the name cannot")


FAKE_SSH = """#!/bin/sh
# Stands for a host without anything: answers -G, and runs commands in an empty environment without our Python.
if [ "$1" = -G ]; then echo "hostname 192.0.2.7"; exit 0; fi
while [ "$1" != -- ]; do shift; done
echo "$3" >> "$SSH_LOG"
case "$3" in "sh -c"*) exec env -i PATH=/usr/bin:/bin sh -c "$3" ;; esac
echo "sh: 1: python: not found" >&2
exit 127
"""


def test_a_host_without_python_by_a_fake_ssh(tmp_path: Path) -> None:
    (tmp_path / "ssh").write_text(FAKE_SSH)
    (tmp_path / "ssh").chmod(0o755)
    path = f"{tmp_path}:{os.environ['PATH']}"
    result = fleetune(
        "doctor",
        "--hosts",
        "node7",
        "--json",
        check=False,
        PATH=path,
        SSH_LOG=str(tmp_path / "log"),
        HF_TOKEN="hf_secret",
    )
    assert (result.returncode, result.stderr) == (1, "")
    report = json.loads(result.stdout)
    failures = [one for one in report["findings"] if one["status"] == "failure"]
    assert [(one["check"], one["hosts"], one["fix"]) for one in failures] == [
        ("python", ["node7"], "fleetune setup --hosts node7")
    ]
    assert report["hosts"]["node7"]["without_python"]["hostname"] == socket.gethostname()
    assert "hf_secret" not in result.stdout + (tmp_path / "log").read_text()


def test_the_command_of_a_probe() -> None:
    scope = Scope(ports=range(20000, 30000), environ={"PYTHONPATH": "/a b/src", "HF_TOKEN": "hf_x"}, timeout_s=4)
    command = probe_command(Host(name="node2", user="me"), scope)
    assert command[0] == "ssh"
    assert "ConnectTimeout=4" in command
    assert command[-2] == "me@node2"
    assert command[-1].startswith("env 'PYTHONPATH=/a b/src' ")
    assert command[-1].endswith(" -m fleetune.doctor.probe node2")
    assert "hf_x" not in " ".join(command)


@pytest.mark.parametrize(
    ("words", "problem"),
    [
        (["--hosts", "a", "--hostfile", "b"], "--hosts and --hostfile: give one"),
        (["--hosts", "node[2-1]"], "--hosts node[2-1]: [2-1] is no range: 1 comes before 2"),
        (["--network", "10.0.0.300"], "--network 10.0.0.300: "),
        (["--port_range", "many"], "--port_range many: "),
        (["--learning_rate", "1"], "--learning_rate is a setting of `fleetune train`, this command does not take it"),
    ],
)
def test_what_is_refused(words: list[str], problem: str) -> None:
    with pytest.raises(ConfigError) as refused:
        doctor.run(words)
    assert problem in str(refused.value)


def test_hosts_of_a_file(tmp_path: Path) -> None:
    path = tmp_path / "hosts"
    path.write_text("node1 slots=2\nme@node2\n")
    asked = doctor.asked_hosts(RunConfig(hostfile=path))
    assert [host.target for host in asked] == ["node1", "me@node2"]


def test_the_scope_is_that_of_a_run() -> None:
    scope = doctor.scope_of(RunConfig(port_range="29500-29510", network="10.0.0.0/8", timeout_s=7))
    assert (scope.ports, scope.has_own_ports) == (range(29500, 29511), True)
    assert (scope.network, scope.timeout_s) == ("10.0.0.0/8", 7)
    assert doctor.scope_of(RunConfig()).ports == range(20000, 30000)


def test_a_dry_run_prints_the_command_of_each_host(capsys: pytest.CaptureFixture[str]) -> None:
    assert main.run(["doctor", "--hosts", "no-such-host,me@10.0.0.9", "--dry_run"]) == 0
    first, second, what = capsys.readouterr().out.splitlines()
    assert first.startswith("no-such-host: ssh -T -o BatchMode=yes ")
    assert " -- me@10.0.0.9 " in second
    assert second.endswith("-m fleetune.doctor.probe 10.0.0.9'")
    assert "standard input" in what
