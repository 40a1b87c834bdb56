"""The matrix products that a training step needs, timed alone: the roofline that fleetune's step is held against.

Counted is every linear layer of the encoder with its three products: forward, gradient of the input, gradient of the
weight. Attention's own small products and the head are not counted.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from numpy.typing import NDArray
from torch import Tensor

from benchmarks.arms import Arm, Laps, Turn
from fleetune.data.batches import Indices
from fleetune.kernels.linear import product

PRODUCTS: Mapping[str, Callable[[Tensor, Tensor], Tensor]] = {
    "matrix products": product,
    "matrix products by torch": torch.mm,
}
"""Name of an arm -> what multiplies: the function that fleetune's own step goes through, and torch's. A roofline of
fleetune's products alone would look the better the slower they are."""


@dataclass(frozen=True, kw_only=True)
class LinearShape:
    """One linear layer at work on a batch: (M, N, K) = (rows, outputs, inputs)."""

    rows: int
    outputs: int
    inputs: int

    @property
    def num_flop(self) -> int:
        """Floating-point operations of its three products."""
        return 3 * 2 * self.rows * self.outputs * self.inputs


@dataclass(frozen=True, kw_only=True)
class EncoderShape:
    """The widths of a BERT-like encoder."""

    num_layers: int
    hidden: int
    feed_forward: int
    head_reads_all_tokens: bool = False

    @classmethod
    def of(cls, model_config: Any, *, head_reads_all_tokens: bool = False) -> EncoderShape:
        """From a Hugging Face config with BERT's names."""
        return cls(
            num_layers=model_config.num_hidden_layers,
            hidden=model_config.hidden_size,
            feed_forward=model_config.intermediate_size,
            head_reads_all_tokens=head_reads_all_tokens,
        )

    def linears(self, tokens: int, sequences: int) -> list[LinearShape]:
        """Every linear layer of the encoder, in the order of the forward pass.

        All layers but the last work on all tokens. Where the head reads first tokens only, the last layer's query,
        output and feed-forward are needed for these, and its keys and values for none: scores and values of one query
        a sequence are had from the layer's input through the query's side.
        """
        qkv = LinearShape(rows=tokens, outputs=3 * self.hidden, inputs=self.hidden)
        if self.head_reads_all_tokens:
            return [*(qkv, *self._after_attention(tokens)) * self.num_layers]
        query = LinearShape(rows=sequences, outputs=self.hidden, inputs=self.hidden)
        inner = (qkv, *self._after_attention(tokens)) * (self.num_layers - 1)
        return [*inner, query, *self._after_attention(sequences)]

    def _after_attention(self, rows: int) -> list[LinearShape]:
        return [
            LinearShape(rows=rows, outputs=self.hidden, inputs=self.hidden),
            LinearShape(rows=rows, outputs=self.feed_forward, inputs=self.hidden),
            LinearShape(rows=rows, outputs=self.hidden, inputs=self.feed_forward),
        ]


class MatrixProducts:
    """The products of given linear layers, with weights of their own, as in a model.

    Inputs and gradients are parts of two buffers that all layers share: what they hold is of no use afterwards.

    Args:
        widest: The layers at their most rows, in the order of the forward pass.
        product: Multiplies two matrices.
    """

    def __init__(self, widest: Sequence[LinearShape], product: Callable[[Tensor, Tensor], Tensor]) -> None:
        self._product = product
        self._weights = [torch.randn(shape.outputs, shape.inputs) for shape in widest]
        self._inputs = torch.randn(max(shape.rows * shape.inputs for shape in widest))
        self._gradients = torch.randn(max(shape.rows * shape.outputs for shape in widest))

    def run(self, shapes: Sequence[LinearShape]) -> None:
        """Forward, then backward in the opposite order; the shapes are of the same layers with as many rows or less."""
        layers = list(zip(shapes, self._weights, strict=True))
        for shape, weight in layers:
            self._product(self._input(shape), weight.t())
        for shape, weight in reversed(layers):
            gradient = self._gradients[: shape.rows * shape.outputs].view(shape.rows, shape.outputs)
            self._product(gradient, weight)
            self._product(gradient.t(), self._input(shape))

    def _input(self, shape: LinearShape) -> Tensor:
        return self._inputs[: shape.rows * shape.inputs].view(shape.rows, shape.inputs)


class ProductsArm(Arm):
    """Takes as its turn the matrix products of the batches' updates and nothing else; it trains nothing.

    Args:
        name: One of `PRODUCTS`.
        encoder: Widths of the model that the other arms train.
        lengths: Tokens of every training example.
        batch_size: Most examples of a batch.
    """

    def __init__(self, name: str, encoder: EncoderShape, lengths: NDArray[Any], batch_size: int) -> None:
        self.name, self._encoder, self._lengths = name, encoder, lengths
        widest = encoder.linears(batch_size * int(lengths.max()), batch_size)
        self._products = MatrixProducts(widest, PRODUCTS[name])
        self._laps = Laps()

    def take(self, batches: Sequence[Indices]) -> Turn:
        shapes = [self._encoder.linears(self._tokens(examples), len(examples)) for examples in batches]
        self._laps.start()
        for linears in shapes:
            self._products.run(linears)
            self._laps.lap()
        return Turn(
            seconds=tuple(self._laps.seconds),
            computed_tokens=tuple(map(self._tokens, batches)),
            mean_loss=None,
            num_flop=tuple(sum(linear.num_flop for linear in linears) for linears in shapes),
        )

    def _tokens(self, examples: Indices) -> int:
        return int(self._lengths[examples].sum())
