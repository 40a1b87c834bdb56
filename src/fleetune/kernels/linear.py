"""Linear layers: the matrix products that a step consists of.

The bias is added where the product's tiles are still in registers, and the gradients of weight, bias and input are
computed only where they are wanted. In bfloat16 the products are torch's own (oneDNN's, with the CPU's bfloat16 or AMX
units where it has them), on weights that are rounded for the purpose: the float32 weights stay the master copy.

Shape suffixes: R rows, I input width, O output width.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd import Function
from torch.autograd.function import once_differentiable

from fleetune.kernels.contest import torch_wins
from fleetune.kernels.library import raw_ops


def product(a_MK: Tensor, b_KN: Tensor, bias_N: Tensor | None = None) -> Tensor:
    """a b, and the bias in every row: (M, N), in the type of `a`; any strides. Not known to autograd."""
    by_torch = a_MK.dtype == torch.bfloat16 or torch_wins()
    multiply = raw_ops().product_by_torch if by_torch else raw_ops().product
    result: Tensor = multiply(a_MK, b_KN, bias_N)
    return result


class _Linear(Function):
    """One product for several weights that share their input, where these lie one after the other in memory."""

    @staticmethod
    def forward(ctx: Any, x_RI: Tensor, count: int, *parameters: Tensor | None) -> Tensor:
        weight_OI, bias_O = joined(parameters[:count]), joined(parameters[count:])
        assert weight_OI is not None
        ctx.sizes = [len(weight) for weight in parameters[:count] if weight is not None]
        ctx.save_for_backward(x_RI, weight_OI)
        return product(x_RI, weight_OI.t(), bias_O)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, dy_RO: Tensor) -> tuple[Tensor | None, ...]:
        x_RI, weight_OI = ctx.saved_tensors
        count = len(ctx.sizes)
        wants_x, _, *wants = ctx.needs_input_grad
        dx_RI = product(dy_RO, weight_OI) if wants_x else None
        dweights = _split(product(dy_RO.t(), x_RI).float(), ctx.sizes) if any(wants[:count]) else [None] * count
        dbiases = _split(raw_ops().column_sums(dy_RO), ctx.sizes) if any(wants[count:]) else [None] * count
        grads = [grad if wanted else None for grad, wanted in zip([*dweights, *dbiases], wants, strict=True)]
        return dx_RI, None, *grads


def linear(x_RI: Tensor, *layers: nn.Linear) -> Tensor:
    """The layers' results side by side (R, sum of O), in the type of `x_RI`; one product for all of them."""
    weights, biases = [layer.weight for layer in layers], [layer.bias for layer in layers]
    y_RO: Tensor = _Linear.apply(x_RI, len(layers), *weights, *biases)  # type: ignore[no-untyped-call]
    return y_RO


def _split(grad: Tensor, sizes: Sequence[int]) -> list[Tensor | None]:
    return [grad] if len(sizes) == 1 else list(grad.split(sizes))


def joined(tensors: Sequence[Tensor | None]) -> Tensor | None:
    """Tensors one below the other, without a copy where they lie so already; None if they are all None."""
    present = [x for x in tensors if x is not None]
    if not present:
        return None
    if len(present) < len(tensors):
        raise ValueError("of the layers that share an input, some have a bias and others have none")
    first = present[0]
    if len(present) == 1:
        return first
    if lies_together(present):
        return first.as_strided((sum(len(x) for x in present), *first.shape[1:]), first.stride())
    return torch.cat(present)


def lies_together(tensors: Sequence[Tensor]) -> bool:
    """Whether each tensor begins where the one before it ends, in one piece of memory."""
    storage, at = tensors[0].untyped_storage().data_ptr(), tensors[0].data_ptr()
    for x in tensors:
        if not x.is_contiguous() or x.untyped_storage().data_ptr() != storage or x.data_ptr() != at:
            return False
        at += x.numel() * x.element_size()
    return True


def lay_together(*layers: nn.Linear) -> None:
    """Move the weights, and the biases, of layers that share their input into one piece of memory each.

    The parameters stay the same objects, with the same values. Whoever gives them other memory later (a cast, a copy of
    the model) loses the saving, nothing else.
    """
    for parameters in ([layer.weight for layer in layers], [layer.bias for layer in layers]):
        present = [p for p in parameters if p is not None]
        if len(present) == len(layers) and not lies_together([p.data for p in present]):
            for parameter, part in zip(present, torch.cat([p.data for p in present]).split([len(p) for p in present]),
                                       strict=True):  # fmt: skip
                parameter.data = part
