"""`fleetune setup`: the same Python environment on every host, from this one's."""

from __future__ import annotations

from collections.abc import Sequence

from fleetune.cli.arguments import make_parser, parse, tell_notices
from fleetune.cluster.environment.here import read_environment
from fleetune.cluster.environment.send import Options, Outcome, set_up
from fleetune.cluster.remote import CONNECT_TIMEOUT_S
from fleetune.cluster.start import hosts_of
from fleetune.errors import ConfigError, LaunchError

DESCRIPTION = """Copy this Python environment over ssh to the same place on every host, check that it works there, and
compile the kernels. What is there already is not sent again. Hosts need no internet, only the same Python interpreter
and ssh without a password."""

FIELDS = frozenset({"hosts", "hostfile", "timeout_s"})


def run(words: Sequence[str]) -> int:
    """Set the hosts up; one line for each."""
    parser = make_parser("setup", DESCRIPTION, FIELDS)
    for flags, text in (
        (("--dry_run", "--dry-run"), "ask the hosts, print what would be sent and run, and change nothing"),
        (("--force",), "replace an environment that is in the same place and was not made by fleetune setup"),
        (("--no_kernels", "--no-kernels"), "do not compile the kernels; the first run will"),
    ):
        parser.add_argument(*flags, action="store_true", help=text)
    parsed = parse(parser, words, ("dry_run", "force", "no_kernels"))
    tell_notices(parsed)
    options = Options(
        force=parsed.extra.get("force", False),
        with_kernels=not parsed.extra.get("no_kernels", False),
        dry_run=parsed.extra.get("dry_run", False),
        connect_timeout_s=min(parsed.config.timeout_s, CONNECT_TIMEOUT_S),
    )
    if parsed.config.hosts is None and parsed.config.hostfile is None:
        raise ConfigError("on which hosts? Give --hosts node1,node2 or --hostfile FILE")
    hosts = hosts_of(parsed.config)
    environment = read_environment()
    for warning in environment.warnings:
        _say(f"warning: {warning}")
    return _conclude(set_up(hosts, environment, options, _say), options)


def _conclude(outcomes: Sequence[Outcome], options: Options) -> int:
    """Say how it ended.

    Raises:
        LaunchError: Lists the hosts that are not set up, with reason and remedy.
    """
    problems = [f"  {outcome.host.name}: {outcome.problem}" for outcome in outcomes if outcome.problem is not None]
    if problems:
        how = "cannot be" if options.dry_run else "are not"
        raise LaunchError("\n".join([f"{len(problems)} of {len(outcomes)} hosts {how} set up:", *problems]))
    if not options.dry_run:
        _say(f"{len(outcomes)} {'host is' if len(outcomes) == 1 else 'hosts are'} set up")
    return 0


def _say(line: str) -> None:
    print(line, flush=True)
