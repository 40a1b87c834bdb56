"""`fleetune COMMAND`: picks the command, and turns every error into a message and an exit status."""

from __future__ import annotations

import importlib
import os
import sys
from collections.abc import Sequence

from fleetune.config.values import nearest
from fleetune.errors import FleetuneError, PeerError

COMMANDS = {
    "train": "fine-tune an encoder on a task or on your own files",
    "evaluate": "metrics of a finished run, or of any classifier, on labelled data",
    "predict": "predictions for a file of texts",
    "export": "a finished model as a file for onnxruntime, OpenVINO or torch",
    "launch": "run any training script as ranks, here or on several hosts",
    "plan": "what a run would make of this host: ranks, threads, cores, memory, and why",
    "doctor": "what would go wrong on this machine, or on the hosts of a cluster, and how to mend it",
    "bench": "measure one job on several sizes: speed-up, accuracy, bytes and money, with their spread",
    "report": "tables and a page from the records of runs, and whether they are worse than a baseline",
    "env": "facts of this host, for a bug report",
    "demo": "fine-tune the built-in example from start to finish",
    "setup": "copy this Python environment to the hosts of a cluster, and compile the kernels there",
    "build-kernels": "compile ahead what the first run compiles otherwise",
}
"""Command -> what it does; each lives in a module of its name, with _ for -, imported when it is called."""


def main(arguments: Sequence[str] | None = None) -> None:
    """Run a command and exit with its status."""
    words = list(sys.argv[1:] if arguments is None else arguments)
    sys.exit(run(words))


def run(words: list[str]) -> int:
    """Run a command.

    Returns:
        0 when it did what was asked; 2 for settings or data that cannot be used; 1 for another failure; 128 + n when
        signal n ended it.
    """
    if not words or words[0] in ("-h", "--help", "help"):
        print(overview())
        return 0
    if words[0] in ("-V", "--version", "version"):
        from fleetune import __version__

        print(f"fleetune {__version__}")
        return 0
    if words[0] not in COMMANDS:
        print(
            f"fleetune: {words[0]!r} is not a command{nearest(words[0], tuple(COMMANDS))}\n\n{overview()}",
            file=sys.stderr,
        )
        return 2
    return guarded(words[0], words[1:])


def overview() -> str:
    """What `fleetune --help` prints."""
    lines = [
        "usage: fleetune COMMAND [--setting value ...]",
        "",
        "Fine-tune transformer encoders fast on the CPUs you already have.",
        "",
        *(f"  {name:<14} {summary}" for name, summary in COMMANDS.items()),
        "",
        "fleetune COMMAND --help lists its settings.",
    ]
    return "\n".join(lines)


def guarded(command: str, words: list[str]) -> int:
    """Run a command's module, and say in plain words why it ended where it did not end well."""
    try:
        status: int = importlib.import_module(f"fleetune.cli.{command.replace('-', '_')}").run(words)
        return status
    except PeerError as error:
        return error.exit_status
    except FleetuneError as error:
        print(f"error{_rank_words()}: {error}", file=sys.stderr, flush=True)
        return error.exit_status
    except KeyboardInterrupt:
        if not _rank_words():
            print("\ninterrupted: nothing more was written", file=sys.stderr, flush=True)
        return 130
    except BrokenPipeError:  # the reader of our output went away, as in `fleetune ... | head`
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 141
    except Exception as error:
        if not _is_peer_loss(error):
            raise
        return PeerError.exit_status


def _is_peer_loss(error: Exception) -> bool:
    """Whether an error only says that another rank is gone; ranks have torch loaded when that can happen."""
    if "fleetune.comm.ranks" not in sys.modules:
        return False
    return bool(sys.modules["fleetune.comm.ranks"].is_peer_loss(error))


def _rank_words() -> str:
    """ " on rank 1", where there are several and the first is not the one that speaks."""
    from fleetune.cluster.rank import read_rank

    try:
        info = read_rank(os.environ)
    except FleetuneError:
        return ""
    return f" on rank {info.rank}" if info is not None and info.rank > 0 else ""
