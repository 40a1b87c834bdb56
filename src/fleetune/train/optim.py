"""AdamW over a model's parameters, and its state as named tensors."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from fleetune.config import RunConfig

_NO_DECAY = (nn.LayerNorm, nn.RMSNorm)


def make_optimizer(model: nn.Module, config: RunConfig) -> torch.optim.AdamW:
    """AdamW (Loshchilov and Hutter 2019) in its fused form, with a state for every trainable parameter.

    Weight decay spares biases and norms, as in the published recipes. The state exists from the start, so that
    saving and restoring see the same tensors at any step.
    """
    spared = {id(p) for m in model.modules() if isinstance(m, _NO_DECAY) for p in m.parameters(recurse=False)}
    decayed: list[nn.Parameter] = []
    plain: list[nn.Parameter] = []
    for name, parameter in model.named_parameters():
        if parameter.requires_grad:
            (plain if name.endswith("bias") or id(parameter) in spared else decayed).append(parameter)
    groups = [{"params": decayed, "weight_decay": config.weight_decay}, {"params": plain, "weight_decay": 0.0}]
    optimizer = torch.optim.AdamW(
        [g for g in groups if g["params"]],
        lr=config.learning_rate,
        betas=(config.adam_beta1, config.adam_beta2),
        eps=config.adam_epsilon,
        fused=True,
    )
    for parameter in decayed + plain:
        optimizer.state[parameter] = {
            "step": torch.zeros((), dtype=torch.float32),
            "exp_avg": torch.zeros_like(parameter),
            "exp_avg_sq": torch.zeros_like(parameter),
        }
    return optimizer


def update(optimizer: torch.optim.AdamW, learning_rate: float, max_grad_norm: float) -> Tensor:
    """Clip the gradients to a global norm, take one step, and clear them.

    Returns:
        The norm before clipping, a scalar.
    """
    parameters = [p for group in optimizer.param_groups for p in group["params"]]
    norm = nn.utils.clip_grad_norm_(parameters, max_grad_norm if max_grad_norm > 0 else float("inf"))
    for group in optimizer.param_groups:
        group["lr"] = learning_rate
    optimizer.step()
    optimizer.zero_grad(set_to_none=True)
    return norm


def state_tensors(model: nn.Module, optimizer: torch.optim.AdamW) -> dict[str, Tensor]:
    """The optimizer's own tensors, not copies, under `<parameter>/<what>`; writing into them restores a state."""
    return {
        f"{name}/{what}": value
        for name, parameter in model.named_parameters()
        if parameter.requires_grad
        for what, value in optimizer.state[parameter].items()
    }
