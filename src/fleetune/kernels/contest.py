"""Whose matrix products are faster on this machine: ours, or torch's (MKL, OpenBLAS, Accelerate).

Which one wins depends on the CPU, on its number of threads and on torch's build. So the first process that asks
measures, for a fraction of a second, and writes the answer beside the compiled kernels: later runs compute with the
same products, and therefore the same last bits, also when the same kernels are compiled again. Delete
`products-*.json` there to measure anew. On a busy machine threads wait for one that does not get its core, and what is
measured is luck: nothing is written then, and ours are taken.
"""

from __future__ import annotations

import fcntl
import json
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from fleetune.errors import OutputError
from fleetune.files import write_json
from fleetune.kernels.facts import MEASURED
from fleetune.kernels.library import load_kernels

Product = Callable[[Tensor, Tensor], Tensor]

MARGIN = 1.05
"""How many times as fast torch's must be to be taken."""
QUIET = 0.85
"""Share of the cores' time that the threads must have got for an answer to count. Alone they get all but their start;
one other busy program on two cores leaves them three quarters."""
_MEASURED_S = 0.3
_ROWS, _SHAPES = 768, ((768, 768), (3072, 768), (768, 3072))
_known: dict[int, bool] = {}


def torch_wins() -> bool:
    """Whether torch's products are clearly faster with the threads that this process has; measured once."""
    threads = torch.get_num_threads()
    if threads not in _known:
        kernels = load_kernels()
        _known[threads] = kernels.path is not None and _kept(kernels.path.parent, threads)
    return _known[threads]


def kernels_in_use() -> str:
    """What computes in this process, in words, for a plan or a record."""
    return load_kernels().name + (", matrix products by torch" if torch_wins() else "")


def _kept(folder: Path, threads: int) -> bool:
    """The answer in a folder; measured and written there by the first process of several that ask."""
    path = folder / MEASURED.replace("*", str(threads))
    try:
        with (folder / "products.lock").open("a") as lock:
            fcntl.flock(lock, fcntl.LOCK_EX)
            told = _read(path)
            if told is None:
                told = _measured(threads)
                if told["share_of_cores"] >= QUIET:
                    write_json(path, told)
    except (OSError, OutputError):  # a folder that cannot be written: every process measures for itself
        told = _measured(threads)
    return bool(told["times_as_fast"] > MARGIN and told["share_of_cores"] >= QUIET)


def _measured(threads: int) -> dict[str, Any]:
    wall, cpu = time.perf_counter(), time.process_time()
    times_as_fast = contest(torch.mm, torch.ops.fleetune.product)
    share = (time.process_time() - cpu) / (threads * (time.perf_counter() - wall))
    return {"times_as_fast": times_as_fast, "threads": threads, "share_of_cores": round(share, 2)}


def _read(path: Path) -> dict[str, Any] | None:
    try:
        told: dict[str, Any] = json.loads(path.read_text(encoding="utf-8"))
        return told if float(told["times_as_fast"]) > 0 < float(told["share_of_cores"]) else None
    except (OSError, ValueError, TypeError, KeyError):
        return None


def contest(one: Product, other: Product) -> float:
    """How many times as fast `one` is for the three products of some linear layers, forward and backward."""
    operands = [(torch.randn(_ROWS, i), torch.randn(o, i), torch.randn(_ROWS, o)) for o, i in _SHAPES]

    def products_by(product: Product) -> Callable[[], None]:
        def work() -> None:
            for x, weight, dy in operands:
                product(x, weight.t())
                product(dy, weight)
                product(dy.t(), x)

        return work

    of_one, of_other = least_seconds([products_by(one), products_by(other)], _MEASURED_S)
    return of_other / of_one


def least_seconds(works: Sequence[Callable[[], None]], measured_s: float) -> list[float]:
    """The shortest time of each work. They take turns for so many seconds, at least once: what else the machine does
    meets them alike."""
    least = [float("inf")] * len(works)
    began = time.perf_counter()
    while time.perf_counter() - began < measured_s or float("inf") in least:
        for i, work in enumerate(works):
            start = time.perf_counter()
            work()
            least[i] = min(least[i], time.perf_counter() - start)
    return least
