"""Which arithmetic a model computes in: float32, or bfloat16 where it is wanted and worth it."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from fleetune.comm.ranks import Ranks
from fleetune.config import RunConfig
from fleetune.hardware.host import read_host
from fleetune.kernels.contest import least_seconds
from fleetune.kernels.linear import product
from fleetune.model.load import Classifier

BF16_UNITS = ("amx_bf16", "avx512_bf16", "bf16")
"""Instruction sets that multiply bfloat16 numbers, as /proc/cpuinfo spells them; the last one is Arm's."""
_PROBE_S = 0.4
"""Time that the probe gives to each of the two, at least one round of products."""


@dataclass(frozen=True, kw_only=True)
class Precision:
    """What was decided."""

    dtype: str
    """float32 or bfloat16."""
    notices: tuple[str, ...] = ()


def agreed_precision(
    config: RunConfig, classifier: Classifier, ranks: Ranks, *, earlier: str | None = None
) -> Precision:
    """Decide on the first rank, for all, and set the model up accordingly.

    Args:
        config: Has the wish.
        classifier: The model.
        ranks: All of the run.
        earlier: What the run that is gone on with computed in, which `auto` keeps.
    """
    told: dict[str, Any] = ranks.on_first(
        lambda: vars(choose_precision(config.bf16, read_host().isa, classifier, earlier=earlier))
    )
    precision = Precision(dtype=told["dtype"], notices=tuple(told["notices"]))
    classifier.module.compute_in(torch.bfloat16 if precision.dtype == "bfloat16" else torch.float32)
    return precision


def choose_precision(
    wish: str, isa: tuple[str, ...], classifier: Classifier, *, earlier: str | None = None
) -> Precision:
    """Float32 or bfloat16.

    Args:
        wish: The setting: false, true or auto.
        isa: Instruction sets of the CPU.
        classifier: Whose layers the probe measures.
        earlier: See `agreed_precision`.
    """
    units = [unit for unit in BF16_UNITS if unit in isa]
    if wish == "true" and not units:
        return Precision(dtype="bfloat16", notices=(
            f"--bf16 true: this CPU has no bfloat16 units ({', '.join(BF16_UNITS)}): it is emulated, and slower than "
            "float32",
        ))  # fmt: skip
    if wish == "true":
        return Precision(dtype="bfloat16")
    if wish == "false":
        return Precision(dtype="float32")
    if earlier is not None:
        return Precision(dtype=earlier, notices=(f"--bf16 auto: {earlier}, as in the checkpoint",))
    if not units:
        return Precision(dtype="float32", notices=("--bf16 auto: float32, the CPU has no bfloat16 units",))
    times = dict(zip(("float32", "bfloat16"), probe(classifier.hugging_face), strict=True))
    chosen, other = sorted(times, key=lambda dtype: times[dtype])
    told = f"{1e3 * times[chosen]:.2f} ms, {1e3 * times[other]:.2f} ms in {other}"
    return Precision(dtype=chosen, notices=(f"--bf16 auto: {chosen}, in which the layers' products take {told}",))


def probe(model: nn.Module, num_tokens: int = 1024) -> tuple[float, float]:
    """How long the products of a layer take, forward and backward.

    Args:
        model: Its linear layers give the shapes.
        num_tokens: Rows of the products.

    Returns:
        Seconds in float32, and in bfloat16.
    """
    shapes = sorted({tuple(m.weight.shape) for m in model.modules() if isinstance(m, nn.Linear)}, reverse=True)[:4]
    operands = [(torch.randn(num_tokens, i), torch.randn(o, i), torch.randn(num_tokens, o)) for o, i in shapes]

    def rounds_in(dtype: torch.dtype) -> Callable[[], None]:
        inputs = [(x.to(dtype), weight, dy.to(dtype)) for x, weight, dy in operands]

        def work() -> None:
            for x, weight, dy in inputs:
                _round(x, weight, dy)

        return work

    single, half = least_seconds([rounds_in(torch.float32), rounds_in(torch.bfloat16)], 2 * _PROBE_S)
    return single, half


def _round(x_RI: Tensor, weight_OI: Tensor, dy_RO: Tensor) -> None:
    """The three products of a linear layer, with the rounding of its float32 weights."""
    weight_OI = weight_OI.to(x_RI.dtype)
    product(x_RI, weight_OI.t())
    product(dy_RO, weight_OI)
    product(dy_RO.t(), x_RI)
