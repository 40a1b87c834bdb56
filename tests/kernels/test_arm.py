"""The kernels on 64-bit Arm, with NEON and with SVE, where a cross compiler and an emulator are at hand.

Most tests are those of the operators, with an object that calls the emulator in the place of `torch.ops.fleetune`, and
with fewer shapes: an emulated product takes a hundred times as long.
"""

from __future__ import annotations

import functools
import re
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from fleetune.kernels import random
from fleetune.kernels.library import load_kernels
from tests.kernels import arm
from tests.kernels import test_operators as operators
from tests.kernels.test_operators import BF16, BOTH, F32, LENGTHS, SITE, cu, keys_of

pytestmark = pytest.mark.slow
Check = Callable[..., None]

CPUS = {
    "NEON": ("-march=armv8.2-a", "max"),
    "SVE": ("-mcpu=neoverse-v1", "max,sve-max-vq=2"),  # 256 bits, as this core has
}
"""What to compile for, and a CPU of the emulator."""


@dataclass(frozen=True, kw_only=True)
class Target:
    driver: Path
    cpu: str


@pytest.fixture(scope="module", params=CPUS.values(), ids=list(CPUS))
def target(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Target:
    flag, cpu = request.param
    arm.emulator()  # without it, nothing need be compiled
    return Target(driver=arm.compile_driver(tmp_path_factory.mktemp("arm"), [flag]), cpu=cpu)


@pytest.fixture(scope="module")
def ops(target: Target) -> Iterator[arm.Arm]:
    with arm.emulated(target.driver, target.cpu, threads=1) as found:
        yield found


@pytest.fixture(autouse=True)
def _same_draws_every_time() -> None:
    torch.manual_seed(0)


def of_columns(rows: int, width: int, rate: float = 0.1) -> dict[str, Any]:
    return {"num_rows": rows, "width": width, "rate": rate}


OF_BOTH_TYPES: dict[str, Check] = {
    "attention": functools.partial(operators.test_attention, head_width=7, window=0, rate=0.1),
    "attention in a window": functools.partial(operators.test_attention, head_width=20, window=16, rate=0.5),
    "attention of first tokens": functools.partial(
        operators.test_attention_of_the_first_tokens_only, num_heads=3, rate=0.0
    ),
    "attention with a bias": functools.partial(operators.test_attention_with_a_bias, head_width=7, window=0, rate=0.1),
    "rotate": functools.partial(operators.test_rotate, num_heads=3, half=7, behind=5),
    "add_norm of narrow rows": functools.partial(operators.test_add_norm, **of_columns(7, 5)),
    "add_norm": functools.partial(operators.test_add_norm, **of_columns(70, 100)),
    "add_norm without dropout": functools.partial(operators.test_add_norm, **of_columns(150, 384, 0.0)),
    "add_norm far from zero": operators.test_add_norm_of_rows_far_from_zero,
    "dropout_rows": functools.partial(operators.test_dropout_rows, **of_columns(70, 100)),
    "gelu with erf": functools.partial(operators.test_activations, num_rows=70, width=101, kind=0),
    "gelu with tanh": functools.partial(operators.test_activations, num_rows=70, width=101, kind=1),
    "embed": functools.partial(operators.test_embed, width=100, rate=0.1),
    "sums": functools.partial(operators.test_sums, num_rows=300, width=100),
}
OF_FLOAT32: dict[str, Check] = {
    "attention with fewer queries than keys": operators.test_attention_with_other_numbers_of_queries_than_of_keys,
    "attention to its own columns": operators.test_attention_reads_its_own_columns_and_sequences_only,
    "attention with large scores": functools.partial(operators.test_large_scores_do_not_overflow, size=1e4),
    "gelu far from zero, erf": functools.partial(operators.test_gelu_far_from_zero, kind=0),
    "gelu far from zero, tanh": functools.partial(operators.test_gelu_far_from_zero, kind=1),
    "product of any strides": operators.test_product_of_any_strides,
    "squared_norm": operators.test_squared_norm,
    "adamw": functools.partial(operators.test_adamw, weight_decay=0.1, grad_scale=0.25),
    "adamw of rows": functools.partial(operators.test_adamw_of_rows, width=101, weight_decay=0.1, grad_scale=1.0),
}


@BOTH
@pytest.mark.parametrize("check", OF_BOTH_TYPES.values(), ids=list(OF_BOTH_TYPES))
def test_an_operator(ops: arm.Arm, check: Check, dtype: torch.dtype) -> None:
    check(ops, dtype=dtype)


@pytest.mark.parametrize("check", OF_FLOAT32.values(), ids=list(OF_FLOAT32))
def test_an_operator_of_float32(ops: arm.Arm, check: Check) -> None:
    check(ops)


@pytest.mark.parametrize(
    ("m", "k", "n", "with_bias"),
    [(1, 1, 1, False), (1, 384, 1, True), (13, 7, 5, True), (100, 33, 47, False), (37, 1100, 29, True)],
)
def test_product(ops: arm.Arm, m: int, k: int, n: int, with_bias: bool) -> None:
    """Transposed or not; the deepest one is added up in three blocks."""
    operators.test_product(ops, m, k, n, with_bias)


def test_a_result_does_not_depend_on_the_number_of_threads(ops: arm.Arm, target: Target) -> None:
    with arm.emulated(target.driver, target.cpu, threads=3) as others:
        compare_bits(ops, others)


def compare_bits(few: arm.Arm, many: arm.Arm) -> None:
    a, b = torch.randn(130, 70), torch.randn(70, 90)
    assert torch.equal(few.product(a, b, None), many.product(a, b, None))
    x, y, z = torch.randn(sum(LENGTHS), 3, 24).unbind(1)
    layout = cu(LENGTHS), cu(LENGTHS), 2, 0.3, 0, 0.1, SITE, keys_of(len(x))
    lse = few.attention_forward(x, y, z, *layout)[1]
    norm = torch.randn(24), torch.randn(len(x)), torch.rand(len(x)), 0.1, SITE, keys_of(len(x))
    for name, arguments in (("attention_backward", (x, x, y, z, lse, *layout)), ("add_norm_backward", (x, y, *norm))):
        results = (getattr(each, name)(*arguments) for each in (few, many))
        assert all(torch.equal(f, g) for f, g in zip(*results, strict=True)), name


@pytest.mark.parametrize("rate", [0.1, 0.5, 0.999])
def test_masks_are_those_of_the_definition(ops: arm.Arm, rate: float) -> None:
    """Bit for bit, of every head, and also where a row ends within a block of columns."""
    keys, num_heads, width = keys_of(60), 3, 300
    (found,) = ops.call("factors", [60, width, num_heads, rate, SITE, keys], [(F32, (num_heads, 60, width))])
    scale = np.float32(random.keep_scale(rate))
    for head in range(num_heads):
        kept = random.levels(keys, SITE, width, head) >= random.threshold(rate)
        assert np.array_equal(found[head].numpy(), np.where(kept, scale, np.float32(0.0)))


@BOTH
def test_dropout_has_the_bits_that_this_machine_gives(ops: arm.Arm, dtype: torch.dtype) -> None:
    kernels = load_kernels()
    if not kernels.compiled:
        pytest.skip(f"no compiled kernels: {kernels.reason}")
    x = torch.randn(50, 384).to(dtype)
    dropout = 0.1, SITE, keys_of(50)
    assert torch.equal(ops.dropout_rows(x, *dropout), torch.ops.fleetune.dropout_rows(x, *dropout))


def test_rounding_to_bfloat16(ops: arm.Arm) -> None:
    """All upper halves of a float32, with lower ones that lie around the tie: as torch rounds; NaN stays NaN."""
    low = np.array([0, 1, 0x7FFF, 0x8000, 0x8001, 0xFFFF], dtype=np.uint32)
    bits = (np.arange(1 << 16, dtype=np.uint32) << 16)[:, None] | low
    x = torch.from_numpy(bits.view(np.float32).ravel())
    (found,) = ops.call("rounded", [x], [(BF16, x.shape)])
    expected = x.bfloat16()
    assert torch.equal(found.isnan(), x.isnan())
    assert torch.equal(found[~x.isnan()].view(torch.int16), expected[~x.isnan()].view(torch.int16))


@dataclass(frozen=True)
class Instruction:
    address: int
    name: str
    operands: str

    @property
    def accumulator(self) -> str | None:
        """The register that four products are added to."""
        added = re.match(r"(v\d+)\.4s", self.operands) if self.name == "fmla" else None
        return added and added[1]

    @property
    def touches_stack(self) -> bool:
        return "[sp" in self.operands


def instructions_of(disassembly: str) -> list[Instruction]:
    lines = re.finditer(r"^ *([0-9a-f]+):\t(\S+)(?:\t(.*))?$", disassembly, re.MULTILINE)
    return [Instruction(int(m[1], 16), m[2], m[3] or "") for m in lines]


def straight_loops(instructions: list[Instruction]) -> Iterator[list[Instruction]]:
    """From the target of a conditional jump back to the jump, where no other jump is in between."""
    places = {x.address: i for i, x in enumerate(instructions)}
    begin = 0
    for place, x in enumerate(instructions):
        if not re.match(r"(b|b\..*|bl|br|blr|ret|cbn?z|tbn?z)$", x.name):
            continue
        target = re.search(r"\b([0-9a-f]+) <", x.operands)
        start = places.get(int(target[1], 16), -1) if target else -1
        if x.name not in ("b", "bl") and begin <= start <= place:
            yield instructions[start : place + 1]
        begin = place + 1


def test_a_tile_of_the_product_stays_in_registers(target: Target) -> None:
    """The loop over the inner dimension multiplies and adds four numbers at a time, and touches no stack."""
    objdump = arm.tool("aarch64-linux-gnu-objdump")
    listing = arm.run([objdump, "--disassemble", "--no-show-raw-insn", target.driver.with_name("product.o")])
    sections = listing.split("Disassembly of section")  # the addresses of each begin with 0
    loops = [loop for section in sections for loop in straight_loops(instructions_of(section))]
    sums = [[x.accumulator for x in loop if x.accumulator] for loop in loops]
    most = max(map(len, sums))
    whole = [i for i, found in enumerate(sums) if len(found) == most]
    assert most >= 16, "products wait for each other: four units with a latency of four"
    assert len(whole) == 6, "of three layouts, with an addend and without"
    for i in whole:
        assert len(set(sums[i])) == most, "a sum is not always in the same register"
        assert not [x for x in loops[i] if x.name.startswith("st") or x.touches_stack]
