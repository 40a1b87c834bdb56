"""Commands on other hosts: what reaches a program there, and what ssh's failures are called. Real sshd in a lab."""

from __future__ import annotations

import json
import os
import shutil
import sys
from collections.abc import Iterator

import pytest

from fleetune.cluster.remote import FAILED, remote_words, ssh_command, why_ssh_failed
from lab import Host, Lab

TELL = "import json, os, sys; print(json.dumps([os.fsencode(word).hex() for word in sys.argv[1:]]))"
ECHO = (sys.executable, "-I", "-S", "-c", TELL)
AWKWARD = (
    "", " ", "plain", "two words", "tab\there", "it's", '"double"', "''", "$HOME ${HOME} $(id) `id`", "back\\slash",
    "\\", "\\\\'", "\\n", "new\nline", "\n", "trailing\n", "carriage\r", "a!b", "!!", "*", "[a-z]?", "~", "~root",
    "=ls", "=1", "a=b", "%1", "%s%d", "{a,b}", "#no comment", ";|&<>()", "-n", "--", "größe 数 🙂", "\x01\x1b[0m",
    "\udcff not UTF-8", "^H", "@", "x" * 5000,
)  # fmt: skip
SHELLS = ("bash", "dash", "csh", "tcsh", "fish", "zsh", "ksh")


@pytest.fixture(scope="module")
def lab() -> Iterator[Lab]:
    if reason := Lab.unavailable(with_ssh=True):
        pytest.skip(reason)
    with Lab.up(3, with_ssh=True) as lab:
        yield lab


def set_login_shell(host: Host, shell: str) -> None:
    """Root's on one host only: it gets an /etc/passwd of its own."""
    script = (
        "if mountpoint -q /etc/passwd; then umount /etc/passwd; fi; "
        'sed "/^root:/s|[^:]*$|$0|" /etc/passwd >/run/passwd; mount --bind /run/passwd /etc/passwd'
    )
    host.run(["sh", "-c", script, shell]).check_returncode()


@pytest.mark.parametrize("name", SHELLS)
def test_every_argument_arrives_whole(name: str, lab: Lab) -> None:
    """All at once, which takes the way of octal; and those for which quotes do."""
    shell = shutil.which(name, path="/bin:/usr/bin")
    if shell is None:
        pytest.skip(f"no {name} on this machine")
    set_login_shell(lab["node2"], shell)
    asked = lab["node1"].run(ssh_command("node2", ["sh", "-c", "echo $SHELL"]))
    assert (asked.stdout, asked.stderr) == (f"{shell}\n", "")
    quoted = [word for word in AWKWARD if not remote_words(["true", word]).startswith("exec sh")]
    assert len(AWKWARD) > len(quoted) > 15
    for words in (AWKWARD, quoted):
        ran = lab["node1"].run(ssh_command("node2", [*ECHO, *words]))
        assert ran.returncode == 0, ran.stderr
        assert [bytes.fromhex(word) for word in json.loads(ran.stdout)] == [os.fsencode(word) for word in words]


def test_usual_commands_stay_readable() -> None:
    assert remote_words(["python3", "-m", "fleetune", "train", "--x", "a b"]) == "python3 -m fleetune train --x 'a b'"
    assert remote_words(["echo", "it's", "=x"]) == "echo 'it'\"'\"'s' '=x'"
    assert remote_words(["echo", "a!\n"]) == (
        """exec sh -c 'eval "exec $(printf %b "$1")"' sh 'echo \\0047a\\0041\\0012\\0047'"""
    )


def test_the_command_line() -> None:
    line = ssh_command("me@node2", ["true"], connect_timeout_s=3)
    assert line[0] == "ssh"
    assert line[-3:] == ["--", "me@node2", "true"]
    assert {"BatchMode=yes", "ConnectTimeout=3"} <= set(line)
    assert not any("StrictHostKeyChecking" in word or "KnownHosts" in word for word in line)


def test_status_streams_and_input_are_the_commands_own(lab: Lab) -> None:
    ran = lab["node1"].run(ssh_command("node2", ["sh", "-c", "cat; echo err >&2; exit 7"]), stdin="in")
    assert (ran.returncode, ran.stdout, ran.stderr) == (7, "in", "err\n")


def test_what_a_user_configured_for_logins_does_no_harm(lab: Lab) -> None:
    """A forwarded port, which the second of two connections could not open, and a command of one's own."""
    node1 = lab["node1"]
    config = node1.run(["cat", "/etc/ssh/ssh_config"]).stdout
    own = "Host node2\nLocalForward 5555 localhost:22\nExitOnForwardFailure yes\nRemoteCommand cat\nRequestTTY force\n"
    node1.run(["sh", "-c", "cat >/tmp/own"], stdin=own + config).check_returncode()
    ssh, *rest = ssh_command("node2", ["sh", "-c", "test -t 0 || echo no terminal; sleep $0", "20"])
    with node1.start([ssh, "-F", "/tmp/own", *rest]) as first:
        assert first.stdout is not None
        assert first.stdout.readline() == "no terminal\n"
        ssh, *rest = ssh_command("node2", ["echo", "second"])
        second = node1.run([ssh, "-F", "/tmp/own", *rest])
        first.kill()
    assert (second.returncode, second.stdout, second.stderr) == (0, "second\n", "")


# ---- why ssh failed, in its own words


