"""Setting hosts up: ask each, plan, send, check, compile the kernels. All hosts at once, a thread each."""

from __future__ import annotations

import contextlib
import fcntl
import json
import os
import subprocess
import tempfile
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor, wait
from dataclasses import dataclass
from pathlib import Path

from fleetune.cluster.environment import plan as plans
from fleetune.cluster.environment.contents import FORMAT, Contents, Listing, parse_listing, read_contents
from fleetune.cluster.environment.here import Environment
from fleetune.cluster.environment.plan import HostPlan
from fleetune.cluster.environment.probe import HostFacts, parse_facts, probe_command
from fleetune.cluster.hosts import Host
from fleetune.cluster.remote import FAILED, why_ssh_failed
from fleetune.errors import FleetuneError, LaunchError

CHUNK_BYTES = 1 << 20
HELD_BYTES = 1 << 16
"""The end of an archive, with the marker, is sent when tar has ended well: a host takes nothing else for complete."""
PROGRESS_S = 5.0
MAX_AT_ONCE = 8
"""Hosts that are worked on at the same time. They share this machine's network; and a jump host's sshd refuses more
than ten connections that are just being made (MaxStartups)."""
ANSWER_S = 300
"""Longest wait for a host's answer to a question, such as the list of its files or an import of torch."""

Say = Callable[[str], None]


@dataclass(frozen=True, kw_only=True)
class Options:
    """How to set up."""

    force: bool = False
    """Replace an environment that fleetune did not make."""
    with_kernels: bool = True
    dry_run: bool = False
    """Only ask the hosts, and tell what would be done."""
    connect_timeout_s: int = 10


@dataclass(frozen=True, kw_only=True)
class Outcome:
    """What came of a host: one of the two."""

    host: Host
    done: str | None = None
    problem: str | None = None
    is_busy: bool = False
    """Whether that is because somebody else is writing the environment."""


def set_up(hosts: Sequence[Host], environment: Environment, options: Options, say: Say) -> list[Outcome]:
    """Give every host this environment.

    Args:
        hosts: Resolved.
        environment: This one.
        options: How.
        say: Told what is going on, from several threads.

    Returns:
        Of every host, in order. Where the block is left by an exception (Ctrl-C), no host has half an environment.

    Raises:
        LaunchError: This environment cannot be read, or is being sent already.
    """
    marker = {"from": environment.head, "fleetune": environment.versions.split()[1]}
    with tempfile.TemporaryDirectory(prefix="fleetune-setup-") as folder, _alone(environment, options):
        (stage := Path(folder, "stage")).mkdir()
        contents = read_contents(environment, stage, lambda found: json.dumps({**marker, "newest_s": found.newest_s}))
        num_bytes = sum(entry.num_bytes for entry in contents.all.values() if entry.kind == "f")
        say(f"{environment.title()}: {len(contents.all):,} files and folders, {plans.readable(num_bytes)}")
        setup = _Setup(environment=environment, contents=contents, options=options, say=say, folder=Path(folder))
        with ThreadPoolExecutor(max_workers=MAX_AT_ONCE) as threads:
            futures = [threads.submit(setup.outcome, host) for host in hosts]
            try:
                wait(futures)
            except BaseException:
                setup.stop()
                raise
        outcomes = [future.result() for future in futures]
        # Hosts that share the folder with each other find it done, once the first of them has it.
        return [setup.outcome(outcome.host) if outcome.is_busy else outcome for outcome in outcomes]


@contextlib.contextmanager
def _alone(environment: Environment, options: Options) -> Iterator[None]:
    """Two at once would take each other's half-made environments for left-overs."""
    descriptor = os.open(environment.prefix, os.O_RDONLY | os.O_DIRECTORY)
    try:
        if not options.dry_run:
            try:
                fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:
                raise LaunchError(f"another setup is sending {environment.prefix}: wait for it to end") from None
        yield
    finally:
        os.close(descriptor)


@dataclass(frozen=True, kw_only=True)
class _Answer:
    """What a command on a host gave."""

    status: int
    output: bytes
    errors: str


class _BusyError(LaunchError):
    """Somebody else is writing a host's environment."""


