"""Results that guides have published for the same recipe: quoted, from other hardware, never measured here."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, kw_only=True)
class Quoted:
    """One size of a published result."""

    task: str
    model: str
    hosts: int
    wall_s: float
    """As published: wall time of the run."""
    speedup: float
    setting: str
    """Hardware and arithmetic."""


_C6I = "c6i.16xlarge, float32, padded to 128, 25 Gbit/s"
_SPR = "Sapphire Rapids, bfloat16"
_MINUTE, _HOUR = 60.0, 3600.0

QUOTED = (
    Quoted(task="mrpc", model="BERT, 3 epochs", hosts=1, wall_s=7 * _MINUTE + 46, speedup=1.0, setting=_C6I),
    Quoted(task="mrpc", model="BERT, 3 epochs", hosts=2, wall_s=4 * _MINUTE + 39, speedup=1.67, setting=_C6I),
    Quoted(task="mrpc", model="BERT, 3 epochs", hosts=4, wall_s=2 * _MINUTE + 36, speedup=2.99, setting=_C6I),
    Quoted(task="qqp", model="BERT, 3 epochs", hosts=1, wall_s=11 * _HOUR + 22 * _MINUTE, speedup=1.0, setting=_C6I),
    Quoted(task="qqp", model="BERT, 3 epochs", hosts=2, wall_s=6 * _HOUR + 38 * _MINUTE, speedup=1.71, setting=_C6I),
    Quoted(task="qqp", model="BERT, 3 epochs", hosts=4, wall_s=3 * _HOUR + 51 * _MINUTE, speedup=2.95, setting=_C6I),
    Quoted(task="squad", model="DistilBERT, 1 epoch", hosts=1, wall_s=26 * _MINUTE, speedup=1.0, setting=_SPR),
    Quoted(task="squad", model="DistilBERT, 1 epoch", hosts=4, wall_s=7 * _MINUTE + 30, speedup=3.47, setting=_SPR),
)
"""Times and speed-ups as their guides tell them, for Intel Xeon servers, PyTorch DDP, oneCCL and IPEX."""
SOURCE = (
    "Quoted from guides published for Intel Xeon servers with PyTorch DDP, oneCCL and IPEX: other hardware and other "
    "data loading, each measured once; to be read beside this table, not as its baseline."
)
