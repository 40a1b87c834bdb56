"""The roofline's products: their shapes by hand, and that each is done."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from torch import Tensor

from benchmarks.products import PRODUCTS, EncoderShape, LinearShape, MatrixProducts, ProductsArm

TINY = EncoderShape(num_layers=2, hidden=4, feed_forward=10)


def test_layers_of_an_encoder() -> None:
    shapes = [(s.rows, s.outputs, s.inputs) for s in TINY.linears(tokens=7, sequences=3)]
    assert shapes == [
        *[(7, 12, 4), (7, 4, 4), (7, 10, 4), (7, 4, 10)],
        *[(3, 4, 4), (3, 4, 4), (3, 10, 4), (3, 4, 10)],  # no product of all tokens in the last layer
    ]


def test_every_layer_but_the_last_works_on_all_tokens() -> None:
    deep = EncoderShape(num_layers=6, hidden=4, feed_forward=10).linears(tokens=7, sequences=3)
    assert [shape.rows for shape in deep] == [7] * 20 + [3] * 4


def test_a_head_that_reads_all_tokens_needs_the_last_layer_whole() -> None:
    shape = EncoderShape(num_layers=2, hidden=4, feed_forward=10, head_reads_all_tokens=True)
    layer = [(7, 12, 4), (7, 4, 4), (7, 10, 4), (7, 4, 10)]
    assert [(s.rows, s.outputs, s.inputs) for s in shape.linears(tokens=7, sequences=3)] == layer * 2


def test_widths_come_from_the_config() -> None:
    from transformers import BertConfig

    config = BertConfig(num_hidden_layers=3, hidden_size=8, intermediate_size=20, num_attention_heads=2)
    assert EncoderShape.of(config) == EncoderShape(num_layers=3, hidden=8, feed_forward=20)


def test_operations_of_three_products() -> None:
    assert LinearShape(rows=5, outputs=3, inputs=2).num_flop == 3 * 2 * 5 * 3 * 2


def test_each_layer_has_three_products_and_they_run_backward() -> None:
    seen: list[tuple[tuple[int, ...], tuple[int, ...]]] = []

    def record(a: Tensor, b: Tensor) -> Tensor:
        seen.append((tuple(a.shape), tuple(b.shape)))
        return torch.mm(a, b)

    widest = [LinearShape(rows=9, outputs=3, inputs=2), LinearShape(rows=9, outputs=5, inputs=3)]
    fewer = [LinearShape(rows=7, outputs=3, inputs=2), LinearShape(rows=7, outputs=5, inputs=3)]
    MatrixProducts(widest, record).run(fewer)
    assert seen == [
        *[((7, 2), (2, 3)), ((7, 3), (3, 5))],
        *[((7, 5), (5, 3)), ((5, 7), (7, 3))],
        *[((7, 3), (3, 2)), ((3, 7), (7, 2))],
    ]


def test_a_turn_of_the_arm() -> None:
    lengths = np.array([3, 7, 5, 2], dtype=np.int64)
    turn = ProductsArm("matrix products", TINY, lengths, batch_size=2).take([np.array([0, 1]), np.array([3])])
    assert turn.computed_tokens == (10, 2)
    assert turn.mean_loss is None
    assert turn.num_flop is not None
    assert turn.num_flop[0] == sum(shape.num_flop for shape in TINY.linears(10, 2))
    assert len(turn.seconds) == 2
    assert all(seconds > 0 for seconds in turn.seconds)


@pytest.mark.parametrize("name", PRODUCTS)
def test_what_multiplies_takes_transposed_matrices(name: str) -> None:
    a, b = torch.randn(5, 3), torch.randn(5, 4)
    torch.testing.assert_close(PRODUCTS[name](a.t(), b), a.t() @ b)