class _Setup:
    """One call of `set_up`: what its threads share."""

    def __init__(
        self, *, environment: Environment, contents: Contents, options: Options, say: Say, folder: Path
    ) -> None:
        self._environment, self._contents, self._options, self._folder = environment, contents, options, folder
        self._say = say
        self._lock, self._running, self._is_stopped = threading.Lock(), set[subprocess.Popen[bytes]](), False

    def stop(self) -> None:
        """End all commands: hosts notice that the stream ends early, and remove what they got."""
        with self._lock:
            self._is_stopped = True
            for process in self._running:
                process.terminate()

    def outcome(self, host: Host) -> Outcome:
        """Set one host up, whatever happens to the others."""
        try:
            return Outcome(host=host, done=self._set_up(host))
        except _BusyError as error:
            return Outcome(host=host, problem=str(error), is_busy=True)
        except (FleetuneError, OSError) as error:  # a full disk of this machine, say
            return Outcome(host=host, problem=str(error))

    # ---- the steps of a host

    def _set_up(self, host: Host) -> str:
        plan = HostPlan(host=host, action="here") if host.is_here else self._planned(host)
        if self._options.dry_run:
            self._say("\n".join(plans.lines(
                plan, self._environment, self._contents,
                with_kernels=self._options.with_kernels, connect_timeout_s=self._options.connect_timeout_s,
            )))  # fmt: skip
            return plan.title()
        began = time.monotonic()
        if plan.has_to_send:
            self._say(f"{host.name}: sending ({plan.title()})")
            self._send(plan)
            done = f"{plan.title()} in {time.monotonic() - began:.1f} s"
        else:
            if plan.action != "here":
                self._check(host)
            done = plan.title()
        if self._options.with_kernels:
            done += f"; {self._compiled_kernels(host)}"
        self._say(f"{host.name}: {done}")
        return done

    def _planned(self, host: Host) -> HostPlan:
        facts = self._facts(host)
        listing = self._listing(host) if facts.found == "ours" and "find" not in facts.missing else None
        return plans.plan_host(
            host, self._environment, self._contents, facts, listing, force=self._options.force
        )  # fmt: skip

    def _facts(self, host: Host) -> HostFacts:
        answer = self._ask(host, probe_command(self._environment))
        try:
            return parse_facts(answer.output.decode("utf-8", "surrogateescape"))
        except ValueError as error:
            raise LaunchError(f"no answer that can be used: {error} {_last_line(answer.errors)}".strip()) from None

    def _listing(self, host: Host) -> Listing:
        command = ["sh", "-c", plans.LIST, "sh", str(self._environment.prefix), FORMAT]
        answer = self._ask(host, command)
        if answer.status != 0:
            raise LaunchError(f"its {self._environment.prefix} cannot be listed: {_last_line(answer.errors)}")
        return parse_listing(answer.output)

    def _check(self, host: Host) -> None:
        answer = self._ask(host, plans.check_command(self._environment))
        found = _last_line(answer.output.decode(errors="replace"))  # a login script may have spoken before
        if answer.status != 0 or found != self._environment.versions:
            why = self._not_as_expected(found or answer.errors)
            raise LaunchError(f"{self._environment.prefix} is there but does not work: {why}")

    def _compiled_kernels(self, host: Host) -> str:
        answer = self._ask(host, plans.kernels_command(self._environment), timeout_s=20 * 60)
        if answer.status != 0:
            raise LaunchError(
                f"the environment is there, but its kernels are not compiled: {_error_line(answer.errors)}; "
                "mend that and repeat the command, or train without them, which is slower (--no_kernels)"
            )
        took = [line.split(maxsplit=1)[1] for line in answer.output.decode().splitlines() if line.startswith("time ")]
        return f"kernels compiled in {took[0]}" if took and took[0][0].isdigit() else "kernels were there"

    def _send(self, plan: HostPlan) -> None:
        """Stream what is missing; the host puts it in place when it is whole and works."""
        lists = (self._folder / f"{plan.host.name}.files", self._folder / f"{plan.host.name}.staged")
        for path, names in zip(lists, plans.file_lists(plan, self._contents), strict=True):
            path.write_bytes(names)
        command = plans.on_host(
            plan.host, plans.receive_command(plan, self._environment), self._options.connect_timeout_s
        )  # fmt: skip
        with tempfile.TemporaryFile() as tar_says, tempfile.TemporaryFile() as host_says:
            with (
                self._started(
                    plans.tar_command(self._contents, lists), stdin=subprocess.DEVNULL, stderr=tar_says
                ) as tar,
                self._started(command, stdin=subprocess.PIPE, stderr=host_says) as there,
            ):
                self._pump(plan, tar, there)
                assert there.stdout is not None
                output = there.stdout.read()
            if self._is_stopped:
                raise LaunchError("interrupted")
            if tar.returncode > 0:
                raise LaunchError(f"this environment changed while it was sent ({_last_line(_tail(tar_says))}): repeat")
            if there.returncode == plans.BUSY:
                place = f"{self._environment.prefix}.fleetune-new"
                raise _BusyError(f"{place} is there: another setup is writing it; if none is running, remove it")
            if there.returncode != 0:
                said = output.decode(errors="replace")
                raise LaunchError(self._why_not_received(plan, there.returncode, _tail(host_says), said))

    def _pump(self, plan: HostPlan, tar: subprocess.Popen[bytes], there: subprocess.Popen[bytes]) -> None:
        """From tar to the host, telling now and then how far it is."""
        assert tar.stdout is not None
        assert there.stdin is not None
        began = told = time.monotonic()
        sent, held = 0, b""
        try:
            there.stdin.write(plans.removals(plan))
            while chunk := tar.stdout.read(CHUNK_BYTES):
                held += chunk
                there.stdin.write(held[:-HELD_BYTES])
                held = held[-HELD_BYTES:]
                sent += len(chunk)
                if (now := time.monotonic()) - told >= PROGRESS_S:
                    told = now
                    rate = sent / 1e6 / (now - began)
                    self._say(f"{plan.host.name}: {sent / 1e6:,.0f} of {plan.num_bytes / 1e6:,.0f} MB, {rate:.0f} MB/s")
            if tar.wait() == 0:
                there.stdin.write(held)
            there.stdin.close()
        except BrokenPipeError:  # the host ended first, and says why
            tar.terminate()
            with contextlib.suppress(BrokenPipeError):
                there.stdin.close()

    def _why_not_received(self, plan: HostPlan, status: int, errors: str, output: str) -> str:
        prefix = self._environment.prefix
        if status == FAILED:
            reason, remedy = why_ssh_failed(errors, plan.host.target)
            return f"{reason}: {remedy}"
        if "No space left" in errors or "Disk quota" in errors:
            size = plans.readable(plan.num_bytes)
            return f"its disk is full: what had arrived is removed, {prefix} is as it was; free {size} and repeat"
        if status == 5:
            return f"what was sent does not work there, and is removed: {self._not_as_expected(output)}"
        return f"{prefix} could not be made there, and is as it was: {_last_line(errors) or f'status {status}'}"

    def _not_as_expected(self, said: str) -> str:
        names = ", ".join(("Python", *self._environment.modules))
        return f"importing says {_last_line(said)!r}, {self._environment.versions!r} is expected ({names})"

    # ---- commands

    def _ask(self, host: Host, command: list[str], timeout_s: float = ANSWER_S) -> _Answer:
        """Run a command on a host to its end.

        Raises:
            LaunchError: It was not reached, or did not answer in time.
        """
        line = plans.on_host(host, command, self._options.connect_timeout_s)
        with self._started(line, stdin=subprocess.DEVNULL, stderr=subprocess.PIPE) as process:
            try:
                output, errors = process.communicate(timeout=timeout_s)
            except subprocess.TimeoutExpired:
                process.kill()
                process.communicate()
                raise LaunchError(f"no answer within {timeout_s:.0f} s to {command[0]} {command[1]}") from None
        if self._is_stopped:
            raise LaunchError("interrupted")
        said = errors.decode(errors="replace")
        if process.returncode == FAILED and not host.is_here:
            reason, remedy = why_ssh_failed(said, host.target)
            raise LaunchError(f"{reason}: {remedy}")
        return _Answer(status=process.returncode, output=output, errors=said)

    @contextlib.contextmanager
    def _started(self, command: list[str], **streams: object) -> Iterator[subprocess.Popen[bytes]]:
        """A process that `stop` ends, and that has ended when the block is left."""
        with self._lock:
            if self._is_stopped:
                raise LaunchError("interrupted")
            try:
                process = subprocess.Popen(command, stdout=subprocess.PIPE, **streams)  # type: ignore[call-overload]
            except FileNotFoundError:
                raise LaunchError(f"this machine has no program `{command[0]}`: install it") from None
            self._running.add(process)
        try:
            with process:
                yield process
        finally:
            with self._lock:
                self._running.discard(process)


def _tail(stream: object) -> str:
    """The last of what was written to a temporary file: a full disk makes tar complain of every file."""
    size = stream.seek(0, os.SEEK_END)  # type: ignore[attr-defined]
    stream.seek(max(0, size - 8192))  # type: ignore[attr-defined]
    text: bytes = stream.read()  # type: ignore[attr-defined]
    return text.decode(errors="replace")


def _last_line(text: str) -> str:
    return (text.strip().splitlines() or [""])[-1].strip()


def _error_line(text: str) -> str:
    """The line of fleetune's own message, which may go on with a compiler's; else the last, as of a traceback."""
    told = text.strip().splitlines() or ["no message"]
    return next((line.removeprefix("error: ") for line in told if line.startswith("error: ")), told[-1])
