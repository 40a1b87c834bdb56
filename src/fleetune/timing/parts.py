"""The parts that a run's time is divided into: what they are called, and what is in them.

A rank's wall time is the sum of all parts of all groups. `docs/time.md` says what to do about each.
"""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, kw_only=True)
class Part:
    """A part of the time."""

    name: str
    """In records and traces."""
    label: str
    """For people."""
    meaning: str


def _part(name: str, label: str, meaning: str) -> Part:
    return Part(name=name, label=label, meaning=meaning)


PARTS: dict[str, tuple[Part, ...]] = {
    "start_up": (
        _part("imports", "imports", "the interpreter, our modules, PyTorch and transformers"),
        _part("meeting", "meeting", "waiting for the other ranks to come, and joining them"),
        _part("compiling", "kernels", "compiling the kernels, or loading them"),
        _part("model", "model", "configuration, tokenizer and weights: sent to hosts that lack them, and read"),
        _part("tokens", "tokens", "reading the data and tokenising them, or finding that done in the cache"),
        _part("setup", "setup", "probes of arithmetic and link, the plan, memory for gradients, a checkpoint"),
        _part("trackers", "trackers", "starting what --report_to names"),
    ),
    "steps": (
        _part("products", "matrix products", "the linear layers of the encoder, forward and backward"),
        _part("attention", "attention", "scores, softmax and mixing of every sequence, forward and backward"),
        _part("kernels", "other kernels", "embeddings, norms, activations and dropout, sums for biases"),
        _part("framework", "PyTorch and Python", "forward and backward between our kernels: autograd, head, loss"),
        _part("optimizer", "optimizer", "the norm of the gradients, and AdamW"),
        _part("communication", "exposed communication", "packing gradients, and waiting until they have arrived"),
        _part("waiting", "waiting for the slowest rank", "what the slowest rank of a step took longer than this one"),
        _part("data", "data", "choosing the examples of a step, and laying them out"),
        _part("rest", "rest", "the loop itself, the progress bar, the log"),
    ),
    "around": (
        _part("evaluation", "evaluation", "predicting the validation splits during and after training, and metrics"),
        _part("checkpoints", "checkpoints", "writing them, or waiting for the first rank to do so"),
        _part("prediction", "prediction", "predicting the test splits"),
        _part("output", "output", "writing the model, results and predictions"),
        _part("other", "other", "whatever is between these"),
    ),
}  # fmt: skip
"""Group -> its parts, in the order in which they are shown."""

HIDDEN = _part("hidden_communication", "hidden communication",
               "the thread that exchanges gradients works while the rank computes: beside the other parts")  # fmt: skip


def names_of(group: str) -> tuple[str, ...]:
    """The names of a group's parts."""
    return tuple(part.name for part in PARTS[group])
