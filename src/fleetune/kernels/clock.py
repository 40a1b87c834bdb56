"""How long this process has computed in its compiled operations, by kind; always counted (`csrc/clock.h`)."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from fleetune.kernels.library import load_kernels
from fleetune.timing.clock import Span

KINDS = ("products", "attention", "kernels")
"""As in `csrc/clock.h`; the names are those of `timing.parts`."""


@dataclass(frozen=True, kw_only=True)
class KernelTimes:
    """Since the process began; how long each kind ran, and how often it was come to."""

    ns: dict[str, int]
    calls: dict[str, int]


def kernel_times() -> KernelTimes:
    """What has been counted up to now; nothing where the kernels are plain PyTorch."""
    if not load_kernels().compiled:
        return KernelTimes(ns=dict.fromkeys(KINDS, 0), calls=dict.fromkeys(KINDS, 0))
    ns, calls = torch.ops.fleetune.kernel_clock().tolist()
    return KernelTimes(ns=dict(zip(KINDS, ns, strict=True)), calls=dict(zip(KINDS, calls, strict=True)))


def kernel_ns() -> dict[str, int]:
    """Nanoseconds of every kind up to now."""
    return kernel_times().ns


def keep_spans(wanted: bool) -> None:
    """From now on, keep every stay in a kind, or no longer."""
    if load_kernels().compiled:
        torch.ops.fleetune.keep_spans(wanted)


def stay_ns(count: int = 1_000_000) -> float:
    """What it costs to take the time of one operation, ns; a mean over so many. It is counted as other kernels'."""
    return float(torch.ops.fleetune.stay_ns(count))


def take_spans() -> list[Span]:
    """The stays that were kept, in the order in which they ended; they are forgotten then."""
    if not load_kernels().compiled:
        return []
    return [(KINDS[kind], begin, end) for kind, begin, end in torch.ops.fleetune.take_spans().tolist()]
