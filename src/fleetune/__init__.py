"""Fine-tune transformer encoders fast on CPUs, one machine or a cluster."""

from __future__ import annotations

from typing import TYPE_CHECKING

__version__ = "0.1.0"
__all__ = ["RunConfig", "__version__", "finetune", "optimize"]

if TYPE_CHECKING:
    from fleetune.config import RunConfig
    from fleetune.model.optimize import optimize
    from fleetune.train.program import finetune


def __getattr__(name: str) -> object:
    """Import on first use, so that `import fleetune` and `fleetune --help` load no torch."""
    if name == "RunConfig":
        from fleetune.config import RunConfig

        return RunConfig
    if name == "finetune":
        from fleetune.train.program import finetune

        return finetune
    if name == "optimize":
        from fleetune.model.optimize import optimize

        return optimize
    raise AttributeError(f"module 'fleetune' has no attribute {name!r}")
