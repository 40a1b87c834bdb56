"""The kernels, compiled for 64-bit Arm and called in an emulator: `arm_driver.cpp` is the program that is run."""

from __future__ import annotations

import contextlib
import itertools
import os
import shutil
import struct
import subprocess
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from fleetune.kernels import toolchain

DRIVER = Path(__file__).with_name("arm_driver.cpp")
SOURCES = Path(toolchain.__file__).with_name("csrc")
PACKAGES = "on Debian, apt-get install g++-aarch64-linux-gnu qemu-user"
F32 = torch.float32
Shape = Sequence[int]


def tool(*names: str) -> str:
    """The first of some programs that is there, or else the test is skipped."""
    found = next((path for name in names if (path := shutil.which(name))), None)
    if found is None:
        pytest.skip(f"there is no {names[0]}: {PACKAGES}")
    return found


def emulator() -> str:
    return tool("qemu-aarch64", "qemu-aarch64-static")


def compile_driver(folder: Path, flags: Sequence[str]) -> Path:
    """The driver with all kernels, linked statically: the emulator then needs no libraries of Arm."""
    compiler = tool("aarch64-linux-gnu-g++")
    sources = [DRIVER, *(path for path in sorted(SOURCES.glob("*.cpp")) if path.name != "operators.cpp")]
    objects = [folder / f"{path.stem}.o" for path in sources]
    command = [compiler, *toolchain._FLAGS, *flags, f"-I{SOURCES}"]
    with ThreadPoolExecutor(max_workers=2) as pool:
        list(pool.map(lambda x: run([*command, "-c", x[0], "-o", x[1]]), zip(sources, objects, strict=True)))
    run([compiler, "-static", "-fopenmp", *objects, "-o", folder / "arm_driver"])
    return folder / "arm_driver"


def run(command: Sequence[str | Path]) -> str:
    result = subprocess.run(command, capture_output=True, text=True, timeout=120, check=False)
    assert result.returncode == 0, f"{' '.join(map(str, command))}\n{result.stderr}"
    return result.stdout


@contextlib.contextmanager
def emulated(driver: Path, cpu: str, threads: int) -> Iterator[Arm]:
    """The driver, running on a CPU of the emulator's."""
    command = emulator(), "-cpu", cpu, driver
    # A thread that waits must leave the core to the other one: both may be slow on a busy machine
    environ = {**os.environ, "OMP_NUM_THREADS": str(threads), "OMP_WAIT_POLICY": "passive"}
    with subprocess.Popen(command, env=environ, stdin=subprocess.PIPE, stdout=subprocess.PIPE) as process:
        yield Arm(process=process)


