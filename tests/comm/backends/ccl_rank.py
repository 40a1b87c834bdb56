"""One rank of the tests of backend `ccl`: plays a scene, whose name is given, with its peers.

    RANK=0 WORLD_SIZE=2 MASTER_ADDR=127.0.0.1 MASTER_PORT=... python -m tests.comm.backends.ccl_rank lifecycle

It says "done" at its end; a scene that fails ends with an exception.
"""

from __future__ import annotations

import os
import signal
import sys
import threading
import time
from collections.abc import Callable
from datetime import timedelta

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

import fleetune.comm.ccl  # noqa: F401  registers the backend

RANK, SIZE = int(os.environ.get("RANK", "0")), int(os.environ.get("WORLD_SIZE", "1"))
IMPATIENCE_S = 3
"""How long calls may take that are to fail."""
LOST = 1
"""The rank that goes, where one does."""


def join(name: str = "ccl") -> None:
    """Make the group of all ranks."""
    dist.init_process_group(name, timeout=timedelta(seconds=120))


def set_patience(seconds: float) -> None:
    """What calls have from now on; `_set_pg_timeout` knows torch's own backends alone."""
    assert dist.group.WORLD is not None
    dist.group.WORLD.set_timeout(timedelta(seconds=seconds))


def check_sum() -> None:
    """All ranks are there, and add up."""
    numbers = torch.full((5,), RANK + 1.0)
    dist.all_reduce(numbers)
    assert numbers.tolist() == [SIZE * (SIZE + 1) / 2] * 5


def lifecycle() -> None:
    """Made, destroyed and made again, under both names, with groups of some ranks that come and go."""
    for turn, name in enumerate(["ccl", "cpu:ccl", "ccl"]):
        join(name)
        check_sum()
        for _ in range(2):
            pair = dist.new_group([0, 1])
            if RANK < 2:
                numbers = torch.tensor([RANK + turn])
                dist.broadcast(numbers, 1, group=pair)
                assert numbers.tolist() == [1 + turn]
                dist.destroy_process_group(pair)
        check_sum()
        dist.destroy_process_group()


def left_open() -> None:
    """Nobody destroys the group."""
    join()
    check_sum()


def rounding() -> None:
    """Sums of half-precision numbers are those in float32, rounded once; shares of them, too."""
    join()
    for dtype in (torch.bfloat16, torch.float16):
        for count in (7, 40_001 * SIZE):
            parts = [torch.randn(count, generator=torch.Generator().manual_seed(r)).to(dtype) for r in range(SIZE)]
            exact = parts[0].float()
            for part in parts[1:]:
                exact = exact + part.float()
            found = parts[RANK].clone()
            dist.all_reduce(found)
            torch.testing.assert_close(found, exact.to(dtype), rtol=0, atol=0)
            mean = parts[RANK].clone()
            dist.all_reduce(mean, dist.ReduceOp.AVG)
            torch.testing.assert_close(mean, (exact / SIZE).to(dtype), rtol=0, atol=0)
            if count % SIZE == 0:
                share = torch.empty(count // SIZE, dtype=dtype)
                dist.reduce_scatter(share, list(parts[RANK].chunk(SIZE)))
                torch.testing.assert_close(share, exact.to(dtype).chunk(SIZE)[RANK], rtol=0, atol=0)
    dist.destroy_process_group()


def messages() -> None:
    """Tags in another order than they were sent in, from anybody, large ones both ways, one that never comes."""
    join()
    other = (RANK + 1) % SIZE, (RANK - 1) % SIZE
    if RANK == 0:
        for tag in (1, 2, 1):
            dist.send(torch.full((3,), float(tag)), 1, tag=tag)
        dist.send(torch.empty(0), 1, tag=4)
    if RANK == 1:
        for tag in (2, 1, 1):
            numbers = torch.zeros(2, 3).t()[:, 0]
            dist.recv(numbers, 0, tag=tag)
            assert numbers.tolist() == [tag] * 3
        dist.recv(torch.empty(0), 0, tag=4)
    large = torch.full((1 << 21,), float(RANK))
    sent, numbers = dist.isend(large, other[0]), torch.empty_like(large)
    assert dist.recv(numbers) == other[1] or SIZE > 2
    assert sent is not None
    sent.wait()
    assert numbers.unique().numel() == 1
    dist.barrier()
    if RANK == 0:
        set_patience(IMPATIENCE_S)
        never = dist.irecv(torch.empty(3), 1, tag=9)
        assert never is not None
        with pytest.raises(dist.DistBackendError, match=f"recv timed out: not complete after {IMPATIENCE_S} s"):
            never.wait()
        set_patience(120)
    check_sum()
    dist.destroy_process_group()


def futures() -> None:
    """Several calls under way, some of several steps; what follows one of them happens once, with its value."""
    join()
    seen: list[tuple[str, float]] = []
    told = threading.Event()

    def after(future: torch.futures.Future[list[Tensor]]) -> Tensor:
        seen.append((threading.current_thread().name, float(future.value()[0][0])))
        told.set()
        return future.value()[0] * 2

    tensors = [torch.ones(100_000, dtype=dtype) for dtype in (torch.bfloat16, torch.float32) * 4]
    works = [dist.all_reduce(tensor, async_op=True) for tensor in tensors]
    doubled = works[0].get_future().then(after)
    for work in reversed(works):
        work.wait()
    assert all(tensor.unique().tolist() == [SIZE] for tensor in tensors)
    assert doubled.wait()[0] == 2 * SIZE
    assert told.wait(30)
    assert [value for _, value in seen] == [SIZE]
    dist.barrier()
    dist.destroy_process_group()


def goes(how: Callable[[], None]) -> None:
    """One rank goes, the others wait for it; they show the error and leave."""
    join()
    check_sum()
    print("joined", flush=True)
    if RANK == LOST:
        how()
    numbers = torch.ones(1000)
    try:
        dist.all_reduce(numbers)
    except dist.DistBackendError as error:
        print("raised", error, flush=True)
        try:
            dist.barrier()
        except dist.DistBackendError:
            print("raised again", flush=True)
        raise


def fail() -> None:
    """End as a script with a mistake."""
    raise ValueError("a mistake of rank 1")


def leave() -> None:
    """End well, too early."""
    dist.destroy_process_group()
    print("done", flush=True)
    sys.exit(0)


def late() -> None:
    """One rank is alive, and does not come in time."""
    join()
    check_sum()
    set_patience(IMPATIENCE_S)
    if RANK == LOST:
        time.sleep(4 * IMPATIENCE_S)
    check_sum()


SCENES: dict[str, Callable[[], None]] = {
    **{scene.__name__: scene for scene in (lifecycle, left_open, rounding, messages, futures, late)},
    "killed": lambda: goes(lambda: os.kill(os.getpid(), signal.SIGKILL)),
    "frozen": lambda: goes(lambda: os.kill(os.getpid(), signal.SIGSTOP)),
    "failed": lambda: goes(fail),
    "left": lambda: goes(leave),
    "lost with its host": lambda: goes(lambda: time.sleep(1000)),
}

if __name__ == "__main__":
    SCENES[sys.argv[1]]()
    print("done", flush=True)