def said(host: Host, target: str, *, options: tuple[str, ...] = (), timeout_s: int = 2) -> str:
    """What the real ssh says; it must fail."""
    line = ssh_command(target, ["true"], connect_timeout_s=timeout_s)
    ran = host.run([line[0], *options, *line[1:]], timeout=30)
    assert ran.returncode == FAILED, ran
    return ran.stderr


def test_known_and_unknown_names_and_keys(lab: Lab) -> None:
    node1, _, node3 = lab
    reasons = {}
    reasons["name"] = said(node1, "no-such-host.invalid")
    reasons["unknown key"] = said(node1, "node2", options=("-o", "UserKnownHostsFile=/dev/null"))
    key3 = node3.run(["cat", "/etc/ssh/host_key.pub"]).stdout
    node1.run(["sh", "-c", "cat >/tmp/known"], stdin=f"node2 {key3}").check_returncode()
    reasons["changed key"] = said(node1, "node2", options=("-o", "UserKnownHostsFile=/tmp/known"))
    assert {case: why_ssh_failed(text, "node2")[0] for case, text in reasons.items()} == {
        "name": "the name cannot be resolved",
        "unknown key": "its host key is not known here",
        "changed key": "its host key is another than the known one",
    }
    assert "ssh-keygen -R node2" in why_ssh_failed(reasons["changed key"], "node2")[1]


def test_a_refused_key(lab: Lab) -> None:
    node1 = lab["node1"]
    node1.run(["ssh-keygen", "-q", "-t", "ed25519", "-N", "", "-f", "/tmp/other"]).check_returncode()
    config = node1.run(["cat", "/etc/ssh/ssh_config"]).stdout
    other = "\n".join("IdentityFile /tmp/other" if "IdentityFile" in line else line for line in config.splitlines())
    node1.run(["sh", "-c", "cat >/tmp/config"], stdin=other).check_returncode()
    text = said(node1, "node2", options=("-F", "/tmp/config"))
    assert why_ssh_failed(text, "me@node2") == (
        "it refuses the key", "`ssh-copy-id me@node2`, or start an agent that has the key"
    )  # fmt: skip
    (accepted,) = (line.split()[1] for line in config.splitlines() if "IdentityFile" in line)
    copy = f"cp {accepted} /tmp/other; rm /tmp/other.pub; chmod 644 /tmp/other"
    node1.run(["sh", "-c", copy]).check_returncode()
    text = said(node1, "node2", options=("-F", "/tmp/config"))
    assert why_ssh_failed(text)[0] == "the private key may be read by others, so ssh does not use it"
    node1.run(["sh", "-c", "echo Nonsense yes >>/tmp/config"]).check_returncode()
    text = said(node1, "node2", options=("-F", "/tmp/config"))
    assert why_ssh_failed(text) == (
        "this machine's ssh configuration is refused by ssh", "mend what `ssh -G HOST` complains about"
    )  # fmt: skip


def test_nothing_listens_no_answer_and_no_route(lab: Lab) -> None:
    node1, node2, node3 = lab
    assert why_ssh_failed(said(node1, "node2", options=("-p", "2222")))[0] == "nothing listens on its ssh port"
    node3.cut()
    try:
        assert why_ssh_failed(said(node1, "node3"))[0] in ("no answer", "no route to it")
    finally:
        node3.join()
    assert why_ssh_failed(said(node1, "192.0.2.1"))[0] == "no route to it"
    node2.freeze()  # the kernel accepts, and nobody speaks
    try:
        assert why_ssh_failed(said(node1, "node2"))[0] == "no answer"
    finally:
        node2.thaw()


CLOSE = """
import socket
server = socket.create_server(("", 2300))
print("up", flush=True)
while True:
    server.accept()[0].close()
"""


def test_a_server_that_closes_and_a_jump_host_that_does_not_let_through(lab: Lab) -> None:
    node1, node2, _ = lab
    closing = node2.start([sys.executable, "-c", CLOSE])
    assert closing.stdout is not None
    assert closing.stdout.readline() == "up\n"
    try:
        text = said(node1, "node2", options=("-p", "2300"))
    finally:
        closing.kill()
        closing.communicate()
    assert why_ssh_failed(text)[0] == "it closes the connection before the login"
    strict = "/usr/sbin/sshd -f /etc/ssh/sshd_config -p 2301 -o AllowTcpForwarding=no -o PidFile=none -E /tmp/log"
    node2.run(strict.split()).check_returncode()
    text = said(node1, "node3", options=("-J", "node2:2301"), timeout_s=5)
    assert why_ssh_failed(text)[0] == "the jump host does not forward connections"


def test_a_lost_connection(lab: Lab) -> None:
    node1, _, node3 = lab
    with node1.start(ssh_command("node3", ["sh", "-c", "echo on; sleep 60"])) as running:
        assert running.stdout is not None
        assert running.stdout.readline() == "on\n"
        node3.kill()
        rest = running.communicate(timeout=30)[0]
    node3.boot()
    assert running.returncode == FAILED
    assert why_ssh_failed(rest)[0] == "the connection was lost", rest


def test_words_that_nobody_knows() -> None:
    assert why_ssh_failed("first\nlast\n\n", "n1") == ("last", "try `ssh -v n1 true` by hand")
    assert why_ssh_failed(" \n")[0].startswith("ssh ended without a word")


def test_a_program_that_is_denied_something_is_not_a_refused_key() -> None:
    assert why_ssh_failed("bash: /data: Permission denied")[0] == "bash: /data: Permission denied"
