"""AdamW over a model's parameters, and its state as named tensors."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor, nn

from fleetune.config import RunConfig
from fleetune.kernels.library import raw_ops

_NO_DECAY = (nn.LayerNorm, nn.RMSNorm)


@dataclass(frozen=True, kw_only=True)
class _Entry:
    """A parameter and its moments."""

    name: str
    parameter: nn.Parameter
    decay: float
    rate: float
    """Factor of the learning rate."""
    exp_avg: Tensor
    exp_avg_sq: Tensor

    def seen_rows(self) -> Tensor:
        """Which rows of a table ever had a gradient, bool: those that have moments."""
        return (self.exp_avg != 0).any(dim=1) | (self.exp_avg_sq != 0).any(dim=1)


class AdamW:
    """AdamW (Loshchilov and Hutter 2019) as `torch.optim.AdamW` computes it, with clipping by the global norm.

    Weight decay spares biases and norms, as in the published recipes. A gradient may be sparse by rows, as that of a
    table of words is: rows that never had a gradient have no moments, so that their update is weight decay alone.

    An update is begun once, when the norm of all gradients is known, and applied in as many parts as they arrive in.

    Args:
        model: Its trainable parameters, all float32, are updated.
        config: Learning rate, betas and so on.
        rates: Factors of the learning rate; 1 where a parameter has none.
    """

    def __init__(self, model: nn.Module, config: RunConfig, rates: Mapping[nn.Parameter, float] | None = None) -> None:
        self._betas = config.adam_beta1, config.adam_beta2
        self._eps = config.adam_epsilon
        self._entries = {
            id(p): _Entry(
                name=name,
                parameter=p,
                decay=decay,
                rate=(rates or {}).get(p, 1.0),
                exp_avg=_zeros(p.shape),
                exp_avg_sq=_zeros(p.shape),
            )
            for name, p, decay in _decays(model, config.weight_decay)
        }
        self._step = torch.zeros((), dtype=torch.int64)
        self._seen: dict[str, Tensor] = {}

    def begin(self, learning_rate: float, norm: float, max_grad_norm: float, factor: float = 1.0) -> None:
        """Begin an update: gradients of a greater norm than `max_grad_norm` (0: no limit) are scaled down to it.

        Args:
            learning_rate: Of this update.
            norm: Of all gradients, times the factor.
            max_grad_norm: Greatest norm.
            factor: What gradients are multiplied with first.
        """
        scale = max_grad_norm / (norm + 1e-6) if max_grad_norm > 0 else 1.0  # as torch.nn.utils.clip_grad_norm_
        self._settings = learning_rate, factor * min(scale, 1.0)
        self._step += 1

    @torch.no_grad()
    def apply(self, gradients: Iterable[tuple[nn.Parameter, Tensor]]) -> None:
        """Update some parameters, each once in an update.

        Args:
            gradients: A parameter and its gradient, dense or sparse by rows and coalesced.
        """
        updated = [(self._entries[id(parameter)], grad) for parameter, grad in gradients]
        for group in sorted({(entry.decay, entry.rate) for entry, _ in updated}):
            self._apply_group(*group, [(e, grad) for e, grad in updated if (e.decay, e.rate) == group])

    def state_tensors(self) -> dict[str, Tensor]:
        """The optimizer's own tensors, not copies; writing into them before the first update restores a state."""
        moments = {f"{entry.name}/exp_avg": entry.exp_avg for entry in self._entries.values()}
        squares = {f"{entry.name}/exp_avg_sq": entry.exp_avg_sq for entry in self._entries.values()}
        return {"step": self._step, **moments, **squares}

    def _apply_group(self, decay: float, rate: float, updated: Sequence[tuple[_Entry, Tensor]]) -> None:
        """Update parameters of one weight decay and one factor of the learning rate."""
        learning_rate, scale = self._settings
        settings = learning_rate * rate, *self._betas, self._eps, decay, int(self._step), scale
        dense = [(entry, grad) for entry, grad in updated if not grad.is_sparse]
        if dense:
            entries, grads = zip(*dense, strict=True)
            raw_ops().adamw_([e.parameter for e in entries], list(grads), [e.exp_avg for e in entries],
                             [e.exp_avg_sq for e in entries], *settings)  # fmt: skip
        for entry, grad in updated:
            if grad.is_sparse:
                if entry.name not in self._seen:
                    self._seen[entry.name] = entry.seen_rows()
                raw_ops().adamw_rows_(entry.parameter, grad.indices()[0], grad.values(), entry.exp_avg,
                                      entry.exp_avg_sq, self._seen[entry.name], *settings)  # fmt: skip


def _zeros(shape: torch.Size) -> Tensor:
    """Float32 zeros whose pages take memory when they are first written: those of rows never seen do not."""
    return torch.from_numpy(np.zeros(shape, np.float32))


def _decays(model: nn.Module, weight_decay: float) -> Iterator[tuple[str, nn.Parameter, float]]:
    """The trainable parameters with their weight decay."""
    spared = {id(p) for m in model.modules() if isinstance(m, _NO_DECAY) for p in m.parameters(recurse=False)}
    for name, parameter in model.named_parameters():
        if parameter.requires_grad:
            plain = name.endswith("bias") or id(parameter) in spared
            yield name, parameter, 0.0 if plain else weight_decay