@dataclass(frozen=True, kw_only=True)
class Arm:
    """Stands for `torch.ops.fleetune`."""

    process: subprocess.Popen[bytes]

    def call(
        self, name: str, arguments: Sequence[Any], results: Sequence[tuple[torch.dtype, Shape]],
        storage: torch.dtype = F32,
    ) -> tuple[Tensor, ...]:  # fmt: skip
        """Call a kernel.

        Args:
            name: As the driver knows it.
            arguments: Integers, floats, tensors or None, as the driver reads them.
            results: Types and shapes of the tensors that it gives.
            storage: Of what is stored as float32 or bfloat16.
        """
        assert self.process.stdin
        assert self.process.stdout
        message = b"".join(map(_encoded, [name, str(storage).removeprefix("torch."), *arguments]))
        self.process.stdin.write(struct.pack("<q", len(message) // 8) + message)
        self.process.stdin.flush()
        head = self.process.stdout.read(8)
        assert len(head) == 8, f"{name}: the emulated program ended with status {self.process.wait()}"
        return _decoded(bytearray(self.process.stdout.read(*struct.unpack("<q", head))), results)

    def product(self, a: Tensor, b: Tensor, bias: Tensor | None) -> Tensor:
        (m, k), n = a.shape, b.shape[1]
        arguments = [m, n, k, *_strided(a), *_strided(b), bias]
        return self.call("product", arguments, [(F32, (m, n))])[0]

    def attention_forward(self, q: Tensor, k: Tensor, v: Tensor, *layout: Any) -> tuple[Tensor, ...]:
        results = [(q.dtype, q.shape), (F32, (len(q), layout[2]))]
        return self.call("attention_forward", [*_layout(q, k, *layout), q, k, v], results, q.dtype)

    def attention_backward(
        self, dout: Tensor, q: Tensor, k: Tensor, v: Tensor, lse: Tensor, *layout: Any
    ) -> tuple[Tensor, ...]:
        arguments = [*_layout(q, k, *layout), dout, q, k, v, lse]
        return self.call("attention_backward", arguments, [(x.dtype, x.shape) for x in (q, k, v)], q.dtype)

    def biased_attention_forward(
        self, q: Tensor, k: Tensor, v: Tensor, bias: Tensor, *layout: Any
    ) -> tuple[Tensor, ...]:
        results = [(q.dtype, q.shape), (F32, (len(q), layout[2]))]
        arguments = [*_layout(q, k, *layout), q, k, v, bias.shape[1], bias]
        return self.call("biased_attention_forward", arguments, results, q.dtype)

    def biased_attention_backward(
        self, dout: Tensor, q: Tensor, k: Tensor, v: Tensor, bias: Tensor, lse: Tensor, *layout: Any
    ) -> tuple[Tensor, ...]:
        arguments = [*_layout(q, k, *layout), dout, q, k, v, lse, bias.shape[1], bias]
        results = [*((x.dtype, x.shape) for x in (q, k, v)), (F32, bias.shape)]
        return self.call("biased_attention_backward", arguments, results, q.dtype)

    def rotate(self, x: Tensor, cos: Tensor, sin: Tensor, num_heads: int) -> Tensor:
        arguments = [*x.shape, num_heads, cos.shape[1], x, cos, sin]
        return self.call("rotate", arguments, [(x.dtype, x.shape)], x.dtype)[0]

    def add_norm_forward(self, new: Tensor, *rest: Any) -> tuple[Tensor, ...]:
        results = [(new.dtype, new.shape)] * 2 + [(F32, new.shape[:1])] * 2
        return self.call("add_norm_forward", [*new.shape, new, *rest], results, new.dtype)

    def add_norm_backward(self, dy: Tensor, *rest: Any) -> tuple[Tensor, ...]:
        results = [(dy.dtype, dy.shape)] * 2 + [(F32, dy.shape[1:])] * 2
        return self.call("add_norm_backward", [*dy.shape, dy, *rest], results, dy.dtype)

    def embed_forward(
        self, tables: list[Tensor], ids: list[Tensor], weight: Tensor, bias: Tensor, eps: float, as_bfloat16: bool,
        *dropout: Any,
    ) -> tuple[Tensor, ...]:  # fmt: skip
        shape, dtype = (len(ids[0]), len(weight)), torch.bfloat16 if as_bfloat16 else F32
        lookups = itertools.chain(*zip(tables, ids, strict=True))
        arguments = [*shape, len(tables), *lookups, weight, bias, eps, *dropout]
        return self.call("embed_forward", arguments, [(dtype, shape), (F32, shape), *[(F32, shape[:1])] * 2], dtype)

    def embed_backward(self, dy: Tensor, *rest: Any) -> tuple[Tensor, ...]:
        results = [(F32, dy.shape)] + [(F32, dy.shape[1:])] * 2
        return self.call("embed_backward", [*dy.shape, dy, *rest], results, dy.dtype)

    def dropout_rows(self, x: Tensor, *dropout: Any) -> Tensor:
        return self.call("dropout_rows", [*x.shape, x, *dropout], [(x.dtype, x.shape)], x.dtype)[0]

    def gelu_forward(self, x: Tensor, kind: int) -> Tensor:
        return self.call("gelu_forward", [x, kind], [(x.dtype, x.shape)], x.dtype)[0]

    def gelu_backward(self, dy: Tensor, x: Tensor, kind: int) -> Tensor:
        return self.call("gelu_backward", [dy, x, kind], [(x.dtype, x.shape)], x.dtype)[0]

    def gelu_again(self, dy: Tensor, x: Tensor, kind: int) -> tuple[Tensor, ...]:
        return self.call("gelu_again", [dy, x, kind], [(x.dtype, x.shape)] * 2, x.dtype)

    def geglu_forward(self, x: Tensor, kind: int) -> Tensor:
        shape = len(x), x.shape[1] // 2
        return self.call("geglu_forward", [*shape, x, kind], [(x.dtype, shape)], x.dtype)[0]

    def geglu_backward(self, dy: Tensor, x: Tensor, kind: int) -> Tensor:
        return self.call("geglu_backward", [*dy.shape, dy, x, kind], [(x.dtype, x.shape)], x.dtype)[0]

    def column_sums(self, x: Tensor) -> Tensor:
        return self.call("column_sums", [*x.shape, x], [(F32, x.shape[1:])], x.dtype)[0]

    def row_sums(self, ids: Tensor, x: Tensor, num_rows: int) -> tuple[Tensor, ...]:
        count, width = len(ids.unique()), x.shape[1]
        return self.call("row_sums", [width, ids, x], [(torch.int64, [count]), (F32, (count, width))], x.dtype)

    def squared_norm(self, tensors: list[Tensor]) -> Tensor:
        return self.call("squared_norm", [len(tensors), *tensors], [(torch.float64, ())])[0]

    def adamw_(self, *arguments: Any) -> None:
        lists, settings = arguments[:4], arguments[4:]
        parameters = list(zip(*lists, strict=True))
        changed = [x for p, _, mean, square in parameters for x in (p, mean, square)]
        given = [*settings, len(parameters), *itertools.chain(*parameters)]
        self._change("adamw_", given, changed)

    def adamw_rows_(self, param: Tensor, rows: Tensor, values: Tensor, *rest: Any) -> None:
        mean, square, seen, *settings = rest
        given = [*settings, *param.shape, len(rows), param, rows, values, mean, square, seen]
        self._change("adamw_rows_", given, [param, mean, square, seen])

    def _change(self, name: str, arguments: Sequence[Any], changed: Sequence[Tensor]) -> None:
        for old, new in zip(changed, self.call(name, arguments, [(x.dtype, x.shape) for x in changed]), strict=True):
            old.copy_(new)


def _layout(
    q: Tensor, k: Tensor, cu_q: Tensor, cu_k: Tensor, num_heads: int, scale: float, window: int, *dropout: Any
) -> list[Any]:
    sizes = len(q), len(k), len(cu_q) - 1, num_heads, q.shape[1] // num_heads
    return [*sizes, cu_q, cu_k, scale, window, *dropout]


def _strided(x: Tensor) -> tuple[Tensor, int, int]:
    """A matrix as the memory that it spans, from its first element to its last, and its strides."""
    span = 1 + sum((size - 1) * stride for size, stride in zip(x.shape, x.stride(), strict=True))
    return x.as_strided((span,), (1,)), x.stride(0), x.stride(1)


def _encoded(x: Any) -> bytes:
    if x is None:
        return struct.pack("<q", -1)
    if isinstance(x, str):
        data = x.encode()
    elif isinstance(x, Tensor):
        data = (x.view(torch.int16) if x.dtype == torch.bfloat16 else x).numpy().tobytes()
    else:
        data = struct.pack("<d" if isinstance(x, float) else "<q", x)
    return struct.pack("<q", len(data)) + data + bytes(-len(data) % 8)


def _decoded(data: bytearray, results: Sequence[tuple[torch.dtype, Shape]]) -> tuple[Tensor, ...]:
    tensors, start = [], 0
    for dtype, shape in results:
        tensor = torch.empty(shape, dtype=dtype)
        end = start + tensor.nbytes
        if tensor.numel():
            tensor = torch.frombuffer(data[start:end], dtype=dtype).reshape(shape)
        tensors.append(tensor)
        start = end
    assert start == len(data), f"{start} bytes of results were expected, {len(data)} came"
    return tuple(tensors)
