"""The parts of an update: which operation belongs where, and that they add up."""

from __future__ import annotations

import pytest

from benchmarks.breakdown import (
    ATTENTION,
    OPTIMIZER,
    OTHER,
    PRODUCTS,
    REST,
    OperationTime,
    break_down,
    breakdown_table,
    category_of,
)


@pytest.mark.parametrize(
    ("operation", "category"),
    [
        ("aten::mm", PRODUCTS),
        ("aten::addmm", PRODUCTS),
        ("aten::linear", PRODUCTS),
        ("fleetune::product", PRODUCTS),
        ("fleetune::product_transposed", PRODUCTS),
        ("fleetune::attention_forward", ATTENTION),
        ("aten::bmm", ATTENTION),
        ("aten::_scaled_dot_product_flash_attention_for_cpu", ATTENTION),
        ("aten::native_layer_norm", OTHER),
        ("aten::gelu_backward", OTHER),
        ("aten::_softmax", OTHER),
        ("aten::mul", OTHER),
        ("aten::embedding_dense_backward", OTHER),
        ("fleetune::dropout_add_norm", OTHER),
        ("fleetune::adamw", OPTIMIZER),
        ("fleetune::squared_norm", OPTIMIZER),
        ("aten::_fused_adamw_", OPTIMIZER),
        ("aten::_foreach_norm", OPTIMIZER),
        ("autograd::engine::evaluate_function: MmBackward0", REST),
        ("AddmmBackward0", REST),
        ("Optimizer.step#AdamW.step", REST),
    ],
)
def test_category_of_an_operation(operation: str, category: str) -> None:
    assert category_of(operation) == category


def operation(name: str, calls: int, self_s: float) -> OperationTime:
    return OperationTime(name=name, calls=calls, self_s=self_s)


def test_parts_add_up_to_the_wall_time() -> None:
    operations = [
        operation("aten::mm", 20, 0.5),
        operation("aten::addmm", 10, 0.25),
        operation("fleetune::attention", 2, 0.25),
        operation("aten::gelu", 4, 0.125),
        operation("MmBackward0", 20, 0.375),
    ]
    found = break_down(2.0, 2, operations)
    assert found.parts_ms == {PRODUCTS: 375.0, ATTENTION: 125.0, OPTIMIZER: 0.0, OTHER: 62.5, REST: 437.5}
    assert sum(found.parts_ms.values()) == found.update_ms == 1000.0
    assert found.largest[0] == {"name": "aten::mm", "part": PRODUCTS, "calls": 10.0, "ms": 250.0}
    lines = breakdown_table(found).splitlines()
    assert lines[2] == "| matrix products   | 375.0   | 37.5% |"
    assert lines[-1] == "| all               | 1,000.0 |       |"


def test_operations_of_several_threads_are_refused() -> None:
    with pytest.raises(ValueError, match="more than one thread's"):
        break_down(1.0, 1, [operation("aten::mm", 1, 1.5)])
